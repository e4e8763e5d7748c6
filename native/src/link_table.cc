#include "link_table.h"

#include <sys/eventfd.h>

#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>

#include "clock.h"
#include "engine.h"
#include "handshake.h"

namespace ldr {
namespace {

constexpr int64_t kSimultaneousWaitNs = 10 * kSecond;  // for the peer's own attempt, when the caller sets no limit
constexpr size_t kMaxBroken = 1024;                     // kept to tell why they broke; then the oldest are forgotten
constexpr size_t kMaxSelfHalves = 8;                    // one that is used and others on their way out

Status closing_error() { return fail(LDR_ERR_CLOSED, "the engine is being destroyed"); }

}  // namespace

struct LinkTable::Impl {
  explicit Impl(Engine &engine) : engine(engine) {}

  Engine &engine;
  Fd wake{make_private([] { return eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); })};  // readable once closing
  mutable std::mutex mutex;
  std::condition_variable changed;
  std::map<uint64_t, LinkPtr> links;
  std::vector<LinkPtr> self_halves;       // server halves of links to ourselves
  std::map<uint64_t, uint64_t> attempts;  // client halves under way: cluster id -> incarnation
  uint64_t last_epoch = 0;
  bool closing = false;

  bool attempt_wins(uint64_t cluster_id, uint64_t incarnation) const {
    auto at = attempts.find(cluster_id);
    return at != attempts.end() && at->second == incarnation && engine.incarnation < incarnation;
  }

  LinkPtr find(uint64_t cluster_id) const {
    auto at = links.find(cluster_id);
    return at == links.end() ? nullptr : at->second;
  }

  // Files the link and returns the one that it replaces. Forgotten ones are collected too: they must not be destroyed under the mutex.
  LinkPtr file(const LinkPtr &link, std::vector<LinkPtr> *forgotten_p) {
    LinkPtr replaced = std::exchange(links[link->facts().cluster_id], link);
    forget_oldest(forgotten_p);
    return replaced;
  }

  void forget_oldest(std::vector<LinkPtr> *forgotten_p) {
    if (links.size() <= kMaxBroken) return;
    std::map<uint64_t, uint64_t> broken;  // epoch -> cluster id
    for (auto &[id, link] : links) {
      if (!link->ready()) broken[link->facts().epoch] = id;
    }
    for (; broken.size() > kMaxBroken; broken.erase(broken.begin())) {
      auto oldest = links.find(broken.begin()->second);
      forgotten_p->push_back(std::move(oldest->second));
      links.erase(oldest);
    }
  }

  // Our own attempt is under way, or it is somebody else who has our incarnation.
  Status check_self_half() const {
    auto own = attempts.find(engine.config.cluster_id);
    if (own == attempts.end() || own->second != engine.incarnation)
      return fail(LDR_ERR_AUTH, "the client claims to be this engine, which is not connecting to itself");
    if (self_halves.size() >= kMaxSelfHalves) return fail(LDR_ERR_BUSY, "%zu links of this engine to itself are still open", self_halves.size());
    return Status::success();
  }

  void bring_up(const LinkPtr &link, const LinkPtr &replaced) {
    if (replaced) replaced->fail(fail(LDR_ERR_LINK_BROKEN, "%s was replaced by a new link", replaced->name().c_str()));
    if (!link->facts().is_self || !link->facts().is_server_half) link->announce();
    link->start();
  }

  // Ends with its scope, by an exception too.
  class Attempt {
   public:
    Attempt(Impl &table, uint64_t cluster_id) : table_(table), cluster_id_(cluster_id) {}
    ~Attempt() { end(); }
    void end() {
      if (!std::exchange(open_, false)) return;
      std::lock_guard lock(table_.mutex);
      end_locked();
    }
    void end_locked() {
      open_ = false;
      table_.attempts.erase(cluster_id_);
      table_.changed.notify_all();
    }

   private:
    Impl &table_;
    const uint64_t cluster_id_;
    bool open_ = true;
  };

  Status begin_attempt(const Hello &server, int64_t deadline_ns);
  Status await_inbound(const Hello &server, int64_t deadline_ns, LinkPtr *link_p);
};

LinkTable::LinkTable(Engine &engine) : impl_(new Impl(engine)) {}

LinkTable::~LinkTable() = default;

LinkPtr LinkTable::find(uint64_t cluster_id) const {
  std::lock_guard lock(impl_->mutex);
  return impl_->find(cluster_id);
}

LinkPtr LinkTable::find_usable(uint64_t cluster_id) const {
  LinkPtr link = find(cluster_id);
  if (!link || !link->ready()) return nullptr;
  if (!link->peer_gone()) return link;
  link->fail(fail(LDR_ERR_LINK_BROKEN, "%s: process %d of the peer has ended", link->name().c_str(), int(link->facts().peer_pid)));
  return nullptr;
}

std::vector<LinkPtr> LinkTable::all() const {
  std::lock_guard lock(impl_->mutex);
  std::vector<LinkPtr> links;
  for (auto &[id, link] : impl_->links) links.push_back(link);
  return links;
}

uint32_t LinkTable::size() const {
  std::lock_guard lock(impl_->mutex);
  return uint32_t(std::count_if(impl_->links.begin(), impl_->links.end(), [](auto &entry) { return entry.second->ready(); }));
}

uint64_t LinkTable::last_epoch() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->last_epoch;
}

// One attempt per cluster at a time: a second caller waits for the first and then finds its link.
Status LinkTable::Impl::begin_attempt(const Hello &server, int64_t deadline_ns) {
  std::unique_lock lock(mutex);
  auto free = [&] { return closing || !attempts.count(server.cluster_id); };
  if (!wait_until(changed, lock, deadline_ns, free))
    return fail(LDR_ERR_TIMEOUT, "another thread is still linking to cluster %llu", (unsigned long long)server.cluster_id);
  if (closing) return closing_error();
  LinkPtr existing = find(server.cluster_id);
  if (existing && existing->ready() && !existing->peer_gone())
    return fail(LDR_ERR_ALREADY_LINKED, "there is a link to cluster %llu at %s already", (unsigned long long)server.cluster_id,
                existing->facts().address.c_str());
  attempts[server.cluster_id] = server.incarnation;
  return Status::success();
}

// The peer refused us because it is connecting to us itself.
Status LinkTable::Impl::await_inbound(const Hello &server, int64_t deadline_ns, LinkPtr *link_p) {
  std::unique_lock lock(mutex);
  LinkPtr link;
  auto up = [&] {
    link = find(server.cluster_id);
    return closing || (link && link->ready() && link->facts().incarnation == server.incarnation);
  };
  if (!wait_until(changed, lock, std::min(deadline_ns, now_ns() + kSimultaneousWaitNs), up))
    return fail(LDR_ERR_TIMEOUT, "cluster %llu was connecting to this engine at the same time, but its link did not come up",
                (unsigned long long)server.cluster_id);
  if (closing) return closing_error();
  *link_p = std::move(link);
  return Status::success();
}

Status LinkTable::open(const ldr_link_params_t &params, LinkPtr *link_p) {
  if (!params.ip || !*params.ip) return fail(LDR_ERR_INVALID, "no IP address to link to");
  int64_t deadline_ns = deadline_after(params.timeout_ns);
  ClientHandshake handshake(impl_->engine, params.ip, params.port, deadline_ns, impl_->wake.get());
  if (Status status = handshake.meet(); !status.ok()) return status;
  const Hello &server = handshake.server();
  if (Status status = impl_->begin_attempt(server, deadline_ns); !status.ok()) return status;

  Impl::Attempt attempt(*impl_, server.cluster_id);

  Acquaintance acquaintance;
  if (Status status = handshake.join(&acquaintance); !status.ok()) {
    attempt.end();
    return handshake.simultaneous() ? impl_->await_inbound(server, deadline_ns, link_p) : status;
  }
  LinkPtr link, replaced;
  std::vector<LinkPtr> forgotten;
  {
    std::lock_guard lock(impl_->mutex);
    attempt.end_locked();
    if (impl_->closing) return closing_error();
    link = acquaintance.make_link(impl_->engine, ++impl_->last_epoch);
    replaced = impl_->file(link, &forgotten);
  }
  impl_->bring_up(link, replaced);
  *link_p = std::move(link);
  return Status::success();
}

bool LinkTable::yields_to_own_attempt(const Hello &client) const {
  std::lock_guard lock(impl_->mutex);
  return impl_->attempt_wins(client.cluster_id, client.incarnation);
}

Status LinkTable::adopt(const LinkFacts &facts, uint64_t epoch_at_hello, const std::function<LinkPtr(uint64_t epoch)> &make) {
  LinkPtr link, replaced;
  std::vector<LinkPtr> forgotten;
  {
    std::lock_guard lock(impl_->mutex);
    if (impl_->closing) return closing_error();
    if (facts.is_self) {
      if (Status status = impl_->check_self_half(); !status.ok()) return status;
    } else {
      LinkPtr existing = impl_->find(facts.cluster_id);
      bool crossed = existing && existing->ready() && existing->facts().incarnation == facts.incarnation && existing->facts().epoch > epoch_at_hello;
      if (crossed || impl_->attempt_wins(facts.cluster_id, facts.incarnation))
        return fail(LDR_ERR_LINK_FAILED, "both engines connected to each other; the other attempt counts");
    }
    link = make(++impl_->last_epoch);
    if (facts.is_self) impl_->self_halves.push_back(link);
    else replaced = impl_->file(link, &forgotten);
    impl_->changed.notify_all();
  }
  impl_->bring_up(link, replaced);
  return Status::success();
}

Status LinkTable::close(uint64_t cluster_id, bool force, const char *ip, uint32_t port, int64_t timeout_ns) {
  int64_t deadline_ns = deadline_after(timeout_ns);
  LinkPtr link = find(cluster_id);
  if (!link) return Status::success();
  if (!force && ip && *ip && find_usable(cluster_id) == link) {
    Fd socket;
    Status status = connect_tcp(ip, port, deadline_ns, impl_->wake.get(), &socket);
    if (status.code == LDR_ERR_LINK_FAILED) status.code = LDR_ERR_UNLINK_FAILED;
    if (!status.ok())
      return fail(status.code, "unlink of %s: %s: %s; the link is kept", link->name().c_str(), address_text(ip, port).c_str(), status.text.c_str());
  }
  if (Status status = link->close(force, deadline_ns); !status.ok()) return status;
  remove(*link);
  return Status::success();
}

void LinkTable::remove(const Link &link) {
  LinkPtr removed;  // not destroyed under the lock
  std::lock_guard lock(impl_->mutex);
  auto at = impl_->links.find(link.facts().cluster_id);
  if (at != impl_->links.end() && at->second.get() == &link) {
    removed = std::move(at->second);
    impl_->links.erase(at);
  }
  auto self = std::find_if(impl_->self_halves.begin(), impl_->self_halves.end(), [&](const LinkPtr &half) { return half.get() == &link; });
  if (self == impl_->self_halves.end()) return;
  removed = std::move(*self);
  impl_->self_halves.erase(self);
}

int LinkTable::wake_fd() const { return impl_->wake.get(); }

void LinkTable::begin_close() {
  std::lock_guard lock(impl_->mutex);
  impl_->closing = true;
  eventfd_write(impl_->wake.get(), 1);
  impl_->changed.notify_all();
}

void LinkTable::close_all() {
  std::vector<LinkPtr> links;
  {
    std::lock_guard lock(impl_->mutex);
    links.swap(impl_->self_halves);
    for (auto &[id, link] : impl_->links) links.push_back(std::move(link));
    impl_->links.clear();
  }
  for (const LinkPtr &link : links) link->fail(fail(LDR_ERR_CLOSED, "%s: this engine is being destroyed", link->name().c_str()));
  impl_->engine.loop.run([] {});  // they are torn down
}

}  // namespace ldr
