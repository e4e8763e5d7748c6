"""The native engine, typed. Thin: one native call per method, no policy (that is ``datadist`` and ``cache``)."""

from __future__ import annotations

import select
import time
import warnings
from types import TracebackType
from typing import NamedTuple

from llm_datadist_ray._native._ldr import ffi, lib
from llm_datadist_ray._native.cache_calls import CacheCalls
from llm_datadist_ray._native.clock import timeout_ns
from llm_datadist_ray._native.event import Event, event_from_c
from llm_datadist_ray._native.grant_calls import GrantCalls
from llm_datadist_ray._native.handle import EngineHandle
from llm_datadist_ray._native.info import EngineInfo, LinkInfo, engine_info_from_c, link_info_from_c
from llm_datadist_ray._native.paths import mask_of_paths, parse_paths
from llm_datadist_ray._native.status import check
from llm_datadist_ray._native.transfer import Transfer, TransferResult, result_from_c

_ERROR_TEXT_BYTES = 1024


class Progress(NamedTuple):
    bytes_done: int
    bytes_total: int
    """0 until the plan is made."""


class NativeEngine(CacheCalls, GrantCalls):
    """One engine: its links, caches, transfers and grants. Several may live in a process.

    Every method may be called from any thread and releases the interpreter lock while it blocks; ``timeout_s`` bounds
    it, None is no limit. Failures are :class:`NativeError`. A context manager; an engine that is garbage collected
    open gives a ResourceWarning.
    """

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
        one_way: bool = False,
        ip_tos: int = 0,
        socket_priority: int = 0,
    ) -> None:
        """Starts the engine's threads and listeners.

        ``listen_ip`` None: no TCP listener; port 0: the kernel chooses (:attr:`EngineInfo.listen_port`). ``paths`` such
        as ``"shm,tcp"`` restricts what may carry bulk bytes. ``secret`` and ``insecure``: design section 8.
        Zeros take the core's defaults (min(4, cores) threads, 500 ms, 3 s). ``layout_digest`` not 0 marks a cluster
        member, which links only with members of the same layout; ``layout_text`` is what a refused peer reads.
        ``one_way``: a link carries transfers only of the end that opened it. ``ip_tos`` and ``socket_priority`` are set
        on TCP sockets, best effort.
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
            | (lib.LDR_ENGINE_ONE_WAY if one_way else 0)
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
        params.ip_tos = ip_tos
        params.socket_priority = socket_priority
        self._handle = EngineHandle(params)
        self.cluster_id = cluster_id
        self.remote_access = remote_access
        engine = self._handle.pointer
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

    # Engine

    def listen(self, ip: str | None, port: int = 0) -> None:
        """Starts, moves or (None) stops the TCP listener; the port it has already changes nothing.

        NativeError BIND (LLM_FAILED) when it cannot bind; the old listener is gone then.
        """
        engine = self._native.pointer
        check(lib.ldr_engine_listen(engine, ffi.NULL if ip is None else ip.encode(), port))

    def listen_also(self, ip: str, port: int) -> None:
        """One more TCP listener beside that one; the same address again is shared and counted. NativeError BIND."""
        engine = self._native.pointer
        check(lib.ldr_engine_listen_also(engine, ip.encode(), port))

    def unlisten(self, ip: str, port: int) -> None:
        """Gives up one share of it; the last closes the listener. NativeError NOT_FOUND when there is none."""
        engine = self._native.pointer
        check(lib.ldr_engine_unlisten(engine, ip.encode(), port))

    def info(self) -> EngineInfo:
        info = ffi.new("ldr_engine_info_t *")
        engine = self._native.pointer
        check(lib.ldr_engine_info(engine, info))
        return engine_info_from_c(info)

    # Links

    def link(self, *, ip: str, port: int, timeout_s: float | None, file_under: int | None = None) -> LinkInfo:
        """Connects to a listening engine; the link is then usable by both ends (``one_way``: by this one). Any number
        at once.

        Filed under the id that the peer reports, or with ``one_way`` under ``file_under``. NativeError: ALREADY_LINKED
        for a usable link, LINK_FAILED, TIMEOUT, HANDSHAKE, MODE_MISMATCH, AUTH, VERSION, LAYOUT.
        """
        c_ip = ffi.new("char[]", ip.encode())
        params = ffi.new("ldr_link_params_t *")
        params.struct_size = ffi.sizeof("ldr_link_params_t")
        params.ip = c_ip
        params.port = port
        params.timeout_ns = timeout_ns(timeout_s)
        if file_under is not None:
            params.flags = lib.LDR_LINK_AS
            params.cluster_id = file_under
        info = ffi.new("ldr_link_info_t *")
        check(lib.ldr_link_open(self._native.pointer, params, info))
        return link_info_from_c(info)

    def unlink(
        self, cluster_id: int, *, force: bool = False, ip: str | None = None, port: int = 0, timeout_s: float | None
    ) -> None:
        """Drops both halves, or with ``force`` the local one only. Waits for the transfer that runs on the link.

        An address, when given, must answer first: otherwise UNLINK_FAILED or TIMEOUT, and the link is kept. No link at
        all is success.
        """
        c_ip = ffi.NULL if ip is None else ip.encode()
        check(lib.ldr_link_close(self._native.pointer, cluster_id, force, c_ip, port, timeout_ns(timeout_s)))

    def link_info(self, cluster_id: int) -> LinkInfo:
        """Also of a broken link; NativeError NOT_LINKED when there is none."""
        info = ffi.new("ldr_link_info_t *")
        check(lib.ldr_link_query(self._native.pointer, cluster_id, info))
        return link_info_from_c(info)

    def probe_link(self, cluster_id: int, timeout_s: float | None) -> None:
        """One round trip to the peer's engine. NativeError NOT_LINKED, TIMEOUT, LINK_BROKEN."""
        check(lib.ldr_link_probe(self._native.pointer, cluster_id, timeout_ns(timeout_s)))

    def links(self) -> list[LinkInfo]:
        """All links, broken ones too."""
        capacity = 16
        count_p = ffi.new("uint32_t *")
        while True:
            infos = ffi.new("ldr_link_info_t[]", capacity)
            check(lib.ldr_link_list(self._native.pointer, infos, capacity, count_p))
            if count_p[0] <= capacity:
                return [link_info_from_c(infos[index]) for index in range(count_p[0])]
            capacity = count_p[0] + 16

    # Transfers

    def transfer(self, transfer: Transfer) -> TransferResult:
        """Moves the bytes and waits. All checks run before a byte moves. Transfers on one link queue up.

        NativeError, whose text says how far it came.
        """
        result = ffi.new("ldr_transfer_result_t *")
        check(lib.ldr_transfer(self._native.pointer, transfer.params, result))
        return result_from_c(result)

    def run(self, transfer: Transfer) -> None:
        """:meth:`transfer` without its result, which takes longer to make than a small transfer's arguments."""
        handle = self._handle
        assert handle is not None
        status = lib.ldr_transfer(handle.pointer, transfer.params, ffi.NULL)
        if status:
            check(status)

    def submit(self, transfer: Transfer, *, user_tag: int = 0) -> int:
        """Starts a transfer and returns its operation id. Raises at once, or exactly one OP event follows."""
        op_id_p = ffi.new("uint64_t *")
        check(lib.ldr_transfer_submit(self._native.pointer, transfer.params, user_tag, op_id_p))
        return op_id_p[0]

    def cancel(self, op_id: int) -> None:
        """A request; the event tells what happened. NativeError NOT_FOUND when it is over."""
        check(lib.ldr_op_cancel(self._native.pointer, op_id))

    def progress(self, op_id: int) -> Progress:
        """NativeError NOT_FOUND when the operation is over."""
        done_p, total_p = ffi.new("uint64_t *"), ffi.new("uint64_t *")
        check(lib.ldr_op_progress(self._native.pointer, op_id, done_p, total_p))
        return Progress(done_p[0], total_p[0])

    def op_error(self, op_id: int) -> str:
        """The text of a failed operation; kept for the last 1024 failures, NativeError NOT_FOUND afterwards."""
        text = ffi.new("char[]", _ERROR_TEXT_BYTES)
        check(lib.ldr_op_error(self._native.pointer, op_id, text, _ERROR_TEXT_BYTES))
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
        with self._native.held() as engine:
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
