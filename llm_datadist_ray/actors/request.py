"""One request's way through a cluster, as its client sees it."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ray.exceptions import ActorDiedError, RayError, RayTaskError

from llm_datadist_ray.actors.attempt import new_attempt
from llm_datadist_ray.actors.errors import RequestCancelled, RequestError, RequestFailed
from llm_datadist_ray.actors.interrupt import Interrupt
from llm_datadist_ray.actors.messages import GenerateRequest, MemberRecord, Prefilled, RequestReport, TokenPiece
from llm_datadist_ray.actors.router import Route, RouteError, Router, describe

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
        """From any thread: an iteration that waits ends at once with RequestCancelled, and both sides free what they
        hold. Waits until both have heard of it, at most a second."""
        self._passage.cancel()


class _Passage:
    """The request on its way: admit, reserve, prefill, decode; on any failure both sides are cancelled."""

    def __init__(self, router: Router, request: GenerateRequest) -> None:
        self.request = request
        self.report: RequestReport | None = None
        self._attempt_id = new_attempt(request.request_id)
        self._router = router
        self._route: Route | None = None
        self._interrupt = Interrupt()
        self._started_at = 0.0

    def cancel(self) -> None:
        self._interrupt.set(self._cancelled())
        route = self._route
        if route is not None:
            self._cancel_both(route)

    def run(self) -> Generator[TokenPiece, None, None]:
        self._started_at = time.monotonic()
        try:
            with self._router.route(self.request.request_id, self._interrupt) as route:
                yield from self._travel(route)
        except RouteError as error:
            raise self._failed(error.step, error.who, error.reason) from error

    def _travel(self, route: Route) -> Iterator[TokenPiece]:
        self._route = route  # before the first look at the interrupt: whoever cancels later finds it
        try:
            yield from self._steps(route)
        except RequestError as error:
            if (reason := self._interrupt.reason) is not None:
                # Whoever interrupted tells both sides; this thread is free at once.
                if error is reason:
                    raise
                raise reason from error
            self._cancel_both(route)
            if isinstance(error, RequestFailed) and error.step in _HANDOFF_STEPS:
                self._router.mark_broken(route)
            raise
        except BaseException:
            # No link, or the client went away (GeneratorExit), or was interrupted.
            self._cancel_both(route)
            raise
        finally:
            self._route = None

    def _steps(self, route: Route) -> Iterator[TokenPiece]:
        attempt_id, prompt, decoder = self._attempt_id, route.prompt, route.decoder
        self._interrupt.check()
        self._router.ensure_link(route, self._interrupt.wait)
        admit = prompt.admit.remote(replace(self.request, request_id=attempt_id))
        admission = self._call("admit", route.prompt_record, admit)
        # Sink blocks before prefill: a prompt that nobody can decode is not computed.
        limits = (admission.num_prompt_tokens, self.request.max_tokens)
        reserve = decoder.reserve.remote(attempt_id, *limits, self.request.sampling)
        self._call("reserve", route.decoder_record, reserve)
        prefilled: Prefilled = self._call("prefill", route.prompt_record, prompt.prefill.remote(attempt_id))
        stream = decoder.decode.remote(attempt_id, prefilled.handoff, describe(route.prompt_record))
        first_token_s = 0.0
        for item in self._items(stream, route.decoder_record):
            if isinstance(item, RequestReport):
                self.report = _completed(item, prefilled, first_token_s)
            else:
                first_token_s = first_token_s or time.monotonic() - self._started_at
                yield item
        if self.report is None:  # a decoder ends a cancelled request without a word
            raise self._cancelled()

    def _call(self, step: str, member: MemberRecord, ref: Any) -> Any:
        with self._naming(step, member):
            return self._interrupt.wait(ref)

    def _items(self, stream: Any, decoder: MemberRecord) -> Iterator[TokenPiece | RequestReport]:
        items = self._interrupt.iterate(stream)
        while True:
            with self._naming("decode", decoder):
                item = next(items, None)
            if item is None:
                return
            yield item

    @contextmanager
    def _naming(self, step: str, member: MemberRecord) -> Iterator[None]:
        """What Ray raises becomes what a client understands."""
        try:
            yield
        except RayTaskError as error:
            if isinstance(error.cause, RequestError):
                raise error.cause from None
            reason = f"{type(error.cause).__name__}: {error.cause}; its log has the details"
            raise self._failed(step, describe(member), reason) from error
        except ActorDiedError as error:
            self._router.mark_dead(member.cluster_id)
            reason = "its process has died; the blocks of this request are being freed, try again"
            raise self._failed(step, describe(member), reason) from error
        except RayError as error:
            reason = f"Ray could not reach it for the moment ({type(error).__name__}: {error}); try again"
            raise self._failed(step, describe(member), reason) from error

    def _cancelled(self) -> RequestCancelled:
        return RequestCancelled(f"request {self.request.request_id} was cancelled")

    def _failed(self, step: str, who: str, reason: str) -> RequestFailed:
        elapsed_s = time.monotonic() - self._started_at
        return RequestFailed(
            f"request {self.request.request_id}: {who} failed in step {step} after {elapsed_s * 1000:.0f} ms: {reason}",
            member=who,
            step=step,
            elapsed_s=elapsed_s,
        )

    def _cancel_both(self, route: Route) -> None:
        """Tells both sides and waits until they answered. One that has died needs no telling."""
        if not self._router.is_open:
            return  # dropped after the shutdown: there is nobody to tell
        answers = [member.cancel.remote(self._attempt_id).future() for member in (route.prompt, route.decoder)]
        wait(answers, timeout=_CANCEL_TIMEOUT_S)


def _completed(report: RequestReport, prefilled: Prefilled, first_token_s: float) -> RequestReport:
    """The decoder's report with what only the router knows."""
    times = replace(
        report.times,
        prefill_s=prefilled.prefill_s,
        handoff_s=report.times.handoff_s + prefilled.mint_s,
        first_token_s=first_token_s,
    )
    return replace(report, times=times)
