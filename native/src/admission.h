// The server half of the handshake: what listeners accept is admitted, or refused, here. Reactive, on the loop thread; nothing waits. Whoever has not yet proved to know
// the secret costs one descriptor, 4 KiB and five seconds, at most kMaxUnproven times.
#pragma once

#include <cstdint>
#include <memory>

#include "fd.h"

namespace ldr {

class Engine;

constexpr uint32_t kMaxUnproven = 256;
constexpr uint32_t kMaxConnections = 4096;  // proven ones too: without a secret everybody is

class Admission {
 public:
  explicit Admission(Engine &engine, const std::string &unix_path);
  ~Admission();
  // On the loop thread.
  void take(Fd socket, bool is_unix);
  void close();  // drops everything that is under way

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ldr
