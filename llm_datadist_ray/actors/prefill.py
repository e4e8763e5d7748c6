"""Prefill as one member does it: admit a prompt, compute its KV, grant it to a sink. No Ray."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from functools import partial

from llm_datadist_ray._native import EventKind
from llm_datadist_ray.actors.attempt import request_id_of
from llm_datadist_ray.actors.errors import RequestCancelled, RequestRejected
from llm_datadist_ray.actors.messages import Admission, GenerateRequest, Prefilled
from llm_datadist_ray.actors.request_input import check_request
from llm_datadist_ray.actors.request_table import RequestTable
from llm_datadist_ray.actors.status import WorkerStatus
from llm_datadist_ray.actors.worker import WorkerCore
from llm_datadist_ray.engines.base import Sampling
from llm_datadist_ray.handoff.blocks import BlocksFull
from llm_datadist_ray.handoff.handoff import Handoff
from llm_datadist_ray.handoff.source import Grant, GrantSource


@dataclass(frozen=True, slots=True)
class _Prompt:
    token_ids: list[int]
    sampling: Sampling


class PrefillService:
    """Any thread may call; computations run one after the other. Requests go by their attempt ids."""

    def __init__(self, core: WorkerCore) -> None:
        self._core = core
        self._source = GrantSource(
            core.native, core.allocator, cache_id=core.cache_id, layout_digest=core.layout.digest
        )
        self._requests: RequestTable[_Prompt] = RequestTable(f"prompt {core.cluster_id}")
        core.listen_to_events({EventKind.GRANT_ENDED: self._source.on_grant_ended})

    def admit(self, request: GenerateRequest) -> Admission:
        """Tokenises and checks that the prompt can ever fit. RequestRejected that says what to change."""
        check_request(request)
        token_ids = self._core.engine.encode(request.prompt, chat=request.chat)
        self._check_length(request.request_id, len(token_ids))
        self._requests.add(request.request_id, _Prompt(token_ids, request.sampling))
        return Admission(request_id_of(request.request_id), len(token_ids))

    def prefill(self, attempt_id: str) -> Prefilled:
        """Computes the prompt and grants its blocks; they return when the grant has ended. Blocks the caller for the
        computation. RequestRejected when there are too few free blocks now, RequestCancelled."""
        core = self._core
        prompt = self._requests.begin(attempt_id)
        check = partial(self._requests.check, attempt_id)
        try:
            num_tokens = len(prompt.token_ids)
            blocks = self._reserve(attempt_id, num_tokens)
            with core.compute_turn.take(check):
                started_at = time.monotonic()
                first_token = core.engine.prefill(prompt.token_ids, blocks, sampling=prompt.sampling, check=check)
            computed_at = time.monotonic()
            grant = self._source.mint(attempt_id, blocks, num_tokens)
            minted_at = time.monotonic()
            self._revoke_if_cancelled(attempt_id)
        finally:
            core.allocator.release(attempt_id)  # what was not granted
            self._requests.end(attempt_id)
        handoff = self._handoff(attempt_id, grant, num_tokens, first_token, len(blocks))
        return Prefilled(handoff, prefill_s=computed_at - started_at, mint_s=minted_at - computed_at)

    def cancel(self, attempt_id: str) -> None:
        """Any phase, idempotent: revokes the grant; a computation ends at its next chunk and is not granted."""
        self._requests.cancel(attempt_id)
        self._core.compute_turn.recheck()
        self._source.revoke(attempt_id)

    def status(self) -> WorkerStatus:
        return self._core.status(num_requests=len(self._requests), grants=asdict(self._source.stats()))

    def _reserve(self, attempt_id: str, num_tokens: int) -> tuple[int, ...]:
        try:
            return self._core.allocator.reserve(attempt_id, self._core.layout.num_blocks_for(num_tokens))
        except BlocksFull as error:
            raise _rejected(attempt_id, f"prompt {self._core.cluster_id} is full: {error}; try again later") from error

    def _revoke_if_cancelled(self, attempt_id: str) -> None:
        """A cancel that came before the mint found no grant to revoke."""
        try:
            self._requests.check(attempt_id)
        except RequestCancelled:
            self._source.revoke(attempt_id)
            raise

    def _check_length(self, attempt_id: str, num_tokens: int) -> None:
        core = self._core
        if num_tokens < 1:
            raise _rejected(attempt_id, "the prompt has no tokens")
        if num_tokens > core.max_context_tokens:
            raise _rejected(
                attempt_id, f"the prompt has {num_tokens} tokens, the context holds {core.max_context_tokens}"
            )
        num_blocks = core.layout.num_blocks_for(num_tokens)
        if num_blocks > core.allocator.num_blocks:
            raise _rejected(
                attempt_id,
                f"the prompt has {num_tokens} tokens and needs {num_blocks} KV blocks, prompt {core.cluster_id} has "
                f"{core.allocator.num_blocks}: shorten it or raise prompt.num_blocks",
            )

    def _handoff(self, attempt_id: str, grant: Grant, num_tokens: int, first_token: int, num_blocks: int) -> Handoff:
        core = self._core
        return Handoff(
            request_id=request_id_of(attempt_id),
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


def _rejected(attempt_id: str, reason: str) -> RequestRejected:
    return RequestRejected(f"request {request_id_of(attempt_id)}: {reason}")
