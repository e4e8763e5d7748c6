// The way of a transfer through its steps: checks, the link, questions to the peer, the end.
#include <new>

#include "clock.h"
#include "engine.h"
#include "move.h"
#include "paths/path.h"
#include "paths/stream.h"

namespace ldr {

namespace {

using ull = unsigned long long;

// What is wrong whatever the caches are.
Status check_params(const Engine &engine, const ldr_transfer_params_t &p) {
  if (p.direction != LDR_PULL && p.direction != LDR_PUSH) return fail(LDR_ERR_INVALID, "direction %u", p.direction);
  if (p.remote_by > LDR_BY_ADDRESS) return fail(LDR_ERR_INVALID, "remote_by %u", p.remote_by);
  if (p.remote_by == LDR_BY_ADDRESS) {
    if (p.direction != LDR_PUSH || engine.config.remote_access) return fail(LDR_ERR_INVALID, "an address can only be pushed to, by a two-sided engine");
  } else if (p.direction == LDR_PUSH && !engine.config.remote_access) {
    return fail(LDR_ERR_INVALID, "pushing to a cache needs remote-access mode; this engine is two-sided");
  }
  if (p.direction == LDR_PULL && p.cluster_id == engine.config.cluster_id) return fail(LDR_ERR_INVALID, "a pull from the own cluster %llu", ull(p.cluster_id));
  if (p.flags & ~uint32_t(LDR_TRANSFER_KEEP_KEY)) return fail(LDR_ERR_INVALID, "unknown flags %#x", p.flags);
  if (p.move > LDR_MOVE_ENTRY_TO_BLOCKS) return fail(LDR_ERR_INVALID, "move %u", p.move);
  if (p.remote_by == LDR_BY_OPEN_GRANT && (p.direction != LDR_PULL || p.move != LDR_MOVE_BLOCKS)) {
    return fail(LDR_ERR_INVALID, "an open grant can only be pulled, blocks to blocks");
  }
  if (p.move == LDR_MOVE_ENTRY) {
    if (p.size_bytes != -1 && p.size_bytes <= 0) return fail(LDR_ERR_INVALID, "size_bytes is %lld; -1 or more than 0 is allowed", (long long)p.size_bytes);
    if (p.src_blocks.count || p.dst_blocks.count) return fail(LDR_ERR_INVALID, "block lists given for a move of one entry");
  } else {
    if (p.dst_blocks.count == 0) return fail(LDR_ERR_INVALID, "dst_blocks is empty");
    if (p.move == LDR_MOVE_ENTRY_TO_BLOCKS && p.src_blocks.count) return fail(LDR_ERR_INVALID, "src_blocks given for a contiguous source");
  }
  return Status::success();
}

// The owner ends a pin of ours; nobody waits for it.
void tell_failed(Link &link, uint64_t pin_id, ldr_status_t outcome) {
  if (pin_id == 0) return;
  Writer w;
  w.u64(pin_id);
  w.u32(uint32_t(outcome));
  link.send(FrameType::kDone, 0, w);
}

}  // namespace

Status Move::prepare() {
  const ldr_transfer_params_t &p = params_;
  if (Status s = check_params(engine_, p); !s.ok()) return s;
  if (Status s = widen_blocks("src_blocks", p.src_blocks, &input_.src_blocks); !s.ok()) return s;
  if (Status s = widen_blocks("dst_blocks", p.dst_blocks, &input_.dst_blocks); !s.ok()) return s;
  local_ = engine_.caches.find(p.local_cache_id);
  if (!local_) return fail(LDR_ERR_NO_CACHE, "no local cache %lld", (long long)p.local_cache_id);
  input_.direction = p.direction;
  input_.move = p.move;
  input_.need_accessible = engine_.config.remote_access;
  input_.restrict_placements = !engine_.config.remote_access && p.remote_by != LDR_BY_OPEN_GRANT;
  input_.local = local_.get();
  input_.local_batch_index = p.local_batch_index;
  input_.remote_batch_index = p.remote_batch_index;
  input_.local_first_tensor = p.local_first_tensor;
  input_.local_num_tensors = p.local_num_tensors;
  input_.remote_first_tensor = p.remote_first_tensor;
  input_.remote_num_tensors = p.remote_num_tensors;
  input_.size_bytes = p.size_bytes;
  input_.local_offset_bytes = p.local_offset_bytes;
  input_.remote_offset_bytes = p.remote_offset_bytes;
  input_.dst_block_bytes = p.dst_block_bytes;
  if (p.remote_by == LDR_BY_ADDRESS) {
    input_.remote_batch_index = input_.remote_first_tensor = input_.remote_num_tensors = 0;  // an address says it all
    const uint32_t num_tensors = p.local_num_tensors ? p.local_num_tensors : local_->num_tensors();
    if (num_tensors != 1) return fail(LDR_ERR_INVALID, "%u local tensors selected; one goes to an address", num_tensors);
  }
  if (Status s = check_before_link(input_); !s.ok()) return s;
  link_ = engine_.links.find_usable(p.cluster_id);
  if (!link_) {
    LinkPtr broken = engine_.links.find(p.cluster_id);
    if (!broken) return fail(LDR_ERR_NOT_LINKED, "no link to cluster %llu", ull(p.cluster_id));
    return fail(LDR_ERR_NOT_LINKED, "the link to %s is down: %s; link again", broken->name().c_str(), broken->why_down().text.c_str());
  }
  if (Status s = check_before_remote(input_); !s.ok()) return s;
  return p.remote_by == LDR_BY_OPEN_GRANT ? resolve_grant() : Status::success();
}

void Move::submit(OpPtr op) noexcept {
  op_ = std::move(op);
  step([this] { wait_for_turn(); });
}

void Move::wait_for_turn() {
  op_->on_stop([weak = weak_from_this()] {
    if (auto self = weak.lock()) self->on_stop();
  });
  if (link_->transfers.enter(shared_from_this())) {
    take_turn();
  } else if (op_->stopped()) {
    on_stop();  // the handler may have run before there was anything to withdraw
  }
}

void Move::start_turn() {
  try {
    engine_.ops.resume(op_, [self = shared_from_this()] { self->take_turn(); });
  } catch (const std::bad_alloc &) {
    finish(out_of_memory());
  }
}

void Move::refuse(const Status &why) {
  if (claim(Stage::kQueued, Stage::kRunning)) finish(why);
}

// Runs on whichever thread stops the operation. What is copied in batches ends by itself; what waits for others is ended here.
void Move::on_stop() {
  switch (stage_.load()) {
    case Stage::kQueued:
      if (link_->transfers.withdraw(*this)) refuse(op_->stop_status());
      break;
    case Stage::kCalling:
      if (claim(Stage::kCalling, Stage::kRunning)) finish(op_->stop_status());
      break;
    case Stage::kStreaming:
      for (const auto &connection : link_->data()) connection->abandon(*op_);
      break;
    default:
      break;
  }
}

void Move::on_deadline() {
  op_->stop(LDR_ERR_TIMEOUT, "the time limit of " + std::to_string(params_.timeout_ns / kMillisecond) + " ms passed");
}

// One question to the peer; next runs when it is answered, where the operation is waited for, or on a copy thread.
void Move::ask(FrameType type, const Writer &payload, Use use, Next next) {
  stage_ = Stage::kCalling;
  auto on_reply = [self = shared_from_this(), type, use = std::move(use), next](const Status &status, Reader in, Fd &passed) {
    // What the owner holds for us is known before anything can end the operation.
    const uint64_t pin_id = type == FrameType::kLookup && status.ok() ? Reader(in).u64() : 0;
    if (!self->claim(Stage::kCalling, Stage::kRunning)) return tell_failed(*self->link_, pin_id, LDR_ERR_CANCELLED);  // stopped meanwhile
    if (pin_id != 0) self->pin_id_ = pin_id;
    self->step([&] {
      Status result = status.ok() ? use(in, passed) : status;
      if (status.ok() && result.code == LDR_ERR_LINK_BROKEN) self->link_->fail(result);  // a peer that answers nonsense
      self->engine_.ops.resume(self->op_, [self, next, result] { self->step([&] { ((*self).*next)(result); }); });
    });
  };
  link_->call(type, payload, deadline_ns_, std::move(on_reply));
  if (op_->stopped()) on_stop();
}

void Move::take_turn() {
  stage_ = Stage::kRunning;
  turn_ns_ = now_ns();
  deadline_ns_ = deadline_after(params_.timeout_ns);
  step([this] {
    if (params_.timeout_ns == 0) return finish(fail(LDR_ERR_TIMEOUT, "the time limit is 0"));
    if (const PeerPage *page = link_->page()) link_->mappings.drop_unused(*page);
    find_remote();
  });
}

void Move::plan() {
  input_.remote = remote_.get();
  if (Status s = plan_pieces(input_, &pieces_); !s.ok()) return finish(s);
  op_->bytes_total.store(sum_bytes(pieces_), std::memory_order_relaxed);
  choose_path();
}

void Move::copied(const Status &status) {
  if (status.code == LDR_ERR_NO_CACHE && !link_->page() && engine_.config.remote_access && !grant_ && !fetched_table_ && !op_->stopped()) {
    // Without the peer's page only its refusal tells that our copy of its table is old.
    if (has_timer_) engine_.loop.cancel(timer_);
    has_timer_ = false;
    stage_ = Stage::kRunning;
    op_->bytes_done.store(0, std::memory_order_relaxed);
    remote_ = nullptr;
    return step([this] { fetch_table(); });
  }
  let_caches_go();
  if (status.ok() && pin_id_ != 0) return step([this] { release_source(); });
  finish(status);
}

// Everything has arrived: the owner gives up the source, and with it the key that was pulled. That is waited for, so that the key is gone for everybody when
// the pull is over, and nothing stops it any more. A push takes nothing from anybody.
void Move::release_source() {
  stage_ = Stage::kRunning;
  Writer w;
  w.u64(std::exchange(pin_id_, 0));
  w.u32(LDR_OK);
  if (params_.direction == LDR_PULL) {
    return link_->call(FrameType::kDone, w, deadline_ns_, [self = shared_from_this()](const Status &status, Reader, Fd &) {
      self->finish(!status.ok() && self->op_->stopped() ? self->op_->stop_status() : status);
    });
  }
  link_->send(FrameType::kDone, 0, w);
  finish(Status::success());
}

// The path is done with them. Other threads may hold this transfer and its job for a moment longer, but its caller may give the local cache back as soon as it
// hears of the end, and then counts on the memory being free.
void Move::let_caches_go() {
  if (job_) job_->local = job_->remote = nullptr;
  local_ = remote_ = nullptr;
}

void Move::finish(const Status &status) noexcept {
  if (stage_.exchange(Stage::kDone) == Stage::kDone) return;
  if (has_timer_) engine_.loop.cancel(timer_);
  if (status.ok()) {
    uint64_t bytes = op_->bytes_total.load(std::memory_order_relaxed);
    op_->bytes_done.store(bytes, std::memory_order_relaxed);
    auto &of_link = params_.direction == LDR_PULL ? link_->bytes_pulled : link_->bytes_pushed;
    auto &of_engine = params_.direction == LDR_PULL ? engine_.bytes_pulled : engine_.bytes_pushed;
    of_link[op_->path].fetch_add(bytes, std::memory_order_relaxed);
    of_engine[op_->path].fetch_add(bytes, std::memory_order_relaxed);
  }
  Status told;
  try {
    if (!status.ok()) tell_failed(*link_, pin_id_, status.code);  // before the next transfer's first words
    told = explain(status);
  } catch (const std::bad_alloc &) {
    told.code = status.code;
  }
  local_ = remote_ = nullptr;
  // The link is left first, so that the caller's next transfer finds it free; the next one starts last, so that completions keep the order.
  std::shared_ptr<Transfer> next = link_->transfers.leave(*this);
  engine_.ops.complete(op_, told);
  if (next) next->start_turn();
}

Status Move::explain(const Status &why) const {
  if (why.ok()) return why;
  std::string text = params_.direction == LDR_PULL ? "pull from " : "push to ";
  text += link_->name();
  if (op_->path != LDR_PATH_NONE) text += std::string(" over ") + path_name(op_->path);
  text += ": " + why.text;
  if (turn_ns_ != 0) {
    text += " (" + std::to_string(op_->bytes_done.load(std::memory_order_relaxed)) + " of " +
            std::to_string(op_->bytes_total.load(std::memory_order_relaxed)) + " bytes after " +
            std::to_string((now_ns() - turn_ns_) / kMillisecond) + " ms)";
  }
  return {why.code, text};
}

Status transfer_submit(Engine &engine, const ldr_transfer_params_t &params, bool waited, uint64_t user_tag, OpPtr *op_p) {
  auto transfer = std::make_shared<Move>(engine, params);
  if (Status s = transfer->prepare(); !s.ok()) return s;
  if (Status s = engine.ops.begin(waited, user_tag, op_p); !s.ok()) return s;
  transfer->submit(*op_p);
  return Status::success();
}

}  // namespace ldr
