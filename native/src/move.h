// Inside of a transfer. Its steps are in transfer.cc, how the remote cache is found in transfer_remote.cc, how a data path is chosen in transfer_path.cc.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "clock.h"
#include "event_loop.h"
#include "grant.h"
#include "link.h"
#include "plan.h"
#include "transfer.h"

namespace ldr {

class Path;
struct CopyJob;

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
  Status plan_to_address(uint64_t *extent_bytes_p);
  void look_up_address();
  void address_found(const Status &status);
  void ask_owner(uint64_t extent_bytes, Use use, Next next);
  Status read_found(Reader &in, uint32_t *found_p);
  bool table_is_old() const;
  CachePtr find_in_table();

  void plan();
  void choose_path();
  bool reach_by_shm();           // false: it does not, or the answer comes later
  void mapping_fetched(const Status &status);
  void run_on(Path &path, uint32_t path_id);
  void copied(const Status &status);
  void release_source();
  void let_caches_go();
  void finish(const Status &status) noexcept;
  Status explain(const Status &why) const;

  Engine &engine_;
  ldr_transfer_params_t params_;
  PlanInput input_;
  CachePtr local_, remote_;
  std::shared_ptr<CopyJob> job_;
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
  uint64_t pin_id_ = 0;  // what the owner holds for us until it hears kDone; 0: nothing
  std::string shm_failure_;
  std::vector<Piece> pieces_;
};

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

}  // namespace ldr
