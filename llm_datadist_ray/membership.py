"""What a member of a cluster brings to :meth:`LLMDataDist.init` beyond upstream's option dictionary."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Membership:
    """Passed by the actors; scripts written for upstream never need it (design sections 5 and 8).

    With a membership the environment is not consulted: not for the secret and not for the data paths.
    """

    secret: bytes | None = field(repr=False)
    """The cluster secret; ``None`` = none, then only processes of one uid on one host may link."""

    layout_digest: int
    """:attr:`llm_datadist_ray.engines.base.KvLayout.digest`; another member with another digest is refused at link time."""

    layout_text: str
    """What the layout is, for the text of that refusal."""

    paths: str | None = None
    """Data paths that may carry bulk bytes, as in ``LDR_PATHS``; ``None`` = all."""
