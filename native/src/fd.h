// A descriptor that closes itself.
#pragma once

#include <unistd.h>

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
  int release() { return std::exchange(fd_, -1); }
  void reset(int fd = -1) {
    if (fd_ >= 0) {
      forget_in_child(fd_);
      ::close(fd_);
    }
    fd_ = fd;
  }
  // For everything that tells a peer that we live: a forked child closes its copy at once.
  Fd &&private_to_process() && {
    close_in_child(fd_);
    return std::move(*this);
  }

 private:
  int fd_ = -1;
};

}  // namespace ldr
