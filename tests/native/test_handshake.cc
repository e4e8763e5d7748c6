// An engine against peers that are no engine: what a listener and a client must survive, and what they say.
#include <arpa/inet.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <functional>
#include <thread>
#include <vector>

#include "engines.h"
#include "handshake.h"
#include "socket.h"

using namespace ldr;
using namespace ldr_test;

namespace {

// Our end of a connection, spoken frame by frame.
struct Raw {
  Fd socket;
  FrameReader reader{kMaxHandshakeFrameBytes};

  static Raw to(uint32_t port) {
    Raw raw;
    CHECK_OK(connect_tcp("127.0.0.1", port, {}, deadline_after(kPatienceNs), -1, &raw.socket));
    return raw;
  }
  static Raw to(const std::string &path) {
    Raw raw;
    CHECK_OK(connect_unix(path, &raw.socket));
    return raw;
  }
  void bytes(const std::vector<uint8_t> &data, int pass_fd = -1) {
    CHECK_EQ(send_some(socket.get(), data.data(), data.size(), pass_fd), ssize_t(data.size()));
  }
  void frame(FrameType type, const Writer &payload, int pass_fd = -1) { bytes(encode_frame(type, 0, payload, pass_fd >= 0), pass_fd); }
  FrameReader::Result next(Frame *frame_p) {
    for (;;) {
      FrameReader::Result result = reader.read(socket.get(), frame_p);
      if (result != FrameReader::kWouldBlock) return result;
      CHECK_OK(wait_for(socket.get(), POLLIN, deadline_after(kPatienceNs), -1));
    }
  }
  Frame expect(FrameType type) {
    Frame frame;
    CHECK_EQ(next(&frame), FrameReader::kFrame);
    CHECK_EQ(frame.type(), type);
    return frame;
  }
  void expect_reject(ldr_status_t code, const char *part) {
    Rejection rejection = Rejection::decode(expect(FrameType::kReject).reader());
    CHECK_EQ(rejection.status.code, code);
    CHECK_CONTAINS(rejection.status.text, part);
    expect_end();
  }
  void expect_end() {
    Frame frame;
    CHECK_EQ(next(&frame), FrameReader::kEnd);
  }
};

Hello hello_of(const TestEngine &engine) {
  // As an engine on this host would say it; what differs is set by the test.
  Raw raw = Raw::to(engine.port());
  Hello hello;
  hello.remote_access = true;
  hello.cluster_id = 50;
  hello.incarnation = 51;
  hello.path_set = kAllPaths;
  hello.host.boot_id = "elsewhere";
  hello.insecure = true;
  return hello;
}

Writer encoded(const Hello &hello) {
  Writer out;
  hello.encode(out);
  return out;
}

EngineOptions insecure(uint64_t cluster_id, const std::string &secret = "") {
  EngineOptions options{cluster_id, LDR_ENGINE_REMOTE_ACCESS | LDR_ENGINE_INSECURE};
  options.secret = secret;
  return options;
}

// The engine still answers after whatever was done to it.
void still_alive(const TestEngine &engine) {
  TestEngine other(insecure(99));
  CHECK_C(other.link(engine), LDR_OK);
  CHECK_C(other.unlink(engine.info().cluster_id), LDR_OK);
}

void garbage() {
  TestEngine engine(insecure(1));
  Raw text = Raw::to(engine.port());
  std::string request = "GET / HTTP/1.1\r\nHost: x\r\n\r\n";
  text.bytes(std::vector<uint8_t>(request.begin(), request.end()));  // reads as a frame of 542 MB
  text.expect_reject(LDR_ERR_LINK_FAILED, "at most 4096");
  Raw oversized = Raw::to(engine.port());
  Writer big;
  big.raw(std::string(kMaxHandshakeFrameBytes + 1, 'x').data(), kMaxHandshakeFrameBytes + 1);
  oversized.frame(FrameType::kHello, big);
  oversized.expect_reject(LDR_ERR_LINK_FAILED, "4097 bytes");
  Raw unknown = Raw::to(engine.port());
  unknown.frame(FrameType(999), Writer());
  unknown.expect_reject(LDR_ERR_LINK_FAILED, "type 999");
  Raw no_hello = Raw::to(engine.port());
  Writer zeros;
  zeros.raw(std::string(300, 0).data(), 300);
  no_hello.frame(FrameType::kHello, zeros);
  no_hello.expect_reject(LDR_ERR_LINK_FAILED, "magic");
  for (FrameType type : {FrameType::kAuth, FrameType::kReady, FrameType::kAttach, FrameType::kDataHello, FrameType::kHeartbeat, FrameType::kTable}) {
    Raw out_of_order = Raw::to(engine.port());
    out_of_order.frame(type, zeros);
    Frame frame;
    CHECK_EQ(out_of_order.next(&frame), FrameReader::kFrame);
    CHECK_EQ(frame.type(), FrameType::kReject);
    out_of_order.expect_end();
  }
  Raw leaves = Raw::to(engine.port());
  leaves.bytes({1, 2, 3});
  leaves.socket.reset();
  still_alive(engine);
}

void each_cut_of_a_hello() {
  TestEngine engine(insecure(1));
  std::vector<uint8_t> whole = encoded(hello_of(engine)).bytes();
  for (size_t size = 0; size < whole.size(); size += 3) {
    Raw raw = Raw::to(engine.port());
    Writer cut;
    cut.raw(whole.data(), size);
    raw.frame(FrameType::kHello, cut);
    Frame frame;
    CHECK_EQ(raw.next(&frame), FrameReader::kFrame);
    CHECK_EQ(frame.type(), FrameType::kReject);
    raw.expect_end();
  }
  still_alive(engine);
}

void other_version() {
  TestEngine engine(insecure(1));
  Hello hello = hello_of(engine);
  hello.version = 7;
  Raw raw = Raw::to(engine.port());
  raw.frame(FrameType::kHello, encoded(hello));
  raw.expect_reject(LDR_ERR_VERSION, "version 7");
}

void wrong_and_replayed_proofs() {
  TestEngine engine(insecure(1, "secret"));
  Hello hello = hello_of(engine);
  hello.has_secret = true;
  std::vector<uint8_t> secret = {'s', 'e', 'c', 'r', 'e', 't'};
  auto meet = [&](Raw &raw) {
    raw.frame(FrameType::kHello, encoded(hello));
    Frame reply = raw.expect(FrameType::kHelloReply);
    return Transcript{encoded(hello).bytes(), {reply.payload.begin(), reply.payload.end() - sizeof(Digest)}};
  };
  auto authenticate = [](Raw &raw, const Digest &proof) {
    Writer out;
    out.raw(proof.data(), proof.size());
    raw.frame(FrameType::kAuth, out);
  };
  Raw first = Raw::to(engine.port());
  Digest good = client_proof(secret, meet(first));
  authenticate(first, good);
  first.expect(FrameType::kWelcome);
  Raw replay = Raw::to(engine.port());  // the same hello and the proof that was good for it
  meet(replay);
  authenticate(replay, good);
  replay.expect_reject(LDR_ERR_AUTH, "LLM_DATADIST_SECRET");
  Raw reflection = Raw::to(engine.port());
  authenticate(reflection, server_proof(secret, meet(reflection)));
  reflection.expect_reject(LDR_ERR_AUTH, "LLM_DATADIST_SECRET");
  Raw guess = Raw::to(engine.port());
  authenticate(guess, client_proof({'g'}, meet(guess)));
  guess.expect_reject(LDR_ERR_AUTH, "LLM_DATADIST_SECRET");
  Raw twice = Raw::to(engine.port());
  Transcript transcript = meet(twice);
  authenticate(twice, client_proof(secret, transcript));
  twice.expect(FrameType::kWelcome);
  authenticate(twice, client_proof(secret, transcript));
  twice.expect_reject(LDR_ERR_LINK_FAILED, "out of order");
  CHECK_EQ(engine.info().num_links, 0u);
}

// Proven, but then nonsense: data connections and path sets that were not agreed, a page that could be cut under us.
void nonsense_after_the_welcome() {
  TestEngine engine(insecure(1));
  Hello hello = hello_of(engine);
  Hello server;
  std::string unix_path;
  LinkToken token{};
  auto meet = [&](Raw &raw) {
    raw.frame(FrameType::kHello, encoded(hello));
    Frame reply = raw.expect(FrameType::kHelloReply);
    Reader in = reply.reader();
    CHECK_OK(Hello::decode(in, &server));
    unix_path = in.text();
    Digest proof = client_proof({}, {encoded(hello).bytes(), {reply.payload.begin(), reply.payload.end() - sizeof(Digest)}});
    Writer out;
    out.raw(proof.data(), proof.size());
    raw.frame(FrameType::kAuth, out);
    Frame welcome = raw.expect(FrameType::kWelcome);
    CHECK_EQ(welcome.payload.size(), token.size());
    std::copy(welcome.payload.begin(), welcome.payload.end(), token.begin());
    return session_key({}, hello.nonce, server.nonce);
  };
  auto ready = [](uint32_t path_set, uint32_t num_data) {
    Writer out;
    out.u32(path_set);
    out.u32(num_data);
    return out;
  };
  for (auto [path_set, num_data] : {std::pair(1u << LDR_PATH_SHM, 0u), std::pair(0u, 0u), std::pair(1u << 20, 0u), std::pair(1u << LDR_PATH_TCP, 0u),
                                    std::pair(1u << LDR_PATH_TCP, 4u), std::pair(1u << LDR_PATH_TCP, 0xffffffffu)}) {
    Raw raw = Raw::to(engine.port());
    meet(raw);
    raw.frame(FrameType::kReady, ready(path_set, num_data));
    Frame frame = raw.expect(FrameType::kReject);
    raw.expect_end();
  }
  auto data_hello = [&](uint32_t index, const Digest &proof) {
    Writer out;
    out.raw(token.data(), token.size());
    out.u32(index);
    out.raw(proof.data(), proof.size());
    return out;
  };
  Raw main = Raw::to(engine.port());
  Digest key = meet(main);
  for (auto [index, proof] : {std::pair(0u, data_proof(key, 1)), std::pair(4u, data_proof(key, 4)), std::pair(0u, Digest{})}) {
    Raw data = Raw::to(engine.port());
    data.frame(FrameType::kDataHello, data_hello(index, proof));
    data.expect_reject(LDR_ERR_AUTH, "no handshake");
  }
  Raw data = Raw::to(engine.port());
  data.frame(FrameType::kDataHello, data_hello(0, data_proof(key, 0)));
  data.expect(FrameType::kDataWelcome);
  Raw again = Raw::to(engine.port());
  again.frame(FrameType::kDataHello, data_hello(0, data_proof(key, 0)));
  again.expect_reject(LDR_ERR_AUTH, "no handshake");
  main.socket.reset();
  data.expect_end();  // a handshake ends with each of its connections

  hello.pid = getpid();
  Raw host = Raw::to(engine.port());
  key = meet(host);
  Writer attach;
  attach.raw(token.data(), token.size());
  Digest proof = attach_proof(key);
  attach.raw(proof.data(), proof.size());
  CmaOffer{0x1000, 7}.encode(attach);
  Raw without_page = Raw::to(unix_path);
  without_page.frame(FrameType::kAttach, attach);
  without_page.expect_reject(LDR_ERR_LINK_FAILED, "malformed");
  Fd unsealed(memfd_create("page", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  CHECK_EQ(ftruncate(unsealed.get(), 2 << 20), 0);
  Raw with_unsealed = Raw::to(unix_path);
  with_unsealed.frame(FrameType::kAttach, attach, unsealed.get());
  with_unsealed.expect_reject(LDR_ERR_LINK_FAILED, "sealed");
  Raw unannounced = Raw::to(unix_path);  // a descriptor that the header does not speak of
  unannounced.bytes(encode_frame(FrameType::kAttach, 0, attach), unsealed.get());
  unannounced.expect_reject(LDR_ERR_LINK_FAILED, "descriptors");
  still_alive(engine);
}

// Whoever knows our incarnation, which we tell everybody, could pass for us: only an attempt of our own makes a link to ourselves.
void claims_to_be_the_engine() {
  TestEngine engine(insecure(1));
  Hello hello = hello_of(engine);
  hello.cluster_id = 1;
  hello.incarnation = engine.info().incarnation;
  Raw raw = Raw::to(engine.port());
  raw.frame(FrameType::kHello, encoded(hello));
  Frame reply = raw.expect(FrameType::kHelloReply);
  Reader in = reply.reader();
  Hello server;
  CHECK_OK(Hello::decode(in, &server));
  Digest proof = client_proof({}, {encoded(hello).bytes(), {reply.payload.begin(), reply.payload.end() - sizeof(Digest)}});
  Writer auth;
  auth.raw(proof.data(), proof.size());
  raw.frame(FrameType::kAuth, auth);
  Frame welcome = raw.expect(FrameType::kWelcome);
  Digest key = session_key({}, hello.nonce, server.nonce);
  std::vector<Raw> connections;
  for (uint32_t index = 0; index < kMaxDataConnections; ++index) {
    Writer out;
    out.raw(welcome.payload.data(), welcome.payload.size());
    out.u32(index);
    Digest data = data_proof(key, index);
    out.raw(data.data(), data.size());
    connections.push_back(Raw::to(engine.port()));
    connections.back().frame(FrameType::kDataHello, out);
    connections.back().expect(FrameType::kDataWelcome);
  }
  Writer ready;
  ready.u32(1u << LDR_PATH_TCP);
  ready.u32(kMaxDataConnections);
  raw.frame(FrameType::kReady, ready);
  raw.expect_reject(LDR_ERR_AUTH, "claims to be this engine");
  CHECK_C(engine.link(engine), LDR_OK);
}

void no_secret_means_same_host_and_user() {
  TestEngine engine(1);  // neither secret nor insecure
  Hello hello = hello_of(engine);
  Raw raw = Raw::to(engine.port());
  raw.frame(FrameType::kHello, encoded(hello));
  raw.expect_reject(LDR_ERR_AUTH, "LLM_DATADIST_SECRET");
}

void slow_client() {
  TestEngine engine(insecure(1));
  int64_t start = now_ns();
  Raw silent = Raw::to(engine.port()), half = Raw::to(engine.port());
  std::vector<uint8_t> frame = encode_frame(FrameType::kHello, 0, encoded(hello_of(engine)));
  half.bytes({frame.begin(), frame.begin() + 20});
  silent.expect_end();
  half.expect_end();
  int64_t elapsed = now_ns() - start;
  CHECK(elapsed >= kFreshConnectionTimeoutNs - kSecond && elapsed < kFreshConnectionTimeoutNs + 5 * kSecond);
}

void too_many_unproven() {
  TestEngine engine(insecure(1));
  std::vector<Raw> crowd;
  for (int i = 0; i < 256; ++i) crowd.push_back(Raw::to(engine.port()));
  Raw last = Raw::to(engine.port());
  last.expect_end();  // at once, and not after the handshake's deadline
  crowd.clear();
  // The engine sees the crowd go in its own time: a client tries until it is let in.
  TestEngine other(insecure(2));
  ldr_status_t status;
  for (int64_t deadline = deadline_after(kPatienceNs); (status = other.link(engine)) != LDR_OK && now_ns() < deadline;) CHECK_EQ(status, LDR_ERR_HANDSHAKE);
  CHECK_EQ(status, LDR_OK);
}

// A server made of a function; the engine connects to it.
void against(const std::function<void(Raw &)> &server, ldr_status_t code, const char *part, int64_t timeout_ns = kPatienceNs) {
  Fd listener;
  uint32_t port;
  CHECK_OK(listen_tcp("127.0.0.1", 0, {}, &listener, &port));
  std::thread thread([&] {
    CHECK_OK(wait_for(listener.get(), POLLIN, deadline_after(kPatienceNs), -1));
    Raw raw;
    raw.socket = accept_connection(listener.get());
    raw.expect(FrameType::kHello);
    server(raw);
  });
  TestEngine engine(insecure(1));
  int64_t start = now_ns();
  CHECK_C(engine.link(port, nullptr, timeout_ns), code);
  std::string text = ldr_last_error();
  CHECK_CONTAINS(text, part);
  CHECK_CONTAINS(text, "127.0.0.1:" + std::to_string(port));
  CHECK_CONTAINS(text, "step \"hello\" after");
  CHECK(now_ns() - start < 10 * kSecond);
  thread.join();
  CHECK_EQ(engine.info().num_links, 0u);
}

void strange_servers() {
  TestEngine real(insecure(9));
  Hello hello = hello_of(real);
  auto reply = [&](Hello h, const Digest &proof) {
    Writer out = encoded(h);
    out.text("/nowhere.sock");
    out.raw(proof.data(), proof.size());
    return out;
  };
  against([](Raw &) {}, LDR_ERR_HANDSHAKE, "closed the connection");
  against([](Raw &raw) { raw.bytes(std::vector<uint8_t>(64, 0xff)); }, LDR_ERR_HANDSHAKE, "at most 4096");
  against([](Raw &raw) { raw.frame(FrameType::kWelcome, Writer()); }, LDR_ERR_HANDSHAKE, "frame type 4");
  against([](Raw &raw) { raw.frame(FrameType::kHelloReply, Writer()); }, LDR_ERR_HANDSHAKE, "magic");
  against([](Raw &raw) { raw.frame(FrameType::kReject, Writer()); }, LDR_ERR_HANDSHAKE, "without a reason");
  against([&](Raw &raw) { raw.frame(FrameType::kHelloReply, encoded(hello)); }, LDR_ERR_HANDSHAKE, "wrong size");
  against([&](Raw &raw) { raw.frame(FrameType::kHelloReply, reply(hello, Digest{})); }, LDR_ERR_AUTH, "LLM_DATADIST_SECRET");
  against(
      [&](Raw &raw) {
        Hello newer = hello;
        newer.version = 8;
        raw.frame(FrameType::kHelloReply, reply(newer, Digest{}));
      },
      LDR_ERR_VERSION, "version 8");
  against(
      [](Raw &raw) {
        Frame none;
        raw.next(&none);  // until the client gives up
      },
      LDR_ERR_TIMEOUT, "no answer", 300 * kMillisecond);
}

}  // namespace

int main() {
  test("garbage", garbage);
  test("each cut of a hello", each_cut_of_a_hello);
  test("other version", other_version);
  test("wrong and replayed proofs", wrong_and_replayed_proofs);
  test("nonsense after the welcome", nonsense_after_the_welcome);
  test("claims to be the engine", claims_to_be_the_engine);
  test("no secret means same host and user", no_secret_means_same_host_and_user);
  test("slow client", slow_client);
  test("too many unproven", too_many_unproven);
  test("strange servers", strange_servers);
}
