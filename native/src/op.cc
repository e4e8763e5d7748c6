#include "op.h"

#include <cstdio>
#include <deque>
#include <new>
#include <unordered_map>
#include <vector>

#include "clock.h"
#include "engine.h"

namespace ldr {

namespace {
constexpr uint32_t kMaxInFlight = 65536;
constexpr size_t kNumErrorTexts = 1024;
}  // namespace

bool Op::stop(ldr_status_t code, const std::string &text) {
  std::function<void()> handler;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (stopped()) return false;
    stop_text_ = text;
    stop_code_.store(code, std::memory_order_release);
    handler.swap(stop_handler_);
  }
  if (handler) handler();
  return true;
}

Status Op::stop_status() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return {stop_code_.load(std::memory_order_relaxed), stop_text_};
}

void Op::on_stop(std::function<void()> handler) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!stopped()) {
      stop_handler_.swap(handler);
      return;
    }
  }
  handler();
}

struct OpTable::Impl {
  Engine &engine;
  mutable std::mutex mutex;
  std::condition_variable all_finished;
  std::unordered_map<uint64_t, OpPtr> ops;
  std::deque<std::pair<uint64_t, std::string>> error_texts;
  uint64_t last_id = 0;
  uint32_t unfinished = 0;  // also those whose completion is being told; wait_all() waits for them
  bool closed = false;

  explicit Impl(Engine &e) : engine(e) {}
};

OpTable::OpTable(Engine &engine) : impl_(std::make_unique<Impl>(engine)) {}
OpTable::~OpTable() = default;

Status OpTable::begin(bool waited, uint64_t user_tag, OpPtr *op_p) {
  auto op = std::make_shared<Op>();
  op->user_tag = user_tag;
  op->waited = waited;
  op->start_ns = now_ns();
  std::lock_guard<std::mutex> lock(impl_->mutex);
  if (impl_->closed) return fail(LDR_ERR_CLOSED, "the engine is being destroyed");
  if (impl_->unfinished >= kMaxInFlight) return fail(LDR_ERR_BUSY, "%u operations are in flight; wait for some to complete", kMaxInFlight);
  op->id = ++impl_->last_id;
  impl_->ops.emplace(op->id, op);
  ++impl_->unfinished;
  *op_p = std::move(op);
  return Status::success();
}

void OpTable::complete(const OpPtr &op, const Status &status) {
  {
    std::lock_guard<std::mutex> lock(impl_->mutex);
    if (impl_->ops.erase(op->id) == 0) return;
    if (!status.ok()) {
      try {
        impl_->error_texts.emplace_back(op->id, status.text);
        if (impl_->error_texts.size() > kNumErrorTexts) impl_->error_texts.pop_front();
      } catch (const std::bad_alloc &) {  // the code is enough
      }
    }
  }
  std::function<void()> handler;  // destroyed after the lock: it may hold the last reference to something
  {
    std::lock_guard<std::mutex> lock(op->mutex_);
    handler.swap(op->stop_handler_);
    op->result_.code = status.code;
    try {
      op->result_.text = status.text;
    } catch (const std::bad_alloc &) {  // likewise
    }
    op->done_ = true;
    op->changed_.notify_all();
  }
  if (!op->waited) {
    ldr_event_t event{};
    event.id = op->id;
    event.user_tag = op->user_tag;
    event.bytes = op->bytes_done.load(std::memory_order_relaxed);
    event.latency_ns = now_ns() - op->start_ns;
    event.status = status.code;
    event.kind = LDR_EVENT_OP;
    event.path = uint16_t(op->path);
    try {
      impl_->engine.events.push(event);
    } catch (const std::bad_alloc &) {
      fprintf(stderr, "llm_datadist_ray: out of memory: the completion of operation %llu is not told\n", (unsigned long long)op->id);
    }
  }
  std::lock_guard<std::mutex> lock(impl_->mutex);
  if (--impl_->unfinished == 0) impl_->all_finished.notify_all();
}

Status OpTable::wait(const OpPtr &op) {
  std::unique_lock<std::mutex> lock(op->mutex_);
  while (!op->done_) {
    if (!op->task_) {
      op->changed_.wait(lock);
      continue;
    }
    std::function<void()> task = std::exchange(op->task_, nullptr);
    lock.unlock();
    task();
    lock.lock();
  }
  return op->result_;
}

void OpTable::resume(const OpPtr &op, std::function<void()> task) {
  if (!op->waited) return impl_->engine.pool.submit(std::move(task));
  std::lock_guard<std::mutex> lock(op->mutex_);
  op->task_ = std::move(task);
  op->changed_.notify_all();
}

OpPtr OpTable::find(uint64_t id) const {
  std::lock_guard<std::mutex> lock(impl_->mutex);
  auto found = impl_->ops.find(id);
  return found == impl_->ops.end() ? nullptr : found->second;
}

bool OpTable::error_text(uint64_t id, std::string *text_p) const {
  std::lock_guard<std::mutex> lock(impl_->mutex);
  for (const auto &[op_id, text] : impl_->error_texts) {
    if (op_id != id) continue;
    *text_p = text;
    return true;
  }
  return false;
}

uint32_t OpTable::in_flight() const {
  std::lock_guard<std::mutex> lock(impl_->mutex);
  return uint32_t(impl_->ops.size());
}

void OpTable::close() {
  std::vector<OpPtr> ops;
  {
    std::lock_guard<std::mutex> lock(impl_->mutex);
    impl_->closed = true;
    for (const auto &entry : impl_->ops) ops.push_back(entry.second);
  }
  for (const OpPtr &op : ops) op->stop(LDR_ERR_CLOSED, "the engine is being destroyed");
}

void OpTable::wait_all() {
  std::unique_lock<std::mutex> lock(impl_->mutex);
  impl_->all_finished.wait(lock, [this] { return impl_->unfinished == 0; });
}

}  // namespace ldr
