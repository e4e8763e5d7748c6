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
  std::map<uint64_t, LinkPtr> inbound;    // one-way engines: by the peer's incarnation
  std::vector<LinkPtr> self_halves;       // server halves of links to ourselves
  std::map<uint64_t, uint64_t> attempts;  // client halves under way: cluster id to file under -> incarnation
  uint64_t last_epoch = 0;
  bool closing = false;

  // Never of one-way engines: what both open at once are two links.
  bool attempt_wins(uint64_t cluster_id, uint64_t incarnation) const {
    if (engine.config.one_way) return false;
    auto at = attempts.find(cluster_id);
    return at != attempts.end() && at->second == incarnation && engine.incarnation < incarnation;
  }

  LinkPtr find(uint64_t cluster_id) const {
    auto at = links.find(cluster_id);
    return at == links.end() ? nullptr : at->second;
  }

  // One-way engines may look for a peer under several ids.
  bool attempted(uint64_t cluster_id, uint64_t incarnation) const {
    auto to_peer = [incarnation](const auto &attempt) { return attempt.second == incarnation; };
    return attempts.count(cluster_id) || (engine.config.one_way && std::any_of(attempts.begin(), attempts.end(), to_peer));
  }

  // What stands in the way of a new link: a usable one with that id or, of a one-way engine, to that peer.
  LinkPtr find_rival(uint64_t cluster_id, uint64_t incarnation) const {
    auto usable = [](const LinkPtr &link) { return link && link->ready() && !link->peer_gone(); };
    if (LinkPtr link = find(cluster_id); usable(link)) return link;
    if (!engine.config.one_way) return nullptr;
    for (auto &[id, link] : links) {
      if (link->facts().incarnation == incarnation && usable(link)) return link;
    }
    return nullptr;
  }

  std::vector<LinkPtr> file_inbound(const LinkPtr &link) {
    const LinkFacts &facts = link->facts();
    std::vector<LinkPtr> replaced;
    for (auto at = inbound.begin(); at != inbound.end();) {
      const LinkPtr &old = at->second;
      bool ends = at->first == facts.incarnation || (old->facts().cluster_id == facts.cluster_id && old->peer_gone());
      if (ends) replaced.push_back(old);
      at = ends ? inbound.erase(at) : std::next(at);
    }
    inbound[facts.incarnation] = link;
    return replaced;
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

  void bring_up(const LinkPtr &link, const std::vector<LinkPtr> &replaced) {
    for (const LinkPtr &old : replaced) {
      if (old) old->fail(fail(LDR_ERR_LINK_BROKEN, "%s was replaced by a new link", old->name().c_str()));
    }
    const LinkFacts &facts = link->facts();
    try {
      if (!facts.is_inbound && !(facts.is_self && facts.is_server_half)) link->announce();
      link->start();
    } catch (const std::bad_alloc &) {  // it is filed, and nobody would serve it
      link->fail({LDR_ERR_LINK_BROKEN, "out of memory"});
      throw;
    }
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

  Status begin_attempt(uint64_t cluster_id, uint64_t incarnation, int64_t deadline_ns);
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
  for (auto &[incarnation, link] : impl_->inbound) links.push_back(link);
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
Status LinkTable::Impl::begin_attempt(uint64_t cluster_id, uint64_t incarnation, int64_t deadline_ns) {
  std::unique_lock lock(mutex);
  auto free = [&] { return closing || !attempted(cluster_id, incarnation); };
  if (!wait_until(changed, lock, deadline_ns, free))
    return fail(LDR_ERR_TIMEOUT, "another thread is still linking to cluster %llu", (unsigned long long)cluster_id);
  if (closing) return closing_error();
  if (LinkPtr rival = find_rival(cluster_id, incarnation)) {
    const LinkFacts &facts = rival->facts();
    if (facts.cluster_id == cluster_id)
      return fail(LDR_ERR_ALREADY_LINKED, "there is a link to cluster %llu at %s already", (unsigned long long)cluster_id, facts.address.c_str());
    return fail(LDR_ERR_ALREADY_LINKED, "that peer is linked already, as cluster %llu at %s; unlink it to link it as cluster %llu",
                (unsigned long long)facts.cluster_id, facts.address.c_str(), (unsigned long long)cluster_id);
  }
  attempts[cluster_id] = incarnation;
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
  const bool one_way = impl_->engine.config.one_way, names_peer = params.flags & LDR_LINK_AS;
  if (!params.ip || !*params.ip) return fail(LDR_ERR_INVALID, "no IP address to link to");
  if (params.flags & ~uint32_t(LDR_LINK_AS)) return fail(LDR_ERR_INVALID, "link flags %#x are unknown", params.flags);
  if (names_peer && !one_way) return fail(LDR_ERR_INVALID, "only a one-way engine names its peers itself (LDR_LINK_AS)");
  int64_t deadline_ns = deadline_after(params.timeout_ns);
  ClientHandshake handshake(impl_->engine, params.ip, params.port, deadline_ns, impl_->wake.get());
  if (Status status = handshake.meet(); !status.ok()) return status;
  const Hello &server = handshake.server();
  if (one_way && server.incarnation == impl_->engine.incarnation)
    return fail(LDR_ERR_INVALID, "%s is this engine, and a one-way link to oneself is of no use", address_text(params.ip, params.port).c_str());
  const uint64_t cluster_id = names_peer ? params.cluster_id : server.cluster_id;
  if (Status status = impl_->begin_attempt(cluster_id, server.incarnation, deadline_ns); !status.ok()) return status;
  Impl::Attempt attempt(*impl_, cluster_id);

  Acquaintance acquaintance;
  if (Status status = handshake.join(&acquaintance); !status.ok()) {
    attempt.end();
    return handshake.simultaneous() && !one_way ? impl_->await_inbound(server, deadline_ns, link_p) : status;
  }
  acquaintance.facts.cluster_id = cluster_id;
  LinkPtr link, replaced;
  std::vector<LinkPtr> forgotten;
  {
    std::lock_guard lock(impl_->mutex);
    attempt.end_locked();
    if (impl_->closing) return closing_error();
    link = acquaintance.make_link(impl_->engine, ++impl_->last_epoch);
    replaced = impl_->file(link, &forgotten);
  }
  impl_->bring_up(link, {replaced});
  *link_p = std::move(link);
  return Status::success();
}

bool LinkTable::yields_to_own_attempt(const Hello &client) const {
  std::lock_guard lock(impl_->mutex);
  return impl_->attempt_wins(client.cluster_id, client.incarnation);
}

Status LinkTable::adopt(const LinkFacts &facts, uint64_t epoch_at_hello, const std::function<LinkPtr(uint64_t epoch)> &make) {
  LinkPtr link;
  std::vector<LinkPtr> replaced, forgotten;
  {
    std::lock_guard lock(impl_->mutex);
    if (impl_->closing) return closing_error();
    if (facts.is_self) {
      if (Status status = impl_->check_self_half(); !status.ok()) return status;
    } else if (!facts.is_inbound) {
      LinkPtr existing = impl_->find(facts.cluster_id);
      bool crossed = existing && existing->ready() && existing->facts().incarnation == facts.incarnation && existing->facts().epoch > epoch_at_hello;
      if (crossed || impl_->attempt_wins(facts.cluster_id, facts.incarnation))
        return fail(LDR_ERR_LINK_FAILED, "both engines connected to each other; the other attempt counts");
    }
    link = make(++impl_->last_epoch);
    if (facts.is_self) impl_->self_halves.push_back(link);
    else if (facts.is_inbound) replaced = impl_->file_inbound(link);
    else replaced.push_back(impl_->file(link, &forgotten));
    impl_->changed.notify_all();
  }
  impl_->bring_up(link, replaced);
  return Status::success();
}

Status LinkTable::close(uint64_t cluster_id, bool force, const char *ip, uint32_t port, int64_t timeout_ns) {
  int64_t deadline_ns = deadline_after(timeout_ns);
  LinkPtr link = find(cluster_id);
  if (!link) return Status::success();
  force = force || impl_->engine.config.one_way;  // spec api-datadist 5: only the own connection is closed
  if (!force && ip && *ip && find_usable(cluster_id) == link) {
    Fd socket;
    Status status = connect_tcp(ip, port, impl_->engine.config.marks, deadline_ns, impl_->wake.get(), &socket);
    if (status.code == LDR_ERR_LINK_FAILED) status.code = LDR_ERR_UNLINK_FAILED;
    if (!status.ok())
      return fail(status.code, "unlink of %s: %s: %s; the link is kept", link->name().c_str(), address_text(ip, port).c_str(), status.text.c_str());
  }
  if (Status status = link->close(force, deadline_ns); !status.ok()) return status;
  remove(*link);
  return Status::success();
}

Status LinkTable::probe(uint64_t cluster_id, int64_t timeout_ns) const {
  if (LinkPtr link = find_usable(cluster_id)) return link->probe(deadline_after(timeout_ns));
  LinkPtr broken = find(cluster_id);
  if (!broken) return fail(LDR_ERR_NOT_LINKED, "probe: no link to cluster %llu", (unsigned long long)cluster_id);
  return fail(LDR_ERR_NOT_LINKED, "probe: the link to %s is down: %s; link again", broken->name().c_str(), broken->why_down().text.c_str());
}

void LinkTable::remove(const Link &link) {
  LinkPtr removed;  // not destroyed under the lock
  std::lock_guard lock(impl_->mutex);
  auto take = [&](std::map<uint64_t, LinkPtr> &from, uint64_t key) {
    auto at = from.find(key);
    if (at == from.end() || at->second.get() != &link) return;
    removed = std::move(at->second);
    from.erase(at);
  };
  take(impl_->links, link.facts().cluster_id);
  take(impl_->inbound, link.facts().incarnation);
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
    for (auto *filed : {&impl_->links, &impl_->inbound}) {
      for (auto &[key, link] : *filed) links.push_back(std::move(link));
      filed->clear();
    }
  }
  for (const LinkPtr &link : links) link->fail(fail(LDR_ERR_CLOSED, "%s: this engine is being destroyed", link->name().c_str()));
  impl_->engine.loop.run([] {});  // they are torn down
}

}  // namespace ldr
