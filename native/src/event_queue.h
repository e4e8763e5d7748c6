// What ldr_poll hands out: bounded by what is in flight (operations) and by coalescing (one LINK_DOWN per link, one end per grant), so nothing is ever dropped.
#pragma once

#include <cstdint>
#include <memory>

#include "status.h"

namespace ldr {

class EventQueue {
 public:
  EventQueue();
  ~EventQueue();
  void push(const ldr_event_t &event);
  // As ldr_poll.
  Status take(ldr_event_t *events, uint32_t capacity, int64_t timeout_ns, uint32_t *count_p);
  int fd() const;
  void close();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ldr
