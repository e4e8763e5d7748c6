// Who proves what in a handshake (design section 8). Every proof is an HMAC over both hellos, which hold a fresh nonce each, under a label of its own: neither a recorded
// nor a reflected proof fits. The secret itself never travels.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "sha256.h"
#include "status.h"

namespace ldr {

using Nonce = std::array<uint8_t, 32>;
using LinkToken = std::array<uint8_t, 16>;

Status random_bytes(void *data, size_t size_bytes);

struct Transcript {
  std::vector<uint8_t> client_hello, server_hello;  // the payloads, the server's without its proof
};

Digest server_proof(const std::vector<uint8_t> &secret, const Transcript &transcript);
Digest client_proof(const std::vector<uint8_t> &secret, const Transcript &transcript);
Digest session_key(const std::vector<uint8_t> &secret, const Nonce &client, const Nonce &server);
Digest attach_proof(const Digest &session_key);
Digest data_proof(const Digest &session_key, uint32_t index);
bool same(const Digest &a, const Digest &b);  // in constant time

}  // namespace ldr
