#include "copy_pool.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "check.h"

using ldr::CopyPool;
using ldr_test::test;

namespace {

class Gate {
 public:
  void open() {
    std::lock_guard<std::mutex> lock(mutex_);
    is_open_ = true;
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    CHECK(changed_.wait_for(lock, std::chrono::seconds(20), [this] { return is_open_; }));
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_open_ = false;
};

void first_in_first_out() {
  CopyPool pool(1);
  std::vector<int> order;
  Gate done;
  for (int i = 0; i < 100; ++i) pool.submit([&order, i] { order.push_back(i); });
  pool.submit([&] { done.open(); });
  done.wait();
  for (int i = 0; i < 100; ++i) CHECK_EQ(order[i], i);
  pool.stop();
}

void all_threads_work() {
  CopyPool pool(3);
  CHECK_EQ(pool.num_threads(), 3u);
  Gate all_here, go;
  std::atomic<int> here{0};
  for (int i = 0; i < 3; ++i) {
    pool.submit([&] {
      if (++here == 3) all_here.open();
      go.wait();
    });
  }
  all_here.wait();  // only when three run at once
  go.open();
  pool.stop();
}

void stop_runs_what_is_queued() {
  CopyPool pool(2);
  std::atomic<int> ran{0};
  Gate go;
  for (int i = 0; i < 2; ++i) pool.submit([&] { go.wait(); });
  for (int i = 0; i < 500; ++i) {
    pool.submit([&] {
      ++ran;
      pool.submit([&] { ++ran; });
    });
  }
  std::thread opener([&] { go.open(); });
  pool.stop();
  CHECK_EQ(ran.load(), 1000);
  opener.join();
  pool.stop();  // again: nothing happens
  bool here = false;
  pool.submit([&] { here = true; });  // no thread is left
  CHECK(here);
}

void a_task_is_destroyed_before_the_next() {
  CopyPool pool(1);
  auto held = std::make_shared<int>(1);
  std::weak_ptr<int> watch = held;
  Gate done;
  bool was_gone = false;
  pool.submit([held = std::move(held)] {});
  pool.submit([&] {
    was_gone = watch.expired();
    done.open();
  });
  done.wait();
  CHECK(was_gone);
  pool.stop();
}

void ends_without_stop() {
  std::atomic<int> ran{0};
  {
    CopyPool pool(2);
    for (int i = 0; i < 100; ++i) pool.submit([&] { ++ran; });
  }
  CHECK_EQ(ran.load(), 100);
}

void survives_a_failing_task() {
  CopyPool pool(1);
  bool ran = false;
  pool.submit([] { throw std::bad_alloc(); });
  pool.submit([&] { ran = true; });
  pool.stop();
  CHECK(ran);
}

void default_size() {
  CopyPool pool(0);
  CHECK(pool.num_threads() >= 1 && pool.num_threads() <= 4);
  pool.stop();
}

}  // namespace

int main() {
  test("first in, first out", first_in_first_out);
  test("all threads work", all_threads_work);
  test("stop runs what is queued", stop_runs_what_is_queued);
  test("a task is destroyed before the next one runs", a_task_is_destroyed_before_the_next);
  test("it ends without stop()", ends_without_stop);
  test("a task that fails takes nothing with it", survives_a_failing_task);
  test("the default size", default_size);
}
