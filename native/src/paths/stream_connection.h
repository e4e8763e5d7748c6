// Inside of a data connection: two state machines, one for what goes out and one for what comes in, over a non-blocking socket.
// Everything is under one mutex, which is held across single non-blocking system calls only: whoever abandons chunks or shuts down knows that no call touches
// their memory any more. At most one thread at a time, the driver, moves the connection on; it never waits for long.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "../fd.h"
#include "../link.h"
#include "stream.h"
#include "stream_frames.h"
#include "stream_job.h"

namespace ldr {

constexpr uint32_t kWindow = 4;      // chunks of one job that are asked for and not yet answered
constexpr uint32_t kMaxChunks = 32;  // of all jobs, with those that were stopped and whose answers are still owed; a peer bears twice as many

// A chunk that we asked the peer for.
struct StreamChunk {
  std::shared_ptr<StreamJob> job;  // nullptr: abandoned, its bytes are dropped
  Scatter local;                   // where a read goes; a write's memory is in its frame
  uint64_t size_bytes = 0;
  bool is_write = false;
  Status failure;                  // of our own memory
};

// A frame on its way out: head, then body, and for kReadData the status that is true after the last byte was taken.
struct OutgoingFrame {
  FrameType type;
  uint64_t chunk_id;
  std::vector<uint8_t> head;
  size_t head_sent = 0;
  Scatter body;
  ChunkRequest served;  // kReadData
  ldr_status_t status = LDR_OK;
  bool has_status = false;  // head is the trailer now

  bool started() const { return head_sent > 0 || has_status; }
  bool is_request() const { return type == FrameType::kRead || type == FrameType::kWrite; }
};

// What one step caused and what must be done without the mutex: make it before the mutex is taken, so that an exception settles too.
struct StepResult {
  ~StepResult() { settle(); }
  void settle() noexcept {
    for (auto &entry : settled) entry.job->settle(entry.status, entry.bytes);
    settled.clear();
  }
  bool moved = false;
  Status broken;  // the connection cannot go on
  struct Settled {
    std::shared_ptr<StreamJob> job;
    Status status;
    uint64_t bytes;
  };
  std::vector<Settled> settled;
};

struct StreamConnection::Impl {
  Impl(Engine &engine_in, Fd socket_in, uint32_t path_in) : engine(engine_in), path(path_in), socket(std::move(socket_in)) {}

  // Takes chunks of the job, as many as the window allows, and sees to it that somebody moves them: this thread, or a copy thread.
  void attach(const std::shared_ptr<StreamJob> &job, bool drive_here);
  void drive(bool is_caller);  // as the driver: a copy thread, or the caller of attach()
  void drive_on(bool is_caller);
  void hand_over();            // the driver's part, to a copy thread
  void on_ready();             // the loop thread
  void leave_without_memory();
  void break_off(const Status &why);
  void await_answer(std::weak_ptr<StreamJob> job, uint64_t moved_before, int64_t give_up_ns);

  Engine &engine;
  const uint32_t path;
  std::weak_ptr<StreamConnection> self;
  std::weak_ptr<Link> link;

  std::mutex mutex;  // all below
  Fd socket;
  bool is_watched = false;
  bool is_closed = false;
  bool has_driver = false;
  Status why_closed;

  std::unordered_map<uint64_t, StreamChunk> chunks;
  std::deque<std::shared_ptr<StreamJob>> parked;  // each held, until there is room for its chunks
  uint64_t num_moved = 0;                         // system calls that moved something
  uint64_t next_chunk_id = 1;
  std::deque<OutgoingFrame> outgoing;
  uint32_t num_answers_queued = 0;

  enum class Stage { kHeader, kPayload, kBody, kStatus };
  Stage stage = Stage::kHeader;
  FrameHeader header{};
  size_t got = 0;  // of the header, payload or status
  std::vector<uint8_t> payload;
  Scatter incoming;
  ChunkRequest write_request;  // kWrite
  ldr_status_t write_status = LDR_OK;
  int32_t read_status = LDR_OK;
  std::vector<uint8_t> scratch;

  // stream_send.cc
  void send_step(StepResult &result);
  bool prepare_body(OutgoingFrame &frame, StepResult &result);
  void give_up_write(OutgoingFrame &frame, StepResult &result);
  void on_send_fault(OutgoingFrame &frame, StepResult &result);
  bool local_is_gone(StreamChunk &chunk);  // under the guard; notes the failure
  bool next_part(OutgoingFrame &frame);
  void queue_chunks(const std::shared_ptr<StreamJob> &job, uint32_t count, StepResult &result);
  bool has_room() const { return chunks.size() + kWindow <= kMaxChunks; }
  void admit_parked(StepResult &result);
  bool is_unsent(uint64_t chunk_id) const;  // a request of ours that the peer cannot have seen to its end
  void queue_answer(FrameType type, uint64_t chunk_id, ldr_status_t status, const ChunkRequest *served, Scatter body);

  // stream_receive.cc
  void receive_step(StepResult &result);
  bool receive_into(void *target, size_t size, StepResult &result);
  void receive_body(StepResult &result);
  Status on_header();
  Status on_payload(StepResult &result);
  Status on_chunk_end(ldr_status_t status, StepResult &result);
  void on_write_end();
  void drop_incoming();
  void next_frame();
  Status malformed(const char *what) const;

  void settle(StreamChunk &chunk, const Status &status, StepResult &result);
  void note_moved(StepResult &result) {
    result.moved = true;
    ++num_moved;
  }
  bool expects_more() const { return !chunks.empty() || !outgoing.empty() || stage != Stage::kHeader || got > 0; }
  void arm();
  void close_socket();
  std::string peer_name() const;
};

}  // namespace ldr
