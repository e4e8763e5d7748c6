"""The decode actor."""

from __future__ import annotations

from collections.abc import Iterator

from llm_datadist_ray.actors.decode import DecodeService
from llm_datadist_ray.actors.member import CONCURRENCY_GROUPS, MemberActor
from llm_datadist_ray.actors.messages import RequestReport, Reservation, TokenPiece
from llm_datadist_ray.actors.remote import actor, method
from llm_datadist_ray.actors.worker import WorkerCore
from llm_datadist_ray.engines.base import GREEDY, Sampling
from llm_datadist_ray.handoff.handoff import Handoff
from llm_datadist_ray.types import LLMRole


@actor(num_cpus=0, max_restarts=0, concurrency_groups=CONCURRENCY_GROUPS)
class DecoderActor(MemberActor[DecodeService]):
    """A Ray face on :class:`DecodeService`; errors are those of that class."""

    role = LLMRole.DECODER

    @method(concurrency_group="control")
    def reserve(
        self, attempt_id: str, num_prompt_tokens: int, max_tokens: int, sampling: Sampling = GREEDY
    ) -> Reservation:
        return self._serving().reserve(attempt_id, num_prompt_tokens, max_tokens, sampling)

    @method(concurrency_group="data", num_returns="streaming")
    def decode(self, attempt_id: str, handoff: Handoff, source: str = "") -> Iterator[TokenPiece | RequestReport]:
        """A streaming generator. Dropping it does not stop it: call :meth:`cancel`."""
        yield from self._serving().decode(attempt_id, handoff, source)

    def _serve(self, core: WorkerCore) -> DecodeService:
        return DecodeService(core, damaged_block=self._config.testing.overwrite_pulled_block)
