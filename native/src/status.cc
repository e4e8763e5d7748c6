#include "status.h"

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace ldr {
namespace {

constexpr size_t kMaxTextBytes = 4096;
thread_local char last_error[kMaxTextBytes];  // fixed, so that reporting "out of memory" needs none

std::string formatted(const char *format, va_list arguments) {
  char text[kMaxTextBytes];
  int length = vsnprintf(text, sizeof(text), format, arguments);
  if (length < 0) return format;
  return std::string(text, std::min(size_t(length), sizeof(text) - 1));
}

const char *const kPathNames[LDR_NUM_PATHS] = {"none", "shm", "cma", "unix", "tcp"};

}  // namespace

Status fail(ldr_status_t code, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  Status status{code, formatted(format, arguments)};
  va_end(arguments);
  return status;
}

Status fail_errno(ldr_status_t code, const char *format, ...) {
  int error = errno;
  va_list arguments;
  va_start(arguments, format);
  Status status{code, formatted(format, arguments)};
  va_end(arguments);
  char buffer[128];
  status.text += std::string(": ") + strerror_r(error, buffer, sizeof(buffer)) + " (errno " + std::to_string(error) + ")";
  return status;
}

void set_last_error(const std::string &text) { report_text(LDR_OK, text.c_str()); }

ldr_status_t report_text(ldr_status_t code, const char *text) noexcept {
  snprintf(last_error, sizeof(last_error), "%s", text);
  return code;
}

ldr_status_t report(const Status &status) { return report_text(status.code, status.text.c_str()); }

const char *path_name(uint32_t path) { return path < LDR_NUM_PATHS ? kPathNames[path] : "?"; }

std::string path_set_text(uint32_t path_set) {
  std::string text;
  for (uint32_t path = LDR_PATH_SHM; path < LDR_NUM_PATHS; ++path) {
    if (!(path_set & (1u << path))) continue;
    if (!text.empty()) text += ',';
    text += kPathNames[path];
  }
  return text.empty() ? "none" : text;
}

Status parse_path_set(const char *text, uint32_t *path_set_p) {
  if (!text || !*text) {
    *path_set_p = kAllPaths;
    return Status::success();
  }
  uint32_t path_set = 0;
  for (std::string rest = text; !rest.empty();) {
    size_t comma = rest.find(',');
    std::string name = rest.substr(0, comma);
    rest = comma == std::string::npos ? "" : rest.substr(comma + 1);
    size_t first = name.find_first_not_of(" \t"), last = name.find_last_not_of(" \t");
    name = first == std::string::npos ? "" : name.substr(first, last - first + 1);
    uint32_t path = LDR_PATH_SHM;
    while (path < LDR_NUM_PATHS && name != kPathNames[path]) ++path;
    if (path == LDR_NUM_PATHS)
      return fail(LDR_ERR_INVALID, "\"%s\" in \"%s\" is no data path; known are shm, cma, unix, tcp", name.c_str(), text);
    path_set |= 1u << path;
  }
  *path_set_p = path_set;
  return Status::success();
}

}  // namespace ldr

using namespace ldr;

const char *ldr_status_name(ldr_status_t status) {
#define NAME(code) \
  case code: return #code;
  switch (status) {
    NAME(LDR_OK)
    NAME(LDR_ERR_INVALID)
    NAME(LDR_ERR_NOT_FOUND)
    NAME(LDR_ERR_NO_CACHE)
    NAME(LDR_ERR_TIMEOUT)
    NAME(LDR_ERR_CANCELLED)
    NAME(LDR_ERR_NO_PATH)
    NAME(LDR_ERR_UNSUPPORTED)
    NAME(LDR_ERR_BUSY)
    NAME(LDR_ERR_KEY_BOUND)
    NAME(LDR_ERR_STALE)
    NAME(LDR_ERR_CONSUMED)
    NAME(LDR_ERR_EXPIRED)
    NAME(LDR_ERR_UNKNOWN_GRANT)
    NAME(LDR_ERR_REVOKED)
    NAME(LDR_ERR_NOT_LINKED)
    NAME(LDR_ERR_ALREADY_LINKED)
    NAME(LDR_ERR_LINK_FAILED)
    NAME(LDR_ERR_LINK_BROKEN)
    NAME(LDR_ERR_MODE_MISMATCH)
    NAME(LDR_ERR_AUTH)
    NAME(LDR_ERR_VERSION)
    NAME(LDR_ERR_LAYOUT)
    NAME(LDR_ERR_UNLINK_FAILED)
    NAME(LDR_ERR_HANDSHAKE)
    NAME(LDR_ERR_POOL_FULL)
    NAME(LDR_ERR_INTERNAL)
    NAME(LDR_ERR_NO_MEMORY)
    NAME(LDR_ERR_FORKED)
    NAME(LDR_ERR_CLOSED)
    NAME(LDR_ERR_BIND)
    NAME(LDR_ERR_SYSTEM)
    default: return "LDR_ERR_?";
  }
#undef NAME
}

const char *ldr_last_error(void) { return last_error; }
