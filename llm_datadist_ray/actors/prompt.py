"""The prefill actor."""

from __future__ import annotations

from llm_datadist_ray.actors.member import CONCURRENCY_GROUPS, MemberActor
from llm_datadist_ray.actors.messages import Admission, GenerateRequest, Prefilled
from llm_datadist_ray.actors.prefill import PrefillService
from llm_datadist_ray.actors.remote import actor, method
from llm_datadist_ray.actors.worker import WorkerCore
from llm_datadist_ray.types import LLMRole


@actor(num_cpus=0, max_restarts=0, concurrency_groups=CONCURRENCY_GROUPS)
class PromptActor(MemberActor[PrefillService]):
    """A Ray face on :class:`PrefillService`; errors are those of that class."""

    role = LLMRole.PROMPT

    @method(concurrency_group="control")
    def admit(self, request: GenerateRequest) -> Admission:
        return self._serving().admit(request)

    @method(concurrency_group="data")
    def prefill(self, attempt_id: str) -> Prefilled:
        return self._serving().prefill(attempt_id)

    def _serve(self, core: WorkerCore) -> PrefillService:
        return PrefillService(core)
