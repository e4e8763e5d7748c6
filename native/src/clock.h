// One clock: CLOCK_MONOTONIC in nanoseconds.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <ctime>
#include <limits>
#include <mutex>

namespace ldr {

constexpr int64_t kMillisecond = 1'000'000;
constexpr int64_t kSecond = 1'000'000'000;
constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

inline int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * kSecond + t.tv_nsec;
}

// Negative timeout: no limit. Saturates.
inline int64_t deadline_after(int64_t timeout_ns) {
  if (timeout_ns < 0) return kNever;
  int64_t now = now_ns();
  return timeout_ns > kNever - now ? kNever : now + timeout_ns;
}

// As condition_variable::wait_until; kNever waits without a limit.
template <class Predicate> bool wait_until(std::condition_variable &changed, std::unique_lock<std::mutex> &lock, int64_t deadline_ns, Predicate done) {
  if (deadline_ns != kNever) return changed.wait_until(lock, std::chrono::steady_clock::time_point(std::chrono::nanoseconds(deadline_ns)), done);
  changed.wait(lock, done);
  return true;
}

}  // namespace ldr
