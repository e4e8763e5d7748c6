"""The coordinator's state machine: pure, no Ray, no clock, no I/O. The actor around it holds the lock.

Every mutation is idempotent: repeating a call, in any order with others, gives the same answer and changes nothing
more (Ray delivers at least once). A cluster id belongs to one incarnation for ever; once that is dead the id is never
live again. ``epoch`` moves by one whenever, and only when, the topology moves.
"""

from __future__ import annotations

from llm_datadist_ray.actors.errors import MembershipError
from llm_datadist_ray.actors.messages import JoinReply, JoinRequest, LinkReport, MemberRecord, Topology
from llm_datadist_ray.types import LLMRole

_ROLES = (LLMRole.PROMPT, LLMRole.DECODER)


class ClusterState:
    """Members, links and ids of one cluster. Not thread safe; picklable, so that it can be stored as it is.

    The successor of another cluster of that name goes on with its epoch and ids, so that nobody who still knows the old
    topology takes an old member for a new one.
    """

    def __init__(self, *, epoch: int = 0, next_cluster_id: int = 1) -> None:
        self._epoch = epoch
        self._next_cluster_id = next_cluster_id
        self._joins: dict[str, tuple[JoinRequest, int]] = {}
        self._joined: dict[int, JoinRequest] = {}
        self._members: dict[int, MemberRecord] = {}
        self._dead: dict[int, str] = {}
        self._links: set[tuple[int, int]] = set()

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def next_cluster_id(self) -> int:
        return self._next_cluster_id

    def topology(self) -> Topology:
        members = tuple(self._members[cluster_id] for cluster_id in sorted(self._members))
        return Topology(self._epoch, members, frozenset(self._links))

    def member(self, cluster_id: int) -> MemberRecord:
        """A live, registered member. MembershipError that says why there is none."""
        record = self._members.get(cluster_id)
        if record is None:
            raise MembershipError(f"cluster {cluster_id} is no member: {self._why_not(cluster_id)}")
        return record

    def join(self, request: JoinRequest) -> JoinReply:
        """A cluster id that was never given before; the same one again for a repeated ``join_id``.

        MembershipError for a role that an actor cannot have, and for a ``join_id`` that somebody else used.
        """
        known = self._joins.get(request.join_id)
        if known is not None:
            if known[0] != request:
                raise MembershipError(f"join id {request.join_id} was used by {known[0]}, now by {request}")
            return JoinReply(known[1], self._epoch)
        if request.role not in _ROLES:
            raise MembershipError(f"role {request.role} cannot join: an actor is {_ROLES[0]} or {_ROLES[1]}")
        cluster_id = self._next_cluster_id
        self._next_cluster_id += 1
        self._joins[request.join_id] = (request, cluster_id)
        self._joined[cluster_id] = request
        return JoinReply(cluster_id, self._epoch)

    def register(self, record: MemberRecord) -> int:
        """Makes a joined process a member; returns the epoch. MembershipError when it never joined, is dead, has
        another role than it joined with, or the id is another incarnation's."""
        cluster_id = record.cluster_id
        request = self._joined.get(cluster_id)
        if request is None or cluster_id in self._dead:
            raise MembershipError(f"cluster {cluster_id} cannot register: {self._why_not(cluster_id)}")
        if record.role != request.role:
            raise MembershipError(f"cluster {cluster_id} joined as {request.role} and cannot register as {record.role}")
        known = self._members.get(cluster_id)
        if known is not None and known.incarnation != record.incarnation:
            raise MembershipError(
                f"cluster {cluster_id} is incarnation {known.incarnation:x}; incarnation {record.incarnation:x} needs "
                "an id of its own: join first"
            )
        if known != record:
            self._members[cluster_id] = record
            self._epoch += 1
        return self._epoch

    def remove(self, cluster_id: int, reason: str) -> bool:
        """The member and its links are gone, its id is spent. False when that is known already."""
        if cluster_id not in self._joined:
            raise MembershipError(f"cluster {cluster_id} cannot go: {self._why_not(cluster_id)}")
        if cluster_id in self._dead:
            return False
        self._dead[cluster_id] = reason
        self._links = {pair for pair in self._links if cluster_id not in pair}
        if self._members.pop(cluster_id, None) is not None:
            self._epoch += 1
        return True

    def check_pair(self, decoder_id: int, prompt_id: int) -> tuple[MemberRecord, MemberRecord]:
        """(decoder, prompt), both live. MembershipError also for wrong roles."""
        decoder, prompt = self.member(decoder_id), self.member(prompt_id)
        for record, role in ((decoder, LLMRole.DECODER), (prompt, LLMRole.PROMPT)):
            if record.role != role:
                raise MembershipError(
                    f"cluster {record.cluster_id} ({record.actor_name}) is {record.role} and cannot be the {role} of a "
                    "link"
                )
        return decoder, prompt

    def record_link(self, decoder_id: int, decoder_incarnation: int, report: LinkReport) -> bool:
        """Files what a decoder reports about its link to ``report.cluster_id``: up, or (with an error) not.

        True when that link is up now. A report by or about an incarnation that is dead, or not this one, is ignored.
        """
        decoder, prompt = self._members.get(decoder_id), self._members.get(report.cluster_id)
        if decoder is None or prompt is None:
            return False
        if (decoder.incarnation, prompt.incarnation) != (decoder_incarnation, report.incarnation):
            return False
        self.check_pair(decoder_id, report.cluster_id)
        pair = (decoder_id, report.cluster_id)
        if report.error:
            self.break_link(*pair)
        elif pair not in self._links:
            self._links.add(pair)
            self._epoch += 1
        return pair in self._links

    def break_link(self, decoder_id: int, prompt_id: int) -> bool:
        """That link is down, its ends are not. False when it was not up."""
        pair = (decoder_id, prompt_id)
        if pair not in self._links:
            return False
        self._links.remove(pair)
        self._epoch += 1
        return True

    def _why_not(self, cluster_id: int) -> str:
        if cluster_id in self._dead:
            return f"it is dead ({self._dead[cluster_id]})"
        if cluster_id in self._joined:
            return "it joined and did not register yet"
        return "the id was never given out"
