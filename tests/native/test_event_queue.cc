// What waits for ldr_poll: everything, but of links only the latest.
#include "event_queue.h"

#include <vector>

#include "check.h"

using namespace ldr;
using ldr_test::test;

namespace {

ldr_event_t event(uint16_t kind, uint64_t id) {
  ldr_event_t event{};
  event.kind = kind;
  event.id = id;
  return event;
}

std::vector<ldr_event_t> take_all(EventQueue &queue) {
  std::vector<ldr_event_t> all(3 * kMaxLinkEvents);
  uint32_t count = 0;
  CHECK_OK(queue.take(all.data(), uint32_t(all.size()), 0, &count));
  all.resize(count);
  return all;
}

void the_oldest_of_links_go() {
  EventQueue queue;
  for (int round = 0; round < 2; ++round) {  // what was taken does not count any more
    for (uint64_t id = 0; id < kMaxLinkEvents + 10; ++id) {
      queue.push(event(id % 2 ? LDR_EVENT_LINK_DOWN : LDR_EVENT_LINK_UP, id));
      if (id % 1000 == 0) queue.push(event(id % 2000 ? LDR_EVENT_GRANT_ENDED : LDR_EVENT_OP, id));
    }
    uint64_t next_of_links = 10, next_of_others = 0;
    for (const ldr_event_t &event : take_all(queue)) {
      if (event.kind == LDR_EVENT_LINK_UP || event.kind == LDR_EVENT_LINK_DOWN) {
        CHECK_EQ(event.id, next_of_links++);
      } else {
        CHECK_EQ(event.id, next_of_others);
        next_of_others += 1000;
      }
    }
    CHECK_EQ(next_of_links, uint64_t(kMaxLinkEvents + 10));
    CHECK_EQ(next_of_others, uint64_t(5000));
  }
}

}  // namespace

int main() { test("the oldest of links go", the_oldest_of_links_go); }
