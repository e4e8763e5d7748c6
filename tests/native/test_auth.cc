// FIPS 180-4 examples, RFC 4231 vectors, and that no proof fits a place that it was not made for.
#include <cstring>

#include "auth.h"
#include "check.h"

using namespace ldr;
using namespace ldr_test;

namespace {

template <class Bytes> std::string hex(const Bytes &bytes) {
  std::string text;
  char byte[3];
  for (uint8_t b : bytes) {
    snprintf(byte, sizeof(byte), "%02x", b);
    text += byte;
  }
  return text;
}

std::string sha256(const std::string &text, size_t step = 1 << 20) {
  Sha256 hash;
  for (size_t at = 0; at < text.size(); at += step) hash.add(text.data() + at, std::min(step, text.size() - at));
  return hex(hash.finish());
}

std::string hmac(const std::string &key, const std::string &text) {
  HmacSha256 mac(key.data(), key.size());
  mac.add(text.data(), text.size());
  return hex(mac.finish());
}

void sha256_vectors() {
  CHECK_EQ(sha256(""), std::string("e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"));
  CHECK_EQ(sha256("abc"), std::string("ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"));
  CHECK_EQ(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
           std::string("248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"));
  std::string million(1000000, 'a');
  for (size_t step : {size_t(1), size_t(63), size_t(64), size_t(65), million.size()})
    CHECK_EQ(sha256(million, step), std::string("cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"));
}

void hmac_vectors() {  // RFC 4231, cases 1, 2, 3, 4, 6, 7
  CHECK_EQ(hmac(std::string(20, '\x0b'), "Hi There"), std::string("b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"));
  CHECK_EQ(hmac("Jefe", "what do ya want for nothing?"), std::string("5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"));
  CHECK_EQ(hmac(std::string(20, '\xaa'), std::string(50, '\xdd')), std::string("773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe"));
  std::string key;
  for (char c = 1; c <= 25; ++c) key += c;
  CHECK_EQ(hmac(key, std::string(50, '\xcd')), std::string("82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b"));
  CHECK_EQ(hmac(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First"),
           std::string("60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"));
  CHECK_EQ(hmac(std::string(131, '\xaa'),
                "This is a test using a larger than block-size key and a larger than block-size data. The key needs to be hashed before being used by "
                "the HMAC algorithm."),
           std::string("9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2"));
}

void proofs_differ() {
  std::vector<uint8_t> secret = {1, 2, 3}, other = {1, 2, 4};
  Transcript t{{1, 2}, {3, 4}}, shifted{{1, 2, 3}, {4}};
  Digest key = session_key(secret, Nonce{}, Nonce{});
  CHECK(same(server_proof(secret, t), server_proof(secret, t)));
  CHECK(!same(server_proof(secret, t), client_proof(secret, t)));        // reflection
  CHECK(!same(server_proof(secret, t), server_proof(other, t)));
  CHECK(!same(server_proof(secret, t), server_proof(secret, shifted)));  // same bytes, cut elsewhere
  CHECK(!same(data_proof(key, 0), data_proof(key, 1)));
  CHECK(!same(data_proof(key, 0), attach_proof(key)));
  Nonce fresh{};
  fresh[31] = 1;
  CHECK(!same(key, session_key(secret, Nonce{}, fresh)));
}

void comparison_and_random() {
  Digest a{}, b{};
  CHECK(equal_in_constant_time(a.data(), b.data(), a.size()));
  b[31] = 0x80;
  CHECK(!equal_in_constant_time(a.data(), b.data(), a.size()));
  CHECK_OK(random_bytes(a.data(), a.size()));
  CHECK_OK(random_bytes(b.data(), b.size()));
  CHECK(a != b);
}

}  // namespace

int main() {
  test("SHA-256 vectors", sha256_vectors);
  test("HMAC vectors", hmac_vectors);
  test("proofs differ", proofs_differ);
  test("comparison and random bytes", comparison_and_random);
}
