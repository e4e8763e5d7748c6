"""Decode as one member does it: reserve blocks, fetch the prompt's KV, generate tokens. No Ray."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

from llm_datadist_ray.actors.attempt import request_id_of
from llm_datadist_ray.actors.errors import RequestCancelled, RequestFailed, RequestRejected
from llm_datadist_ray.actors.messages import PhaseTimes, RequestReport, Reservation, TokenPiece
from llm_datadist_ray.actors.request_table import RequestTable
from llm_datadist_ray.actors.status import WorkerStatus
from llm_datadist_ray.actors.worker import WorkerCore
from llm_datadist_ray.engines.base import GREEDY, Sampling
from llm_datadist_ray.handoff.blocks import BlocksFull
from llm_datadist_ray.handoff.handoff import Handoff
from llm_datadist_ray.handoff.sink import Fetched, FetchFailed, GrantSink


@dataclass(frozen=True, slots=True)
class _Slot:
    """``blocks`` hold the prompt's ``num_prompt_tokens`` positions and behind them those of all but the last token."""

    blocks: tuple[int, ...]
    num_prompt_tokens: int
    max_tokens: int
    sampling: Sampling


@dataclass(slots=True)
class _Output:
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finish_reason: str = ""


class DecodeService:
    """Any thread may call; requests, by their attempt ids, are decoded side by side, one step at a time.

    ``damaged_block`` is ``testing.overwrite_pulled_block``.
    """

    def __init__(self, core: WorkerCore, *, damaged_block: int | None = None) -> None:
        self._core = core
        self._damaged_block = damaged_block
        self._sink = GrantSink(core.native, cache_id=core.cache_id)
        self._requests: RequestTable[_Slot] = RequestTable(f"decoder {core.cluster_id}")
        core.listen_to_events({})

    def reserve(
        self, attempt_id: str, num_prompt_tokens: int, max_tokens: int, sampling: Sampling = GREEDY
    ) -> Reservation:
        """Takes blocks for the prompt and for what may be generated, so that a request that is admitted can end.
        RequestRejected when it can never fit, or does not now."""
        core = self._core
        # The last token is never computed with; generation ends early, with "length", when the context is full.
        max_tokens = min(max_tokens, core.max_context_tokens - num_prompt_tokens + 1)
        num_blocks = core.layout.num_blocks_for(num_prompt_tokens + max_tokens - 1)
        if num_blocks > core.allocator.num_blocks:
            raise RequestRejected(
                f"request {request_id_of(attempt_id)}: {num_prompt_tokens} prompt tokens and up to {max_tokens} new "
                f"ones need {num_blocks} KV blocks, decoder {core.cluster_id} has {core.allocator.num_blocks}: lower "
                "max_tokens or raise decoder.num_blocks"
            )
        try:
            blocks = core.allocator.reserve(attempt_id, num_blocks)
        except BlocksFull as error:
            raise RequestRejected(
                f"request {request_id_of(attempt_id)}: decoder {core.cluster_id} is full: {error}; try again later"
            ) from error
        try:
            self._requests.add(attempt_id, _Slot(blocks, num_prompt_tokens, max_tokens, sampling))
        except BaseException:
            core.allocator.release(attempt_id)
            raise
        return Reservation(request_id_of(attempt_id), num_blocks)

    def decode(self, attempt_id: str, handoff: Handoff, source: str = "") -> Iterator[TokenPiece | RequestReport]:
        """Fetches the KV and yields each token, the last item is the report. Blocks while it computes; its blocks are
        free when the iterator ends or is closed. RequestFailed naming the source, as ``source`` calls it, and step.

        A cancelled request ends without a report and without an error: its client may be gone, and Ray logs an error
        that nobody fetches.
        """
        with contextlib.suppress(RequestCancelled):
            yield from self._decode(attempt_id, self._requests.begin(attempt_id), handoff, source)

    def cancel(self, attempt_id: str) -> None:
        """Any phase, idempotent. What has begun ends at its next token, or with its transfer."""
        if self._requests.cancel(attempt_id) is not None:
            self._core.allocator.release(attempt_id)
        self._core.compute_turn.recheck()

    def status(self) -> WorkerStatus:
        return self._core.status(num_requests=len(self._requests), grants=None)

    def _decode(
        self, attempt_id: str, slot: _Slot, handoff: Handoff, source: str
    ) -> Iterator[TokenPiece | RequestReport]:
        try:
            fetched = self._fetch(attempt_id, slot, handoff, source)
            fetched_at = time.monotonic()
            output = _Output()
            yield from self._generate(attempt_id, slot, handoff, output)
            yield self._report(handoff, fetched, output, time.monotonic() - fetched_at)
        finally:
            self._core.allocator.release(attempt_id)
            self._requests.end(attempt_id)

    def _fetch(self, attempt_id: str, slot: _Slot, handoff: Handoff, source: str) -> Fetched:
        source = source or f"prompt {handoff.source_cluster_id} at {handoff.source_address}"
        if handoff.num_tokens != slot.num_prompt_tokens:
            raise RequestFailed(
                f"request {handoff.request_id}: the handoff from {source} has {handoff.num_tokens} tokens, decoder "
                f"{self._core.cluster_id} reserved for {slot.num_prompt_tokens}; nothing was decoded, send it again",
                member=source,
                step="open",
            )
        pulled = slot.blocks[: self._core.layout.num_blocks_for(handoff.num_tokens)]
        try:
            fetched = self._sink.fetch(handoff, pulled, timeout_s=self._core.timeout_s, source=source)
        except FetchFailed as error:
            self._requests.check(attempt_id)  # a cancel at the source is no failure
            raise RequestFailed(
                f"{error}; nothing was decoded, try again",
                member=source,
                step=error.step,
                elapsed_s=error.elapsed_s,
            ) from error
        if self._damaged_block is not None:
            self._damage(handoff, pulled, self._damaged_block)
        return fetched

    def _damage(self, handoff: Handoff, pulled: tuple[int, ...], ordinal: int) -> None:
        if ordinal >= len(pulled):
            raise RequestRejected(
                f"request {handoff.request_id}: testing.overwrite_pulled_block is {ordinal}, but only {len(pulled)} "
                "blocks were pulled: lower it or ask with a longer prompt"
            )
        self._core.memory.damage(pulled[ordinal])

    def _generate(self, attempt_id: str, slot: _Slot, handoff: Handoff, output: _Output) -> Iterator[TokenPiece]:
        core = self._core
        check = partial(self._requests.check, attempt_id)
        detokenize = core.engine.detokenizer()
        sequence = None
        token_id = handoff.first_token
        while True:
            output.token_ids.append(token_id)
            output.texts.append(detokenize(token_id))
            yield TokenPiece(handoff.request_id, len(output.token_ids) - 1, token_id, output.texts[-1])
            if token_id in core.engine.eos_token_ids:
                output.finish_reason = "stop"
                return
            if len(output.token_ids) >= slot.max_tokens:
                output.finish_reason = "length"
                return
            with core.compute_turn.take(check):
                if sequence is None:
                    sequence = core.engine.start_decode(
                        slot.num_prompt_tokens, handoff.first_token, slot.blocks, sampling=slot.sampling
                    )
                token_id = sequence.step()

    def _report(self, handoff: Handoff, fetched: Fetched, output: _Output, decode_s: float) -> RequestReport:
        """Without what only the router knows: the times of prefill, mint and first token."""
        return RequestReport(
            request_id=handoff.request_id,
            prompt_cluster_id=handoff.source_cluster_id,
            decoder_cluster_id=self._core.cluster_id,
            num_prompt_tokens=handoff.num_tokens,
            token_ids=tuple(output.token_ids),
            text="".join(output.texts),
            finish_reason=output.finish_reason,
            transfer_bytes=fetched.num_bytes,
            transfer_path=fetched.path,
            times=PhaseTimes(
                handoff_s=fetched.open_s + fetched.close_s, transfer_s=fetched.transfer_s, decode_s=decode_s
            ),
        )
