#include "pins.h"

#include <algorithm>
#include <new>

#include "clock.h"
#include "engine.h"
#include "link.h"
#include "paths/stream_frames.h"

namespace ldr {

uint64_t Pins::add(Link &link, Pin pin, int64_t timeout_ns) {
  const int64_t deadline_ns = deadline_after(timeout_ns);
  std::lock_guard lock(mutex_);
  const uint64_t id = ++last_id_;
  Pin &kept = pins_[id];
  kept = std::move(pin);
  kept.link = &link;
  try {
    if (deadline_ns != kNever) {
      kept.timer = engine_.loop.at(deadline_ns, [this, id] {
        Pin late;
        if (take(id, nullptr, &late)) end(std::move(late), nullptr);
      });
    }
  } catch (const std::bad_alloc &) {
    pins_.erase(id);
    throw;
  }
  kept.holds = kept.cache->is_allocated();
  if (!kept.holds || engine_.caches.pin(*kept.cache)) return id;
  if (kept.timer) engine_.loop.cancel(kept.timer);
  pins_.erase(id);
  return 0;
}

// nullptr: whoever's it is.
bool Pins::take(uint64_t pin_id, const Link *link, Pin *pin_p) {
  std::lock_guard lock(mutex_);
  auto it = pins_.find(pin_id);
  if (it == pins_.end() || (link && it->second.link != link)) return false;
  *pin_p = std::move(it->second);
  pins_.erase(it);
  return true;
}

// When then runs, no reference to the cache is left here: the peer may count on its memory being free.
void Pins::end(Pin pin, Task then) {
  const int64_t cache_id = pin.cache->id;
  pin.cache = nullptr;
  CachePtr gone = pin.holds ? engine_.caches.unpin(cache_id) : nullptr;
  if (!gone) {
    if (then) then();
    return;
  }
  struct Ending {
    CachePtr gone;
    Task then;
  };
  std::shared_ptr<Ending> ending;
  try {
    ending = std::make_shared<Ending>(Ending{gone, then});
  } catch (const std::bad_alloc &) {
    engine_.caches.let_go(std::move(gone));
    throw;
  }
  gone = nullptr;
  auto finish = [this, ending] {
    engine_.caches.let_go(std::move(ending->gone));
    if (ending->then) ending->then();
  };
  try {
    engine_.pool.submit(finish);
  } catch (const std::bad_alloc &) {
    finish();
  }
}

void Pins::serve_done(Link &link, uint64_t call_id, Reader in) {
  const uint64_t pin_id = in.u64();
  const auto outcome = ldr_status_t(in.u32());
  if (!in.finished() || outcome > 0) return link.fail(fail(LDR_ERR_LINK_BROKEN, "%s: malformed end of a transfer", link.name().c_str()));
  auto answer = [owner = link.shared_from_this(), call_id](const Status &status) {
    if (!call_id) return;
    try {
      owner->reply(call_id, status, Writer());
    } catch (const std::bad_alloc &) {
      owner->fail({LDR_ERR_LINK_BROKEN, "out of memory"});  // on a copy thread nobody else would: the puller waits for this answer
    }
  };
  Task then = [answer] { answer(Status::success()); };  // now: an exception must not lose the pin
  Pin pin;
  if (!take(pin_id, &link, &pin)) return answer(fail(LDR_ERR_TIMEOUT, "the owner's time limit for this transfer had passed"));
  if (pin.timer) engine_.loop.cancel(pin.timer);
  try {
    if (outcome == LDR_OK && pin.consumes) engine_.caches.consume(pin.cache->id, pin.key, pin.first_tensor, pin.num_tensors);
  } catch (const std::bad_alloc &) {
    end(std::move(pin), nullptr);  // the key stays, the pin does not
    throw;
  }
  end(std::move(pin), std::move(then));
}

// Takes no memory: whoever tears a link down has more to end.
void Pins::on_link_lost(const Link &link) noexcept {
  for (;;) {
    Pin pin;
    {
      std::lock_guard lock(mutex_);
      auto it = std::find_if(pins_.begin(), pins_.end(), [&link](const auto &entry) { return entry.second.link == &link; });
      if (it == pins_.end()) return;
      pin = std::move(it->second);
      pins_.erase(it);
    }
    if (pin.timer) engine_.loop.cancel(pin.timer);
    try {
      end(std::move(pin), nullptr);
    } catch (const std::bad_alloc &) {  // then it was let go here
    }
  }
}

uint64_t Pins::find_window(const Link *link, const ChunkRequest &request) const {
  std::lock_guard lock(mutex_);
  for (const auto &[id, pin] : pins_) {
    if (!pin.is_window || pin.link != link || pin.cache->slot != request.cache_slot || pin.cache->version != request.cache_version) continue;
    auto is_inside = [window = &pin](const ChunkPiece &piece) {
      return piece.tensor == window->tensor && piece.offset >= window->offset_bytes && piece.offset - window->offset_bytes <= window->size_bytes &&
             piece.size_bytes <= window->size_bytes - (piece.offset - window->offset_bytes);
    };
    if (std::all_of(request.pieces.begin(), request.pieces.end(), is_inside)) return id;
  }
  return 0;
}

bool Pins::is_open(uint64_t pin_id) const {
  std::lock_guard lock(mutex_);
  return pins_.count(pin_id) > 0;
}

size_t Pins::count(const Link &link) const {
  std::lock_guard lock(mutex_);
  return size_t(std::count_if(pins_.begin(), pins_.end(), [&link](const auto &entry) { return entry.second.link == &link; }));
}

size_t Pins::size() const {
  std::lock_guard lock(mutex_);
  return pins_.size();
}

}  // namespace ldr
