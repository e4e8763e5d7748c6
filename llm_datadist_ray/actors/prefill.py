"""Prefill as one member does it: admit a prompt, compute its KV, grant it to a sink. No Ray."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

from llm_datadist_ray._native import EventKind
from llm_datadist_ray.actors.errors import RequestCancelled, RequestRejected
from llm_datadist_ray.actors.messages import Admission, GenerateRequest, Prefilled
from llm_datadist_ray.actors.request_table import RequestTable
from llm_datadist_ray.actors.status import WorkerStatus
from llm_datadist_ray.actors.worker import WorkerCore
from llm_datadist_ray.handoff.blocks import BlocksFull
from llm_datadist_ray.handoff.handoff import Handoff
from llm_datadist_ray.handoff.source import Grant, GrantSource


@dataclass(frozen=True, slots=True)
class _Prompt:
    token_ids: list[int]


class PrefillService:
    """Any thread may call; computations run one after the other."""

    def __init__(self, core: WorkerCore) -> None:
        self._core = core
        self._source = GrantSource(
            core.native, core.allocator, cache_id=core.cache_id, layout_digest=core.layout.digest
        )
        self._requests: RequestTable[_Prompt] = RequestTable()
        core.listen_to_events({EventKind.GRANT_ENDED: self._source.on_grant_ended})

    def admit(self, request: GenerateRequest) -> Admission:
        """Tokenises and checks that the prompt can ever fit. RequestRejected that says what to change."""
        if request.max_tokens < 1:
            raise _rejected(request.request_id, f"max_tokens is {request.max_tokens}; at least 1 token is generated")
        if not request.prompt:
            raise _rejected(request.request_id, "the prompt is empty")
        token_ids = self._core.engine.encode(request.prompt, chat=request.chat)
        self._check_length(request.request_id, len(token_ids))
        self._requests.add(request.request_id, _Prompt(token_ids))
        return Admission(request.request_id, len(token_ids))

    def prefill(self, request_id: str) -> Prefilled:
        """Computes the prompt and grants its blocks; they return when the grant has ended. Blocks the caller for the
        computation. RequestRejected when there are too few free blocks now, RequestCancelled."""
        core = self._core
        prompt = self._requests.begin(request_id)
        try:
            num_tokens = len(prompt.token_ids)
            blocks = self._reserve(request_id, num_tokens)
            with core.compute_lock:
                self._requests.check(request_id)
                started_at = time.monotonic()
                first_token = core.engine.prefill(prompt.token_ids, blocks)
            computed_at = time.monotonic()
            grant = self._source.mint(request_id, blocks, num_tokens)
            minted_at = time.monotonic()
            self._revoke_if_cancelled(request_id)
        finally:
            core.allocator.release(request_id)  # what was not granted
            self._requests.end(request_id)
        handoff = self._handoff(request_id, grant, num_tokens, first_token, len(blocks))
        return Prefilled(handoff, prefill_s=computed_at - started_at, mint_s=minted_at - computed_at)

    def cancel(self, request_id: str) -> None:
        """Any phase, idempotent: revokes the grant, and what is being computed is not granted."""
        self._requests.cancel(request_id)
        self._source.revoke(request_id)

    def status(self) -> WorkerStatus:
        return self._core.status(num_requests=len(self._requests), grants=asdict(self._source.stats()))

    def _reserve(self, request_id: str, num_tokens: int) -> tuple[int, ...]:
        try:
            return self._core.allocator.reserve(request_id, self._core.layout.num_blocks_for(num_tokens))
        except BlocksFull as error:
            raise _rejected(request_id, f"prompt {self._core.cluster_id} is full: {error}; try again later") from error

    def _revoke_if_cancelled(self, request_id: str) -> None:
        """A cancel that came before the mint found no grant to revoke."""
        try:
            self._requests.check(request_id)
        except RequestCancelled:
            self._source.revoke(request_id)
            raise

    def _check_length(self, request_id: str, num_tokens: int) -> None:
        core = self._core
        if num_tokens < 1:
            raise _rejected(request_id, "the prompt has no tokens")
        if num_tokens > core.max_context_tokens:
            raise _rejected(
                request_id, f"the prompt has {num_tokens} tokens, the context holds {core.max_context_tokens}"
            )
        num_blocks = core.layout.num_blocks_for(num_tokens)
        if num_blocks > core.allocator.num_blocks:
            raise _rejected(
                request_id,
                f"the prompt has {num_tokens} tokens and needs {num_blocks} KV blocks, prompt {core.cluster_id} has "
                f"{core.allocator.num_blocks}: shorten it or raise prompt.num_blocks",
            )

    def _handoff(self, request_id: str, grant: Grant, num_tokens: int, first_token: int, num_blocks: int) -> Handoff:
        core = self._core
        return Handoff(
            request_id=request_id,
            source_cluster_id=core.cluster_id,
            source_incarnation=grant.id.incarnation,
            source_address=core.address,
            grant_sequence=grant.id.sequence,
            grant_nonce=grant.id.nonce,
            generation=grant.generation,
            model_id=core.layout.model_id,
            num_tokens=num_tokens,
            first_token=first_token,
            layout_digest=core.layout.digest,
            num_blocks=num_blocks,
        )


def _rejected(request_id: str, reason: str) -> RequestRejected:
    return RequestRejected(f"request {request_id}: {reason}")
