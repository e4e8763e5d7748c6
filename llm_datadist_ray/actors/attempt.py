"""One try of a request, as router and members call it: the request's id and a part that is never the same twice.

Two tries of one request can then never be taken for each other, neither by a cancel that comes late nor by a grant
that has not ended yet. Texts and reports name the request only.
"""

from __future__ import annotations

import secrets

_SEPARATOR = "~"
_RANDOM_BYTES = 8


def new_attempt(request_id: str) -> str:
    return f"{request_id}{_SEPARATOR}{secrets.token_hex(_RANDOM_BYTES)}"


def request_id_of(attempt_id: str) -> str:
    """The request's id; what is no attempt id is taken for a request id."""
    return attempt_id.rpartition(_SEPARATOR)[0] or attempt_id
