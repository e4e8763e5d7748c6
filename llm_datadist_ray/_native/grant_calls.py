"""Grants of a native engine, source and sink (design section 5)."""

from __future__ import annotations

from llm_datadist_ray._native._ldr import ffi, lib
from llm_datadist_ray._native.blocks import BlockList, fill_block_list
from llm_datadist_ray._native.clock import timeout_ns
from llm_datadist_ray._native.engine_calls import EngineCalls
from llm_datadist_ray._native.grant import CloseOutcome, GrantId, GrantStats, grant_stats_from_c
from llm_datadist_ray._native.status import check


class GrantCalls(EngineCalls):
    """Part of :class:`NativeEngine`."""

    def grant_mint(
        self, *, cache_id: int, blocks: BlockList, num_tokens: int, layout_digest: int
    ) -> tuple[GrantId, int]:
        """Source: grants blocks of a blocks cache, in token order. Returns the id and the generation.

        The blocks must not change until the GRANT_ENDED event.
        """
        params = ffi.new("ldr_grant_params_t *")
        params.struct_size = ffi.sizeof("ldr_grant_params_t")
        params.cache_id = cache_id
        keep_alive = fill_block_list(params.blocks, "blocks", blocks)
        params.num_tokens = num_tokens
        params.layout_digest = layout_digest
        grant_p, generation_p = ffi.new("ldr_grant_id_t *"), ffi.new("uint64_t *")
        check(lib.ldr_grant_mint(self._native.pointer, params, grant_p, generation_p))
        del keep_alive
        return GrantId(grant_p.incarnation, grant_p.sequence, grant_p.nonce), generation_p[0]

    def grant_revoke(self, sequence: int) -> None:
        """Source: ends a grant, also an open one (its reader fails). Ended already is success."""
        check(lib.ldr_grant_revoke(self._native.pointer, sequence))

    def grant_stats(self) -> GrantStats:
        """Source: its counters since it started."""
        stats = ffi.new("ldr_grant_stats_t *")
        check(lib.ldr_grant_stats(self._native.pointer, stats))
        return grant_stats_from_c(stats)

    def grant_open(
        self,
        *,
        cluster_id: int,
        grant: GrantId,
        generation: int,
        num_tokens: int,
        layout_digest: int,
        open_id: int,
        timeout_s: float | None,
    ) -> int:
        """Sink: pins the granted blocks at the source and returns their number; one round trip, idempotent.

        ``open_id`` is random and not 0; transfers name the grant by it. NativeError STALE, CONSUMED, EXPIRED,
        UNKNOWN_GRANT, REVOKED or LAYOUT when the source refuses.
        """
        params = ffi.new("ldr_grant_open_params_t *")
        params.struct_size = ffi.sizeof("ldr_grant_open_params_t")
        params.cluster_id = cluster_id
        params.grant.incarnation, params.grant.sequence, params.grant.nonce = grant
        params.generation = generation
        params.num_tokens = num_tokens
        params.layout_digest = layout_digest
        params.open_id = open_id
        params.timeout_ns = timeout_ns(timeout_s)
        num_blocks_p = ffi.new("uint64_t *")
        check(lib.ldr_grant_open(self._native.pointer, params, num_blocks_p))
        return num_blocks_p[0]

    def grant_close(self, open_id: int, outcome: CloseOutcome, *, timeout_s: float | None) -> None:
        """Sink: ends its reading; what was pulled may be used only after this returned for OK. Idempotent."""
        check(lib.ldr_grant_close(self._native.pointer, open_id, outcome, timeout_ns(timeout_s)))
