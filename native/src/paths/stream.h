// One data connection of a link (unix or tcp), used by both ends in both directions at once: kRead / kReadData, kWrite / kWriteDone.
// A chunk is at most 1 MiB of pieces. The owner of the memory checks every frame, and again before each send or receive that touches it, under
// CacheTable::read_guard; a chunk whose source went away ends with a status in its trailer.
// No call on the socket blocks. When it is ready a copy thread takes the connection (EPOLLONESHOT), works, waits at most a few ms for more, and arms it
// again: no thread is ever held by a slow peer, so two engines that pull from each other cannot block one another.
#pragma once

#include <cstdint>
#include <memory>

#include "../fd.h"
#include "../op.h"
#include "../status.h"

namespace ldr {

class Engine;
class Link;
struct CopyJob;

class StreamConnection : public std::enable_shared_from_this<StreamConnection> {
 public:
  static std::shared_ptr<StreamConnection> create(Engine &engine, Fd socket, uint32_t path);
  ~StreamConnection();
  void start(const std::shared_ptr<Link> &link);  // watch the socket; once
  void shutdown(const Status &why);               // any thread; every chunk in flight ends; idempotent
  // For an operation that was stopped: ends its chunks with op.stop_status(). After the return nothing of it is written to local memory; what still comes in
  // is dropped. A write whose frame has begun ends only with the peer's answer (or the connection), because until then its bytes can arrive there.
  void abandon(const Op &op);

  struct Impl;
  Impl &impl() { return *impl_; }

 private:
  explicit StreamConnection(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ldr
