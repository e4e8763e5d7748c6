// Who may use a link now: transfers one after the other, first come first served.
#include "clock.h"
#include "transfer.h"

namespace ldr {

bool TransferQueue::enter(const std::shared_ptr<Transfer> &transfer) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!closed_) {
      if (!running_) {
        running_ = transfer;
        return true;
      }
      waiting_.push_back(transfer);
      return false;
    }
  }
  transfer->refuse(ldr::fail(LDR_ERR_NOT_LINKED, "the link is being closed"));
  return false;
}

std::shared_ptr<Transfer> TransferQueue::leave(Transfer &transfer) {
  std::shared_ptr<Transfer> self;  // its last reference may be ours: not under the lock
  std::vector<std::function<void()>> when_idle;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (running_.get() != &transfer) return nullptr;  // its turn never came
    self = std::move(running_);
    if (!waiting_.empty()) {
      running_ = std::move(waiting_.front());
      waiting_.pop_front();
      return running_;
    }
    when_idle.swap(when_idle_);
    idle_.notify_all();
  }
  for (const auto &callback : when_idle) callback();
  return nullptr;
}

void TransferQueue::on_idle(std::function<void()> callback) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (running_) {
      when_idle_.push_back(std::move(callback));
      return;
    }
  }
  callback();
}

bool TransferQueue::withdraw(Transfer &transfer) {
  std::shared_ptr<Transfer> self;
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto it = waiting_.begin(); it != waiting_.end(); ++it) {
    if (it->get() != &transfer) continue;
    self = std::move(*it);
    waiting_.erase(it);
    return true;
  }
  return false;
}

bool TransferQueue::close(int64_t deadline_ns) {
  std::deque<std::shared_ptr<Transfer>> waiting;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    waiting.swap(waiting_);
  }
  for (const auto &transfer : waiting) transfer->refuse(ldr::fail(LDR_ERR_NOT_LINKED, "the link was closed before its turn came"));
  std::unique_lock<std::mutex> lock(mutex_);
  return wait_until(idle_, lock, deadline_ns, [this] { return !running_; });
}

void TransferQueue::reopen() {
  std::lock_guard<std::mutex> lock(mutex_);
  closed_ = failed_;
}

void TransferQueue::fail(const Status &why) {
  std::deque<std::shared_ptr<Transfer>> waiting;
  std::shared_ptr<Transfer> running;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = failed_ = true;
    waiting.swap(waiting_);
    running = running_;
  }
  if (running) running->stop(why.ok() ? ldr::fail(LDR_ERR_NOT_LINKED, "the link was closed") : why);
  for (const auto &transfer : waiting) transfer->refuse(ldr::fail(LDR_ERR_NOT_LINKED, "the link went down before its turn came: %s", why.text.c_str()));
}

}  // namespace ldr
