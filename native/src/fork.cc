#include "fork.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>

namespace ldr {
namespace {

constexpr int kMaxFds = 1 << 20;  // descriptors above it (never seen) just stay open in the child
uint64_t known[kMaxFds / 64];     // a bit each
std::atomic<uint64_t> generation{1};

void before() { fork_mutex().lock(); }

void in_parent() { fork_mutex().unlock(); }

void in_child() {
  generation.fetch_add(1, std::memory_order_relaxed);
  for (int word = 0; word < kMaxFds / 64; ++word) {
    for (; known[word]; known[word] &= known[word] - 1) ::close(word * 64 + __builtin_ctzll(known[word]));
  }
  fork_mutex().unlock();
}

}  // namespace

std::mutex &fork_mutex() {
  static auto *mutex = new std::mutex;  // lives as long as anything that still closes descriptors
  return *mutex;
}

void close_in_child(int fd) {
  if (fd >= 0 && fd < kMaxFds) known[fd / 64] |= uint64_t(1) << (fd % 64);
}

void forget_in_child(int fd) {
  if (fd >= 0 && fd < kMaxFds) known[fd / 64] &= ~(uint64_t(1) << (fd % 64));
}

void close_private(int fd) {
  int error = errno;
  std::lock_guard<std::mutex> lock(fork_mutex());
  forget_in_child(fd);
  ::close(fd);
  errno = error;  // closing is often part of reporting
}

uint64_t fork_generation() {
  static const int installed = pthread_atfork(before, in_parent, in_child);
  (void)installed;
  return generation.load(std::memory_order_relaxed);
}

}  // namespace ldr
