// fork(): the child must not keep the parent's connections open (its peers would never see the parent's end) and must not use its engines.
// Lock-free, so that the handler in the child may run whatever the other threads of the parent were doing.
#pragma once

#include <cstdint>

namespace ldr {

void close_in_child(int fd);   // a forked child closes it at once
void forget_in_child(int fd);  // before it is closed here; no-op for others
// Grows in each forked child: an engine of another generation is not usable. The first call installs the handler.
uint64_t fork_generation();

}  // namespace ldr
