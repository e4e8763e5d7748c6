#include "auth.h"

#include <sys/random.h>

#include <cerrno>
#include <cstring>

namespace ldr {
namespace {

struct Part {
  const void *data;
  size_t size_bytes;
};

// The length before each part keeps two different lists of parts from giving the same bytes.
Digest proof(const void *key, size_t key_bytes, const char *label, std::initializer_list<Part> parts) {
  HmacSha256 hmac(key, key_bytes);
  hmac.add(label, strlen(label) + 1);
  for (const Part &part : parts) {
    uint64_t size_bytes = part.size_bytes;
    hmac.add(&size_bytes, sizeof(size_bytes));
    hmac.add(part.data, part.size_bytes);
  }
  return hmac.finish();
}

Digest transcript_proof(const std::vector<uint8_t> &secret, const char *label, const Transcript &t) {
  return proof(secret.data(), secret.size(), label,
               {{t.client_hello.data(), t.client_hello.size()}, {t.server_hello.data(), t.server_hello.size()}});
}

}  // namespace

Status random_bytes(void *data, size_t size_bytes) {
  auto *to = static_cast<uint8_t *>(data);
  while (size_bytes > 0) {
    ssize_t n = getrandom(to, size_bytes, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return fail_errno(LDR_ERR_SYSTEM, "getrandom");
    to += n, size_bytes -= size_t(n);
  }
  return Status::success();
}

Digest server_proof(const std::vector<uint8_t> &secret, const Transcript &transcript) { return transcript_proof(secret, "server", transcript); }

Digest client_proof(const std::vector<uint8_t> &secret, const Transcript &transcript) { return transcript_proof(secret, "client", transcript); }

Digest session_key(const std::vector<uint8_t> &secret, const Nonce &client, const Nonce &server) {
  return proof(secret.data(), secret.size(), "session", {{client.data(), client.size()}, {server.data(), server.size()}});
}

Digest attach_proof(const Digest &session_key) { return proof(session_key.data(), session_key.size(), "attach", {}); }

Digest data_proof(const Digest &session_key, uint32_t index) {
  return proof(session_key.data(), session_key.size(), "data", {{&index, sizeof(index)}});
}

bool same(const Digest &a, const Digest &b) { return equal_in_constant_time(a.data(), b.data(), a.size()); }

}  // namespace ldr
