"""What a member of a cluster brings to :meth:`LLMDataDist.init` beyond upstream's option dictionary."""

from __future__ import annotations

import os
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Membership:
    """Passed by the actors; scripts written for upstream never need it (design sections 5 and 8).

    With a membership the environment is not consulted: not for the secret and not for the data paths.
    """

    secret: bytes | None = field(repr=False)
    """The cluster secret; ``None`` = none, then only processes of one uid on one host may link."""

    layout_digest: int
    """``KvLayout.digest`` of the engine; another member with another digest is refused at link time."""

    layout_text: str
    """What the layout is, for the text of that refusal."""

    paths: str | None = None
    """Data paths that may carry bulk bytes, as in ``LDR_PATHS``; ``None`` = all."""

    heartbeat_ms: int = 500
    """Interval of native heartbeats on a link."""

    budget_ms: int = 3000
    """Silence after which a link is broken."""

    allow_ptracer: bool = True
    """Whether peers may be let read this process's memory under Yama scope 1 (design section 3, ``cma``)."""

    insecure: bool = False
    """No secret is needed, not even one uid and one host."""

    @classmethod
    def of_environment(cls) -> Membership:
        """Of who is no member: ``LLM_DATADIST_SECRET``, ``LLM_DATADIST_INSECURE`` and ``LDR_PATHS`` say it."""
        secret = os.environ.get("LLM_DATADIST_SECRET", "").encode() or None
        return cls(
            secret,
            layout_digest=0,
            layout_text="",
            paths=os.environ.get("LDR_PATHS"),
            insecure=os.environ.get("LLM_DATADIST_INSECURE") == "1",
        )
