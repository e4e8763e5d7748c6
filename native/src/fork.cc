#include "fork.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>

namespace ldr {
namespace {

constexpr int kMaxFds = 1 << 20;  // descriptors above it (never seen) just stay open in the child
std::atomic<uint64_t> owned[kMaxFds / 64];
std::atomic<uint64_t> generation{1};

void in_child() {
  generation.fetch_add(1, std::memory_order_relaxed);
  for (int word = 0; word < kMaxFds / 64; ++word) {
    uint64_t bits = owned[word].load(std::memory_order_relaxed);
    if (!bits) continue;
    owned[word].store(0, std::memory_order_relaxed);
    for (; bits; bits &= bits - 1) ::close(word * 64 + __builtin_ctzll(bits));
  }
}

}  // namespace

void close_in_child(int fd) {
  if (fd >= 0 && fd < kMaxFds) owned[fd / 64].fetch_or(uint64_t(1) << (fd % 64), std::memory_order_relaxed);
}

void forget_in_child(int fd) {
  if (fd >= 0 && fd < kMaxFds) owned[fd / 64].fetch_and(~(uint64_t(1) << (fd % 64)), std::memory_order_relaxed);
}

uint64_t fork_generation() {
  static const int installed = pthread_atfork(nullptr, nullptr, in_child);
  (void)installed;
  return generation.load(std::memory_order_relaxed);
}

}  // namespace ldr
