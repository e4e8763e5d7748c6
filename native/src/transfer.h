// A transfer from submit to completion: wait for the link, find the remote cache, plan the pieces, move them on the best path, check that the source stayed
// what it was, complete. A chain of steps, each run where the previous one ended: the caller's thread, the loop thread, a copy thread.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "op.h"
#include "status.h"

namespace ldr {

class Engine;

// ldr_transfer (waited, op filled before return) and ldr_transfer_submit.
Status transfer_submit(Engine &engine, const ldr_transfer_params_t &params, bool waited, uint64_t user_tag, OpPtr *op_p);

// What waits for its turn on a link. No method runs with a lock held.
class Transfer {
 public:
  virtual ~Transfer() = default;
  virtual void start_turn() = 0;               // the link is ours: go on on the thread that waits for the operation, or on a copy thread
  virtual void refuse(const Status &why) = 0;  // it never will be
  virtual void stop(const Status &why) = 0;    // while it is
};

// Transfers on one link, one after the other, first come first served.
class TransferQueue {
 public:
  // True: the transfer is at the front and may start on this thread. False: it will be started when its turn comes, or has completed with NOT_LINKED.
  bool enter(const std::shared_ptr<Transfer> &transfer);
  // Returns the next one, whose turn it is now; the caller starts it. nullptr: the link is free.
  std::shared_ptr<Transfer> leave(Transfer &transfer);
  bool withdraw(Transfer &transfer);  // false: its turn has come
  // After this new ones are refused with NOT_LINKED and waiting ones complete so. Waits for the running one; false when the deadline passed.
  bool close(int64_t deadline_ns);
  // The link broke: the running one is stopped with why, waiting ones complete with NOT_LINKED. Does not wait.
  void fail(const Status &why);
  // Runs once when no transfer has the link: now, on this thread, or on the one of the last that leaves. Never under a lock; must not throw.
  void on_idle(std::function<void()> callback);
  void reopen();  // the link is kept after all; not after fail()

  uint64_t table_version = 0;  // of the peer's page when its cache table was fetched; only the running transfer looks at it

 private:
  std::mutex mutex_;
  std::condition_variable idle_;
  std::deque<std::shared_ptr<Transfer>> waiting_;
  std::shared_ptr<Transfer> running_;
  std::vector<std::function<void()>> when_idle_;
  bool closed_ = false;
  bool failed_ = false;  // closed for ever
};

}  // namespace ldr
