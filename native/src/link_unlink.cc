// How a link ends in peace: the peer's wish, which a running transfer of ours may delay, and our own.
#include <algorithm>
#include <future>

#include "link_impl.h"

namespace ldr {
namespace {

constexpr size_t kMaxUnlinks = 8;  // asked for by the peer and not yet answered
constexpr int64_t kAnswerReserveNs = 100 * kMillisecond;

}  // namespace

// The peer asks us to drop our half. A transfer of ours that runs on it may end first.
void Link::Impl::begin_unlink(const LinkPtr &self, uint64_t call_id, int64_t deadline_ns) {
  if (unlinks.size() >= kMaxUnlinks || unlinks.count(call_id)) {
    self->reply(call_id, {LDR_ERR_BUSY, std::to_string(unlinks.size()) + " unlinks wait already"}, Writer());
    return;
  }
  unlinks[call_id] = deadline_ns == kNever ? 0 : engine.loop.at(deadline_ns, [self, call_id] { self->impl_->refuse_unlink(self, call_id); });
  try_unlink(self);
}

void Link::Impl::try_unlink(const LinkPtr &self) {
  if (!ready || unlinks.empty()) return;
  if (self->transfers.close(now_ns())) {
    engine.links.remove(*self);
    for (const auto &[call_id, timer] : unlinks) self->reply(call_id, Status::success(), Writer());
    go_down(self, ldr::fail(LDR_ERR_NOT_LINKED, "%s was unlinked by the peer", self->name().c_str()), true);
  } else if (!std::exchange(awaits_idle, true)) {
    auto on_loop = [self] {
      self->impl_->awaits_idle = false;
      self->impl_->try_unlink(self);
    };
    self->transfers.on_idle([self, on_loop] {
      try {
        self->impl_->engine.loop.post(on_loop);
      } catch (const std::bad_alloc &) {  // then the peer's time limit answers
      }
    });
  }
}

// Its time is over and our transfer still runs.
void Link::Impl::refuse_unlink(const LinkPtr &self, uint64_t call_id) {
  if (unlinks.erase(call_id) == 0 || !ready) return;
  if (unlinks.empty()) self->transfers.reopen();
  std::string who = "cluster " + std::to_string(engine.config.cluster_id);
  self->reply(call_id, {LDR_ERR_UNLINK_FAILED, "a transfer of " + who + " still runs on the link"}, Writer());
}

Status Link::close(bool force, int64_t deadline_ns) {
  if (!ready()) return Status::success();
  const Status unlinked = ldr::fail(LDR_ERR_NOT_LINKED, "%s was unlinked", name().c_str());
  bool quiet = transfers.close(deadline_ns);
  if (!force) {
    Status status;
    if (!quiet) {
      status = ldr::fail(LDR_ERR_TIMEOUT, "a transfer still runs on it");
    } else {
      status = impl_->unlink_peer(shared_from_this(), deadline_ns, unlinked);
    }
    // A link that ended meanwhile, because the peer unlinked too or died, is what was asked for.
    if (!status.ok() && ready()) {
      transfers.reopen();
      return ldr::fail(status.code, "unlink of %s: %s; the link is kept", name().c_str(), status.text.c_str());
    }
  }
  impl_->go_down(shared_from_this(), unlinked, true);
  engine().loop.run([] {});  // it is torn down and its descriptors are closed when we return
  return Status::success();
}

// Asks the peer to drop its half, and waits for the answer.
Status Link::Impl::unlink_peer(const LinkPtr &self, int64_t deadline_ns, const Status &unlinked) {
  {
    std::lock_guard lock(mutex);
    ++own_unlinks;
  }
  // The peer gets a little less time than we have, so that its own word comes before our deadline.
  int64_t left_ns = std::max<int64_t>(0, deadline_ns - now_ns());
  Writer payload;
  payload.i64(deadline_ns == kNever ? -1 : left_ns - std::min(left_ns / 4, kAnswerReserveNs));
  auto answer = std::make_shared<std::promise<Status>>();
  std::future<Status> answered = answer->get_future();
  self->call(FrameType::kUnlink, payload, deadline_ns, [self, answer, unlinked](const Status &reply, Reader, Fd &) {
    // Now: the end of the peer's half comes next, and would be a break.
    if (reply.ok()) self->impl_->go_down(self, unlinked, true);
    answer->set_value(reply);
  });
  Status status = answered.get();
  Status data_failed;
  {
    std::lock_guard lock(mutex);
    if (--own_unlinks == 0) data_failed = std::exchange(data_failure, Status::success());
  }
  if (!data_failed.ok()) self->fail(data_failed);
  return status;
}

}  // namespace ldr
