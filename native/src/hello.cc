#include "hello.h"

#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <mutex>

#include "engine.h"

namespace ldr {
namespace {

constexpr uint32_t kMagic = 0x3152444c;  // "LDR1"

std::string cluster(const Hello &hello) { return "cluster " + std::to_string(hello.cluster_id); }

}  // namespace

void Hello::encode(Writer &out) const {
  out.u32(kMagic);
  out.u32(version);
  out.u64(cluster_id);
  out.u64(incarnation);
  out.u8(remote_access);
  out.u8(one_way);
  out.u8(has_secret);
  out.u8(insecure);
  out.text(host.boot_id);
  out.u64(host.network_namespace);
  out.u64(host.pid_namespace);
  out.u32(uint32_t(pid));
  out.u32(path_set);
  out.u64(layout_digest);
  out.text(layout_text);
  out.raw(nonce.data(), nonce.size());
}

Status Hello::decode(Reader &in, Hello *hello_p) {
  Hello hello;
  uint32_t magic = in.u32();
  hello.version = in.u32();
  if (!in.ok() || magic != kMagic) return fail(LDR_ERR_HANDSHAKE, "the peer is no llm_datadist_ray engine: its hello has no magic number");
  if (hello.version != kProtocolVersion)
    return fail(LDR_ERR_VERSION, "one end speaks protocol version %u, the other version %u: run the same release on both", kProtocolVersion, hello.version);
  hello.cluster_id = in.u64();
  hello.incarnation = in.u64();
  hello.remote_access = in.u8();
  hello.one_way = in.u8();
  hello.has_secret = in.u8();
  hello.insecure = in.u8();
  hello.host.boot_id = in.text();
  hello.host.network_namespace = in.u64();
  hello.host.pid_namespace = in.u64();
  hello.pid = pid_t(in.u32());
  hello.path_set = in.u32();
  hello.layout_digest = in.u64();
  hello.layout_text = in.text();
  if (const uint8_t *nonce = in.raw(hello.nonce.size())) std::copy(nonce, nonce + hello.nonce.size(), hello.nonce.begin());
  if (!in.ok()) return fail(LDR_ERR_HANDSHAKE, "the peer's hello is cut off");
  *hello_p = std::move(hello);
  return Status::success();
}

Status make_hello(const Engine &engine, Hello *hello_p) {
  const EngineConfig &config = engine.config;
  Hello hello;
  hello.cluster_id = config.cluster_id;
  hello.incarnation = engine.incarnation;
  hello.remote_access = config.remote_access;
  hello.one_way = config.one_way;
  hello.has_secret = !config.secret.empty();
  hello.insecure = config.insecure;
  hello.host = engine.host;
  hello.pid = getpid();
  hello.path_set = config.path_set;
  hello.layout_digest = config.layout_digest;
  hello.layout_text = config.layout_text;
  if (Status status = random_bytes(hello.nonce.data(), hello.nonce.size()); !status.ok()) return status;
  *hello_p = std::move(hello);
  return Status::success();
}

Status check_hellos(const Hello &client, const Hello &server) {
  if (client.remote_access != server.remote_access) {
    const Hello &remote = client.remote_access ? client : server, &two_sided = client.remote_access ? server : client;
    return fail(LDR_ERR_MODE_MISMATCH, "%s allows remote cache access, %s does not: set llm.EnableRemoteCacheAccessible alike on both",
                cluster(remote).c_str(), cluster(two_sided).c_str());
  }
  if (client.one_way != server.one_way) {
    const Hello &one_way = client.one_way ? client : server, &two_way = client.one_way ? server : client;
    return fail(LDR_ERR_MODE_MISMATCH, "%s has one-way links, %s has links for both sides: set llm.TransferBackend alike on both",
                cluster(one_way).c_str(), cluster(two_way).c_str());
  }
  if (client.has_secret != server.has_secret) {
    const Hello &with = client.has_secret ? client : server, &without = client.has_secret ? server : client;
    return fail(LDR_ERR_AUTH, "%s has a cluster secret, %s has none: set the same LLM_DATADIST_SECRET for both", cluster(with).c_str(),
                cluster(without).c_str());
  }
  if (needs_same_user(client, server) && !is_same_host(client, server)) return refuse_without_secret(client, server, "are not on one host");
  if (client.layout_digest && server.layout_digest && client.layout_digest != server.layout_digest)
    return fail(LDR_ERR_LAYOUT, "the KV layouts differ: %s has \"%s\" (%016llx), %s has \"%s\" (%016llx)", cluster(client).c_str(),
                client.layout_text.c_str(), (unsigned long long)client.layout_digest, cluster(server).c_str(), server.layout_text.c_str(),
                (unsigned long long)server.layout_digest);
  return Status::success();
}

bool is_same_host(const Hello &a, const Hello &b) { return a.host.is_same(b.host); }

bool needs_same_user(const Hello &a, const Hello &b) { return !a.has_secret && !b.has_secret && !(a.insecure && b.insecure); }

Status refuse_without_secret(const Hello &client, const Hello &server, const std::string &why) {
  return fail(LDR_ERR_AUTH,
              "%s and %s have no cluster secret and %s: set the same LLM_DATADIST_SECRET for both (or LLM_DATADIST_INSECURE=1 to do without)",
              cluster(client).c_str(), cluster(server).c_str(), why.c_str());
}

uint32_t common_paths(const Hello &a, const Hello &b, bool attached, bool cma_works) {
  uint32_t possible = 1u << LDR_PATH_TCP;
  if (attached) possible |= 1u << LDR_PATH_SHM | 1u << LDR_PATH_UNIX;
  if (attached && cma_works) possible |= 1u << LDR_PATH_CMA;
  return a.path_set & b.path_set & possible;
}

bool probe_cma(const Engine &engine, pid_t pid, uint64_t address, uint64_t expected) {
  if (engine.config.refuse_cma) return false;
  uint64_t value = 0;
  iovec local{&value, sizeof(value)}, remote{reinterpret_cast<void *>(address), sizeof(value)};
  return process_vm_readv(pid, &local, 1, &remote, 1, 0) == ssize_t(sizeof(value)) && value == expected;
}

void allow_cma_readers(const Engine &engine) {
  if (!engine.config.allow_ptracer || !(engine.config.path_set & 1u << LDR_PATH_CMA)) return;
  static uint64_t allowed_in = 0;  // a forked child has lost the permission
  const uint64_t generation = fork_generation();
  std::lock_guard lock(fork_mutex());
  if (std::exchange(allowed_in, generation) == generation) return;
  prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);  // fails without Yama, where it is not needed
}

}  // namespace ldr
