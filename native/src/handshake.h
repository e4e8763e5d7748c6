// The client half of the handshake: blocking, on the caller's thread, within one deadline. admission.h is the other half.
//   on TCP     kHello / kHelloReply, kAuth / kWelcome        who, and that both know the secret
//   same host  kAttach / kAttachReply on the Unix socket     pages, CMA probes; from here on the Unix connection is the control connection
//   streams    kDataHello / kDataWelcome on each             only when a stream path is the first that covers everything
//   control    kReady / kReadyReply
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "auth.h"
#include "hello.h"
#include "link.h"
#include "socket.h"

namespace ldr {

constexpr int64_t kFreshConnectionTimeoutNs = 5'000'000'000;  // what the server gives each connection until the link is up
constexpr uint32_t kMaxDataConnections = 4;

// The stream path that gets connections (LDR_PATH_NONE: none is needed) and how many.
uint32_t stream_path_of(uint32_t path_set, uint32_t *num_connections_p);

// What a finished handshake hands to the link.
struct Acquaintance {
  LinkFacts facts;  // but the epoch
  Fd control, pidfd;
  std::shared_ptr<PeerPage> page;
  std::vector<Fd> data;
  uint32_t data_path = LDR_PATH_NONE;

  LinkPtr make_link(Engine &engine, uint64_t epoch);
};

// The payloads of kAttach (with token and proof before it) and of kAttachReply.
struct CmaOffer {
  uint64_t nonce_address = 0, nonce = 0;
  void encode(Writer &out) const;
  static CmaOffer decode(Reader &in);
};

struct Rejection {
  Status status;
  bool simultaneous = false;  // both sides connected to each other at once; the peer's own attempt goes on
  void encode(Writer &out) const;
  static Rejection decode(Reader in);  // nonsense is HANDSHAKE
};

class ClientHandshake {
 public:
  // wake_fd is readable when the engine is being destroyed.
  ClientHandshake(Engine &engine, const std::string &ip, uint32_t port, int64_t deadline_ns, int wake_fd);
  // Connects, exchanges hellos, checks the server's proof; then server() is known. Errors name address, step and elapsed time.
  // LINK_FAILED: unreachable or refused. HANDSHAKE: it closed the connection or answered nonsense.
  Status meet();
  const Hello &server() const { return server_; }
  // The rest. simultaneous() after a failure: wait for the peer's own connection instead.
  Status join(Acquaintance *acquaintance_p);
  bool simultaneous() const { return simultaneous_; }

 private:
  Status say(const Fd &socket, FrameType type, const Writer &payload, int pass_fd = -1);
  Status hear(const Fd &socket, FrameType type, Frame *frame_p);
  Status ask(const Fd &socket, FrameType type, const Writer &payload, int pass_fd, FrameType answer, Frame *frame_p);
  Status steps_of_meet();
  Status steps_of_join(Acquaintance *acquaintance_p);
  Status attach(Acquaintance *acquaintance_p);
  Status attach_to(Fd socket, Acquaintance *acquaintance_p);
  Status open_data(Acquaintance *acquaintance_p);
  Status no_common_path(bool is_same_host) const;
  Status explain(const Status &status) const;

  Engine &engine_;
  const std::string ip_;
  const uint32_t port_;
  const int64_t start_ns_, deadline_ns_;
  const int wake_fd_;
  const char *step_ = "connect";
  bool simultaneous_ = false;
  Hello own_, server_;
  std::string server_unix_path_;
  Transcript transcript_;
  Digest session_key_{};
  LinkToken token_{};
  Fd tcp_;
  bool cma_works_ = false;
  std::string why_not_attached_ = "the hosts differ";
};

}  // namespace ldr
