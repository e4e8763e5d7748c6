"""What goes wrong in a cluster, sorted by what the caller does next. All pickle: they cross Ray's borders.

::

    RequestError
      RequestRejected     change the request, or come back later: nothing was computed
      RequestCancelled    nothing: the caller asked for it
      RequestFailed       try again, maybe elsewhere: names member, step and time
      LaunchError         look at the cluster: it did not come up, or somebody else owns the name
    ConfigError           mend the configuration file
"""

from __future__ import annotations


class RequestError(RuntimeError):
    """Base of everything that a :class:`~llm_datadist_ray.DisaggCluster` raises for a request or a launch."""


class RequestRejected(RequestError):
    """The request was not admitted: an empty prompt, one longer than the cache, ``max_tokens`` below 1, or no room."""


class RequestCancelled(RequestError):
    """The request was cancelled; its blocks are free on both sides, or about to be."""


class RequestFailed(RequestError):
    """The request was admitted and did not end. ``member`` is the one that failed, ``step`` what it was doing."""

    def __init__(self, message: str, *, member: str = "", step: str = "", elapsed_s: float = 0.0) -> None:
        super().__init__(message)
        self.member = member
        self.step = step
        self.elapsed_s = elapsed_s


class LaunchError(RequestError):
    """A cluster could not be started or joined; what had been started of it is gone again."""


class ConfigError(ValueError):
    """A cluster configuration is wrong; each line of the message names one key."""


class MembershipError(RuntimeError):
    """The coordinator refuses a member's call: unknown or dead cluster id, another role, another incarnation."""
