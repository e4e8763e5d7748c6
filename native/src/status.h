// Results inside the core: a code and one finished sentence.
#pragma once

#include <string>
#include <utility>

#include "ldr.h"

namespace ldr {

struct [[nodiscard]] Status {
  ldr_status_t code = LDR_OK;
  std::string text;

  bool ok() const { return code == LDR_OK; }
  static Status success() { return {}; }
};

// printf-style; the text names operation, peer, step, time.
Status fail(ldr_status_t code, const char *format, ...) __attribute__((format(printf, 2, 3)));
// Same with ": <strerror> (errno N)" appended; reads errno first.
Status fail_errno(ldr_status_t code, const char *format, ...) __attribute__((format(printf, 2, 3)));

// The calling thread's ldr_last_error().
void set_last_error(const std::string &text);
// Records the text and returns the code: the last line of every C function.
ldr_status_t report(const Status &status);
ldr_status_t report_text(ldr_status_t code, const char *text) noexcept;  // the same, allocates nothing

const char *path_name(uint32_t path);
std::string path_set_text(uint32_t path_set);  // "shm,cma"
constexpr uint32_t kAllPaths = 1u << LDR_PATH_SHM | 1u << LDR_PATH_CMA | 1u << LDR_PATH_UNIX | 1u << LDR_PATH_TCP;
Status parse_path_set(const char *text, uint32_t *path_set_p);  // as ldr_paths_parse

}  // namespace ldr
