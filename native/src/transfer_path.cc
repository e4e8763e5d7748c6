// Which data path moves the pieces: the best that reaches them.
#include "engine.h"
#include "move.h"
#include "paths/path.h"

namespace ldr {

using ull = unsigned long long;

void Move::choose_path() {
  uint32_t set = link_->facts().path_set;
  if ((set & 1u << LDR_PATH_SHM) && shm_failure_.empty()) {
    if (reach_by_shm()) return run_on(shm_path(), LDR_PATH_SHM);
    if (shm_failure_.empty()) return;  // asked for a mapping
  }
  if (set & 1u << LDR_PATH_CMA) return run_on(cma_path(), LDR_PATH_CMA);
  if (!link_->data().empty()) return run_on(stream_path(), set & 1u << LDR_PATH_UNIX ? LDR_PATH_UNIX : LDR_PATH_TCP);
  finish(fail(LDR_ERR_NO_PATH, "no allowed data path reaches it: the link allows %s, and %s", path_set_text(set).c_str(), shm_failure_.c_str()));
}

bool Move::reach_by_shm() {
  const Cache &remote = *remote_;
  uint32_t looked_at = UINT32_MAX;
  for (const Piece &piece : pieces_) {  // ordered by tensor
    uint32_t i = piece.remote_tensor;
    if (i == looked_at) continue;
    looked_at = i;
    if (remote.mapping_ids[i] == 0) {
      shm_failure_ = "tensor " + std::to_string(i) + " of the remote cache " + std::to_string(remote.id) + " is not in shared memory";
      return false;
    }
    if (link_->mappings.address(remote, i)) continue;
    if (asked_mapping_ == remote.mapping_ids[i]) {
      shm_failure_ = "tensor " + std::to_string(i) + " of the remote cache " + std::to_string(remote.id) + " lies outside of its mapping";
      return false;
    }
    asked_mapping_ = remote.mapping_ids[i];
    Writer w;
    w.u64(asked_mapping_);
    auto use = [this](Reader &, Fd &passed) {
      if (!passed) return fail(LDR_ERR_LINK_BROKEN, "the peer sent no descriptor for mapping %llu", ull(asked_mapping_));
      return link_->mappings.add(asked_mapping_, passed.get());
    };
    ask(FrameType::kMapping, w, std::move(use), &Move::mapping_fetched);
    return false;
  }
  return true;
}

void Move::mapping_fetched(const Status &status) {
  if (status.code == LDR_ERR_TIMEOUT || status.code == LDR_ERR_LINK_BROKEN) return finish(status);
  if (!status.ok()) shm_failure_ = "its shared memory cannot be mapped here: " + status.text;
  choose_path();
}

void Move::run_on(Path &path, uint32_t path_id) {
  op_->path = path_id;
  bool is_stream = path_id == LDR_PATH_UNIX || path_id == LDR_PATH_TCP;
  auto job = std::make_shared<CopyJob>();
  job->link = link_;
  job->op = op_;
  job->direction = params_.direction;
  job->local = local_;
  job->remote = remote_;
  job->pieces = std::move(pieces_);
  job->cache_slot = remote_->slot;
  job->cache_version = remote_->version;
  if (grant_) {
    job->has_grant = true;
    job->grant_slot = grant_->slot;
    job->grant_version = grant_->version;
  }
  // A small copy by this thread ends long before a timer could matter.
  if (deadline_ns_ != kNever && (is_stream || op_->bytes_total.load(std::memory_order_relaxed) > kInlineBytes)) {
    timer_ = engine_.loop.at(deadline_ns_, [weak = weak_from_this()] {
      if (auto self = weak.lock()) self->on_deadline();
    });
    has_timer_ = true;
  }
  if (is_stream) stage_ = Stage::kStreaming;
  job_ = job;
  auto self = shared_from_this();
  path.run(std::move(job), [self](Status status) { self->copied(status); });
  if (is_stream && op_->stopped()) on_stop();  // the handler may have run before the chunks were there
}

}  // namespace ldr
