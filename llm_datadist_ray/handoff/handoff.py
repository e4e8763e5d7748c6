"""The record that travels from prefill to decode: everything a sink needs to fetch one request's KV, once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Handoff:
    """Names a grant at its source (design section 5).

    It holds no block numbers, which the sink learns from the source when it opens the grant, and no token ids, which it
    never learns.
    """

    request_id: str
    source_cluster_id: int
    source_incarnation: int
    source_address: str
    """``ip:port`` of the source's listener; for texts, linking goes through the coordinator."""
    grant_sequence: int
    grant_nonce: int
    generation: int
    model_id: str
    num_tokens: int
    """Positions that the granted blocks hold: the prompt's length."""
    first_token: int
    """The token that prefill produced; decode continues from it."""
    layout_digest: int
    num_blocks: int
