// Inside of a link. Its state is under one mutex, what belongs to the peer's process under another, and what only the loop thread touches needs none.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "clock.h"
#include "engine.h"
#include "link.h"
#include "socket.h"

namespace ldr {

struct Link::Impl {
  Impl(Engine &engine, LinkFacts facts) : engine(engine), facts(std::move(facts)) {}

  struct Outgoing {
    std::vector<uint8_t> bytes;
    size_t sent = 0;
    Fd passed;
    size_t cost() const { return bytes.size() + sizeof(Outgoing); }
  };

  struct Call {
    Link::OnReply on_reply;
    TimerId timer = 0;
  };

  // While somebody waits for a same-host peer, its page is looked at that often.
  static constexpr int64_t kDeathLookNs = 50 * kMillisecond;

  Engine &engine;
  const LinkFacts facts;
  std::atomic<bool> ready{true};
  std::atomic<int64_t> last_heard_ns{now_ns()};

  mutable std::mutex peer_mutex;  // the three below
  Fd pidfd;
  std::shared_ptr<PeerPage> page;
  std::vector<std::shared_ptr<StreamConnection>> data;

  mutable std::mutex mutex;  // from here to the loop thread's
  Fd control;
  Status why;
  bool announced = false, waits_for_room = false;
  std::deque<Outgoing> queue;
  size_t queued_bytes = 0, queued_fds = 0;
  std::unordered_map<uint64_t, Call> calls;
  uint64_t last_call = 0;
  TimerId tick_timer = 0;
  int64_t next_tick_ns = kNever;
  uint32_t own_unlinks = 0;  // waiting for their answers
  Status data_failure;       // meanwhile

  // Loop thread only.
  FrameReader reader{kMaxFrameBytes};
  int64_t next_heartbeat_ns = 0;
  std::map<uint64_t, TimerId> unlinks;  // the peer's, by call id; a timer of 0 when it sets no limit
  bool awaits_idle = false;             // on their behalf

  std::string name() const { return "cluster " + std::to_string(facts.cluster_id) + " (" + facts.address + ")"; }
  Status broken(const std::string &what) const { return {LDR_ERR_LINK_BROKEN, name() + ": " + what}; }
  // One-way engines: a link that we opened serves nothing, and grants are open over the peer's only.
  bool serves_peer() const { return !engine.config.one_way || facts.is_inbound; }
  Status process_ended() const { return broken("process " + std::to_string(facts.peer_pid) + " of the peer has ended"); }

  // link.cc
  void start_on_loop(const LinkPtr &self);
  void schedule_tick(const LinkPtr &self, int64_t when_ns);
  void tick(const LinkPtr &self);
  bool go_down(const LinkPtr &self, const Status &why, bool unlinked);
  void tear_down(const LinkPtr &self);
  void drop_when_quiet(const LinkPtr &self);

  // link_frames.cc
  Status flush();  // under the mutex
  bool take_call(uint64_t id, Call *call_p);
  void on_control(Link &link, uint32_t events);
  void read_frames(Link &link);
  void dispatch(Link &link, Frame &frame);
  void on_answer(Link &link, Frame &frame);

  // link_unlink.cc
  void begin_unlink(const LinkPtr &self, uint64_t call_id, int64_t deadline_ns);
  void try_unlink(const LinkPtr &self);
  void refuse_unlink(const LinkPtr &self, uint64_t call_id);
  Status unlink_peer(const LinkPtr &self, int64_t deadline_ns, const Status &unlinked);
};

}  // namespace ldr
