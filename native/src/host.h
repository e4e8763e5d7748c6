// Which host this is, as far as its processes can tell: two engines with the same answers can share memory and reach each other's Unix sockets.
#pragma once

#include <cstdint>
#include <string>

namespace ldr {

struct Host {
  std::string boot_id;  // "": not known, then it is like no other
  uint64_t network_namespace = 0, pid_namespace = 0;

  static Host here();
  bool is_same(const Host &other) const;
};

}  // namespace ldr
