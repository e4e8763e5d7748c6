// What stands between the C functions and the core: exceptions stop here, dead handles are refused, and a handle is not freed under a running call.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <exception>
#include <memory>
#include <new>

#include "engine.h"
#include "fork.h"
#include "status.h"

// Outlives its engine, so that a call that comes too late is answered.
struct ldr_engine {
  std::unique_ptr<ldr::Engine> engine;  // none after ldr_engine_shutdown
  uint64_t fork_generation = ldr::fork_generation();
  std::atomic<uint32_t> calls{0};  // running calls; the top bit: being destroyed
  bool forked() const { return fork_generation != ldr::fork_generation(); }
};

namespace ldr {

// First thing in a C function on a handle: null -> INVALID, inherited by fork -> FORKED, being destroyed -> CLOSED. Counts the call until guarded() returns.
Status enter(ldr_engine_t *handle, Engine **engine_p);
// What guarded() does at its end; nothing to do when enter() was not called or refused.
void leave() noexcept;
// Of a handle that this call has entered: a long call looks at it from time to time.
bool is_closing(const ldr_engine_t *handle);
// Refuses new calls. Then: waits until the running ones have left.
void close_handle(ldr_engine_t *handle);
void wait_for_calls(ldr_engine_t *handle);
// Both, and the engine is gone; the handle stays.
void end_engine(ldr_engine_t *handle);

// The body of every C function that returns a status: f returns Status; the text of an error becomes ldr_last_error().
template <class F> ldr_status_t guarded(F f) noexcept {
  ldr_status_t code;
  try {
    code = report(f());
  } catch (const std::bad_alloc &) {
    code = report_text(LDR_ERR_NO_MEMORY, "out of memory");
  } catch (const std::exception &error) {
    code = report_text(LDR_ERR_INTERNAL, error.what());
  } catch (...) {
    code = report_text(LDR_ERR_INTERNAL, "an unknown exception");
  }
  leave();
  return code;
}

inline Status missing(const char *name) { return fail(LDR_ERR_INVALID, "%s is NULL", name); }
inline Status not_null(const void *pointer, const char *name) { return pointer ? Status::success() : missing(name); }

// A parameter struct as this library knows it: what the caller's does not have reads as zero.
template <class T> Status read_params(const T *params, T *out) {
  if (!params) return fail(LDR_ERR_INVALID, "the parameter struct is NULL");
  if (params->struct_size < sizeof(uint32_t)) return fail(LDR_ERR_INVALID, "struct_size is %u", params->struct_size);
  *out = T{};
  memcpy(static_cast<void *>(out), params, std::min<size_t>(params->struct_size, sizeof(T)));
  return Status::success();
}

}  // namespace ldr
