// The threads that move bytes. They sleep when there is nothing to move, and none ever waits long for a peer: work that cannot go on is parked elsewhere.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace ldr {

class CopyPool {
 public:
  explicit CopyPool(uint32_t num_threads);
  ~CopyPool();
  void stop();  // runs what is queued, joins; idempotent
  void submit(std::function<void()> task);  // any thread, first in first out; bad_alloc: it is not queued
  uint32_t num_threads() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ldr
