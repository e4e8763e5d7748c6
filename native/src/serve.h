// Answers to a peer's control requests: kTable, kLookup, kMapping, kGrantOpen, kGrantClose, kDone. Runs on the loop thread; nothing here waits or touches Python.
#pragma once

#include "fd.h"
#include "wire.h"

namespace ldr {

class Link;

// Called by Link for every frame that is not link management. Bad bytes fail the link.
void serve_frame(Link &link, FrameType type, uint64_t call_id, Reader payload);

}  // namespace ldr
