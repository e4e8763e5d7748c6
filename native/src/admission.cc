#include "admission.h"

#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <unordered_map>

#include "clock.h"
#include "engine.h"
#include "handshake.h"

namespace ldr {
namespace {

// Somebody who said hello, with all connections of that handshake.
struct Visitor {
  Hello hello, own;
  Transcript transcript;
  Digest session_key{};
  LinkToken token{};
  uint64_t epoch_at_hello = 0;
  std::string address;
  bool cma_works = false;
  std::shared_ptr<PeerPage> page;
  Fd pidfd;
  pid_t pid = 0;
  int main_fd = -1, attached_fd = -1;  // keys of the connections
  std::map<uint32_t, int> data_fds;    // by index

  bool attached() const { return attached_fd >= 0; }
};
using VisitorPtr = std::shared_ptr<Visitor>;

struct Connection {
  enum State { kNew, kHelloed, kWelcomed, kAttached, kData };
  Fd socket;
  bool is_unix = false;
  bool proven = false;
  State state = kNew;
  FrameReader reader{kMaxHandshakeFrameBytes};
  TimerId deadline = 0;
  VisitorPtr visitor;
};
using ConnectionPtr = std::shared_ptr<Connection>;

Status malformed(const char *what) { return fail(LDR_ERR_LINK_FAILED, "malformed %s", what); }

template <size_t N> bool read_array(Reader &in, std::array<uint8_t, N> *array_p) {
  const uint8_t *bytes = in.raw(N);
  if (bytes) std::copy(bytes, bytes + N, array_p->begin());
  return bytes;
}

}  // namespace

struct Admission::Impl {
  Impl(Engine &engine, const std::string &unix_path) : engine(engine), unix_path(unix_path) {}

  Engine &engine;
  const std::string unix_path;
  std::unordered_map<int, ConnectionPtr> connections;
  std::map<LinkToken, VisitorPtr> visitors;
  uint32_t num_unproven = 0;

  void take(Fd socket, bool is_unix);
  void on_readable(int fd);
  void read_frame(const ConnectionPtr &c);
  Status on_frame(const ConnectionPtr &c, Frame &frame);
  Status on_hello(const ConnectionPtr &c, const Frame &frame);
  Status on_auth(const ConnectionPtr &c, const Frame &frame);
  Status on_attach(const ConnectionPtr &c, Frame &frame);
  Status on_data(const ConnectionPtr &c, const Frame &frame);
  Status on_ready(const ConnectionPtr &c, const Frame &frame, bool *simultaneous_p);
  VisitorPtr find_visitor(Reader &in);
  void prove(const ConnectionPtr &c);
  Fd release(int fd);
  void drop(int fd);
  void drop_visitor(const VisitorPtr &visitor);
  bool say(const ConnectionPtr &c, FrameType type, const Writer &payload, int pass_fd = -1);
  void refuse(const ConnectionPtr &c, const Status &why, bool simultaneous);
};

void Admission::Impl::take(Fd socket, bool is_unix) {
  if (num_unproven >= kMaxUnproven || connections.size() >= kMaxConnections) return;  // closed unheard
  int fd = socket.get();
  auto c = std::make_shared<Connection>();
  c->socket = std::move(socket);
  c->is_unix = is_unix;
  if (!engine.loop.watch(fd, EPOLLIN, [this, fd](uint32_t) { on_readable(fd); }).ok()) return;
  c->deadline = engine.loop.at(now_ns() + kFreshConnectionTimeoutNs, [this, fd] { drop(fd); });
  connections[fd] = std::move(c);
  ++num_unproven;
}

void Admission::Impl::on_readable(int fd) {
  auto at = connections.find(fd);
  if (at == connections.end()) return;
  ConnectionPtr c = at->second;
  try {
    read_frame(c);
  } catch (const std::exception &) {  // out of memory: this one is lost, the others are not
    drop(fd);
  }
}

void Admission::Impl::read_frame(const ConnectionPtr &c) {
  const int fd = c->socket.get();
  Frame frame;
  switch (c->reader.read(fd, &frame)) {
    case FrameReader::kWouldBlock: return;
    case FrameReader::kEnd: return drop(fd);
    case FrameReader::kBad: return refuse(c, fail(LDR_ERR_LINK_FAILED, "%s", c->reader.why().c_str()), false);
    case FrameReader::kFrame: break;
  }
  bool simultaneous = false;
  Status status = frame.type() == FrameType::kReady ? on_ready(c, frame, &simultaneous) : on_frame(c, frame);
  if (!status.ok()) refuse(c, status, simultaneous);
}

Status Admission::Impl::on_frame(const ConnectionPtr &c, Frame &frame) {
  switch (frame.type()) {
    case FrameType::kHello: return on_hello(c, frame);
    case FrameType::kAuth: return on_auth(c, frame);
    case FrameType::kAttach: return on_attach(c, frame);
    case FrameType::kDataHello: return on_data(c, frame);
    default: return fail(LDR_ERR_LINK_FAILED, "frame type %u has no place in a handshake", frame.header.type);
  }
}

Status Admission::Impl::on_hello(const ConnectionPtr &c, const Frame &frame) {
  if (c->state != Connection::kNew || c->is_unix) return fail(LDR_ERR_LINK_FAILED, "a hello out of order");
  auto visitor = std::make_shared<Visitor>();
  Reader in = frame.reader();
  if (Status status = Hello::decode(in, &visitor->hello); !status.ok()) return status;
  if (!in.finished()) return malformed("hello");
  if (Status status = make_hello(engine, &visitor->own); !status.ok()) return status;
  if (Status status = check_hellos(visitor->hello, visitor->own); !status.ok()) return status;
  if (Status status = random_bytes(visitor->token.data(), visitor->token.size()); !status.ok()) return status;
  visitor->epoch_at_hello = engine.links.last_epoch();
  visitor->address = peer_address(c->socket.get());
  visitor->main_fd = c->socket.get();

  Writer reply;
  visitor->own.encode(reply);
  reply.text(unix_path);
  visitor->transcript = {frame.payload, reply.bytes()};
  Digest proof = server_proof(engine.config.secret, visitor->transcript);
  reply.raw(proof.data(), proof.size());
  visitor->session_key = session_key(engine.config.secret, visitor->hello.nonce, visitor->own.nonce);
  c->visitor = std::move(visitor);
  c->state = Connection::kHelloed;
  say(c, FrameType::kHelloReply, reply);
  return Status::success();
}

Status Admission::Impl::on_auth(const ConnectionPtr &c, const Frame &frame) {
  if (c->state != Connection::kHelloed) return fail(LDR_ERR_LINK_FAILED, "an authentication out of order");
  Reader in = frame.reader();
  Digest proof{};
  read_array(in, &proof);
  if (!in.finished()) return malformed("authentication");
  Visitor &visitor = *c->visitor;
  if (!same(proof, client_proof(engine.config.secret, visitor.transcript)))
    return fail(LDR_ERR_AUTH, "cluster %llu and cluster %llu have different secrets: set the same LLM_DATADIST_SECRET for both",
                (unsigned long long)visitor.hello.cluster_id, (unsigned long long)engine.config.cluster_id);
  if (engine.links.yields_to_own_attempt(visitor.hello)) {
    refuse(c, fail(LDR_ERR_LINK_FAILED, "both engines connect to each other; the other attempt goes on"), true);
    return Status::success();
  }
  prove(c);
  c->state = Connection::kWelcomed;
  visitors[visitor.token] = c->visitor;
  Writer welcome;
  welcome.raw(visitor.token.data(), visitor.token.size());
  say(c, FrameType::kWelcome, welcome);
  return Status::success();
}

Status Admission::Impl::on_attach(const ConnectionPtr &c, Frame &frame) {
  Reader in = frame.reader();
  VisitorPtr visitor = find_visitor(in);
  Digest proof{};
  read_array(in, &proof);
  CmaOffer offer = CmaOffer::decode(in);
  if (frame.lost_descriptor()) return fail(LDR_ERR_LINK_FAILED, "the page was not taken: the process that is linked to has no descriptor left");
  if (!in.finished() || !frame.passed) return malformed("attach");
  if (c->state != Connection::kNew || !c->is_unix || !visitor || visitor->attached() || !same(proof, attach_proof(visitor->session_key)))
    return fail(LDR_ERR_AUTH, "this attach belongs to no handshake");
  PeerProcess process;
  if (Status status = peer_process(c->socket.get(), &process); !status.ok()) return status;
  if (process.pid != visitor->hello.pid)
    return fail(LDR_ERR_LINK_FAILED, "process %d attaches, the hello came from process %d", int(process.pid), int(visitor->hello.pid));
  if (needs_same_user(visitor->hello, visitor->own) && process.uid != geteuid())
    return refuse_without_secret(visitor->hello, visitor->own, "belong to the users " + std::to_string(process.uid) + " and " + std::to_string(geteuid()));
  if (Status status = PeerPage::map(frame.passed.get(), visitor->hello.incarnation, &visitor->page); !status.ok()) return status;

  prove(c);
  allow_cma_readers(engine);
  visitor->pid = process.pid;
  visitor->pidfd = peer_pidfd(c->socket.get(), process.pid);
  bool both_allow = visitor->hello.path_set & visitor->own.path_set & 1u << LDR_PATH_CMA;
  visitor->cma_works = both_allow && probe_cma(engine, process.pid, offer.nonce_address, offer.nonce);
  visitor->attached_fd = c->socket.get();
  c->visitor = visitor;
  c->state = Connection::kAttached;
  Writer reply;
  CmaOffer{engine.page->cma_nonce_address(), engine.page->cma_nonce()}.encode(reply);
  reply.u8(visitor->cma_works);
  say(c, FrameType::kAttachReply, reply, engine.page->fd());
  return Status::success();
}

Status Admission::Impl::on_data(const ConnectionPtr &c, const Frame &frame) {
  Reader in = frame.reader();
  VisitorPtr visitor = find_visitor(in);
  uint32_t index = in.u32();
  Digest proof{};
  read_array(in, &proof);
  if (!in.finished()) return malformed("data hello");
  if (c->state != Connection::kNew || !visitor || index >= kMaxDataConnections || visitor->data_fds.count(index) ||
      !same(proof, data_proof(visitor->session_key, index)))
    return fail(LDR_ERR_AUTH, "this data connection belongs to no handshake");
  prove(c);
  visitor->data_fds[index] = c->socket.get();
  c->visitor = visitor;
  c->state = Connection::kData;
  say(c, FrameType::kDataWelcome, Writer());
  return Status::success();
}

Status Admission::Impl::on_ready(const ConnectionPtr &c, const Frame &frame, bool *simultaneous_p) {
  VisitorPtr visitor = c->visitor;
  if (!visitor || c->state != (visitor->attached() ? Connection::kAttached : Connection::kWelcomed))
    return fail(LDR_ERR_LINK_FAILED, "a ready out of order");
  if (needs_same_user(visitor->hello, visitor->own) && !visitor->attached())
    return refuse_without_secret(visitor->hello, visitor->own, "cannot prove to be one user's");
  Reader in = frame.reader();
  uint32_t path_set = in.u32(), num_data = in.u32(), num_expected;
  if (!in.finished()) return malformed("ready");
  uint32_t possible = common_paths(visitor->hello, visitor->own, visitor->attached(), visitor->cma_works);
  uint32_t data_path = stream_path_of(path_set, &num_expected);
  if (!path_set || path_set & ~possible)
    return fail(LDR_ERR_LINK_FAILED, "data paths %s are not possible, only %s", path_set_text(path_set).c_str(), path_set_text(possible).c_str());
  if (num_data != num_expected || visitor->data_fds.size() != num_data)
    return fail(LDR_ERR_LINK_FAILED, "%u data connections announced, %zu came, %u are needed", num_data, visitor->data_fds.size(), num_expected);

  Acquaintance a;
  a.facts.cluster_id = visitor->hello.cluster_id;
  a.facts.incarnation = visitor->hello.incarnation;
  a.facts.address = visitor->address;
  a.facts.is_same_host = visitor->attached();
  a.facts.is_self = visitor->hello.incarnation == engine.incarnation;
  if (a.facts.is_self && visitor->attached() && visitor->pid != getpid())
    return fail(LDR_ERR_AUTH, "process %d claims to be an engine of process %d", int(visitor->pid), int(getpid()));
  a.facts.is_server_half = true;
  a.facts.is_inbound = engine.config.one_way;
  a.facts.peer_pid = visitor->pid;
  a.facts.path_set = path_set;
  a.page = visitor->page;
  a.data_path = data_path;
  Status status = engine.links.adopt(a.facts, visitor->epoch_at_hello, [&](uint64_t epoch) {
    a.pidfd = std::move(visitor->pidfd);
    a.control = release(c->socket.get());
    for (auto &[index, fd] : visitor->data_fds) a.data.push_back(release(fd));
    LinkPtr link = a.make_link(engine, epoch);
    link->send(FrameType::kReadyReply, 0, Writer());  // before anybody else can send on it
    return link;
  });
  if (!status.ok()) {
    *simultaneous_p = status.code == LDR_ERR_LINK_FAILED;  // they crossed
    return status;
  }
  drop_visitor(visitor);
  return Status::success();
}

VisitorPtr Admission::Impl::find_visitor(Reader &in) {
  LinkToken token{};
  read_array(in, &token);
  auto at = visitors.find(token);
  return at == visitors.end() ? nullptr : at->second;
}

void Admission::Impl::prove(const ConnectionPtr &c) {
  if (!c->proven) --num_unproven;
  c->proven = true;
}

// Takes the connection out of our hands: whoever gets the socket has a clean one.
Fd Admission::Impl::release(int fd) {
  auto at = connections.find(fd);
  if (at == connections.end()) return Fd();
  ConnectionPtr c = at->second;
  connections.erase(at);
  engine.loop.unwatch(fd);
  engine.loop.cancel(c->deadline);
  prove(c);
  return std::move(c->socket);
}

void Admission::Impl::drop(int fd) {
  auto at = connections.find(fd);
  if (at == connections.end()) return;
  VisitorPtr visitor = at->second->visitor;
  release(fd);
  if (visitor) drop_visitor(visitor);  // a handshake does not survive any of its connections
}

void Admission::Impl::drop_visitor(const VisitorPtr &visitor) {
  visitors.erase(visitor->token);
  release(visitor->main_fd);
  release(visitor->attached_fd);
  for (auto &[index, fd] : visitor->data_fds) release(fd);
  visitor->data_fds.clear();
  visitor->main_fd = visitor->attached_fd = -1;
}

// A fresh socket has room for a handshake frame; a peer that lets it fill up is dropped.
bool Admission::Impl::say(const ConnectionPtr &c, FrameType type, const Writer &payload, int pass_fd) {
  std::vector<uint8_t> bytes = encode_frame(type, 0, payload, pass_fd >= 0);
  if (send_some(c->socket.get(), bytes.data(), bytes.size(), pass_fd) == ssize_t(bytes.size())) return true;
  drop(c->socket.get());
  return false;
}

void Admission::Impl::refuse(const ConnectionPtr &c, const Status &why, bool simultaneous) {
  if (!c->socket) return;
  Writer rejection;
  Rejection{why, simultaneous}.encode(rejection);
  if (say(c, FrameType::kReject, rejection)) drop(c->socket.get());
}

Admission::Admission(Engine &engine, const std::string &unix_path) : impl_(new Impl(engine, unix_path)) {}

Admission::~Admission() = default;

void Admission::take(Fd socket, bool is_unix) { impl_->take(std::move(socket), is_unix); }

void Admission::close() {
  while (!impl_->connections.empty()) impl_->drop(impl_->connections.begin()->first);
}

}  // namespace ldr
