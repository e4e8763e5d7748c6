// Sockets as the handshake and the links use them: non-blocking, close-on-exec, closed in a forked child. Frames are read without ever taking a byte of what follows them,
// so that a connection can change hands between two frames.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "fd.h"
#include "status.h"
#include "wire.h"

namespace ldr {

// How the kernel is to treat what goes out: IP_TOS (IPv6: the traffic class; up to 255) and SO_PRIORITY. 0 leaves each as it is.
struct SocketMarks {
  uint32_t ip_tos = 0, priority = 0;
};
// Best effort; no effect on a Unix socket.
void mark(int tcp_socket, const SocketMarks &marks);

Status check_address(const std::string &ip, uint32_t port);  // INVALID unless numeric IPv4 or IPv6, and a port
// Whether who listens on that address also hears those who connect to ip: the same address, or the wildcard of its family.
bool covers(const std::string &listening_ip, const std::string &ip);
// BIND when it cannot be had; *port_p is what the kernel chose for 0.
Status listen_tcp(const std::string &ip, uint32_t port, const SocketMarks &marks, Fd *socket_p, uint32_t *port_p);
Status listen_unix(const std::string &path, Fd *socket_p);
// Empty when nobody waits (any more).
Fd accept_connection(int listener);

// wake_fd: readable when the wait must end early (CLOSED); may be -1. LINK_FAILED when refused or unreachable, TIMEOUT.
Status connect_tcp(const std::string &ip, uint32_t port, const SocketMarks &marks, int64_t deadline_ns, int wake_fd, Fd *socket_p);
Status connect_unix(const std::string &path, Fd *socket_p);  // never waits: a full queue is refused
// Until fd has one of the poll events; TIMEOUT, or CLOSED by the wake_fd.
Status wait_for(int fd, short events, int64_t deadline_ns, int wake_fd);

struct PeerProcess {
  pid_t pid = 0;
  uid_t uid = 0;
};
Status peer_process(int unix_socket, PeerProcess *process_p);
// Of the process at the other end of a Unix socket, whose pid was told by peer_process(). Empty when the kernel has none.
Fd peer_pidfd(int unix_socket, pid_t pid);
// A peer whose host or network is gone is noticed by the kernel: within the budget while bytes wait for it, within about two when idle.
// No effect on a Unix socket; what the kernel refuses is only missed.
void limit_silence(int tcp_socket, int64_t budget_ns);
std::string peer_address(int tcp_socket);               // "127.0.0.1:41234"
std::string address_text(const std::string &ip, uint32_t port);  // "127.0.0.1:26000", "[::1]:26000"

// A whole frame, ready to be sent.
std::vector<uint8_t> encode_frame(FrameType type, uint64_t call_id, const Writer &payload, bool has_fd = false);
// As send(2) and sendmsg(2) with SCM_RIGHTS: bytes sent, or -1 with errno. Never raises SIGPIPE, never waits.
ssize_t send_some(int socket, const uint8_t *data, size_t size_bytes, int pass_fd);

struct Frame {
  FrameHeader header{};
  std::vector<uint8_t> payload;
  Fd passed;
  bool lost_descriptor() const { return header.num_fds && !passed; }  // it was sent, but no descriptor was free here
  FrameType type() const { return FrameType(header.type); }
  Reader reader() const { return Reader(payload.data(), payload.size()); }
};

// Takes one frame after the other from a non-blocking socket.
class FrameReader {
 public:
  explicit FrameReader(uint32_t max_payload_bytes) : max_payload_bytes_(max_payload_bytes) {}
  enum Result { kFrame, kWouldBlock, kEnd, kBad };
  // kEnd: the peer closed or reset the connection, or it failed; kBad: an oversized frame, or a descriptor too few or too many. why() says more.
  Result read(int socket, Frame *frame_p);
  const std::string &why() const { return why_; }

 private:
  Result fill(int socket, uint8_t *to, size_t size_bytes, size_t *have);
  Result bad(std::string why);
  uint32_t max_payload_bytes_;
  uint8_t header_bytes_[sizeof(FrameHeader)];
  size_t have_header_ = 0, have_payload_ = 0;
  Frame frame_;
  std::deque<Fd> passed_;
  bool lost_descriptor_ = false;
  std::string why_;
};

}  // namespace ldr
