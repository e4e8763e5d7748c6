#include "copy_pool.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace ldr {

struct CopyPool::Impl {
  std::mutex mutex;
  std::condition_variable wake;
  std::deque<std::function<void()>> tasks;
  bool stopping = false;
  bool stopped = false;
  std::vector<std::thread> threads;
  uint32_t num_threads = 0;

  void work() {
    pthread_setname_np(pthread_self(), "ldr-copy");
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      wake.wait(lock, [this] { return stopping || !tasks.empty(); });
      if (tasks.empty()) return;
      std::function<void()> task = std::move(tasks.front());
      tasks.pop_front();
      lock.unlock();
      try {
        task();
      } catch (const std::exception &error) {  // the last resort: whoever can do more than lose one step catches earlier
        fprintf(stderr, "llm_datadist_ray: a task of a copy thread was given up: %s\n", error.what());
      }
      task = nullptr;  // what it holds goes away without the lock
      lock.lock();
    }
  }
};

CopyPool::CopyPool(uint32_t num_threads) : impl_(std::make_unique<Impl>()) {
  if (num_threads == 0) num_threads = std::clamp(std::thread::hardware_concurrency(), 1u, 4u);
  impl_->num_threads = num_threads;
  sigset_t all, before;  // signals belong to the application's threads
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    for (uint32_t i = 0; i < num_threads; ++i) impl_->threads.emplace_back([impl = impl_.get()] { impl->work(); });
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    stop();
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

CopyPool::~CopyPool() { stop(); }

void CopyPool::stop() {
  {
    std::lock_guard<std::mutex> lock(impl_->mutex);
    impl_->stopping = true;
  }
  impl_->wake.notify_all();
  for (std::thread &thread : impl_->threads) thread.join();
  impl_->threads.clear();
  std::deque<std::function<void()>> left;
  {
    std::lock_guard<std::mutex> lock(impl_->mutex);
    impl_->stopped = true;
    left.swap(impl_->tasks);
  }
  for (auto &task : left) task();  // submitted between the last thread's look and its end
}

void CopyPool::submit(std::function<void()> task) {
  {
    std::lock_guard<std::mutex> lock(impl_->mutex);
    if (!impl_->stopped) {
      impl_->tasks.push_back(std::move(task));
      impl_->wake.notify_one();
      return;
    }
  }
  task();  // no thread is left; a task is never dropped, because somebody waits for its end
}

uint32_t CopyPool::num_threads() const { return impl_->num_threads; }

}  // namespace ldr
