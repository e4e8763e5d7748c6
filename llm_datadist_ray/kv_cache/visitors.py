"""Whom a PROMPT means when it unlinks: others have linked it, and it knows them by where they come from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from llm_datadist_ray._native import LinkInfo


def find_visitors(links: Mapping[int, LinkInfo], wanted: Iterable[tuple[int, str]]) -> dict[int, LinkInfo]:
    """The link of each wanted (cluster id, ip) that has one among ``links``, those of one device by cluster id.

    It is that cluster's own, if it comes from there. A cluster that is not linked at all gets the only link from its
    address, whoever calls itself what (spec api-datadist §9), unless another one of ``wanted`` has that: a link is
    found once.
    """
    found = {}
    strangers = []
    for cluster_id, ip in wanted:
        if cluster_id not in links:
            strangers.append((cluster_id, ip))
        elif ip_of(links[cluster_id]) == ip:
            found[cluster_id] = links[cluster_id]
    taken = set(found)
    for cluster_id, ip in strangers:
        from_ip = [link for link in links.values() if ip_of(link) == ip]
        if len(from_ip) == 1 and from_ip[0].cluster_id not in taken:
            found[cluster_id] = from_ip[0]
            taken.add(from_ip[0].cluster_id)
    return found


def ip_of(link: LinkInfo) -> str:
    return link.peer_address.rpartition(":")[0]
