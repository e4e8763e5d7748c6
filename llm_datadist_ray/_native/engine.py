"""The native engine, typed. Thin: one native call per method, no policy (that is ``datadist`` and ``cache``)."""

from __future__ import annotations

import select
import time
import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple

from llm_datadist_ray._native._ldr import ffi, lib
from llm_datadist_ray._native.blocks import BlockList, fill_block_list
from llm_datadist_ray._native.cache import CacheKind, NativeKey, cache_to_c
from llm_datadist_ray._native.clock import timeout_ns
from llm_datadist_ray._native.event import Event, event_from_c
from llm_datadist_ray._native.grant import CloseOutcome, GrantId, GrantStats, grant_stats_from_c
from llm_datadist_ray._native.handle import EngineHandle
from llm_datadist_ray._native.info import EngineInfo, LinkInfo, engine_info_from_c, link_info_from_c
from llm_datadist_ray._native.paths import mask_of_paths, parse_paths
from llm_datadist_ray._native.status import check
from llm_datadist_ray._native.transfer import Transfer, TransferResult, result_from_c, transfer_to_c

_ERROR_TEXT_BYTES = 1024


class Progress(NamedTuple):
    bytes_done: int
    bytes_total: int
    """0 until the plan is made."""


class NativeEngine:
    """One engine: its links, caches, transfers and grants. Several may live in a process.

    Every method may be called from any thread and releases the interpreter lock while it blocks; ``timeout_s`` bounds
    it, None is no limit. Failures are :class:`NativeError`. A context manager; an engine that is garbage collected
    open gives a ResourceWarning.
    """

    _handle: EngineHandle | None = None  # for __del__ of an engine whose constructor raised

    def __init__(
        self,
        *,
        cluster_id: int,
        remote_access: bool,
        listen_ip: str | None = None,
        listen_port: int = 0,
        paths: str | None = None,
        secret: bytes | None = None,
        insecure: bool = False,
        allow_ptracer: bool = True,
        num_copy_threads: int = 0,
        heartbeat_interval_s: float = 0.0,
        liveness_budget_s: float = 0.0,
        layout_digest: int = 0,
        layout_text: str = "",
    ) -> None:
        """Starts the engine's threads and listeners.

        ``listen_ip`` None: no TCP listener; port 0: the kernel chooses (:attr:`EngineInfo.listen_port`). ``paths`` such
        as ``"shm,tcp"`` restricts what may carry bulk bytes. ``secret`` and ``insecure``: design section 8.
        Zeros take the core's defaults (min(4, cores) threads, 500 ms, 3 s). ``layout_digest`` not 0 marks a cluster
        member, which links only with members of the same layout; ``layout_text`` is what a refused peer reads.
        """
        c_ip = ffi.new("char[]", listen_ip.encode()) if listen_ip is not None else ffi.NULL
        c_secret = ffi.from_buffer("uint8_t[]", secret) if secret else ffi.NULL
        c_layout_text = ffi.new("char[]", layout_text.encode())
        params = ffi.new("ldr_engine_params_t *")
        params.struct_size = ffi.sizeof("ldr_engine_params_t")
        params.flags = (
            (lib.LDR_ENGINE_REMOTE_ACCESS if remote_access else 0)
            | (lib.LDR_ENGINE_INSECURE if insecure else 0)
            | (0 if allow_ptracer else lib.LDR_ENGINE_NO_PTRACER)
        )
        params.cluster_id = cluster_id
        params.listen_ip = c_ip
        params.listen_port = listen_port
        params.path_set = mask_of_paths(parse_paths(paths))
        params.secret = c_secret
        params.secret_bytes = len(secret) if secret else 0
        params.num_copy_threads = num_copy_threads
        params.heartbeat_interval_ns = timeout_ns(heartbeat_interval_s)
        params.liveness_budget_ns = timeout_ns(liveness_budget_s)
        params.layout_digest = layout_digest
        params.layout_text = c_layout_text
        self._handle = EngineHandle(params)
        self.cluster_id = cluster_id
        self.remote_access = remote_access
        with self._handle as engine:
            self._event_fd: int = lib.ldr_engine_event_fd(engine)

    # Lifetime

    def close(self) -> None:
        """Fails what is in flight with CLOSED, closes all links (peers see them gone at once), joins all threads.

        Repeatable. Calls that other threads have in progress end at once, whatever their time limit.
        """
        if self._handle is not None:
            self._handle.close()

    @property
    def is_open(self) -> bool:
        return self._handle is not None and self._handle.is_open

    def __enter__(self) -> NativeEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if self.is_open:
            warnings.warn(f"engine of cluster {self.cluster_id} was never closed", ResourceWarning, 2, self)
            self.close()

    @property
    def _native(self) -> EngineHandle:
        assert self._handle is not None  # set by the constructor, or there is no object to call a method of
        return self._handle

    # Engine

    def listen(self, ip: str | None, port: int = 0) -> None:
        """Starts, moves or (None) stops the TCP listener; the port it has already changes nothing.

        NativeError BIND (LLM_FAILED) when it cannot bind; the old listener is gone then.
        """
        with self._native as engine:
            check(lib.ldr_engine_listen(engine, ffi.NULL if ip is None else ip.encode(), port))

    def info(self) -> EngineInfo:
        info = ffi.new("ldr_engine_info_t *")
        with self._native as engine:
            check(lib.ldr_engine_info(engine, info))
        return engine_info_from_c(info)

    # Links

    def link(self, *, ip: str, port: int, timeout_s: float | None) -> LinkInfo:
        """Connects to a listening engine; the link is then usable by both ends. Any number at once.

        Filed under the id that the peer reports. NativeError: ALREADY_LINKED for a usable link, LINK_FAILED, TIMEOUT,
        HANDSHAKE, MODE_MISMATCH, AUTH, VERSION, LAYOUT.
        """
        c_ip = ffi.new("char[]", ip.encode())
        params = ffi.new("ldr_link_params_t *")
        params.struct_size = ffi.sizeof("ldr_link_params_t")
        params.ip = c_ip
        params.port = port
        params.timeout_ns = timeout_ns(timeout_s)
        info = ffi.new("ldr_link_info_t *")
        with self._native as engine:
            check(lib.ldr_link_open(engine, params, info))
        return link_info_from_c(info)

    def unlink(
        self, cluster_id: int, *, force: bool = False, ip: str | None = None, port: int = 0, timeout_s: float | None
    ) -> None:
        """Drops both halves, or with ``force`` the local one only. Waits for the transfer that runs on the link.

        An address, when given, must answer first: otherwise UNLINK_FAILED or TIMEOUT, and the link is kept. No link at
        all is success.
        """
        c_ip = ffi.NULL if ip is None else ip.encode()
        with self._native as engine:
            check(lib.ldr_link_close(engine, cluster_id, force, c_ip, port, timeout_ns(timeout_s)))

    def link_info(self, cluster_id: int) -> LinkInfo:
        """Also of a broken link; NativeError NOT_LINKED when there is none."""
        info = ffi.new("ldr_link_info_t *")
        with self._native as engine:
            check(lib.ldr_link_query(engine, cluster_id, info))
        return link_info_from_c(info)

    def links(self) -> list[LinkInfo]:
        """All links, broken ones too."""
        capacity = 16
        count_p = ffi.new("uint32_t *")
        while True:
            infos = ffi.new("ldr_link_info_t[]", capacity)
            with self._native as engine:
                check(lib.ldr_link_list(engine, infos, capacity, count_p))
            if count_p[0] <= capacity:
                return [link_info_from_c(infos[index]) for index in range(count_p[0])]
            capacity = count_p[0] + 16

    # Caches

    def register_cache(
        self,
        *,
        kind: CacheKind,
        placement: int,
        remote_accessible: bool,
        num_entries: int,
        tensor_bytes: int,
        addresses: Sequence[int],
        keys: Sequence[NativeKey] = (),
    ) -> int:
        """The id of a new cache: 1, 2, 3 …, never re-used. The memory is the caller's and is not touched here; it must
        stay until :meth:`unregister_cache`. ``addresses`` has one per tensor of ``tensor_bytes`` bytes."""
        params, keep_alive = cache_to_c(kind, placement, remote_accessible, num_entries, tensor_bytes, addresses, keys)
        cache_id_p = ffi.new("int64_t *")
        with self._native as engine:
            check(lib.ldr_cache_register(engine, params, cache_id_p))
        del keep_alive
        return cache_id_p[0]

    def unregister_cache(self, cache_id: int) -> None:
        """Who still reads it fails with NO_CACHE. An unknown id is success."""
        with self._native as engine:
            check(lib.ldr_cache_unregister(engine, cache_id))

    # Transfers

    def transfer(self, transfer: Transfer) -> TransferResult:
        """Moves the bytes and waits. All checks run before a byte moves. Transfers on one link queue up.

        TypeError for a block list of a wrong type; NativeError otherwise, whose text says how far it came.
        """
        params, keep_alive = transfer_to_c(transfer)
        result = ffi.new("ldr_transfer_result_t *")
        with self._native as engine:
            check(lib.ldr_transfer(engine, params, result))
        del keep_alive
        return result_from_c(result)

    def submit(self, transfer: Transfer, *, user_tag: int = 0) -> int:
        """Starts a transfer and returns its operation id. Raises at once, or exactly one OP event follows."""
        params, keep_alive = transfer_to_c(transfer)
        op_id_p = ffi.new("uint64_t *")
        with self._native as engine:
            check(lib.ldr_transfer_submit(engine, params, user_tag, op_id_p))
        del keep_alive
        return op_id_p[0]

    def cancel(self, op_id: int) -> None:
        """A request; the event tells what happened. NativeError NOT_FOUND when it is over."""
        with self._native as engine:
            check(lib.ldr_op_cancel(engine, op_id))

    def progress(self, op_id: int) -> Progress:
        """NativeError NOT_FOUND when the operation is over."""
        done_p, total_p = ffi.new("uint64_t *"), ffi.new("uint64_t *")
        with self._native as engine:
            check(lib.ldr_op_progress(engine, op_id, done_p, total_p))
        return Progress(done_p[0], total_p[0])

    def op_error(self, op_id: int) -> str:
        """The text of a failed operation; kept for the last 1024 failures, NativeError NOT_FOUND afterwards."""
        text = ffi.new("char[]", _ERROR_TEXT_BYTES)
        with self._native as engine:
            check(lib.ldr_op_error(engine, op_id, text, _ERROR_TEXT_BYTES))
        return ffi.string(text).decode(errors="replace")

    # Events

    @property
    def event_fd(self) -> int:
        """Readable while events are queued. The engine's own: wait for it, never read or close it."""
        self._native.raise_if_closing()
        return self._event_fd

    def poll(self, max_events: int = 64, timeout_s: float | None = 0.0) -> list[Event]:
        """Takes up to ``max_events`` events, waiting for the first; ``[]`` after the timeout.

        Can be interrupted by a signal handler that raises. NativeError CLOSED when the engine is closed meanwhile.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        events = ffi.new("ldr_event_t[]", max_events)
        count_p = ffi.new("uint32_t *")
        with self._native as engine:
            while True:
                check(lib.ldr_poll(engine, events, max_events, 0, count_p))
                if count_p[0] or not self._wait_for_events(deadline):
                    return [event_from_c(events[index]) for index in range(count_p[0])]

    def _wait_for_events(self, deadline: float | None) -> bool:
        """Waits here and not in native code, so that closing and signals get through. False: the deadline passed."""
        remaining_ms = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
        if remaining_ms == 0:
            return False
        poller = select.poll()
        poller.register(self._event_fd, select.POLLIN)
        poller.register(self._native.wake_fd, select.POLLIN)
        is_ready = bool(poller.poll(remaining_ms))
        self._native.raise_if_closing()
        return is_ready

    # Grants

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
        with self._native as engine:
            check(lib.ldr_grant_mint(engine, params, grant_p, generation_p))
        del keep_alive
        return GrantId(grant_p.incarnation, grant_p.sequence, grant_p.nonce), generation_p[0]

    def grant_revoke(self, sequence: int) -> None:
        """Source: ends a grant, also an open one (its reader fails). Ended already is success."""
        with self._native as engine:
            check(lib.ldr_grant_revoke(engine, sequence))

    def grant_stats(self) -> GrantStats:
        """Source: its counters since it started."""
        stats = ffi.new("ldr_grant_stats_t *")
        with self._native as engine:
            check(lib.ldr_grant_stats(engine, stats))
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
        with self._native as engine:
            check(lib.ldr_grant_open(engine, params, num_blocks_p))
        return num_blocks_p[0]

    def grant_close(self, open_id: int, outcome: CloseOutcome, *, timeout_s: float | None) -> None:
        """Sink: ends its reading; what was pulled may be used only after this returned for OK. Idempotent."""
        with self._native as engine:
            check(lib.ldr_grant_close(engine, open_id, outcome, timeout_ns(timeout_s)))
