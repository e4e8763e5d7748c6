// What peers hold here between a look-up and its kDone (spec api-cachemanager 2.4, 5.5): allocated caches, which a pin keeps, and the right to write into one
// tensor in two-sided mode (spec 8.3). A pin ends with the puller's kDone, its link or its time limit, whichever is first.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>

#include "cache_table.h"
#include "event_loop.h"
#include "wire.h"

namespace ldr {

class Engine;
class Link;
struct ChunkRequest;

struct Pin {
  const Link *link = nullptr;  // an identity only
  CachePtr cache;
  bool holds = false;  // set by add(): the cache is allocated, and pinned in the table
  bool consumes = false;
  KeyName key;         // the one that success consumes
  uint32_t first_tensor = 0, num_tensors = 0;
  bool is_window = false;  // may write [offset, offset + size) of this tensor
  uint32_t tensor = 0;
  uint64_t offset_bytes = 0, size_bytes = 0;
  TimerId timer = 0;
};

class Pins {
 public:
  explicit Pins(Engine &engine) : engine_(engine) {}

  // The loop thread. A cache that goes away with a pin does so on a copy thread, and a kDone that is waited for is answered after that.
  uint64_t add(Link &link, Pin pin, int64_t timeout_ns);  // the id, never used again; 0: the cache was retired since it was found
  void serve_done(Link &link, uint64_t call_id, Reader in);
  void on_link_lost(const Link &link) noexcept;

  // Any thread. The window of this link that the request lies in; 0: none.
  uint64_t find_window(const Link *link, const ChunkRequest &request) const;
  bool is_open(uint64_t pin_id) const;
  size_t count(const Link &link) const;
  size_t size() const;

 private:
  bool take(uint64_t pin_id, const Link *link, Pin *pin_p);
  void end(Pin pin, Task then);

  Engine &engine_;
  mutable std::mutex mutex_;
  std::map<uint64_t, Pin> pins_;
  uint64_t last_id_ = 0;
};

}  // namespace ldr
