// Where the other end of a transfer is: in a grant, in our copy of the peer's table, or as the peer says.
#include <algorithm>

#include "engine.h"
#include "move.h"

namespace ldr {

using ull = unsigned long long;

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

void Move::find_remote() {
  if (remote_) return plan();
  if (params_.remote_by == LDR_BY_ADDRESS) return look_up_address();
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
  auto use = [this](Reader &in, Fd &) { return read_found(in, &input_.remote_batch_index); };
  ask_owner(0, std::move(use), &Move::looked_up);
}

void Move::looked_up(const Status &status) {
  if (!status.ok()) return finish(status);
  plan();
}

void Move::ask_owner(uint64_t extent_bytes, Use use, Next next) {
  Writer w;
  w.u32(params_.remote_by);
  w.i64(params_.remote_cache_id);
  w.u64(params_.remote_key_id);
  w.u64(params_.remote_model_id);
  w.u32(params_.remote_batch_index);
  w.u32(params_.remote_first_tensor);
  w.u32(params_.remote_num_tensors);
  w.u32(params_.flags);
  w.u64(extent_bytes);
  w.i64(params_.timeout_ns);
  ask(FrameType::kLookup, w, std::move(use), next);
}

Status Move::read_found(Reader &in, uint32_t *found_p) {
  (void)in.u64();  // the pin: ask() has taken it
  *found_p = in.u32();
  remote_ = decode_cache(in);
  if (!remote_ || !in.finished()) return fail(LDR_ERR_LINK_BROKEN, "a malformed answer to a look-up");
  return Status::success();
}

// Pieces as if one tensor of a cache began at the address, with entries as large as the caller says they are there, and as many as he names (spec 8.3).
Status Move::plan_to_address(uint64_t *extent_bytes_p) {
  Cache target{};
  target.kind = params_.move == LDR_MOVE_ENTRY ? LDR_CACHE_CONTIGUOUS : LDR_CACHE_BLOCKS;
  target.placement = local_->placement;
  target.remote_accessible = true;
  target.addresses = {params_.remote_key_id};
  uint64_t stride = params_.dst_block_bytes;
  if (params_.move == LDR_MOVE_ENTRY_TO_BLOCKS && stride == 0) return fail(LDR_ERR_INVALID, "dst_block_bytes is needed for blocks at an address");
  if (params_.move == LDR_MOVE_ENTRY || stride == 0) stride = local_->stride();
  const auto &blocks = input_.dst_blocks;
  const uint64_t last = blocks.empty() ? 0 : *std::max_element(blocks.begin(), blocks.end());
  if (last >= uint64_t(INT64_MAX) / stride) return fail(LDR_ERR_INVALID, "block %lld of %llu bytes at an address", (long long)last, ull(stride));
  target.num_entries = last + 1;
  target.tensor_bytes = target.num_entries * stride;
  input_.remote = &target;
  Status status = plan_pieces(input_, &pieces_);
  input_.remote = nullptr;
  uint64_t extent_bytes = 0;
  for (const Piece &piece : pieces_) extent_bytes = std::max(extent_bytes, piece.remote_offset + piece.size_bytes);
  *extent_bytes_p = extent_bytes;
  return status;
}

// Two-sided: the owner finds the cache that holds the address, and lets us write there.
void Move::look_up_address() {
  uint64_t extent_bytes = 0;
  if (Status s = plan_to_address(&extent_bytes); !s.ok()) return finish(s);
  auto use = [this, extent_bytes](Reader &in, Fd &) {
    uint32_t tensor = 0;
    if (Status s = read_found(in, &tensor); !s.ok()) return s;
    const uint64_t address = params_.remote_key_id;
    const bool is_tensor = tensor < remote_->num_tensors() && address >= remote_->addresses[tensor];
    const uint64_t offset = is_tensor ? address - remote_->addresses[tensor] : 0;
    if (!is_tensor || extent_bytes > remote_->tensor_bytes || offset > remote_->tensor_bytes - extent_bytes) {
      return fail(LDR_ERR_LINK_BROKEN, "the answer to a look-up names a place that does not hold the address");
    }
    for (Piece &piece : pieces_) {
      piece.remote_tensor = tensor;
      piece.remote_offset += offset;
    }
    return Status::success();
  };
  ask_owner(extent_bytes, std::move(use), &Move::address_found);
}

void Move::address_found(const Status &status) {
  if (!status.ok()) return finish(status);
  op_->bytes_total.store(sum_bytes(pieces_), std::memory_order_relaxed);
  choose_path();
}

}  // namespace ldr
