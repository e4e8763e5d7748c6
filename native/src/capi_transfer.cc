// The C functions for transfers and grants.
#include <cstdio>

#include "barrier.h"
#include "clock.h"
#include "transfer.h"

namespace {

using ldr::Engine;
using ldr::enter;
using ldr::fail;
using ldr::guarded;
using ldr::not_null;
using ldr::read_params;
using ldr::Status;

Status no_operation(uint64_t op_id) { return fail(LDR_ERR_NOT_FOUND, "operation %llu is not in flight", (unsigned long long)op_id); }

}  // namespace

ldr_status_t ldr_transfer(ldr_engine_t *handle, const ldr_transfer_params_t *params, ldr_transfer_result_t *result_p) {
  return guarded([&]() -> Status {
    Engine *engine;
    ldr_transfer_params_t p;
    if (Status s = enter(handle, &engine); !s.ok()) return s;
    if (Status s = read_params(params, &p); !s.ok()) return s;
    ldr::OpPtr op;
    if (Status s = ldr::transfer_submit(*engine, p, true, 0, &op); !s.ok()) return s;
    Status status = engine->ops.wait(op);
    if (status.ok() && result_p) {
      *result_p = {};
      result_p->bytes = op->bytes_done.load(std::memory_order_relaxed);
      result_p->latency_ns = ldr::now_ns() - op->start_ns;
      result_p->path = op->path;
    }
    return status;
  });
}

ldr_status_t ldr_transfer_submit(ldr_engine_t *handle, const ldr_transfer_params_t *params, uint64_t user_tag, uint64_t *op_id_p) {
  return guarded([&]() -> Status {
    Engine *engine;
    ldr_transfer_params_t p;
    if (Status s = enter(handle, &engine); !s.ok()) return s;
    if (Status s = read_params(params, &p); !s.ok()) return s;
    if (Status s = not_null(op_id_p, "op_id_p"); !s.ok()) return s;
    ldr::OpPtr op;
    if (Status s = ldr::transfer_submit(*engine, p, false, user_tag, &op); !s.ok()) return s;
    *op_id_p = op->id;
    return Status::success();
  });
}

ldr_status_t ldr_op_cancel(ldr_engine_t *handle, uint64_t op_id) {
  return guarded([&]() -> Status {
    Engine *engine;
    if (Status s = enter(handle, &engine); !s.ok()) return s;
    ldr::OpPtr op = engine->ops.find(op_id);
    if (!op) return no_operation(op_id);
    op->stop(LDR_ERR_CANCELLED, "cancelled");
    return Status::success();
  });
}

ldr_status_t ldr_op_progress(ldr_engine_t *handle, uint64_t op_id, uint64_t *bytes_done_p, uint64_t *bytes_total_p) {
  return guarded([&]() -> Status {
    Engine *engine;
    if (Status s = enter(handle, &engine); !s.ok()) return s;
    if (!bytes_done_p || !bytes_total_p) return fail(LDR_ERR_INVALID, "bytes_done_p or bytes_total_p is NULL");
    ldr::OpPtr op = engine->ops.find(op_id);
    if (!op) return no_operation(op_id);
    *bytes_done_p = op->bytes_done.load(std::memory_order_relaxed);
    *bytes_total_p = op->bytes_total.load(std::memory_order_relaxed);
    return Status::success();
  });
}

ldr_status_t ldr_op_error(ldr_engine_t *handle, uint64_t op_id, char *text, uint32_t capacity) {
  return guarded([&]() -> Status {
    Engine *engine;
    if (Status s = enter(handle, &engine); !s.ok()) return s;
    if (!text || capacity == 0) return fail(LDR_ERR_INVALID, "text is NULL or has no room");
    std::string found;
    if (!engine->ops.error_text(op_id, &found)) {
      return fail(LDR_ERR_NOT_FOUND, "operation %llu is not among the last failures", (unsigned long long)op_id);
    }
    snprintf(text, capacity, "%s", found.c_str());
    return Status::success();
  });
}

ldr_status_t ldr_grant_mint(ldr_engine_t *handle, const ldr_grant_params_t *params, ldr_grant_id_t *grant_p, uint64_t *generation_p) {
  return guarded([&]() -> Status {
    Engine *engine;
    ldr_grant_params_t p;
    if (Status s = enter(handle, &engine); !s.ok()) return s;
    if (Status s = read_params(params, &p); !s.ok()) return s;
    if (!grant_p || !generation_p) return fail(LDR_ERR_INVALID, "grant_p or generation_p is NULL");
    return engine->grants.mint(p, grant_p, generation_p);
  });
}

ldr_status_t ldr_grant_revoke(ldr_engine_t *handle, uint64_t sequence) {
  return guarded([&]() -> Status {
    Engine *engine;
    if (Status s = enter(handle, &engine); !s.ok()) return s;
    engine->grants.revoke(sequence);
    return Status::success();
  });
}

ldr_status_t ldr_grant_stats(ldr_engine_t *handle, ldr_grant_stats_t *stats_p) {
  return guarded([&]() -> Status {
    Engine *engine;
    if (Status s = enter(handle, &engine); !s.ok()) return s;
    if (Status s = not_null(stats_p, "stats_p"); !s.ok()) return s;
    *stats_p = engine->grants.stats();
    return Status::success();
  });
}

ldr_status_t ldr_grant_open(ldr_engine_t *handle, const ldr_grant_open_params_t *params, uint64_t *num_blocks_p) {
  return guarded([&]() -> Status {
    Engine *engine;
    ldr_grant_open_params_t p;
    if (Status s = enter(handle, &engine); !s.ok()) return s;
    if (Status s = read_params(params, &p); !s.ok()) return s;
    if (Status s = not_null(num_blocks_p, "num_blocks_p"); !s.ok()) return s;
    return engine->open_grants.open(p, num_blocks_p);
  });
}

ldr_status_t ldr_grant_close(ldr_engine_t *handle, uint64_t open_id, uint32_t outcome, int64_t timeout_ns) {
  return guarded([&]() -> Status {
    Engine *engine;
    if (Status s = enter(handle, &engine); !s.ok()) return s;
    return engine->open_grants.close(open_id, outcome, timeout_ns);
  });
}
