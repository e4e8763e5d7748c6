"""A PROMPT and a DECODER in the processes of a pair. v1 knows the two-sided mode only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llm_datadist_ray import LLMRole
from tests.conformance import row_side
from tests.conformance.collective import free_port
from tests.conformance.pair import SUCCESS, End, Pair
from tests.conformance.pool_cache import on_dist
from tests.conformance.row_checks import v1_options

LINK_TIMEOUT_MS = 5000


@dataclass(frozen=True)
class V1Pair:
    prompt: End
    decoder: End

    def link(self) -> None:
        info = self.prompt.info()
        assert on_dist(self.decoder, "link_clusters", [info], LINK_TIMEOUT_MS) == (SUCCESS, [SUCCESS])


def init_v1(pair: Pair, **config: Any) -> V1Pair:
    """Not linked; ``config`` are further properties of both ends' LLMConfig."""
    config.setdefault("sync_kv_timeout", 20_000)
    ends = V1Pair(prompt=pair.b, decoder=pair.a)
    ends.prompt.port = free_port()
    for end, role in ((ends.prompt, LLMRole.PROMPT), (ends.decoder, LLMRole.DECODER)):
        options = v1_options(role, listen_ip_info=f"127.0.0.1:{ends.prompt.port}", **config)
        end.process.run(row_side.init_with, role, end.cluster_id, options)
    return ends
