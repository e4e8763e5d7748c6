"""One request's way through a cluster, as its client sees it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from llm_datadist_ray.actors.errors import RequestCancelled, RequestError, RequestFailed
from llm_datadist_ray.actors.messages import GenerateRequest, MemberRecord, Prefilled, RequestReport, TokenPiece
from llm_datadist_ray.actors.router import Route, Router, describe

_CANCEL_TIMEOUT_S = 1.0
_HANDOFF_STEPS = ("open", "transfer", "close")


class RequestStream:
    """Iterates over the tokens as they come; nothing starts before the first one is asked for.

    A client that stops early, by :meth:`close`, :meth:`cancel` or by dropping this object, frees both sides. Iterate
    from one thread; any may cancel.
    """

    def __init__(self, router: Router, request: GenerateRequest) -> None:
        # The generator must not know this object: dropping it then closes the generator at once.
        self._passage = _Passage(router, request)
        self._pieces = self._passage.run()

    @property
    def request(self) -> GenerateRequest:
        return self._passage.request

    @property
    def report(self) -> RequestReport | None:
        """There once the iteration has ended normally."""
        return self._passage.report

    def __iter__(self) -> Iterator[TokenPiece]:
        return self

    def __next__(self) -> TokenPiece:
        """RequestRejected, RequestCancelled, or RequestFailed naming the member, the step and the time."""
        return next(self._pieces)

    def close(self) -> None:
        """Ends the iteration, from its own thread. Waits until both sides have heard of it, at most a second."""
        self._pieces.close()

    def cancel(self) -> None:
        """From any thread: both sides free what they hold; an iteration that waits ends with RequestCancelled."""
        self._passage.cancel()


class _Passage:
    """The request on its way: admit, reserve, prefill, decode; on any failure both sides are cancelled."""

    def __init__(self, router: Router, request: GenerateRequest) -> None:
        self.request = request
        self.report: RequestReport | None = None
        self._router = router
        self._route: Route | None = None
        self._is_cancelled = False
        self._started_at = 0.0

    def cancel(self) -> None:
        self._is_cancelled = True
        route = self._route
        if route is not None:
            self._cancel_both(route)

    def run(self) -> Generator[TokenPiece, None, None]:
        self._started_at = time.monotonic()
        with self._router.route(self.request.request_id) as route:
            self._route = route
            try:
                yield from self._steps(route)
            except RequestError as error:
                self._cancel_both(route)
                if self._is_cancelled and not isinstance(error, RequestCancelled):
                    raise self._cancelled() from error
                if isinstance(error, RequestFailed) and error.step in _HANDOFF_STEPS:
                    with contextlib.suppress(RequestFailed):  # this request's own failure is the one to tell
                        self._router.report_broken_link(route)
                raise
            except BaseException:
                # The client went away (GeneratorExit), or was interrupted.
                self._cancel_both(route)
                raise
            finally:
                self._route = None

    def _steps(self, route: Route) -> Iterator[TokenPiece]:
        request_id, prompt, decoder = self.request.request_id, route.prompt, route.decoder
        self._check_cancelled()
        self._router.ensure_link(route)
        admission = self._call("admit", route.prompt_record, prompt.admit.remote(self.request))
        # Sink blocks before prefill: a prompt that nobody can decode is not computed.
        reservation = decoder.reserve.remote(request_id, admission.num_prompt_tokens, self.request.max_tokens)
        self._call("reserve", route.decoder_record, reservation)
        prefilled = self._call("prefill", route.prompt_record, prompt.prefill.remote(request_id))
        first_token_s = 0.0
        for ref in decoder.decode.remote(request_id, prefilled.handoff):
            item = self._call("decode", route.decoder_record, ref)
            if isinstance(item, RequestReport):
                self.report = _completed(item, prefilled, first_token_s)
            else:
                first_token_s = first_token_s or time.monotonic() - self._started_at
                yield item
        if self.report is None:  # a decoder ends a cancelled request without a word
            raise self._cancelled()

    def _call(self, step: str, member: MemberRecord, ref: Any) -> Any:
        try:
            answer = ray.get(ref)
        except RayTaskError as error:
            if isinstance(error.cause, RequestError):
                raise error.cause from None
            raise self._failed(step, member, f"{type(error.cause).__name__}: {error.cause}") from error
        except RayActorError as error:
            self._router.mark_dead(member.cluster_id)
            reason = "its process has died; the blocks of this request are being freed, try again"
            raise self._failed(step, member, reason) from error
        self._check_cancelled()
        return answer

    def _check_cancelled(self) -> None:
        if self._is_cancelled:
            raise self._cancelled()

    def _cancelled(self) -> RequestCancelled:
        return RequestCancelled(f"request {self.request.request_id} was cancelled")

    def _failed(self, step: str, member: MemberRecord, reason: str) -> RequestFailed:
        elapsed_s = time.monotonic() - self._started_at
        return RequestFailed(
            f"request {self.request.request_id}: {describe(member)} failed in step {step} after "
            f"{elapsed_s * 1000:.0f} ms: {reason}",
            member=describe(member),
            step=step,
            elapsed_s=elapsed_s,
        )

    def _cancel_both(self, route: Route) -> None:
        """Tells both sides and waits until they answered. One that has died needs no telling."""
        if not ray.is_initialized():
            return  # dropped after the shutdown: there is nobody to tell
        request_id = self.request.request_id
        refs = [route.prompt.cancel.remote(request_id), route.decoder.cancel.remote(request_id)]
        ray.wait(refs, num_returns=len(refs), timeout=_CANCEL_TIMEOUT_S)


def _completed(report: RequestReport, prefilled: Prefilled, first_token_s: float) -> RequestReport:
    """The decoder's report with what only the router knows."""
    times = replace(
        report.times,
        prefill_s=prefilled.prefill_s,
        handoff_s=report.times.handoff_s + prefilled.mint_s,
        first_token_s=first_token_s,
    )
    return replace(report, times=times)
