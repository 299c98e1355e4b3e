"""Answers an IAllocator message byte for byte as Ganeti's `hail` does where it uses the dedicated metric.

docs/spec/partition.md §3, §9 to §11 and §13. There are two deliberate differences. If no lower bound limits an interval
of the policy, `hail` never ends; here it is an error. `is_sequential` requests a multi-allocate in which each instance
sees those before it and may go to any group. This module never places an instance to which the metric does not apply.
"""

import json
from typing import Final, NamedTuple

from bigfleet.partition.allocator import Allocator, NothingToTry
from bigfleet.partition.cluster import MESSAGE, STATIC_KVM_MIB, GanetiCluster, read_cluster
from bigfleet.partition.document import WrongInput, decode, take_object
from bigfleet.partition.hosts import HostGroup, PartitionedHost
from bigfleet.partition.metric import Key, UnlimitedSize
from bigfleet.partition.policy import AllocationPolicy, PolicyRefusal
from bigfleet.partition.request import ALLOCATE, InstanceRequest, Request, is_dedicated, read_request
from bigfleet.partition.search import PlacementChoice, SearchOutcome

#: Ganeti's order of reasons; those between are never met here.
_REASONS: Final = tuple(PolicyRefusal)


class AllocationOptions(NamedTuple):
    """What the command line adds to a message."""

    #: Leave out the soft checks of primaries.
    force: bool = False
    #: The only hosts to look at; takes the place of the request's own list.
    among: frozenset[str] | None = None
    static_kvm_mib: int = STATIC_KVM_MIB
    #: Each instance of a multi-allocate sees those before it.
    is_sequential: bool = False


class HailAnswer(NamedTuple):
    """What goes to standard output, and what Ganeti's log should know."""

    #: One line of JSON; None where the request is not for the dedicated metric.
    line: str | None
    warnings: list[str]
    #: The request's kind.
    kind: str


_USUAL = AllocationOptions()


class _Failed(Exception):
    """The request is refused with this text."""


def answer(content: bytes, options: AllocationOptions = _USUAL) -> HailAnswer:
    """Return the answer to a message. Raises WrongInput when it is not understood or its policy has no measure."""
    message = decode(content)
    take_object(message, "request", MESSAGE)
    cluster = read_cluster(message, static_kvm_mib=options.static_kvm_mib)
    request = read_request(message, cluster)
    warnings = cluster.warnings()
    if not is_dedicated(request, cluster):
        return HailAnswer(None, warnings, request.kind)
    return HailAnswer(_line(request, cluster, options), warnings, request.kind)


def _line(request: Request, cluster: GanetiCluster, options: AllocationOptions) -> str:
    allocator = Allocator(cluster, force=options.force)
    among = options.among
    result: object
    try:
        if request.kind == ALLOCATE:
            (wanted,) = request.wanted
            info, result = _allocate(allocator, wanted, request.group, request.among if among is None else among)
        elif options.is_sequential:
            info, result = _one_after_another(allocator, request, among)
        else:
            info, result = _as_hail_does(allocator, request, among)
    except _Failed as failed:
        return refusal_line(str(failed))
    return _reply(True, f"Request successful: {info}", result)


def refusal_line(reason: str) -> str:
    """Return the reply that refuses a request."""
    return _reply(False, f"Request failed: {reason}", [])


def _reply(is_success: bool, info: str, result: object) -> str:
    reply = {"success": is_success, "info": info, "result": result}
    return json.dumps(reply, separators=(",", ":"), ensure_ascii=False)


# ---- one group -------------------------------------------------------------------------------------------------------


def _group_called(cluster: GanetiCluster, name: str) -> HostGroup:
    found = [group for group in cluster.groups if name in (group.name, group.uuid)]
    if len(found) != 1:
        raise _Failed(f"Wrong number of elems found with name {name}")
    return found[0]


def _choose(
    allocator: Allocator,
    group: HostGroup,
    wanted: InstanceRequest,
    among: frozenset[str] | None,
    of: list[PartitionedHost] | None = None,
) -> SearchOutcome:
    """Try a group. Raises NothingToTry, and WrongInput where `hail` would count for ever."""
    try:
        return allocator.choose(group, wanted.instance, hosts=wanted.hosts, among=among, of=of)
    except UnlimitedSize as error:
        policy = group.policy
        position = policy.intervals.index(policy.by_disk[error.position]) + 1
        raise WrongInput(
            f"invalid data for group '{group.uuid}': key 'ipolicy': Can't use value for 'minmax': the lower bounds of"
            f" interval {position} limit neither memory nor disk nor CPUs, so that it fits without end; give it one"
            " above zero"
        ) from error


def _score(key: Key) -> str:
    loss, disk_mib = key
    return f"([{','.join(map(str, loss))}],{disk_mib})"


def describe(outcome: SearchOutcome) -> str:
    """Return what came of a group, as `hail` puts it."""
    reasons = ", ".join(f"{each.value}: {outcome.refusals[each]}" for each in _REASONS if outcome.refusals[each])
    if outcome.choice is None:
        return f"No valid allocation solutions, failure reasons: {reasons}"
    hosts = "/".join(host.name for host in outcome.choice.hosts)
    return (
        f"score: {_score(outcome.choice.key)}, successes {outcome.successes},"
        f" failures {outcome.refusals.total()} ({reasons}) for node(s) {hosts}"
    )


def _names(choice: PlacementChoice) -> list[str]:
    return [host.name for host in choice.hosts]


# ---- one instance ----------------------------------------------------------------------------------------------------


def _allocate(
    allocator: Allocator, wanted: InstanceRequest, name: str | None, among: frozenset[str] | None
) -> tuple[str, list[str]]:
    if name is None:
        selected, choice, messages = _any_group(allocator, wanted, among, allocator.cluster.hosts)
        return ", ".join([f"Selected group: {selected.name}", *messages]), _names(choice)
    group = _group_called(allocator.cluster, name)
    outcome = _in_named_group(allocator, group, wanted, among)
    message = f"Group {group.name} ({group.allocation.value}): {describe(outcome)}"
    if outcome.choice is None:
        raise _Failed(message)
    return message, _names(outcome.choice)


def _in_named_group(
    allocator: Allocator, group: HostGroup, wanted: InstanceRequest, among: frozenset[str] | None
) -> SearchOutcome:
    try:
        return _choose(allocator, group, wanted, among)
    except NothingToTry as reason:
        raise _Failed(str(reason)) from reason


def _any_group(
    allocator: Allocator, wanted: InstanceRequest, among: frozenset[str] | None, hosts: list[PartitionedHost]
) -> tuple[HostGroup, PlacementChoice, list[str]]:
    """Return the best group with hosts among these, what is chosen there, and what every group said."""
    best: tuple[int, Key] | None = None
    selected: tuple[HostGroup, PlacementChoice] | None = None
    messages = []
    by_group: dict[HostGroup, list[PartitionedHost]] = {group: [] for group in allocator.cluster.groups}
    for host in hosts:
        by_group[host.group].append(host)
    for group, own in by_group.items():
        if not own:
            continue
        try:
            outcome = _choose(allocator, group, wanted, among, own)
        except NothingToTry as reason:
            messages.append(f"Group {group.name}: error {reason}")
            continue
        messages.append(f"Group {group.name} ({group.allocation.value}): {describe(outcome)}")
        choice = outcome.choice
        if choice is None or group.allocation is AllocationPolicy.UNALLOCABLE:
            continue
        rank = (group.allocation.rank, choice.key)
        if best is None or rank <= best:
            best, selected = rank, (group, choice)
    if selected is None:
        raise _Failed(", ".join(messages))
    return (*selected, messages)


# ---- several instances -----------------------------------------------------------------------------------------------


def _multi_reply(placed: list[tuple[str, list[str]]], failed: list[tuple[str, str]]) -> tuple[str, list[object]]:
    info = f"{len(failed)} instances failed to allocate and {len(placed)} were allocated successfully"
    return info, [placed, failed]


def _as_hail_does(allocator: Allocator, request: Request, among: frozenset[str] | None) -> tuple[str, list[object]]:
    """Place the instances as `hail` does, quirks included (docs/spec/partition.md §11).

    In a named group each sees the hosts as they were at first; without a name, one that fails fails all, and the group
    of the first is the only one for the others.
    """
    placed: list[tuple[str, list[str]]] = []
    failed: list[tuple[str, str]] = []
    hosts = allocator.cluster.hosts
    for wanted in request.wanted:
        if request.group is None:
            group, choice, _ = _any_group(allocator, wanted, among, hosts)
            allocator.take(wanted.instance, choice)
            hosts = [host for host in hosts if host.group is group]
        else:
            group = _group_called(allocator.cluster, request.group)
            outcome = _in_named_group(allocator, group, wanted, among)
            if outcome.choice is None:
                failed.append((wanted.instance.name, describe(outcome)))
                continue
            choice = outcome.choice
        placed.append((wanted.instance.name, _names(choice)))
    return _multi_reply(placed, failed)


def _one_after_another(
    allocator: Allocator, request: Request, among: frozenset[str] | None
) -> tuple[str, list[object]]:
    """Place the instances so that each sees those before it, in any group; one that fails fails alone."""
    placed: list[tuple[str, list[str]]] = []
    failed: list[tuple[str, str]] = []
    group = None if request.group is None else _group_called(allocator.cluster, request.group)
    for wanted in request.wanted:
        name = wanted.instance.name
        try:
            choice = _next_choice(allocator, group, wanted, among)
        except _Failed as reason:
            failed.append((name, str(reason)))
            continue
        allocator.take(wanted.instance, choice)
        placed.append((name, _names(choice)))
    return _multi_reply(placed, failed)


def _next_choice(
    allocator: Allocator, group: HostGroup | None, wanted: InstanceRequest, among: frozenset[str] | None
) -> PlacementChoice:
    if group is None:
        return _any_group(allocator, wanted, among, allocator.cluster.hosts)[1]
    outcome = _in_named_group(allocator, group, wanted, among)
    if outcome.choice is None:
        raise _Failed(describe(outcome))
    return outcome.choice
