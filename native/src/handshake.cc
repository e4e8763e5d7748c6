#include "handshake.h"

#include <poll.h>
#include <unistd.h>

#include <cerrno>

#include "clock.h"
#include "engine.h"
#include "paths/stream.h"

namespace ldr {

uint32_t stream_path_of(uint32_t path_set, uint32_t *num_connections_p) {
  *num_connections_p = 0;
  if (path_set & 1u << LDR_PATH_CMA) return LDR_PATH_NONE;
  if (path_set & 1u << LDR_PATH_UNIX) {
    *num_connections_p = 2;
    return LDR_PATH_UNIX;
  }
  if (path_set & 1u << LDR_PATH_TCP) {
    *num_connections_p = kMaxDataConnections;
    return LDR_PATH_TCP;
  }
  return LDR_PATH_NONE;
}

LinkPtr Acquaintance::make_link(Engine &engine, uint64_t epoch) {
  facts.epoch = epoch;
  std::vector<std::shared_ptr<StreamConnection>> connections;
  for (Fd &socket : data) connections.push_back(StreamConnection::create(engine, std::move(socket), data_path));
  return Link::create(engine, facts, std::move(control), std::move(pidfd), page, std::move(connections));
}

void CmaOffer::encode(Writer &out) const {
  out.u64(nonce_address);
  out.u64(nonce);
}

CmaOffer CmaOffer::decode(Reader &in) {
  CmaOffer offer;
  offer.nonce_address = in.u64();
  offer.nonce = in.u64();
  return offer;
}

void Rejection::encode(Writer &out) const {
  out.u32(uint32_t(status.code));
  out.u8(simultaneous);
  out.text(status.text);
}

Rejection Rejection::decode(Reader in) {
  Rejection rejection;
  rejection.status.code = ldr_status_t(in.u32());
  rejection.simultaneous = in.u8();
  rejection.status.text = in.text();
  switch (rejection.status.code) {
    case LDR_ERR_AUTH: case LDR_ERR_VERSION: case LDR_ERR_MODE_MISMATCH: case LDR_ERR_LAYOUT: break;
    default: rejection.status.code = LDR_ERR_LINK_FAILED;
  }
  if (!in.ok()) rejection.status = {LDR_ERR_HANDSHAKE, "refused without a reason"};
  return rejection;
}

ClientHandshake::ClientHandshake(Engine &engine, const std::string &ip, uint32_t port, int64_t deadline_ns, int wake_fd)
    : engine_(engine), ip_(ip), port_(port), start_ns_(now_ns()), deadline_ns_(deadline_ns), wake_fd_(wake_fd) {}

Status ClientHandshake::explain(const Status &status) const {
  if (status.ok() || status.code == LDR_ERR_INVALID) return status;
  return fail(status.code, "link to %s: step \"%s\" after %lld ms: %s", address_text(ip_, port_).c_str(), step_,
              (long long)((now_ns() - start_ns_) / kMillisecond), status.text.c_str());
}

Status ClientHandshake::meet() { return explain(steps_of_meet()); }

Status ClientHandshake::join(Acquaintance *acquaintance_p) { return explain(steps_of_join(acquaintance_p)); }

Status ClientHandshake::say(const Fd &socket, FrameType type, const Writer &payload, int pass_fd) {
  std::vector<uint8_t> bytes = encode_frame(type, 0, payload, pass_fd >= 0);
  for (size_t sent = 0; sent < bytes.size();) {
    ssize_t n = send_some(socket.get(), bytes.data() + sent, bytes.size() - sent, sent == 0 ? pass_fd : -1);
    if (n >= 0) {
      sent += size_t(n);
    } else if (errno == EAGAIN) {
      if (Status status = wait_for(socket.get(), POLLOUT, deadline_ns_, wake_fd_); !status.ok()) return status;
    } else if (errno == EPIPE || errno == ECONNRESET) {
      return Status::success();  // the peer's last words, a rejection perhaps, can still be read
    } else {
      return fail_errno(LDR_ERR_LINK_FAILED, "send");
    }
  }
  return Status::success();
}

Status ClientHandshake::hear(const Fd &socket, FrameType type, Frame *frame_p) {
  FrameReader reader(kMaxHandshakeFrameBytes);
  for (;;) {
    switch (reader.read(socket.get(), frame_p)) {
      case FrameReader::kWouldBlock:
        if (Status status = wait_for(socket.get(), POLLIN, deadline_ns_, wake_fd_); !status.ok()) return status;
        continue;
      case FrameReader::kEnd: return fail(LDR_ERR_HANDSHAKE, "%s", reader.why().c_str());
      case FrameReader::kBad: return fail(LDR_ERR_HANDSHAKE, "the peer sent %s", reader.why().c_str());
      case FrameReader::kFrame: break;
    }
    if (frame_p->type() == FrameType::kReject) {
      Rejection rejection = Rejection::decode(frame_p->reader());
      simultaneous_ = rejection.simultaneous;
      return fail(rejection.status.code, "refused by the peer: %s", rejection.status.text.c_str());
    }
    if (frame_p->type() != type) return fail(LDR_ERR_HANDSHAKE, "the peer sent frame type %u, expected %u", frame_p->header.type, unsigned(type));
    return Status::success();
  }
}

Status ClientHandshake::ask(const Fd &socket, FrameType type, const Writer &payload, int pass_fd, FrameType answer, Frame *frame_p) {
  if (Status status = say(socket, type, payload, pass_fd); !status.ok()) return status;
  return hear(socket, answer, frame_p);
}

Status ClientHandshake::steps_of_meet() {
  if (Status status = connect_tcp(ip_, port_, engine_.config.marks, deadline_ns_, wake_fd_, &tcp_); !status.ok()) return status;
  step_ = "hello";
  if (Status status = make_hello(engine_, &own_); !status.ok()) return status;
  Writer hello;
  own_.encode(hello);
  Frame reply;
  if (Status status = ask(tcp_, FrameType::kHello, hello, -1, FrameType::kHelloReply, &reply); !status.ok()) return status;

  Reader in = reply.reader();
  if (Status status = Hello::decode(in, &server_); !status.ok()) return status;
  server_unix_path_ = in.text();
  transcript_.client_hello = hello.bytes();
  transcript_.server_hello.assign(reply.payload.begin(), reply.payload.end() - ptrdiff_t(in.left()));
  Digest proof{};
  if (const uint8_t *bytes = in.raw(proof.size())) std::copy(bytes, bytes + proof.size(), proof.begin());
  if (!in.finished()) return fail(LDR_ERR_HANDSHAKE, "the peer's answer to the hello has a wrong size");
  if (Status status = check_hellos(own_, server_); !status.ok()) return status;
  if (!same(proof, server_proof(engine_.config.secret, transcript_)))
    return fail(LDR_ERR_AUTH, "cluster %llu and cluster %llu have different secrets: set the same LLM_DATADIST_SECRET for both",
                (unsigned long long)own_.cluster_id, (unsigned long long)server_.cluster_id);
  session_key_ = session_key(engine_.config.secret, own_.nonce, server_.nonce);
  return Status::success();
}

Status ClientHandshake::steps_of_join(Acquaintance *acquaintance_p) {
  Acquaintance &a = *acquaintance_p;
  a.facts.cluster_id = server_.cluster_id;
  a.facts.incarnation = server_.incarnation;
  a.facts.address = address_text(ip_, port_);
  a.facts.is_self = server_.incarnation == engine_.incarnation;

  step_ = "authentication";
  Writer auth;
  Digest proof = client_proof(engine_.config.secret, transcript_);
  auth.raw(proof.data(), proof.size());
  Frame welcome;
  if (Status status = ask(tcp_, FrameType::kAuth, auth, -1, FrameType::kWelcome, &welcome); !status.ok()) return status;
  if (welcome.payload.size() != token_.size()) return fail(LDR_ERR_HANDSHAKE, "the peer's welcome has a wrong size");
  std::copy(welcome.payload.begin(), welcome.payload.end(), token_.begin());

  if (is_same_host(own_, server_)) {
    step_ = "attach to the Unix socket";
    if (Status status = attach(&a); !status.ok()) return status;
  }
  if (!a.control) a.control = std::move(tcp_);

  a.facts.path_set = common_paths(own_, server_, a.facts.is_same_host, cma_works_);
  step_ = "choice of the data paths";
  if (!a.facts.path_set) return no_common_path(a.facts.is_same_host);

  step_ = "data connections";
  if (Status status = open_data(&a); !status.ok()) return status;

  step_ = "ready";
  Writer ready;
  ready.u32(a.facts.path_set);
  ready.u32(uint32_t(a.data.size()));
  Frame reply;
  return ask(a.control, FrameType::kReady, ready, -1, FrameType::kReadyReply, &reply);
}

Status ClientHandshake::no_common_path(bool is_same_host) const {
  std::string why;
  if (!is_same_host) why = "; no same-host path: " + why_not_attached_;
  else if (own_.path_set & server_.path_set & 1u << LDR_PATH_CMA) why = "; cma was refused by the kernel";
  return fail(LDR_ERR_LINK_FAILED, "no data path for both: this engine allows %s, the peer allows %s%s", path_set_text(own_.path_set).c_str(),
              path_set_text(server_.path_set).c_str(), why.c_str());
}

// Where the Unix socket cannot be reached the link does without it, unless it is what proves the user.
Status ClientHandshake::attach(Acquaintance *acquaintance_p) {
  Fd socket;
  Status status = connect_unix(server_unix_path_, &socket);
  if (!status.ok()) {
    why_not_attached_ = status.text;
    if (needs_same_user(own_, server_)) return refuse_without_secret(own_, server_, "cannot prove to be one user's: " + status.text);
    return Status::success();
  }
  return attach_to(std::move(socket), acquaintance_p);
}

Status ClientHandshake::attach_to(Fd socket, Acquaintance *acquaintance_p) {
  PeerProcess process;
  if (Status status = peer_process(socket.get(), &process); !status.ok()) return status;
  if (process.pid != server_.pid)
    return fail(LDR_ERR_LINK_FAILED, "its Unix socket belongs to process %d, the hello came from process %d", int(process.pid), int(server_.pid));
  if (needs_same_user(own_, server_) && process.uid != geteuid())
    return refuse_without_secret(own_, server_, "belong to the users " + std::to_string(geteuid()) + " and " + std::to_string(process.uid));

  allow_cma_readers(engine_);
  Writer out;
  out.raw(token_.data(), token_.size());
  Digest proof = attach_proof(session_key_);
  out.raw(proof.data(), proof.size());
  CmaOffer{engine_.page->cma_nonce_address(), engine_.page->cma_nonce()}.encode(out);
  Frame reply;
  if (Status status = ask(socket, FrameType::kAttach, out, engine_.page->fd(), FrameType::kAttachReply, &reply); !status.ok()) return status;
  Reader in = reply.reader();
  CmaOffer offer = CmaOffer::decode(in);
  bool server_can_read = in.u8();
  if (reply.lost_descriptor()) return fail(LDR_ERR_SYSTEM, "the peer's page was not taken: this process has no descriptor left");
  if (!in.finished() || !reply.passed) return fail(LDR_ERR_HANDSHAKE, "the peer's answer has a wrong size or no page");
  if (Status status = PeerPage::map(reply.passed.get(), server_.incarnation, &acquaintance_p->page); !status.ok()) return status;
  bool both_allow = own_.path_set & server_.path_set & 1u << LDR_PATH_CMA;
  cma_works_ = both_allow && server_can_read && probe_cma(engine_, process.pid, offer.nonce_address, offer.nonce);
  acquaintance_p->facts.is_same_host = true;
  acquaintance_p->facts.peer_pid = process.pid;
  acquaintance_p->pidfd = peer_pidfd(socket.get(), process.pid);
  acquaintance_p->control = std::move(socket);
  return Status::success();
}

Status ClientHandshake::open_data(Acquaintance *acquaintance_p) {
  uint32_t num_connections;
  acquaintance_p->data_path = stream_path_of(acquaintance_p->facts.path_set, &num_connections);
  for (uint32_t index = 0; index < num_connections; ++index) {
    Fd socket;
    Status status = acquaintance_p->data_path == LDR_PATH_UNIX
                        ? connect_unix(server_unix_path_, &socket)
                        : connect_tcp(ip_, port_, engine_.config.marks, deadline_ns_, wake_fd_, &socket);
    if (!status.ok()) return status;
    Writer out;
    out.raw(token_.data(), token_.size());
    out.u32(index);
    Digest proof = data_proof(session_key_, index);
    out.raw(proof.data(), proof.size());
    Frame reply;
    if (status = ask(socket, FrameType::kDataHello, out, -1, FrameType::kDataWelcome, &reply); !status.ok()) return status;
    acquaintance_p->data.push_back(std::move(socket));
  }
  return Status::success();
}

}  // namespace ldr
