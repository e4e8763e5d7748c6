// A link whose peer is made of frames: what an authenticated peer may ask for, and what it cannot do to us.
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/resource.h>
#include <unistd.h>

#include <functional>
#include <future>
#include <thread>

#include "engines.h"
#include "shared_memory.h"
#include "socket.h"
#include "stream_fixture.h"

using namespace ldr;
using namespace ldr_test;

namespace {

// The other end of a control connection. Its link is in the engine's table.
struct Peer {
  Fd socket;
  FrameReader reader{kMaxFrameBytes};
  LinkPtr link;

  Peer(Engine &engine, uint64_t cluster_id, std::vector<Fd> data = {}) {
    Fd control;
    socket_pair(&control, &socket);
    LinkFacts facts;
    facts.cluster_id = cluster_id;
    facts.incarnation = 1000 + cluster_id;
    facts.address = "test";
    facts.is_same_host = true;
    facts.path_set = 1u << LDR_PATH_UNIX;
    CHECK_OK(engine.links.adopt(facts, engine.links.last_epoch(), [&](uint64_t epoch) {
      facts.epoch = epoch;
      std::vector<std::shared_ptr<StreamConnection>> connections;
      for (Fd &fd : data) connections.push_back(StreamConnection::create(engine, std::move(fd), LDR_PATH_UNIX));
      return link = Link::create(engine, facts, std::move(control), Fd(), nullptr, std::move(connections));
    }));
  }
  // False: the engine has closed its end.
  bool frame(FrameType type, uint64_t call_id, const Writer &payload) {
    std::vector<uint8_t> bytes = encode_frame(type, call_id, payload);
    for (size_t sent = 0; sent < bytes.size();) {
      ssize_t n = send_some(socket.get(), bytes.data() + sent, bytes.size() - sent, -1);
      if (n >= 0) sent += size_t(n);
      else if (errno != EAGAIN) return false;
      else CHECK_OK(wait_for(socket.get(), POLLOUT, deadline_after(ldr_test::kPatienceNs), -1));
    }
    return true;
  }
  FrameReader::Result next(Frame *frame_p) {  // but heartbeats
    for (;;) {
      FrameReader::Result result = reader.read(socket.get(), frame_p);
      if (result == FrameReader::kFrame && frame_p->type() == FrameType::kHeartbeat) continue;
      if (result != FrameReader::kWouldBlock) return result;
      CHECK_OK(wait_for(socket.get(), POLLIN, deadline_after(ldr_test::kPatienceNs), -1));
    }
  }
  Frame expect(FrameType type) {
    Frame frame;
    CHECK_EQ(next(&frame), FrameReader::kFrame);
    CHECK_EQ(frame.type(), type);
    return frame;
  }
  void expect_reply(uint64_t call_id, ldr_status_t code) {
    Frame reply = expect(FrameType::kReply);
    CHECK_EQ(reply.header.call_id, call_id);
    Reader in = reply.reader();
    CHECK_EQ(ldr_status_t(in.u32()), code);
  }
  void reply(uint64_t call_id, const Writer &payload = Writer()) {
    Writer out;
    out.u32(LDR_OK);
    out.text("");
    out.raw(payload.bytes().data(), payload.bytes().size());
    CHECK(frame(FrameType::kReply, call_id, out));
  }
};

ldr_event_t next_event(Engine &engine, uint16_t kind) {
  ldr_event_t event{};
  uint32_t count = 0;
  CHECK_OK(engine.events.take(&event, 1, ldr_test::kPatienceNs, &count));
  CHECK_EQ(count, 1u);
  CHECK_EQ(event.kind, kind);
  return event;
}

Writer number(uint64_t value) {
  Writer out;
  out.u64(value);
  return out;
}

struct SharedMapping {
  SharedMapping() {
    CHECK_OK(shared_alloc(4096, &address, nullptr));
    uint64_t offset;
    CHECK(shared_find(reinterpret_cast<uint64_t>(address), 4096, &id, &offset));
  }
  ~SharedMapping() { CHECK_OK(shared_free(address)); }
  void *address = nullptr;
  uint64_t id = 0;
};

// It asks for descriptors and takes none: the answers that wait for it are few, and then the link is over.
void descriptors_that_nobody_takes() {
  auto engine = ldr_test::make_engine(1);
  SharedMapping mapping;
  Peer peer(*engine, 2);
  next_event(*engine, LDR_EVENT_LINK_UP);
  int before = count_entries("fd"), peak = 0;
  for (uint64_t i = 1; i <= 5000 && peer.frame(FrameType::kMapping, i, number(mapping.id)); ++i) {
    if (i % 50 == 0) peak = std::max(peak, count_entries("fd"));
  }
  CHECK_EQ(next_event(*engine, LDR_EVENT_LINK_DOWN).status, int32_t(LDR_ERR_LINK_BROKEN));
  CHECK_CONTAINS(peer.link->why_down().text, "does not read");
  CHECK(peak <= before + 70);
  engine->loop.run([] {});
  CHECK(count_entries("fd") < before);
}

// This process has no descriptor left while the object lives.
struct NoDescriptors {
  rlimit before;
  NoDescriptors() {
    int lowest = dup(0);
    CHECK(lowest >= 0);
    close(lowest);
    CHECK_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
    rlimit none{rlim_t(lowest), before.rlim_max};
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  }
  ~NoDescriptors() { CHECK_EQ(setrlimit(RLIMIT_NOFILE, &before), 0); }
};

void out_of_descriptors() {
  auto engine = ldr_test::make_engine(1);
  SharedMapping mapping;
  Peer peer(*engine, 2);
  {
    NoDescriptors none;
    CHECK(peer.frame(FrameType::kMapping, 1, number(mapping.id)));
    peer.expect_reply(1, LDR_ERR_BUSY);
  }
  CHECK(peer.frame(FrameType::kMapping, 2, number(mapping.id)));
  Frame frame;
  {
    CHECK_OK(wait_for(peer.socket.get(), POLLIN, deadline_after(ldr_test::kPatienceNs), -1));
    NoDescriptors none;
    CHECK_EQ(peer.next(&frame), FrameReader::kFrame);  // whole, but for what it passed
  }
  CHECK(frame.lost_descriptor());
  CHECK(peer.frame(FrameType::kMapping, 3, number(mapping.id)));
  CHECK_EQ(peer.next(&frame), FrameReader::kFrame);
  CHECK(frame.passed && !frame.lost_descriptor());
  CHECK(peer.link->ready());
}

// The same at the asking end: the call says BUSY, and the link stays.
void a_passed_descriptor_that_cannot_be_taken() {
  auto engine = ldr_test::make_engine(1);
  Peer peer(*engine, 2);
  std::promise<Status> answer;
  peer.link->call(FrameType::kMapping, number(1), deadline_after(ldr_test::kPatienceNs), [&](const Status &status, Reader, Fd &) { answer.set_value(status); });
  Frame request = peer.expect(FrameType::kMapping);
  Writer ok;
  ok.u32(LDR_OK);
  ok.text("");
  std::vector<uint8_t> bytes = encode_frame(FrameType::kReply, request.header.call_id, ok, true);
  NoDescriptors none;
  CHECK_EQ(send_some(peer.socket.get(), bytes.data(), bytes.size(), peer.socket.get()), ssize_t(bytes.size()));
  CHECK_CODE(answer.get_future().get(), LDR_ERR_BUSY);
  CHECK(peer.link->ready());
}

// Stands for a transfer that runs as long as the test wants.
struct Occupant : Transfer {
  void start_turn() override {}
  void refuse(const Status &) override {}
  void stop(const Status &) override {}
};

void many_unlinks() {
  auto engine = ldr_test::make_engine(1);
  Peer peer(*engine, 2);
  next_event(*engine, LDR_EVENT_LINK_UP);
  auto running = std::make_shared<Occupant>();
  CHECK(peer.link->transfers.enter(running));
  for (uint64_t id = 1; id <= 20; ++id) CHECK(peer.frame(FrameType::kUnlink, id, number(uint64_t(ldr_test::kPatienceNs))));
  for (uint64_t id = 9; id <= 20; ++id) peer.expect_reply(id, LDR_ERR_BUSY);
  CHECK(peer.link->ready());
  peer.link->transfers.leave(*running);
  for (uint64_t id = 1; id <= 8; ++id) peer.expect_reply(id, LDR_OK);
  CHECK_EQ(next_event(*engine, LDR_EVENT_LINK_DOWN).status, int32_t(LDR_OK));
  CHECK(!engine->links.find(2));
}

void unlink_in_vain() {
  auto engine = ldr_test::make_engine(1);
  Peer peer(*engine, 2);
  auto running = std::make_shared<Occupant>(), next = std::make_shared<Occupant>();
  CHECK(peer.link->transfers.enter(running));
  for (uint64_t id = 1; id <= 3; ++id) {
    CHECK(peer.frame(FrameType::kUnlink, id, number(uint64_t(20 * kMillisecond))));
    peer.expect_reply(id, LDR_ERR_UNLINK_FAILED);
  }
  CHECK(!peer.link->transfers.enter(next));  // waits: the queue is open again
  CHECK(peer.link->transfers.leave(*running) == next);
  CHECK(!peer.link->transfers.leave(*next));
  CHECK(peer.frame(FrameType::kUnlink, 4, number(uint64_t(-1))));
  peer.expect_reply(4, LDR_OK);
}

// It answers an unlink of ours like an engine: OK, and its data connections end. Their end may be seen first, with an abandoned chunk still owed.
void data_connection_ends_before_the_answer_to_an_unlink() {
  auto engine = ldr_test::make_engine(1);
  ldr_test::TestCache local(*engine, 1, kMiB, 1), remote(*engine, 1, kMiB, 2);
  Fd ours, data;
  socket_pair(&ours, &data);
  std::vector<Fd> connections;
  connections.push_back(std::move(ours));
  Peer peer(*engine, 2, std::move(connections));
  next_event(*engine, LDR_EVENT_LINK_UP);
  Run pull(peer.link, LDR_PULL, local.cache, remote.cache);
  pull.everything().start();
  CHECK_OK(wait_for(data.get(), POLLIN, deadline_after(ldr_test::kPatienceNs), -1));  // the request
  pull.stop(LDR_ERR_CANCELLED, "enough");
  CHECK_CODE(pull.wait(), LDR_ERR_CANCELLED);
  Status status;
  std::thread unlinker([&] { status = peer.link->close(false, deadline_after(ldr_test::kPatienceNs)); });
  Frame unlink = peer.expect(FrameType::kUnlink);
  CHECK_EQ(::shutdown(data.get(), SHUT_WR), 0);
  for (char bytes[4096]; read(data.get(), bytes, sizeof(bytes)) > 0;) {
  }
  peer.reply(unlink.header.call_id);
  unlinker.join();
  CHECK_OK(status);
  CHECK_EQ(next_event(*engine, LDR_EVENT_LINK_DOWN).status, int32_t(LDR_OK));
}

// The same, but the peer keeps its half: the connection is lost, so the link is.
void data_connection_ends_and_the_unlink_is_refused() {
  auto engine = ldr_test::make_engine(1);
  Fd ours, data;
  socket_pair(&ours, &data);
  std::vector<Fd> connections;
  connections.push_back(std::move(ours));
  Peer peer(*engine, 2, std::move(connections));
  next_event(*engine, LDR_EVENT_LINK_UP);
  std::thread unlinker([&] { CHECK_OK(peer.link->close(false, deadline_after(ldr_test::kPatienceNs))); });
  Frame unlink = peer.expect(FrameType::kUnlink);
  peer.link->data_failed(fail(LDR_ERR_LINK_BROKEN, "a data connection failed"));
  CHECK(peer.link->ready());
  Writer refusal;
  refusal.u32(uint32_t(LDR_ERR_UNLINK_FAILED));
  refusal.text("no");
  CHECK(peer.frame(FrameType::kReply, unlink.header.call_id, refusal));
  unlinker.join();
  CHECK_EQ(next_event(*engine, LDR_EVENT_LINK_DOWN).status, int32_t(LDR_ERR_LINK_BROKEN));
  CHECK_CONTAINS(peer.link->why_down().text, "a data connection failed");
}

void nonsense_for_an_answer() {
  auto engine = ldr_test::make_engine(1);
  ldr_test::TestCache local(*engine, 1, 4096, 1);
  Peer peer(*engine, 2);
  next_event(*engine, LDR_EVENT_LINK_UP);
  ldr_transfer_params_t params{};
  params.cluster_id = 2;
  params.local_cache_id = local.cache->id;
  params.remote_cache_id = 1;
  int32_t block = 0;
  params.move = LDR_MOVE_BLOCKS;
  params.src_blocks = params.dst_blocks = {&block, 1, 4, 0};
  params.timeout_ns = ldr_test::kPatienceNs;
  OpPtr op;
  CHECK_OK(transfer_submit(*engine, params, false, 7, &op));
  Frame request = peer.expect(FrameType::kTable);
  Writer nonsense;
  nonsense.text("no table");
  peer.reply(request.header.call_id, nonsense);
  bool op_ended = false, link_ended = false;
  while (!op_ended || !link_ended) {
    ldr_event_t event{};
    uint32_t count = 0;
    CHECK_OK(engine->events.take(&event, 1, ldr_test::kPatienceNs, &count));
    CHECK_EQ(count, 1u);
    CHECK_EQ(event.status, int32_t(LDR_ERR_LINK_BROKEN));
    (event.kind == LDR_EVENT_OP ? op_ended : link_ended) = true;
  }
}

void probes_of_both_ends() {
  TestEngine a(1), b(2);
  CHECK_C(ldr_link_probe(a, 2, ldr_test::kPatienceNs), LDR_ERR_NOT_LINKED);
  CHECK_CONTAINS(ldr_last_error(), "no link to cluster 2");
  CHECK_C(a.link(b), LDR_OK);
  CHECK_C(a.link(a), LDR_OK);
  for (int i = 0; i < 20; ++i) {
    CHECK_C(ldr_link_probe(a, 2, ldr_test::kPatienceNs), LDR_OK);
    CHECK_C(ldr_link_probe(b, 1, -1), LDR_OK);
    CHECK_C(ldr_link_probe(a, 1, ldr_test::kPatienceNs), LDR_OK);  // itself
  }
  b.destroy();
  CHECK_C(ldr_link_probe(a, 2, ldr_test::kPatienceNs), LDR_ERR_NOT_LINKED);
  CHECK_CONTAINS(ldr_last_error(), "link again");
}

// It answers probes, and nothing that only looks like one.
void probed_by_the_peer() {
  auto engine = ldr_test::make_engine(1);
  Peer peer(*engine, 2);
  CHECK(peer.frame(FrameType::kProbe, 31, Writer()));
  peer.expect_reply(31, LDR_OK);
  CHECK(peer.frame(FrameType::kProbe, 32, number(1)));
  Frame frame;
  CHECK_EQ(peer.next(&frame), FrameReader::kEnd);
  CHECK_CONTAINS(peer.link->why_down().text, "malformed frame");
}

void probes_without_an_answer() {
  auto engine = ldr_test::make_engine(1);
  Peer silent(*engine, 2);
  Status status = engine->links.probe(2, 30 * kMillisecond);
  CHECK_CODE(status, LDR_ERR_TIMEOUT);
  CHECK_CONTAINS(status.text, "probe: cluster 2 (test) did not answer in time");
  CHECK(silent.link->ready());  // slow is not dead
  uint64_t first = silent.expect(FrameType::kProbe).header.call_id;
  std::thread answers([&] {
    uint64_t second = silent.expect(FrameType::kProbe).header.call_id;
    silent.reply(first);  // too late, and no answer to the second one
    silent.reply(second);
  });
  CHECK_OK(engine->links.probe(2, ldr_test::kPatienceNs));
  answers.join();

  struct End { ldr_status_t code; std::function<void(Peer &)> how; } ends[] = {
      {LDR_ERR_LINK_BROKEN, [](Peer &peer) { peer.socket.reset(); }},
      {LDR_ERR_NOT_LINKED, [](Peer &peer) { CHECK_OK(peer.link->close(true, kNever)); }},
      {LDR_ERR_CLOSED, [&](Peer &) { engine->shutdown(); }},
  };
  uint64_t id = 3;
  for (const End &end : ends) {
    Peer peer(*engine, id);
    std::thread ender([&] {
      peer.expect(FrameType::kProbe);
      end.how(peer);
    });
    CHECK_CODE(engine->links.probe(id++, ldr_test::kPatienceNs), end.code);
    ender.join();
  }
}

void tcp_control_connections_notice_silence() {
  auto engine = ldr_test::make_engine(1);
  Fd listener, raw;
  uint32_t port;
  CHECK_OK(listen_tcp("127.0.0.1", 0, {}, &listener, &port));
  CHECK_OK(connect_tcp("127.0.0.1", port, {}, deadline_after(ldr_test::kPatienceNs), -1, &raw));
  CHECK_OK(wait_for(listener.get(), POLLIN, deadline_after(ldr_test::kPatienceNs), -1));
  Fd control = accept_connection(listener.get());
  const int fd = control.get();
  LinkPtr link = make_link(*engine, 2, std::move(control), {});
  auto option = [fd](int level, int name) {
    int value = -1;
    socklen_t size = sizeof(value);
    CHECK_EQ(getsockopt(fd, level, name, &value, &size), 0);
    return value;
  };
  CHECK_EQ(option(IPPROTO_TCP, TCP_USER_TIMEOUT), 100'000);  // the fixture's liveness budget
  CHECK_EQ(option(SOL_SOCKET, SO_KEEPALIVE), 1);
  link->fail(fail(LDR_ERR_LINK_BROKEN, "over"));
  engine->loop.run([] {});
}

// Peers come, each under a name of its own, and break: what is kept of them is bounded.
void broken_links_are_forgotten() {
  auto engine = ldr_test::make_engine(1);
  constexpr uint64_t kPeers = 1100, kFirst = 10, kKept = 1024;
  Peer stays(*engine, 5);
  int before = count_entries("fd");
  for (uint64_t id = kFirst; id < kFirst + kPeers; ++id) {
    Peer peer(*engine, id);
    peer.link->fail(fail(LDR_ERR_LINK_BROKEN, "over"));
  }
  engine->loop.run([] {});
  CHECK_EQ(count_entries("fd"), before);
  CHECK(engine->links.all().size() <= kKept + 2);
  CHECK(!engine->links.find(kFirst));
  CHECK_EQ(engine->links.find(kFirst + kPeers - 1)->why_down().text, std::string("over"));
  CHECK(engine->links.find(5) == stays.link);
  CHECK(stays.link->ready());
}

}  // namespace

int main() {
  test("descriptors that nobody takes", descriptors_that_nobody_takes);
  test("out of descriptors", out_of_descriptors);
  test("a passed descriptor that cannot be taken", a_passed_descriptor_that_cannot_be_taken);
  test("many unlinks", many_unlinks);
  test("unlink in vain", unlink_in_vain);
  test("data connection ends before the answer to an unlink", data_connection_ends_before_the_answer_to_an_unlink);
  test("data connection ends and the unlink is refused", data_connection_ends_and_the_unlink_is_refused);
  test("nonsense for an answer", nonsense_for_an_answer);
  test("probes of both ends", probes_of_both_ends);
  test("probed by the peer", probed_by_the_peer);
  test("probes without an answer", probes_without_an_answer);
  test("TCP control connections notice silence", tcp_control_connections_notice_silence);
  test("broken links are forgotten", broken_links_are_forgotten);
}
