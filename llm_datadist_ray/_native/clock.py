"""Float seconds on our side of the boundary, int64 nanoseconds on the other."""

from __future__ import annotations

NO_LIMIT_NS = -1
_MAX_NS = 2**63 - 1


def timeout_ns(timeout_s: float | None) -> int:
    """None means no limit, as a negative number does in C; negative seconds are a deadline that has passed: 0."""
    if timeout_s is None:
        return NO_LIMIT_NS
    return min(max(0, int(timeout_s * 1e9)), _MAX_NS)


def seconds(nanoseconds: int) -> float:
    return nanoseconds / 1e9
