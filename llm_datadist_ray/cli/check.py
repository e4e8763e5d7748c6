"""The proof behind ``--check``: the same model in one process, without blocks and transfers, gives the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llm_datadist_ray.actors.cluster_config import ClusterConfig
    from llm_datadist_ray.engines.base import Engine, Sampling


@dataclass(frozen=True, slots=True)
class CheckResult:
    """``num_compared`` is the length of the longer one of the two, so a missing token counts as a different one."""

    num_equal: int
    num_compared: int
    first_difference: str = ""
    """A sentence; empty when there is none."""

    @property
    def is_equal(self) -> bool:
        return self.num_equal == self.num_compared


def compare(token_ids: Sequence[int], reference: Sequence[int]) -> CheckResult:
    pairs = list(zip_longest(token_ids, reference))
    different = [position for position, (ours, theirs) in enumerate(pairs) if ours != theirs]
    if not different:
        return CheckResult(len(pairs), len(pairs))
    position = different[0]
    ours, theirs = ("no token" if token is None else f"token id {token}" for token in pairs[position])
    sentence = f"at index {position} the cluster gave {ours}, one process gives {theirs}"
    return CheckResult(len(pairs) - len(different), len(pairs), sentence)


class Reference:
    """The model in this process. Loading it blocks for seconds; generating for as long as the model takes."""

    def __init__(self, config: ClusterConfig) -> None:
        from llm_datadist_ray import engines

        self._engine: Engine = engines.create(config.engine_spec())
        self._max_context_tokens = config.model.max_context_tokens or self._engine.max_context_tokens

    def check(
        self, token_ids: Sequence[int], prompt: str, *, chat: bool, max_tokens: int, sampling: Sampling
    ) -> CheckResult:
        prompt_ids = self._engine.encode(prompt, chat=chat)
        # The last token is never computed with, so it needs no place in the context.
        room = self._max_context_tokens - len(prompt_ids) + 1
        reference = self._engine.generate_alone(prompt_ids, min(max_tokens, room), sampling=sampling)
        return compare(token_ids, reference)
