"""Reads what an IAllocator message asks for, and whether the dedicated metric answers it.

docs/spec/partition.md §2 and §4. This module never places anything.
"""

from typing import Final, NamedTuple

from bigfleet.partition.cluster import MESSAGE, GanetiCluster, read_instance
from bigfleet.partition.document import (
    Body,
    WrongInput,
    take_int,
    take_object,
    take_objects,
    take_str,
    take_texts,
)
from bigfleet.partition.instance import Instance
from bigfleet.partition.policy import AllocationPolicy

REQUEST: Final = "invalid request dict"
ALLOCATE: Final = "allocate"
MULTI_ALLOCATE: Final = "multi-allocate"
#: What Ganeti also asks; the dedicated metric has no say in these.
OTHERS: Final = ("relocate", "change-group", "node-evacuate", "allocate-secondary")


class InstanceRequest(NamedTuple):
    """An instance, and on how many hosts it goes: two have it mirrored."""

    instance: Instance
    hosts: int


class Request(NamedTuple):
    """What is asked."""

    kind: str
    wanted: tuple[InstanceRequest, ...]
    #: The only group to look at, by name or UUID.
    group: str | None
    #: The only hosts to look at.
    among: frozenset[str] | None


def read_request(message: Body, cluster: GanetiCluster) -> Request:
    """Return the request of a message. Raises WrongInput; of other kinds than the two that allocate, only the kind."""
    body = take_object(message, "request", MESSAGE)
    kind = take_str(body, "type", REQUEST)
    if kind == ALLOCATE:
        name = take_str(body, "name", REQUEST)
        group = _text_maybe(body, "group_name")
        among = None if body.get("restrict-to-nodes") is None else take_texts(body, "restrict-to-nodes", REQUEST)
        wanted = _wanted(name, body, cluster)
        return Request(kind, (wanted,), group, None if among is None else frozenset(among))
    if kind == MULTI_ALLOCATE:
        several = [
            (take_str(entry, "name", REQUEST), _text_maybe(body, "group_name"), _wanted_of(entry, cluster))
            for entry in take_objects(body, "instances", REQUEST)
        ]
        # Without instances the group is not even read.
        return Request(kind, tuple(each[2] for each in several), several[0][1] if several else None, None)
    if kind in OTHERS:
        return Request(kind, (), None, None)
    raise WrongInput(f"{REQUEST}: key 'type': Invalid request type '{kind}'")


def _text_maybe(body: Body, key: str) -> str | None:
    return None if body.get(key) is None else take_str(body, key, REQUEST)


def _wanted_of(entry: Body, cluster: GanetiCluster) -> InstanceRequest:
    return _wanted(take_str(entry, "name", REQUEST), entry, cluster)


def _wanted(name: str, body: Body, cluster: GanetiCluster) -> InstanceRequest:
    hosts = take_int(body, "required_nodes", REQUEST)
    instance = read_instance(name, body)
    tags = cluster.exclusion_tags(tuple(instance.tags))
    return InstanceRequest(instance.with_exclusion_tags(tags) if tags else instance, hosts)


def is_dedicated(request: Request, cluster: GanetiCluster) -> bool:
    """Return whether the lost allocations decide: every host of every group in question has exclusive storage.

    In question are the groups of the name that is asked for, else those that are not unallocable. A UUID is no name
    here, so that a group asked for by UUID counts as dedicated; `hail` does the same.
    """
    if request.kind not in (ALLOCATE, MULTI_ALLOCATE):
        return False
    groups = {
        group.index
        for group in cluster.groups
        if (
            group.allocation is not AllocationPolicy.UNALLOCABLE
            if request.group is None
            else group.name == request.group
        )
    }
    return all(host.is_exclusive or host.group.index not in groups for host in cluster.hosts)
