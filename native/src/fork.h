// fork(): the child must not keep the parent's connections open (its peers would never see the parent's end) and must not use its engines.
// Descriptors that are private to this process are known here, and closed in a forked child before fork() returns there.
#pragma once

#include <cstdint>
#include <mutex>

namespace ldr {

// Held for moments only, around the birth and the end of a private descriptor and for what a forked child must find whole;
// fork() takes it, so that it never falls in between.
std::mutex &fork_mutex();
// Under the mutex.
void close_in_child(int fd);
void forget_in_child(int fd);

// Makes a descriptor (a call that never blocks; negative: failed) that a forked child closes at once.
template <class F> int make_private(F make) {
  std::lock_guard<std::mutex> lock(fork_mutex());
  int fd = make();
  close_in_child(fd);
  return fd;
}
void close_private(int fd);  // any descriptor

// Grows in each forked child: an engine of another generation is not usable. The first call installs the handlers.
uint64_t fork_generation();

}  // namespace ldr
