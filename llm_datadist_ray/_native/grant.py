"""Grants: the source's promise that some blocks stay as they are until their one reader is done (design section 5)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from llm_datadist_ray._native._ldr import CData


class GrantId(NamedTuple):
    """Names one grant for ever: source incarnation, sequence there, and random bits that cannot be guessed."""

    incarnation: int
    sequence: int
    nonce: int


class CloseOutcome(IntEnum):
    OK = 0
    CANCELLED = 1


@dataclass(frozen=True, slots=True)
class GrantStats:
    """Counters of a source: ``granted == closed + live + reclaimed``; ``live`` is counted by walking the table."""

    granted: int
    closed: int
    live: int
    reclaimed: int
    reclaimed_revoked: int
    reclaimed_cancelled: int
    reclaimed_peer_lost: int
    refused_stale: int
    refused_consumed: int
    refused_expired: int
    refused_unknown: int
    refused_revoked: int
    refused_layout: int


def grant_stats_from_c(stats: CData) -> GrantStats:
    return GrantStats(**{field.name: getattr(stats, field.name) for field in fields(GrantStats)})
