"""Which links are in use: v1 refuses a second operation on a link, it does not queue (spec api-kvcachemanager §1)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from llm_datadist_ray.errors import LLMException, LLMStatusCode


class BusyLinks:
    """The links to one remote cluster, those of all devices, serve one operation at a time. Any thread."""

    def __init__(self) -> None:
        self._marks: dict[int, list[str]] = {}
        """Of each link in use: the operation's name, in a list that is this very operation's."""

    @contextmanager
    def use(self, cluster_id: int, operation: str) -> Iterator[None]:
        """LLMException(LLM_LINK_BUSY) at once, which names the operation that has the link."""
        mark = [operation]
        try:
            running = self._marks.setdefault(cluster_id, mark)
            if running is not mark:
                raise LLMException(
                    f"{operation}: the link to cluster {cluster_id} is in use by {running[0]}, try again when that has "
                    "ended",
                    status_code=LLMStatusCode.LLM_LINK_BUSY,
                )
            yield
        finally:
            # Signal handlers run at calls: there is none here, so that one which raises cannot leave the mark behind.
            if cluster_id in self._marks and self._marks[cluster_id] is mark:
                del self._marks[cluster_id]
