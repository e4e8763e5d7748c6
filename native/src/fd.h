// A descriptor that closes itself. What tells a peer that we live (sockets, event loops) is made by make_private(), see fork.h.
#pragma once

#include <utility>

#include "fork.h"

namespace ldr {

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd &&other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd &operator=(Fd &&other) noexcept {
    if (this != &other) reset(std::exchange(other.fd_, -1));
    return *this;
  }
  ~Fd() { reset(); }
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset(int fd = -1) {
    if (fd_ >= 0) close_private(fd_);
    fd_ = fd;
  }

 private:
  int fd_ = -1;
};

}  // namespace ldr
