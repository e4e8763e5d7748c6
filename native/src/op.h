// One operation: submitted once, completed exactly once.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "status.h"

namespace ldr {

class Engine;

inline Status out_of_memory() { return {LDR_ERR_NO_MEMORY, "out of memory"}; }  // a text this short takes no memory of its own

struct Op {
  uint64_t id = 0;
  uint64_t user_tag = 0;
  bool waited = false;  // a thread sits in ldr_transfer; else the completion becomes an event
  int64_t start_ns = 0;
  std::atomic<uint64_t> bytes_total{0}, bytes_done{0};
  uint32_t path = LDR_PATH_NONE;

  // The first reason to stop wins; copy batches look at it between pieces. True: this one was first, and the stop handler has run, on this thread.
  bool stop(ldr_status_t code, const std::string &text);
  bool stopped() const { return stop_code_.load(std::memory_order_acquire) != LDR_OK; }
  Status stop_status() const;
  // Wakes whoever waits for something other than a batch. Runs once, without a lock held; at once when the operation is stopped already. Dropped on completion.
  void on_stop(std::function<void()> handler);

 private:
  friend class OpTable;
  mutable std::mutex mutex_;
  std::condition_variable changed_;  // task_ or done_, for the thread in OpTable::wait
  std::atomic<ldr_status_t> stop_code_{LDR_OK};
  std::string stop_text_;
  std::function<void()> stop_handler_;
  std::function<void()> task_;
  bool done_ = false;
  Status result_;
};
using OpPtr = std::shared_ptr<Op>;

// All operations in flight, and the texts of the last 1024 failures.
class OpTable {
 public:
  explicit OpTable(Engine &engine);
  ~OpTable();
  Status begin(bool waited, uint64_t user_tag, OpPtr *op_p);  // BUSY above 65536 in flight, CLOSED after close()
  void complete(const OpPtr &op, const Status &status);        // once for each begin; any thread
  Status wait(const OpPtr &op);                                // waited ones only; returns the completion's status
  // Goes on with the operation where waiting costs least: on the thread that sits in wait(), or on a copy thread.
  void resume(const OpPtr &op, std::function<void()> task);
  OpPtr find(uint64_t id) const;
  bool error_text(uint64_t id, std::string *text_p) const;
  uint32_t in_flight() const;
  void close();     // stops every operation with CLOSED; begin() refuses from now on
  void wait_all();  // until every operation has completed

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ldr
