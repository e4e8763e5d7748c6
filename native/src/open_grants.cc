// The sink's side of grants: one round trip to open, one to close.
#include <condition_variable>
#include <map>

#include "clock.h"
#include "engine.h"
#include "grant.h"
#include "link.h"

namespace ldr {
namespace {

struct Record {
  uint64_t cluster_id;
  ldr_grant_id_t grant;
  std::shared_ptr<const OpenGrant> open;  // nullptr until the source has answered
};

bool same_grant(const ldr_grant_id_t &a, const ldr_grant_id_t &b) {
  return a.incarnation == b.incarnation && a.sequence == b.sequence && a.nonce == b.nonce;
}

std::shared_ptr<OpenGrant> decode_answer(Reader in) {
  auto open = std::make_shared<OpenGrant>();
  open->slot = in.u32();
  open->version = in.u64();
  open->cache = decode_cache(in);
  uint32_t num_blocks = in.u32();
  if (!open->cache || open->cache->kind != LDR_CACHE_BLOCKS || open->slot >= kNumGrantSlots || in.left() != uint64_t(num_blocks) * 8) return nullptr;
  open->blocks.resize(num_blocks);
  for (uint64_t &block : open->blocks) {
    block = in.u64();
    if (block >= open->cache->num_entries) return nullptr;
  }
  return in.finished() ? open : nullptr;
}

// A call that the calling thread waits for. answered says whether the status came from the source or from the link.
struct Answer {
  Status status;
  bool answered = false;
  std::shared_ptr<OpenGrant> open;
};

Answer round_trip(const LinkPtr &link, FrameType type, const Writer &payload, int64_t timeout_ns) {
  struct Waiter {
    std::mutex mutex;
    std::condition_variable arrived;
    bool done = false;
    Answer answer;
  };
  auto waiter = std::make_shared<Waiter>();
  link->call(type, payload, deadline_after(timeout_ns), [waiter, link, type](const Status &status, Reader in, Fd &) {
    Answer answer;
    answer.status = status;
    answer.answered = status.code != LDR_ERR_TIMEOUT && status.code != LDR_ERR_LINK_BROKEN && status.code != LDR_ERR_CLOSED;
    if (status.ok() && type == FrameType::kGrantOpen && !(answer.open = decode_answer(in))) {
      answer.status = fail(LDR_ERR_LINK_BROKEN, "%s answered an open with a malformed grant", link->name().c_str());
      link->fail(answer.status);
    }
    std::lock_guard lock(waiter->mutex);
    waiter->answer = std::move(answer);
    waiter->done = true;
    waiter->arrived.notify_one();
  });
  std::unique_lock lock(waiter->mutex);
  waiter->arrived.wait(lock, [&] { return waiter->done; });
  return waiter->answer;
}

}  // namespace

struct OpenGrants::Impl {
  explicit Impl(Engine &engine_in) : engine(engine_in) {}

  Engine &engine;
  mutable std::mutex mutex;
  std::map<uint64_t, Record> records;  // by open id
};

OpenGrants::OpenGrants(Engine &engine) : impl_(std::make_unique<Impl>(engine)) {}
OpenGrants::~OpenGrants() = default;

Status OpenGrants::open(const ldr_grant_open_params_t &params, uint64_t *num_blocks_p) {
  if (params.open_id == 0 || !num_blocks_p) return fail(LDR_ERR_INVALID, "open grant: give an open id other than 0 and a place for the number of blocks");
  LinkPtr link = impl_->engine.links.find_usable(params.cluster_id);
  if (!link) return fail(LDR_ERR_NOT_LINKED, "open grant: no usable link to cluster %llu", (unsigned long long)params.cluster_id);
  {
    // From here on until an answer the source may have it open for us: the record lets a close reach it.
    std::lock_guard lock(impl_->mutex);
    auto [it, is_new] = impl_->records.try_emplace(params.open_id, Record{params.cluster_id, params.grant, nullptr});
    if (!is_new && (it->second.cluster_id != params.cluster_id || !same_grant(it->second.grant, params.grant))) {
      return fail(LDR_ERR_INVALID, "open grant: open id %#llx is in use for another grant", (unsigned long long)params.open_id);
    }
  }
  Writer payload;
  payload.u64(params.grant.incarnation);
  payload.u64(params.grant.sequence);
  payload.u64(params.grant.nonce);
  payload.u64(params.generation);
  payload.u64(params.num_tokens);
  payload.u64(params.layout_digest);
  payload.u64(params.open_id);
  Answer answer = round_trip(link, FrameType::kGrantOpen, payload, params.timeout_ns);

  std::lock_guard lock(impl_->mutex);
  if (answer.status.ok()) {
    answer.open->cluster_id = params.cluster_id;
    answer.open->source_incarnation = link->facts().incarnation;
    answer.open->open_id = params.open_id;
    *num_blocks_p = answer.open->blocks.size();
    if (auto it = impl_->records.find(params.open_id); it != impl_->records.end()) it->second.open = std::move(answer.open);
  } else if (answer.answered) {
    // A grant that an earlier call opened stays open, and a close must still find it.
    auto it = impl_->records.find(params.open_id);
    if (it != impl_->records.end() && !it->second.open) impl_->records.erase(it);
  }
  return answer.status;
}

Status OpenGrants::close(uint64_t open_id, uint32_t outcome, int64_t timeout_ns) {
  if (outcome > LDR_CLOSE_CANCELLED) return fail(LDR_ERR_INVALID, "close grant: unknown outcome %u", outcome);
  Record record;
  {
    std::lock_guard lock(impl_->mutex);
    auto it = impl_->records.find(open_id);
    if (it == impl_->records.end()) return fail(LDR_ERR_NOT_FOUND, "close grant: open id %#llx is not known (any more)", (unsigned long long)open_id);
    record = it->second;
  }
  auto forget = [&] {
    std::lock_guard lock(impl_->mutex);
    impl_->records.erase(open_id);
  };
  LinkPtr link = impl_->engine.links.find_usable(record.cluster_id);
  if (!link) {
    // Nobody to tell: the source reclaims the grants of a lost sink. An OK close can be tried again over a new link.
    if (outcome == LDR_CLOSE_CANCELLED) forget();
    return fail(LDR_ERR_NOT_LINKED, "close grant: no usable link to cluster %llu", (unsigned long long)record.cluster_id);
  }
  Writer payload;
  payload.u64(record.grant.incarnation);
  payload.u64(record.grant.sequence);
  payload.u64(record.grant.nonce);
  payload.u64(open_id);
  payload.u32(outcome);
  Answer answer = round_trip(link, FrameType::kGrantClose, payload, timeout_ns);
  if (answer.answered) forget();
  return answer.status;
}

std::shared_ptr<const OpenGrant> OpenGrants::find(uint64_t open_id) const {
  std::lock_guard lock(impl_->mutex);
  auto it = impl_->records.find(open_id);
  return it == impl_->records.end() ? nullptr : it->second.open;
}

}  // namespace ldr
