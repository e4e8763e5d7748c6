"""The records that actors exchange. Small, frozen, picklable; no handles, no arrays. The contract of this layer.

Life of a request, who calls whom. ``id`` is the *attempt* id: one for each try, so that a retry never meets what is
left of an earlier one; texts carry the client's request id::

    router -> P.admit(request)            -> Admission      tokenises, checks that the prompt can fit
    router -> D.reserve(id, ...)          -> Reservation    sink blocks first: no blocks, no prefill
    router -> P.prefill(id)               -> Prefilled      compute, mint a grant
    router -> D.decode(id, handoff, ...)  -> stream of TokenPiece, last a RequestReport
    router -> P.cancel / D.cancel(id)                       any phase, idempotent: frees what that side holds

The coordinator is asked once for the topology and again when its epoch moves, never per request.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from llm_datadist_ray.engines.base import GREEDY, Sampling
from llm_datadist_ray.handoff.handoff import Handoff
from llm_datadist_ray.types import LLMRole

# ---- membership: member -> coordinator


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """Asks for a cluster id. ``join_id`` is chosen by the caller: the same one again gets the same answer."""

    join_id: str
    role: LLMRole
    host: str
    pid: int


@dataclass(frozen=True, slots=True)
class JoinReply:
    cluster_id: int
    epoch: int


@dataclass(frozen=True, slots=True)
class MemberRecord:
    """A member as the coordinator knows it after ``register``."""

    cluster_id: int
    incarnation: int
    role: LLMRole
    host: str
    port: int
    """Where its native engine listens for links."""
    pid: int
    layout_digest: int
    layout_text: str
    num_blocks: int
    actor_name: str
    """Its Ray actor name in the cluster's namespace."""


@dataclass(frozen=True, slots=True)
class LinkOrder:
    """Coordinator -> member: link to that listener now."""

    cluster_id: int
    incarnation: int
    host: str
    port: int
    timeout_ms: int


@dataclass(frozen=True, slots=True)
class LinkReport:
    """Answer to a LinkOrder. ``paths`` are the usable data paths, best first. ``error`` is empty on success."""

    cluster_id: int
    incarnation: int
    paths: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class Topology:
    """What routers cache. ``links`` holds (decoder cluster id, prompt cluster id) pairs that are up."""

    epoch: int
    members: tuple[MemberRecord, ...]
    links: frozenset[tuple[int, int]] = frozenset()


# ---- requests: router -> P, D


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """``prompt`` is text; ``chat`` wraps it as one user turn of the model's chat template."""

    request_id: str
    prompt: str
    max_tokens: int
    chat: bool = True
    sampling: Sampling = GREEDY


@dataclass(frozen=True, slots=True)
class Admission:
    request_id: str
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Reservation:
    request_id: str
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Prefilled:
    handoff: Handoff
    prefill_s: float
    mint_s: float


@dataclass(frozen=True, slots=True)
class TokenPiece:
    """One generated token. ``text`` may be empty (half a character so far, or a special token)."""

    request_id: str
    index: int
    token_id: int
    text: str


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """Seconds of each phase of one request; the last record of a decode stream fills what decode knows."""

    prefill_s: float = 0.0
    handoff_s: float = 0.0
    """Mint at the source, open and close at the sink; without the transfer."""
    transfer_s: float = 0.0
    first_token_s: float = 0.0
    """From the start of the request, as the router sees it, to its first token."""
    decode_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestReport:
    """Ends every successful stream."""

    request_id: str
    prompt_cluster_id: int
    decoder_cluster_id: int
    num_prompt_tokens: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    """``"stop"`` (end-of-sequence token) or ``"length"``."""
    transfer_bytes: int
    transfer_path: str
    times: PhaseTimes = field(default_factory=PhaseTimes)
