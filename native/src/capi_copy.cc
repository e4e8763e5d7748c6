// The C functions for copies inside this process.
#include "barrier.h"
#include "local_copy.h"

using namespace ldr;

ldr_status_t ldr_cache_copy(ldr_engine_t *handle, const ldr_local_copy_params_t *params) {
  return guarded([&]() -> Status {
    Engine *engine;
    ldr_local_copy_params_t p;
    if (Status s = enter(handle, &engine); !s.ok()) return s;
    if (Status s = read_params(params, &p); !s.ok()) return s;
    return copy_caches(engine->caches, p, [&] {
      if (!is_closing(handle)) return Status::success();
      return fail(LDR_ERR_CLOSED, "the engine was destroyed during a local copy from cache %lld to cache %lld", (long long)p.src_cache_id, (long long)p.dst_cache_id);
    });
  });
}

ldr_status_t ldr_raw_copy(ldr_engine_t *handle, const ldr_raw_copy_params_t *params) {
  return guarded([&]() -> Status {
    Engine *engine;  // only kept: its pools may be what is copied
    ldr_raw_copy_params_t p;
    if (Status s = enter(handle, &engine); !s.ok()) return s;
    if (Status s = read_params(params, &p); !s.ok()) return s;
    return copy_raw(p);
  });
}
