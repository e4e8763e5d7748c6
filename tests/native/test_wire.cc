#include <cstring>

#include "check.h"
#include "hello.h"
#include "wire.h"

using namespace ldr;
using namespace ldr_test;

namespace {

void round_trip() {
  Writer out;
  out.u8(0xab);
  out.u16(0xbeef);
  out.u32(0xdeadbeef);
  out.u64(0x0123456789abcdef);
  out.i64(-5);
  out.text("name");
  out.raw("xyz", 3);
  Reader in(out.bytes().data(), out.bytes().size());
  CHECK_EQ(in.u8(), 0xab);
  CHECK_EQ(in.u16(), 0xbeef);
  CHECK_EQ(in.u32(), 0xdeadbeefu);
  CHECK_EQ(in.u64(), uint64_t(0x0123456789abcdef));
  CHECK_EQ(in.i64(), int64_t(-5));
  CHECK_EQ(in.text(), std::string("name"));
  CHECK(!in.finished());
  CHECK(memcmp(in.raw(3), "xyz", 3) == 0);
  CHECK(in.finished());
}

void little_endian() {
  Writer out;
  out.u32(1);
  CHECK(out.bytes() == std::vector<uint8_t>({1, 0, 0, 0}));
}

// Each cut of a message: no read outside, and the reader says that it is cut.
void truncated() {
  Writer out;
  out.u32(7);
  out.text("a text");
  out.u64(9);
  for (size_t size = 0; size < out.bytes().size(); ++size) {
    std::vector<uint8_t> exact(out.bytes().begin(), out.bytes().begin() + ptrdiff_t(size));  // so that the sanitizer sees an overrun
    Reader in(exact.data(), exact.size());
    in.u32();
    in.text();
    in.u64();
    CHECK(!in.ok());
    CHECK_EQ(in.u64(), uint64_t(0));
    CHECK(in.raw(1) == nullptr);
    CHECK(in.text().empty());
  }
}

void texts_are_bounded() {
  Writer out;
  out.text(std::string(5000, 'x'));
  Reader in(out.bytes().data(), out.bytes().size());
  CHECK_EQ(in.text().size(), size_t(1024));
  CHECK(in.finished());
  Writer too_long;
  too_long.u16(1025);
  too_long.raw(std::string(1025, 'x').data(), 1025);
  Reader bad(too_long.bytes().data(), too_long.bytes().size());
  CHECK(bad.text().empty());
  CHECK(!bad.ok());
}

void empty_reader() {
  Reader in;
  CHECK(in.finished());
  CHECK_EQ(in.u8(), 0);
  CHECK(!in.ok());
}

Hello example() {
  Hello hello;
  hello.cluster_id = 5;
  hello.incarnation = 6;
  hello.remote_access = true;
  hello.host.boot_id = "boot";
  hello.pid = 77;
  hello.path_set = 30;
  hello.layout_digest = 8;
  hello.layout_text = "layers=2";
  hello.nonce.fill(3);
  return hello;
}

void hello_round_trip() {
  Writer out;
  example().encode(out);
  Reader in(out.bytes().data(), out.bytes().size());
  Hello hello;
  CHECK_OK(Hello::decode(in, &hello));
  CHECK(in.finished());
  CHECK_EQ(hello.cluster_id, uint64_t(5));
  CHECK_EQ(hello.pid, 77);
  CHECK_EQ(hello.layout_text, std::string("layers=2"));
  CHECK(hello.remote_access && !hello.has_secret && !hello.insecure);
  CHECK(hello.nonce == example().nonce);
}

void hello_cut_off_or_foreign() {
  Writer out;
  example().encode(out);
  Hello hello;
  for (size_t size = 0; size < out.bytes().size(); ++size) {
    std::vector<uint8_t> exact(out.bytes().begin(), out.bytes().begin() + ptrdiff_t(size));
    Reader in(exact.data(), exact.size());
    CHECK_CODE(Hello::decode(in, &hello), LDR_ERR_HANDSHAKE);
  }
  Hello newer = example();
  newer.version = 9;
  Writer other;
  newer.encode(other);
  Reader in(other.bytes().data(), other.bytes().size());
  Status status = Hello::decode(in, &hello);
  CHECK_EQ(status.code, LDR_ERR_VERSION);
  CHECK_CONTAINS(status.text, "version 9");
}

}  // namespace

int main() {
  test("round trip", round_trip);
  test("little-endian", little_endian);
  test("truncated", truncated);
  test("texts are bounded", texts_are_bounded);
  test("empty reader", empty_reader);
  test("hello: round trip", hello_round_trip);
  test("hello: cut off or foreign", hello_cut_off_or_foreign);
}
