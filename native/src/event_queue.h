// What ldr_poll hands out. Nothing is ever dropped or coalesced: one event per operation, one LINK_UP and one LINK_DOWN per link, one end per grant.
// So what an application does not take piles up, as fast as its operations end and its peers come and go.
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
  int fd() const;  // -1: no descriptor was left for it
  void close();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ldr
