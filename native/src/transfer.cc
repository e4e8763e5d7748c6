#include "transfer.h"

#include <new>

#include "clock.h"
#include "engine.h"
#include "link.h"
#include "paths/path.h"
#include "paths/stream.h"

namespace ldr {

namespace {

using ull = unsigned long long;

// What is wrong whatever the caches are.
Status check_params(const Engine &engine, const ldr_transfer_params_t &p) {
  if (p.direction != LDR_PULL && p.direction != LDR_PUSH) return fail(LDR_ERR_INVALID, "direction %u", p.direction);
  if (p.direction == LDR_PUSH && !engine.config.remote_access) return fail(LDR_ERR_INVALID, "pushing needs remote-access mode; this engine is two-sided");
  if (p.direction == LDR_PULL && p.cluster_id == engine.config.cluster_id) return fail(LDR_ERR_INVALID, "a pull from the own cluster %llu", ull(p.cluster_id));
  if (p.remote_by > LDR_BY_OPEN_GRANT) return fail(LDR_ERR_INVALID, "remote_by %u", p.remote_by);
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

// The one kind of transfer: pieces planned from both caches, moved by one path.
class Move final : public Transfer, public std::enable_shared_from_this<Move> {
 public:
  Move(Engine &engine, const ldr_transfer_params_t &params) : engine_(engine), params_(params) {}

  Status prepare();              // the caller's thread, before there is an operation
  void submit(OpPtr op) noexcept;
  void start_turn() override;
  void refuse(const Status &why) override;
  void stop(const Status &why) override { op_->stop(why.code, why.text); }

 private:
  enum class Stage { kQueued, kRunning, kCalling, kStreaming, kDone };
  using Use = std::function<Status(Reader &in, Fd &passed)>;
  using Next = void (Move::*)(const Status &);

  void wait_for_turn();
  void take_turn();  // the link is ours
  template <class F> void step(F body) noexcept;
  bool claim(Stage from, Stage to) { return stage_.compare_exchange_strong(from, to); }
  void on_stop();
  void on_deadline();
  void ask(FrameType type, const Writer &payload, Use use, Next next);

  Status resolve_grant();
  void find_remote();
  void fetch_table();
  void table_fetched(const Status &status);
  void look_up();
  void looked_up(const Status &status);
  bool table_is_old() const;
  CachePtr find_in_table();

  void plan();
  void choose_path();
  bool reach_by_shm();           // false: it does not, or the answer comes later
  void mapping_fetched(const Status &status);
  void run_on(Path &path, uint32_t path_id);
  void copied(const Status &status);
  void finish(const Status &status) noexcept;
  Status explain(const Status &why) const;

  Engine &engine_;
  ldr_transfer_params_t params_;
  PlanInput input_;
  CachePtr local_, remote_;
  std::shared_ptr<const OpenGrant> grant_;
  LinkPtr link_;
  OpPtr op_;
  std::atomic<Stage> stage_{Stage::kQueued};
  int64_t turn_ns_ = 0, deadline_ns_ = kNever;
  TimerId timer_ = 0;
  bool has_timer_ = false;
  bool fetched_table_ = false;
  uint64_t asked_table_version_ = 0;
  uint64_t asked_mapping_ = 0;
  std::string shm_failure_;
  std::vector<Piece> pieces_;
};


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

Status Move::resolve_grant() {
  grant_ = engine_.open_grants.find(params_.remote_key_id);
  if (!grant_) return fail(LDR_ERR_NOT_FOUND, "no grant is open here under id %llu", ull(params_.remote_key_id));
  if (grant_->cluster_id != params_.cluster_id) {
    return fail(LDR_ERR_INVALID, "open grant %llu is of cluster %llu, not %llu", ull(grant_->open_id), ull(grant_->cluster_id), ull(params_.cluster_id));
  }
  if (grant_->source_incarnation != link_->facts().incarnation) {
    return fail(LDR_ERR_STALE, "open grant %llu is of an earlier incarnation of %s", ull(grant_->open_id), link_->name().c_str());
  }
  remote_ = grant_->cache;
  if (input_.src_blocks.empty()) {
    input_.src_blocks = grant_->blocks;
    return Status::success();
  }
  for (uint64_t &position : input_.src_blocks) {
    if (position >= grant_->blocks.size()) {
      return fail(LDR_ERR_INVALID, "position %lld in a grant of %zu blocks", (long long)position, grant_->blocks.size());
    }
    position = grant_->blocks[position];
  }
  return Status::success();
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

// Nothing above us could complete the operation if memory runs out.
template <class F> void Move::step(F body) noexcept {
  try {
    if (op_->stopped()) return finish(op_->stop_status());
    body();
  } catch (const std::bad_alloc &) {
    finish(out_of_memory());
  } catch (const std::exception &error) {
    finish({LDR_ERR_INTERNAL, error.what()});
  }
}

// One question to the peer; next runs when it is answered, where the operation is waited for, or on a copy thread.
void Move::ask(FrameType type, const Writer &payload, Use use, Next next) {
  stage_ = Stage::kCalling;
  auto on_reply = [self = shared_from_this(), use = std::move(use), next](const Status &status, Reader in, Fd &passed) {
    if (!self->claim(Stage::kCalling, Stage::kRunning)) return;  // stopped meanwhile
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

void Move::find_remote() {
  if (remote_) return plan();
  if (!engine_.config.remote_access) return look_up();
  if (table_is_old()) return fetch_table();
  remote_ = find_in_table();
  if (remote_) return plan();
  if (!fetched_table_) return fetch_table();  // it may have been registered since
  finish(fail(LDR_ERR_NO_CACHE, "the peer has no cache under %s %lld", params_.remote_by == LDR_BY_CACHE_ID ? "id" : "the given key, id",
              (long long)(params_.remote_by == LDR_BY_CACHE_ID ? params_.remote_cache_id : int64_t(params_.remote_key_id))));
}

bool Move::table_is_old() const {
  if (fetched_table_) return false;
  const PeerPage *page = link_->page();
  return !link_->table.filled() || (page && page->table_version() != link_->transfers.table_version);
}

CachePtr Move::find_in_table() {
  const ldr_transfer_params_t &p = params_;
  CachePtr found;
  if (p.remote_by == LDR_BY_CACHE_ID) {
    found = link_->table.find(p.remote_cache_id);
  } else if (p.remote_by == LDR_BY_REQUEST_KEY || p.remote_by == LDR_BY_BLOCKS_KEY) {  // prefix keys cannot be found (spec 5.7)
    uint32_t kind = p.remote_by == LDR_BY_REQUEST_KEY ? LDR_KEY_REQUEST : LDR_KEY_BLOCKS;
    uint32_t batch_index = 0;
    found = link_->table.find_key(kind, p.remote_key_id, p.remote_model_id, &batch_index);
    input_.remote_batch_index = batch_index;
  }
  // Not ours any more as soon as its word has moved, whatever the table says.
  const PeerPage *page = link_->page();
  return found && page && page->cache_version(found->slot) != found->version ? nullptr : found;
}

void Move::fetch_table() {
  fetched_table_ = true;
  if (const PeerPage *page = link_->page()) asked_table_version_ = page->table_version();
  ask(FrameType::kTable, Writer(), [this](Reader &in, Fd &) { return link_->table.replace(in); }, &Move::table_fetched);
}

void Move::table_fetched(const Status &status) {
  if (!status.ok()) return finish(status);
  link_->transfers.table_version = asked_table_version_;
  find_remote();
}

// Two-sided: the owner finds the cache (spec 5.5).
void Move::look_up() {
  Writer w;
  w.u32(params_.remote_by);
  w.i64(params_.remote_cache_id);
  w.u64(params_.remote_key_id);
  w.u64(params_.remote_model_id);
  w.u32(params_.remote_batch_index);
  auto use = [this](Reader &in, Fd &) {
    remote_ = decode_cache(in);
    input_.remote_batch_index = in.u32();
    if (!remote_ || !in.finished()) return fail(LDR_ERR_LINK_BROKEN, "a malformed answer to a look-up");
    return Status::success();
  };
  ask(FrameType::kLookup, w, std::move(use), &Move::looked_up);
}

void Move::looked_up(const Status &status) {
  if (!status.ok()) return finish(status);
  plan();
}

void Move::plan() {
  input_.remote = remote_.get();
  if (Status s = plan_pieces(input_, &pieces_); !s.ok()) return finish(s);
  op_->bytes_total.store(sum_bytes(pieces_), std::memory_order_relaxed);
  choose_path();
}

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
  auto self = shared_from_this();
  path.run(std::move(job), [self](Status status) { self->copied(status); });
  if (is_stream && op_->stopped()) on_stop();  // the handler may have run before the chunks were there
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
  finish(status);
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
    told = explain(status);
  } catch (const std::bad_alloc &) {
    told.code = status.code;
  }
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

}  // namespace

Status transfer_submit(Engine &engine, const ldr_transfer_params_t &params, bool waited, uint64_t user_tag, OpPtr *op_p) {
  auto transfer = std::make_shared<Move>(engine, params);
  if (Status s = transfer->prepare(); !s.ok()) return s;
  if (Status s = engine.ops.begin(waited, user_tag, op_p); !s.ok()) return s;
  transfer->submit(*op_p);
  return Status::success();
}

}  // namespace ldr
