"""A request's way with members that are plain objects: no Ray runs here. What they are told, and what a client sees."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator
from concurrent.futures import Future
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError

from llm_datadist_ray.actors import RequestCancelled, RequestFailed, RequestRejected, RequestStream
from llm_datadist_ray.actors.launcher import Launcher
from llm_datadist_ray.actors.messages import (
    Admission,
    GenerateRequest,
    LinkReport,
    MemberRecord,
    Prefilled,
    RequestReport,
    Reservation,
    TokenPiece,
    Topology,
)
from llm_datadist_ray.actors.ray_session import RaySession
from llm_datadist_ray.actors.router import Router
from llm_datadist_ray.engines.base import Sampling
from llm_datadist_ray.handoff import Handoff
from llm_datadist_ray.types import LLMRole
from tests.ray.helpers import tiny_config

PROMPT_TEXT = "a prompt that nobody else has ever written"
HANDOFF = Handoff("r", 1, 11, "127.0.0.1:1", 1, 2, 3, "model", 40, 7, 5, 3)
PIECE = TokenPiece("r", 0, 7, "x")
REPORT = RequestReport("r", 1, 2, 40, (7,), "x", "length", 100, "shm")
DEADLINE_S = 10.0


class Ref:
    """An answer that is there, or (``None``) never comes."""

    def __init__(self, answer: Any) -> None:
        self._future: Future[Any] = Future()
        if isinstance(answer, BaseException):
            self._future.set_exception(answer)
        elif answer is not None:
            self._future.set_result(answer)

    def future(self) -> Future[Any]:
        return self._future

    def __await__(self) -> Generator[Any, None, Any]:
        yield from ()
        return self._future.result()


class Method:
    def __init__(self, called: list[tuple[Any, ...]], name: str, answer: Any) -> None:
        self._called, self._name, self.answer = called, name, answer
        self.was_called = threading.Event()

    def remote(self, *args: Any) -> Any:
        self._called.append((self._name, *args))
        self.was_called.set()
        return _stream(self.answer) if isinstance(self.answer, list) else Ref(self.answer)


async def _stream(items: list[Any]) -> AsyncIterator[Ref]:
    for item in items:
        yield Ref(item)


class Actor:
    def __init__(self, **answers: Any) -> None:
        self.called: list[tuple[Any, ...]] = []
        for name, answer in answers.items():
            setattr(self, name, Method(self.called, name, answer))


class Session(RaySession):
    """Of a Ray that nobody needs; ``is_alive`` is what a test says."""

    is_up = True

    @property
    def is_alive(self) -> bool:
        return self.is_up


def record(cluster_id: int, role: LLMRole, name: str) -> MemberRecord:
    return MemberRecord(cluster_id, 10 + cluster_id, role, "10.0.0.1", 26000, 4700 + cluster_id, 1, "layout", 8, name)


class World:
    """One prompt, one decoder, a coordinator and a real router."""

    def __init__(self) -> None:
        self.p = Actor(
            admit=Admission("r", 40), prefill=Prefilled(HANDOFF, prefill_s=0.1, mint_s=0.1), cancel="cancelled"
        )
        self.d = Actor(reserve=Reservation("r", 3), decode=[PIECE, REPORT], cancel="cancelled")
        members = (record(1, LLMRole.PROMPT, "prompt-0"), record(2, LLMRole.DECODER, "decoder-0"))
        self.coordinator = Actor(
            topology=Topology(3, members), ensure_link=LinkReport(1, 11, ("shm",)), report_broken_link=True
        )
        self.router = Router(self.coordinator, "tests", "namespace", Session(False, ("node", "job")))

    def stream(self, request_id: str = "r", **changes: Any) -> RequestStream:
        return RequestStream(self.router, GenerateRequest(request_id, PROMPT_TEXT, 5, chat=False, **changes))

    def attempts(self, actor: Actor, method: str) -> list[str]:
        return [getattr(args[0], "request_id", args[0]) for name, *args in actor.called if name == method]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(world.router, "handle_of", lambda member: world.p if member.cluster_id == 1 else world.d)
    return world


class Iteration(threading.Thread):
    """Reads a stream to its end in a thread of its own."""

    def __init__(self, stream: RequestStream) -> None:
        super().__init__(daemon=True)
        self.error: Exception | None = None
        self._stream = stream
        self.start()

    def run(self) -> None:
        try:
            list(self._stream)
        except Exception as error:
            self.error = error


def test_every_try_has_an_id_of_its_own_and_the_client_sees_only_its_own(world: World) -> None:
    for _ in range(2):
        stream = world.stream("r")
        assert list(stream) == [PIECE]
        assert stream.report is not None
        assert stream.report.request_id == "r"
    used = [world.attempts(actor, method) for actor, method in ((world.p, "admit"), (world.p, "prefill"))]
    used += [world.attempts(world.d, method) for method in ("reserve", "decode")]
    assert used[0] == used[1] == used[2] == used[3]
    first, second = used[0]
    assert first != second
    assert first.startswith("r")


def test_the_decoder_never_learns_the_prompt(world: World) -> None:
    """Neither its text nor its token ids: what goes to it is ids, counts and the handoff's numbers."""
    list(world.stream(sampling=Sampling(0.5, 0.9, 3)))
    told = {name: args for name, *args in world.d.called}
    assert told["reserve"][1:] == [40, 5, Sampling(0.5, 0.9, 3)]
    assert told["decode"][1] == HANDOFF
    assert PROMPT_TEXT.encode() not in pickle.dumps(told)
    assert {type(getattr(HANDOFF, field)) for field in HANDOFF.__slots__} == {int, str}


def test_an_id_in_use_is_refused_and_the_first_request_does_not_notice(world: World) -> None:
    first = world.stream("same")
    assert next(first) == PIECE
    told_before = (list(world.p.called), list(world.d.called))
    with pytest.raises(RequestRejected, match="request same: this id is in use by another request"):
        next(world.stream("same"))
    assert (world.p.called, world.d.called) == told_before
    assert list(first) == []
    assert first.report is not None
    assert list(world.stream("same")) == [PIECE], "after its end the id is free at once"


def test_a_rejected_request_may_come_again_with_its_id(world: World) -> None:
    good, world.d.reserve.answer = world.d.reserve.answer, RequestRejected("request r: decoder 2 is full")
    with pytest.raises(RequestRejected, match="is full"):
        list(world.stream("r"))
    (cancelled,) = world.attempts(world.d, "cancel")
    world.d.reserve.answer = good
    assert list(world.stream("r")) == [PIECE]
    assert cancelled not in world.attempts(world.d, "decode")


@pytest.mark.parametrize(("actor", "method"), [("p", "admit"), ("d", "reserve"), ("p", "prefill")])
def test_cancel_frees_a_client_that_waits_for_a_silent_member(world: World, actor: str, method: str) -> None:
    silent: Method = getattr(getattr(world, actor), method)
    silent.answer = None
    stream = world.stream()
    iteration = Iteration(stream)
    assert silent.was_called.wait(DEADLINE_S)
    started_at = time.monotonic()
    stream.cancel()
    iteration.join(DEADLINE_S)
    assert time.monotonic() - started_at < 0.5
    assert isinstance(iteration.error, RequestCancelled)
    (attempt,) = world.attempts(world.p, "admit")
    assert world.attempts(world.p, "cancel") == world.attempts(world.d, "cancel") == [attempt]


def test_cancel_frees_a_client_although_no_member_answers_the_cancel(world: World) -> None:
    for method in (world.p.prefill, world.p.cancel, world.d.cancel):
        method.answer = None
    stream = world.stream()
    iteration = Iteration(stream)
    assert world.p.prefill.was_called.wait(DEADLINE_S)
    canceller = threading.Thread(target=stream.cancel)
    started_at = time.monotonic()
    canceller.start()
    iteration.join(DEADLINE_S)
    assert time.monotonic() - started_at < 0.5
    canceller.join(DEADLINE_S)
    assert isinstance(iteration.error, RequestCancelled)


def test_closing_the_router_ends_the_requests_that_are_on_their_way(world: World) -> None:
    world.p.prefill.answer = None
    iteration = Iteration(world.stream())
    assert world.p.prefill.was_called.wait(DEADLINE_S)
    world.router.close(RequestFailed("cluster tests is shut down"))
    iteration.join(DEADLINE_S)
    assert isinstance(iteration.error, RequestFailed)
    assert "is shut down" in str(iteration.error)
    assert world.attempts(world.p, "cancel") == [], "its Ray may be gone: nobody may be called"
    with pytest.raises(RequestFailed, match="it is shut down: launch it again"):
        next(world.stream())


def test_nothing_is_called_once_ray_is_gone_from_the_process(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    on_its_way, early = world.stream("a"), world.stream("b")
    next(on_its_way)
    monkeypatch.setattr(Session, "is_up", False)
    told_before = [list(actor.called) for actor in (world.p, world.d, world.coordinator)]
    on_its_way.close()
    for ask in (lambda: next(early), lambda: next(world.stream("c"))):
        with pytest.raises(RequestFailed, match="the Ray that it runs in was shut down"):
            ask()
    assert [actor.called for actor in (world.p, world.d, world.coordinator)] == told_before


def test_only_a_death_takes_a_member_out(world: World) -> None:
    good = world.p.admit.answer
    world.p.admit.answer = ActorUnavailableError("connection lost", None)
    with pytest.raises(RequestFailed, match=r"prompt-0 \(cluster 1.*in step admit .*for the moment.*try again"):
        list(world.stream())
    world.p.admit.answer = good
    assert list(world.stream()) == [PIECE], "a member that could not be reached once is asked again"
    world.p.admit.answer = ActorDiedError()
    with pytest.raises(RequestFailed, match="has died"):
        list(world.stream())
    with pytest.raises(RequestFailed, match=r"request r: cluster tests failed in step route after .* no prompt actor"):
        list(world.stream())


def _link_refused(world: World) -> None:
    world.coordinator.ensure_link.answer = LinkReport(1, 11, error="no route to host")


def _coordinator_gone(world: World) -> None:
    world.coordinator.ensure_link.answer = ActorDiedError()


def _link_lost(world: World) -> None:
    world.d.decode.answer = [RequestFailed("x", member="prompt-0", step="open")]


@pytest.mark.parametrize(
    ("fail", "words"),
    [
        (_link_refused, ["decoder-0 (cluster 2", "prompt-0 (cluster 1", "step link", "no route to host", "try again"]),
        (_coordinator_gone, ["coordinator of cluster tests", "step link", "it is gone", "launch it again"]),
    ],
)
def test_a_link_that_cannot_be_made_says_who_how_long_and_what_next(
    world: World, fail: Callable[[World], None], words: list[str]
) -> None:
    fail(world)
    with pytest.raises(RequestFailed) as caught:
        list(world.stream())
    assert [word for word in ["request r: ", "ms", *words] if word not in str(caught.value)] == []
    assert caught.value.step == "link"
    assert caught.value.elapsed_s > 0


def test_after_a_failed_transfer_the_pair_links_again_and_nobody_waits_for_the_coordinator(world: World) -> None:
    linked = Topology(4, world.coordinator.topology.answer.members, frozenset({(2, 1)}))
    world.coordinator.topology.answer = linked
    world.router.refresh()
    list(world.stream())
    assert world.attempts(world.coordinator, "ensure_link") == [], "the topology says that they are linked"
    world.coordinator.report_broken_link.answer = None  # it is being started again
    _link_lost(world)
    with pytest.raises(RequestFailed):
        list(world.stream())
    world.d.decode.answer = [PIECE, REPORT]
    assert list(world.stream()) == [PIECE]
    assert world.attempts(world.coordinator, "ensure_link") == [2]


def test_a_coordinator_that_is_gone_is_no_new_cluster(world: World) -> None:
    world.coordinator.topology.answer = ActorDiedError()
    session = Session(False, ("node", "job"))
    with pytest.raises(Exception, match="coordinator of cluster tests failed in step topology: it is gone"):
        Router(world.coordinator, "tests", "namespace", session)


def test_a_launcher_whose_ray_is_gone_calls_nobody(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(True, ("node", "job"))
    launcher = Launcher(tiny_config("gone"), print, session, coordinator=world.coordinator, members={"p": world.p})
    world.coordinator.called.clear()
    monkeypatch.setattr(Session, "is_up", False)
    launcher.stop()
    session.close()
    assert world.p.called == world.coordinator.called == []


def test_an_error_of_ray_itself_is_a_failed_request(world: World) -> None:
    world.p.prefill.answer = RayError("lost")
    with pytest.raises(RequestFailed, match=r"prompt-0 .* failed in step prefill"):
        list(world.stream())
