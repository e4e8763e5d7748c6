// What each engine tells the other first, and whether the two may have a link.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

#include "auth.h"
#include "host.h"
#include "status.h"
#include "wire.h"

namespace ldr {

class Engine;

struct Hello {
  uint32_t version = kProtocolVersion;
  uint64_t cluster_id = 0;
  uint64_t incarnation = 0;
  bool remote_access = false, one_way = false, has_secret = false, insecure = false;
  Host host;
  pid_t pid = 0;
  uint32_t path_set = 0;
  uint64_t layout_digest = 0;
  std::string layout_text;
  Nonce nonce{};

  // Magic and version come first and never move; the rest is read only when the version is ours. Nonsense is HANDSHAKE.
  void encode(Writer &out) const;
  static Status decode(Reader &in, Hello *hello_p);
};

Status make_hello(const Engine &engine, Hello *hello_p);

// VERSION, MODE_MISMATCH, AUTH, LAYOUT; the text names both engines, so that either side can show it.
Status check_hellos(const Hello &client, const Hello &server);
bool is_same_host(const Hello &a, const Hello &b);
// Without a secret on either side, and not insecure on both: only for processes of one user on one host.
bool needs_same_user(const Hello &a, const Hello &b);
Status refuse_without_secret(const Hello &client, const Hello &server, const std::string &why);

// What both allow and what is possible between them.
uint32_t common_paths(const Hello &a, const Hello &b, bool attached, bool cma_works);

// Reads the peer's nonce from its memory: the only proof that the kernel lets us. False with LDR_TEST_REFUSE_CMA=1.
bool probe_cma(const Engine &engine, pid_t pid, uint64_t address, uint64_t expected);
// Lets same-user processes read our memory under Yama (once per process, a forked one included; design section 3, cma).
void allow_cma_readers(const Engine &engine);

}  // namespace ldr
