// A link to a peer: one control connection (Unix socket on the same host, else TCP), data connections, the peer's page. Shared by everything that uses it; READY from
// birth (the handshake makes it), then BROKEN or CLOSED, never back.
#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fd.h"
#include "page.h"
#include "peer_table.h"
#include "status.h"
#include "transfer.h"
#include "wire.h"

namespace ldr {

class Engine;
class StreamConnection;

// What the handshake found out; constant for the life of the link.
struct LinkFacts {
  uint64_t cluster_id = 0;      // it is filed under; the peer's own word for itself, unless LDR_LINK_AS
  uint64_t incarnation = 0;
  uint64_t epoch = 0;
  std::string address;          // "127.0.0.1:26000"
  bool is_same_host = false;
  bool is_self = false;         // the peer is this engine
  bool is_server_half = false;  // the peer connected to us
  bool is_inbound = false;      // likewise, between one-way engines: it is the peer's link, we only serve it
  pid_t peer_pid = 0;
  uint32_t path_set = 0;
};

class Link : public std::enable_shared_from_this<Link> {
 public:
  // pidfd may be empty (other host). The link is not served until start().
  static std::shared_ptr<Link> create(Engine &engine, LinkFacts facts, Fd control, Fd pidfd, std::shared_ptr<PeerPage> page,
                                      std::vector<std::shared_ptr<StreamConnection>> data);
  ~Link();
  void announce();  // LINK_UP, unless it is down already; LINK_DOWN follows only then
  void start();     // watches control socket and pidfd, starts heartbeats; the data connections were started by create()

  Engine &engine() const;
  const LinkFacts &facts() const;
  std::string name() const;  // "cluster 7 (127.0.0.1:26000)": for texts
  bool ready() const;
  bool serves_peer() const;  // not over one that a one-way engine opened
  Status why_down() const;
  // nullptr: other host. For the transfer whose turn it is: the page goes when the link is down and no transfer has it.
  PeerPage *page() const;
  // Death word, then pidfd (one poll): true as soon as the process is known to be gone. Cheap enough for every batch.
  bool peer_gone() const;
  int64_t last_heard_ns() const;

  // Any thread. Sends at once when the socket has room, queues otherwise; a queue above 64 MiB or 64 descriptors breaks the link.
  void send(FrameType type, uint64_t call_id, const Writer &payload, Fd passed = Fd());
  // on_reply runs exactly once: with the peer's answer (its status, its payload, a passed descriptor), BUSY (no descriptor was free here for the passed one),
  // TIMEOUT, or LINK_BROKEN. On the loop thread, or on this one when the link is down already. Payload and descriptor are borrowed for the call.
  using OnReply = std::function<void(const Status &status, Reader payload, Fd &passed)>;
  void call(FrameType type, const Writer &payload, int64_t deadline_ns, OnReply on_reply);
  // As ldr_link_probe.
  Status probe(int64_t deadline_ns);
  // Answer to a frame received with call_id.
  void reply(uint64_t call_id, const Status &status, const Writer &payload, Fd passed = Fd());

  // Any thread, first reason wins: BROKEN, calls and transfers fail, grants of the peer end, LINK_DOWN event.
  void fail(const Status &why);
  // The same for a data connection. While an unlink of ours waits for its answer the peer closes these first, so that is not the end yet: the answer is.
  void data_failed(const Status &why);
  // As ldr_link_close. Runs on the caller's thread.
  Status close(bool force, int64_t deadline_ns);

  // Used by transfer.cc and the paths.
  TransferQueue transfers;
  PeerTable table;
  PeerMappings mappings;
  std::array<std::atomic<uint64_t>, LDR_NUM_PATHS> bytes_pulled{}, bytes_pushed{};
  std::vector<std::shared_ptr<StreamConnection>> data() const;  // empty, too, when the link is down and no transfer has it

 private:
  Link();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};
using LinkPtr = std::shared_ptr<Link>;

}  // namespace ldr
