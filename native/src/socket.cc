#include "socket.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>

#include "clock.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

namespace ldr {
namespace {

struct Address {
  sockaddr_storage storage{};
  socklen_t size = 0;
  sockaddr *get() { return reinterpret_cast<sockaddr *>(&storage); }
};

bool parse_ip(const std::string &ip, uint32_t port, Address *address) {
  auto *v4 = reinterpret_cast<sockaddr_in *>(&address->storage);
  auto *v6 = reinterpret_cast<sockaddr_in6 *>(&address->storage);
  if (port > 65535) return false;
  if (inet_pton(AF_INET, ip.c_str(), &v4->sin_addr) == 1) {
    v4->sin_family = AF_INET;
    v4->sin_port = htons(uint16_t(port));
    address->size = sizeof(sockaddr_in);
    return true;
  }
  if (inet_pton(AF_INET6, ip.c_str(), &v6->sin6_addr) == 1) {
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons(uint16_t(port));
    address->size = sizeof(sockaddr_in6);
    return true;
  }
  return false;
}

uint32_t port_of(const Address &address) {
  auto *v4 = reinterpret_cast<const sockaddr_in *>(&address.storage);
  auto *v6 = reinterpret_cast<const sockaddr_in6 *>(&address.storage);
  return ntohs(address.storage.ss_family == AF_INET6 ? v6->sin6_port : v4->sin_port);
}

Fd new_socket(int family) {
  return Fd(make_private([family] { return socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0); }));
}

void send_without_delay(int socket) {
  int on = 1;
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

Status unix_address(const std::string &path, sockaddr_un *address) {
  address->sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address->sun_path)) return fail(LDR_ERR_INVALID, "\"%s\" is too long for a Unix socket", path.c_str());
  memcpy(address->sun_path, path.c_str(), path.size() + 1);
  return Status::success();
}

int poll_timeout_ms(int64_t deadline_ns) {
  if (deadline_ns == kNever) return -1;
  int64_t left_ns = deadline_ns - now_ns();
  return left_ns <= 0 ? 0 : int(std::min<int64_t>((left_ns + kMillisecond - 1) / kMillisecond, 60'000));
}

}  // namespace

// The priority comes second: the kernel derives one from IP_TOS.
void mark(int tcp_socket, const SocketMarks &marks) {
  auto set = [tcp_socket](int level, int option, uint32_t value) {
    const int number = int(value);
    setsockopt(tcp_socket, level, option, &number, sizeof(number));
  };
  sockaddr_storage own{};
  socklen_t size = sizeof(own);
  if (getsockname(tcp_socket, reinterpret_cast<sockaddr *>(&own), &size) < 0 || own.ss_family == AF_UNIX) return;
  if (marks.ip_tos && marks.ip_tos <= 255) {
    if (own.ss_family == AF_INET6) set(IPPROTO_IPV6, IPV6_TCLASS, marks.ip_tos);
    else set(IPPROTO_IP, IP_TOS, marks.ip_tos);
  }
  if (marks.priority) set(SOL_SOCKET, SO_PRIORITY, marks.priority);
}

bool covers(const std::string &listening_ip, const std::string &ip) {
  Address listening, asked;
  if (!parse_ip(listening_ip, 0, &listening) || !parse_ip(ip, 0, &asked) || listening.storage.ss_family != asked.storage.ss_family) return false;
  Address wildcard;
  parse_ip(listening.storage.ss_family == AF_INET6 ? "::" : "0.0.0.0", 0, &wildcard);
  auto same = [&listening](const Address &other) { return memcmp(&listening.storage, &other.storage, listening.size) == 0; };
  return same(asked) || same(wildcard);
}

Status check_address(const std::string &ip, uint32_t port) {
  Address address;
  if (parse_ip(ip, port, &address)) return Status::success();
  return fail(LDR_ERR_INVALID, "\"%s\" port %u is not a numeric IP address and a port", ip.c_str(), port);
}

Status listen_tcp(const std::string &ip, uint32_t port, const SocketMarks &marks, Fd *socket_p, uint32_t *port_p) {
  Address address;
  if (!parse_ip(ip, port, &address)) return check_address(ip, port);
  Fd socket = new_socket(address.storage.ss_family);
  if (!socket) return fail_errno(LDR_ERR_BIND, "socket for listening on %s", address_text(ip, port).c_str());
  int on = 1;
  setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  mark(socket.get(), marks);
  if (bind(socket.get(), address.get(), address.size) < 0 || listen(socket.get(), SOMAXCONN) < 0)
    return fail_errno(LDR_ERR_BIND, "cannot listen on %s", address_text(ip, port).c_str());
  if (getsockname(socket.get(), address.get(), &address.size) < 0) return fail_errno(LDR_ERR_BIND, "getsockname of %s", address_text(ip, port).c_str());
  *port_p = port_of(address);
  *socket_p = std::move(socket);
  return Status::success();
}

Status listen_unix(const std::string &path, Fd *socket_p) {
  sockaddr_un address{};
  if (Status status = unix_address(path, &address); !status.ok()) return status;
  Fd socket = new_socket(AF_UNIX);
  if (!socket || bind(socket.get(), reinterpret_cast<sockaddr *>(&address), sizeof(address)) < 0 || listen(socket.get(), SOMAXCONN) < 0)
    return fail_errno(LDR_ERR_BIND, "cannot listen on the Unix socket %s", path.c_str());
  *socket_p = std::move(socket);
  return Status::success();
}

Fd accept_connection(int listener) {
  int fd;
  do fd = make_private([listener] { return accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK); });
  while (fd < 0 && (errno == EINTR || errno == ECONNABORTED));
  if (fd >= 0) send_without_delay(fd);  // has no meaning on a Unix socket
  return Fd(fd);
}

Status connect_tcp(const std::string &ip, uint32_t port, const SocketMarks &marks, int64_t deadline_ns, int wake_fd, Fd *socket_p) {
  Address address;
  if (!parse_ip(ip, port, &address)) return check_address(ip, port);
  if (port == 0) return fail(LDR_ERR_INVALID, "port 0 of %s cannot be connected to", ip.c_str());
  Fd socket = new_socket(address.storage.ss_family);
  if (!socket) return fail_errno(LDR_ERR_SYSTEM, "socket");
  mark(socket.get(), marks);
  if (connect(socket.get(), address.get(), address.size) < 0) {
    if (errno != EINPROGRESS && errno != EINTR) return fail_errno(LDR_ERR_LINK_FAILED, "cannot connect");
    if (Status status = wait_for(socket.get(), POLLOUT, deadline_ns, wake_fd); !status.ok()) return status;
    socklen_t size = sizeof(errno);
    int error = 0;
    if (getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &size) < 0) error = errno;
    errno = error;
    if (error) return fail_errno(LDR_ERR_LINK_FAILED, "cannot connect");
  }
  send_without_delay(socket.get());
  *socket_p = std::move(socket);
  return Status::success();
}

Status connect_unix(const std::string &path, Fd *socket_p) {
  sockaddr_un address{};
  if (Status status = unix_address(path, &address); !status.ok()) return status;
  Fd socket = new_socket(AF_UNIX);
  if (!socket) return fail_errno(LDR_ERR_SYSTEM, "socket");
  if (connect(socket.get(), reinterpret_cast<sockaddr *>(&address), sizeof(address)) < 0)
    return fail_errno(LDR_ERR_LINK_FAILED, "cannot connect to the Unix socket %s", path.c_str());
  *socket_p = std::move(socket);
  return Status::success();
}

Status wait_for(int fd, short events, int64_t deadline_ns, int wake_fd) {
  for (;;) {
    pollfd fds[2] = {{fd, events, 0}, {wake_fd, POLLIN, 0}};
    int timeout_ms = poll_timeout_ms(deadline_ns);
    int n = poll(fds, 2, timeout_ms);
    if (n < 0 && errno != EINTR) return fail_errno(LDR_ERR_SYSTEM, "poll");
    if (n > 0 && fds[1].revents) return fail(LDR_ERR_CLOSED, "the engine is being destroyed");
    if (n > 0 && fds[0].revents) return Status::success();
    if (n == 0 && deadline_ns != kNever && now_ns() >= deadline_ns) return fail(LDR_ERR_TIMEOUT, "no answer");
  }
}

Status peer_process(int unix_socket, PeerProcess *process_p) {
  ucred credentials{};
  socklen_t size = sizeof(credentials);
  if (getsockopt(unix_socket, SOL_SOCKET, SO_PEERCRED, &credentials, &size) < 0) return fail_errno(LDR_ERR_LINK_FAILED, "SO_PEERCRED");
  *process_p = {credentials.pid, credentials.uid};
  return Status::success();
}

Fd peer_pidfd(int unix_socket, pid_t pid) {
  return Fd(make_private([unix_socket, pid] {
    int fd = -1;
    socklen_t size = sizeof(fd);
    return getsockopt(unix_socket, SOL_SOCKET, SO_PEERPIDFD, &fd, &size) == 0 ? fd : int(syscall(SYS_pidfd_open, pid, 0));
  }));
}

void limit_silence(int tcp_socket, int64_t budget_ns) {
  auto set = [tcp_socket](int level, int option, int value) { setsockopt(tcp_socket, level, option, &value, sizeof(value)); };
  const int budget_s = int(std::clamp<int64_t>(budget_ns / kSecond, 1, 3600));
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, int(std::min<int64_t>(budget_ns / kMillisecond, INT_MAX)));
  set(IPPROTO_TCP, TCP_KEEPIDLE, budget_s);
  set(IPPROTO_TCP, TCP_KEEPINTVL, std::max(1, budget_s / 3));
  set(IPPROTO_TCP, TCP_KEEPCNT, 3);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
}

std::string peer_address(int tcp_socket) {
  Address address;
  address.size = sizeof(address.storage);
  char text[INET6_ADDRSTRLEN] = "";
  if (getpeername(tcp_socket, address.get(), &address.size) < 0) return "?";
  bool is_v6 = address.storage.ss_family == AF_INET6;
  const void *ip = is_v6 ? static_cast<const void *>(&reinterpret_cast<sockaddr_in6 *>(&address.storage)->sin6_addr)
                         : &reinterpret_cast<sockaddr_in *>(&address.storage)->sin_addr;
  inet_ntop(address.storage.ss_family, ip, text, sizeof(text));
  return address_text(text, port_of(address));
}

std::string address_text(const std::string &ip, uint32_t port) {
  bool is_v6 = ip.find(':') != std::string::npos;
  return (is_v6 ? "[" + ip + "]" : ip) + ":" + std::to_string(port);
}

std::vector<uint8_t> encode_frame(FrameType type, uint64_t call_id, const Writer &payload, bool has_fd) {
  FrameHeader header{uint32_t(payload.bytes().size()), uint16_t(type), uint16_t(has_fd ? 1 : 0), call_id};
  std::vector<uint8_t> bytes(sizeof(header) + payload.bytes().size());
  memcpy(bytes.data(), &header, sizeof(header));
  std::copy(payload.bytes().begin(), payload.bytes().end(), bytes.begin() + sizeof(header));
  return bytes;
}

ssize_t send_some(int socket, const uint8_t *data, size_t size_bytes, int pass_fd) {
  iovec piece{const_cast<uint8_t *>(data), size_bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  if (pass_fd >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr *rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(rights), &pass_fd, sizeof(int));
  }
  ssize_t n;
  do n = sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  while (n < 0 && errno == EINTR);
  return n;
}

FrameReader::Result FrameReader::bad(std::string why) {
  why_ = std::move(why);
  return kBad;
}

// One descriptor at most is taken per read; the kernel closes what does not fit and says so by MSG_CTRUNC.
FrameReader::Result FrameReader::fill(int socket, uint8_t *to, size_t size_bytes, size_t *have) {
  while (*have < size_bytes) {
    iovec piece{to + *have, size_bytes - *have};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
    msghdr message{};
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = CMSG_LEN(sizeof(int));  // not the padded size: a second descriptor would fit into that
    ssize_t n = recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return kWouldBlock;
    if (n <= 0) {
      why_ = n == 0 ? "the peer closed the connection" : std::string("the connection failed: ") + strerror(errno);
      return kEnd;
    }
    for (cmsghdr *c = CMSG_FIRSTHDR(&message); c; c = CMSG_NXTHDR(&message, c)) {
      if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
      int fd;
      memcpy(&fd, CMSG_DATA(c), sizeof(fd));
      passed_.emplace_back(fd);
    }
    bool cut = message.msg_flags & MSG_CTRUNC;
    if ((cut && !passed_.empty()) || passed_.size() > 1) return bad("more descriptors than announced");
    lost_descriptor_ = lost_descriptor_ || cut;  // there was room for one, and not even that came: this process has no descriptor left
    *have += size_t(n);
  }
  return kFrame;
}

FrameReader::Result FrameReader::read(int socket, Frame *frame_p) {
  if (have_header_ < sizeof(FrameHeader)) {
    if (Result result = fill(socket, header_bytes_, sizeof(FrameHeader), &have_header_); result != kFrame) return result;
    memcpy(&frame_.header, header_bytes_, sizeof(FrameHeader));
    if (frame_.header.payload_bytes > max_payload_bytes_)
      return bad("a frame of " + std::to_string(frame_.header.payload_bytes) + " bytes, at most " + std::to_string(max_payload_bytes_) + " are allowed");
    frame_.payload.resize(frame_.header.payload_bytes);
  }
  if (Result result = fill(socket, frame_.payload.data(), frame_.payload.size(), &have_payload_); result != kFrame) return result;
  if (passed_.size() + lost_descriptor_ != frame_.header.num_fds) return bad("another number of descriptors than announced");
  if (!passed_.empty()) {
    frame_.passed = std::move(passed_.front());
    passed_.pop_front();
  }
  have_header_ = have_payload_ = 0;
  lost_descriptor_ = false;
  *frame_p = std::move(frame_);
  frame_ = Frame{};
  return kFrame;
}

}  // namespace ldr
