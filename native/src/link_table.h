// The links of an engine by cluster id, with the rules of who replaces whom (spec api-datadist 4.2 - 4.4; design section 3 "Liveness").
// Of one-way engines these are the links that we opened. What peers opened to us is kept apart, by incarnation: two live peers may have one id, and only
// their links' ends matter here. Such a half is never found, and leaves when it is down.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "status.h"

namespace ldr {

class Engine;
class Link;
struct Hello;
struct LinkFacts;
using LinkPtr = std::shared_ptr<Link>;

class LinkTable {
 public:
  explicit LinkTable(Engine &engine);
  ~LinkTable();
  LinkPtr find(uint64_t cluster_id) const;         // also a broken one; nullptr when none
  LinkPtr find_usable(uint64_t cluster_id) const;  // nullptr unless READY
  std::vector<LinkPtr> all() const;                // ours, then the inbound ones
  uint32_t size() const;                           // READY ones of ours
  Status open(const ldr_link_params_t &params, LinkPtr *link_p);  // ldr_link_open: the client half of the handshake, on this thread
  Status close(uint64_t cluster_id, bool force, const char *ip, uint32_t port, int64_t timeout_ns);
  Status probe(uint64_t cluster_id, int64_t timeout_ns) const;  // ldr_link_probe
  // For the server half (admission.cc). Both engines connect to each other at once: the attempt of the smaller incarnation goes on, the other one is refused.
  bool yields_to_own_attempt(const Hello &client) const;
  uint64_t last_epoch() const;
  // A server half is complete: make(epoch) builds its link, which then is in the table, announced and started. What was there is replaced,
  // unless it is younger than this handshake (LINK_FAILED: they crossed). An inbound one replaces that of the same incarnation, and of an ended process with
  // the same cluster id. AUTH for one that claims to be this engine and is not.
  Status adopt(const LinkFacts &facts, uint64_t epoch_at_hello, const std::function<LinkPtr(uint64_t epoch)> &make);
  void remove(const Link &link);  // closed; no-op if another one took its place
  int wake_fd() const;            // readable once closing; -1: no descriptor was left for it
  void begin_close();             // new links are refused, blocked open() calls return CLOSED
  void close_all();               // engine destruction, after begin_close()

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ldr
