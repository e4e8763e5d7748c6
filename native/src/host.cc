#include "host.h"

#include <sys/stat.h>

#include <cstdio>

namespace ldr {
namespace {

std::string read_boot_id() {
  char text[64] = "";
  if (FILE *file = fopen("/proc/sys/kernel/random/boot_id", "re")) {
    if (!fgets(text, sizeof(text), file)) text[0] = 0;
    fclose(file);
  }
  std::string id = text;
  return id.substr(0, id.find('\n'));
}

uint64_t namespace_inode(const char *path) {
  struct stat info;
  return stat(path, &info) == 0 ? info.st_ino : 0;
}

}  // namespace

Host Host::here() { return {read_boot_id(), namespace_inode("/proc/self/ns/net"), namespace_inode("/proc/self/ns/pid")}; }

bool Host::is_same(const Host &other) const {
  return !boot_id.empty() && boot_id == other.boot_id && network_namespace && network_namespace == other.network_namespace && pid_namespace &&
         pid_namespace == other.pid_namespace;
}

}  // namespace ldr
