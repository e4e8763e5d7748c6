// What ldr_poll hands out, in order: one event per operation, one end per grant, none of which is ever dropped (they pile up as fast as the application makes
// them), one LINK_UP and one LINK_DOWN per link. Of those, which peers cause, the newest kMaxLinkEvents are kept.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "status.h"

namespace ldr {

constexpr size_t kMaxLinkEvents = 4096;  // peers make them, also where nobody takes events

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
