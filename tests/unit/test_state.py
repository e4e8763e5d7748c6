"""The coordinator's state machine under any order of calls, repeated ones and calls of the dead included."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from llm_datadist_ray.actors.errors import MembershipError
from llm_datadist_ray.actors.messages import JoinRequest, LinkReport, MemberRecord, Topology
from llm_datadist_ray.actors.state import ClusterState
from llm_datadist_ray.types import LLMRole

ROLES = st.sampled_from([LLMRole.PROMPT, LLMRole.DECODER])


def request(join_id: str, role: LLMRole = LLMRole.PROMPT) -> JoinRequest:
    return JoinRequest(join_id, role, "127.0.0.1", 4711)


def record(cluster_id: int, role: LLMRole, incarnation: int | None = None) -> MemberRecord:
    return MemberRecord(
        cluster_id=cluster_id,
        incarnation=1000 + cluster_id if incarnation is None else incarnation,
        role=role,
        host="127.0.0.1",
        port=26000,
        pid=4711,
        layout_digest=1,
        layout_text="layout",
        num_blocks=8,
        actor_name=f"{role.name.lower()}-{cluster_id}",
    )


class Cluster(RuleBasedStateMachine):
    """Random histories. The model keeps only what must never be forgotten: who was given which id, and who is dead."""

    members = Bundle("members")

    def __init__(self) -> None:
        super().__init__()
        self.state = ClusterState()
        self.joins: dict[str, int] = {}
        self.roles: dict[int, LLMRole] = {}
        self.live: set[int] = set()
        self.dead: set[int] = set()
        self.seen = Topology(0, ())

    @rule(target=members, number=st.integers(0, 6))
    def join(self, number: int) -> int:
        """Of seven processes, each with its own role; the same one may ask again and again."""
        role = LLMRole.PROMPT if number % 2 else LLMRole.DECODER
        reply = self.state.join(request(f"j{number}", role))
        known = self.joins.setdefault(f"j{number}", reply.cluster_id)
        assert reply.cluster_id == known, "a repeated join got another id"
        assert len(set(self.joins.values())) == len(self.joins), "an id was given to two processes"
        self.roles[known] = role
        return known

    @rule(member=members)
    def register(self, member: int) -> None:
        if member in self.dead:
            with pytest.raises(MembershipError, match="it is dead"):
                self.state.register(record(member, self.roles[member]))
            return
        assert self.state.register(record(member, self.roles[member])) == self.state.epoch
        self.live.add(member)

    @rule(member=members)
    def register_another_incarnation(self, member: int) -> None:
        if member in self.live:
            with pytest.raises(MembershipError, match="needs an id of its own"):
                self.state.register(record(member, self.roles[member], incarnation=7))

    @rule(member=members, reason=st.sampled_from(["its actor was stopped", "its actor has died"]))
    def remove(self, member: int, reason: str) -> None:
        assert self.state.remove(member, reason) == (member not in self.dead)
        self.live.discard(member)
        self.dead.add(member)

    @rule(decoder=members, prompt=members, error=st.sampled_from(["", "", "refused"]), is_stale=st.booleans())
    def report_link(self, decoder: int, prompt: int, error: str, is_stale: bool) -> None:
        report = LinkReport(prompt, 7 if is_stale else 1000 + prompt, ("shm",), error)
        are_live = {decoder, prompt} <= self.live and not is_stale
        if are_live and (self.roles[decoder], self.roles[prompt]) != (LLMRole.DECODER, LLMRole.PROMPT):
            with pytest.raises(MembershipError, match="cannot be the"):
                self.state.record_link(decoder, 1000 + decoder, report)
            return
        assert self.state.record_link(decoder, 1000 + decoder, report) == (are_live and not error)

    @rule(decoder=members, prompt=members)
    def break_link(self, decoder: int, prompt: int) -> None:
        was_up = (decoder, prompt) in self.state.topology().links
        assert self.state.break_link(decoder, prompt) == was_up

    @rule()
    def restart(self) -> None:
        """The coordinator's process dies and comes back with what it stored."""
        self.state = pickle.loads(pickle.dumps(self.state))

    @invariant()
    def members_are_the_live_ones(self) -> None:
        assert {member.cluster_id for member in self.state.topology().members} == self.live

    @invariant()
    def links_are_between_live_incarnations(self) -> None:
        for decoder, prompt in self.state.topology().links:
            assert self.state.member(decoder).role == LLMRole.DECODER
            assert self.state.member(prompt).role == LLMRole.PROMPT

    @invariant()
    def epoch_moves_with_the_topology(self) -> None:
        now = self.state.topology()
        assert now.epoch >= self.seen.epoch
        assert (now.epoch == self.seen.epoch) == ((now.members, now.links) == (self.seen.members, self.seen.links))
        self.seen = now


Cluster.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestCluster = Cluster.TestCase


@pytest.fixture
def pair() -> tuple[ClusterState, int, int]:
    """A state with one decoder and one prompt, not linked."""
    state = ClusterState()
    ids = [state.join(request(role.name, role)).cluster_id for role in (LLMRole.DECODER, LLMRole.PROMPT)]
    for cluster_id, role in zip(ids, (LLMRole.DECODER, LLMRole.PROMPT), strict=True):
        state.register(record(cluster_id, role))
    return state, ids[0], ids[1]


def test_a_dead_members_links_die_with_it(pair: tuple[ClusterState, int, int]) -> None:
    state, decoder, prompt = pair
    assert state.record_link(decoder, 1000 + decoder, LinkReport(prompt, 1000 + prompt, ("shm",)))
    assert state.remove(prompt, "its actor has died")
    assert state.topology().links == frozenset()
    late = LinkReport(prompt, 1000 + prompt, ("shm",))
    assert not state.record_link(decoder, 1000 + decoder, late), "a late report must not link to the dead"


def test_the_successor_of_a_dead_member_gets_a_new_id(pair: tuple[ClusterState, int, int]) -> None:
    state, decoder, prompt = pair
    state.remove(prompt, "its actor has died")
    successor = state.join(request("successor")).cluster_id
    assert successor not in (decoder, prompt)


def test_errors_say_why(pair: tuple[ClusterState, int, int]) -> None:
    state, decoder, prompt = pair
    with pytest.raises(MembershipError, match=r"cluster 99 .* was never given out"):
        state.register(record(99, LLMRole.PROMPT))
    with pytest.raises(MembershipError, match=r"cluster 99 .* was never given out"):
        state.remove(99, "its actor has died")
    fresh = state.join(request("fresh")).cluster_id
    with pytest.raises(MembershipError, match="did not register yet"):
        state.member(fresh)
    with pytest.raises(MembershipError, match=r"joined as LLMRole\.PROMPT and cannot register as LLMRole\.DECODER"):
        state.register(record(fresh, LLMRole.DECODER))
    with pytest.raises(MembershipError, match=rf"cluster {prompt} .* cannot be the LLMRole\.DECODER of a link"):
        state.check_pair(prompt, decoder)
    with pytest.raises(MembershipError, match=r"role LLMRole\.MIX cannot join"):
        state.join(request("mix", LLMRole.MIX))


def test_a_join_id_belongs_to_one_process(pair: tuple[ClusterState, int, int]) -> None:
    state, _, _ = pair
    with pytest.raises(MembershipError, match="was used by"):
        state.join(replace(request(LLMRole.PROMPT.name), pid=1))


def test_repeating_calls_moves_no_epoch(pair: tuple[ClusterState, int, int]) -> None:
    state, decoder, prompt = pair
    report = LinkReport(prompt, 1000 + prompt, ("shm",))
    state.record_link(decoder, 1000 + decoder, report)
    before = state.topology()
    state.join(request(LLMRole.PROMPT.name))
    state.register(record(prompt, LLMRole.PROMPT))
    assert state.record_link(decoder, 1000 + decoder, report)
    assert state.topology() == before


def test_a_successor_goes_on_with_epoch_and_ids(pair: tuple[ClusterState, int, int]) -> None:
    state, decoder, prompt = pair
    successor = ClusterState(epoch=state.epoch + 1, next_cluster_id=state.next_cluster_id)
    assert successor.topology().members == ()
    reply = successor.join(request("new"))
    assert reply.cluster_id > max(decoder, prompt)
    assert reply.epoch > state.epoch
