"""Random IAllocator messages for dedicated groups, sound and broken: small enough to shrink, mixed enough to meet all.

Objects are lists of pairs, so that a key may occur twice. Sizes are quarters of a host with a little more or less, so
that hosts fill up, tie and run short of one thing or another. Nothing here knows what the answer should be.
"""

import json
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any, TypeVar

from hypothesis import strategies as st

T = TypeVar("T")
Pairs = list[tuple[str, Any]]

MEMORY_MIB = 8_000
DISK_MIB = 50_000
#: A little below a quarter, exactly one, and a little above.
_SLACK = (-250, -250, -20, -20, -20, -40, 0, 40)
TEMPLATES = ("plain", "drbd", "plain", "drbd", "plain", "drbd", "plain", "drbd", "file", "diskless")


class Object(Pairs):
    """A JSON object as pairs."""


def dumped(value: Any) -> str:
    """Return the JSON of values in which objects are pairs."""
    if isinstance(value, Object):
        return "{" + ",".join(f"{json.dumps(key)}:{dumped(each)}" for key, each in value) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(dumped, value)) + "]"
    return json.dumps(value)


def plain(value: Any) -> Any:
    """Return the same values with dictionaries, the first of equal keys counting."""
    if isinstance(value, Object):
        return {key: plain(each) for key, each in reversed(value)}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


def bounds(memory: int, vcpus: int, disk: int, disks: int, spindle_use: int) -> Object:
    """Return one end of an interval."""
    numbers = (memory, vcpus, disk, disks, 1, spindle_use)
    keys = ("memory-size", "cpu-count", "disk-size", "disk-count", "nic-count", "spindle-use")
    return Object(zip(keys, numbers, strict=True))


class Dice:
    """Picks, one byte each: one draw for a whole object is what makes thousands of messages quick to draw."""

    def __init__(self, content: bytes) -> None:
        self._bytes = iter(content)

    def pick(self, *options: T) -> T:
        """Return one of the options; the first is the simplest."""
        return options[next(self._bytes) % len(options)]

    def rarely(self, one_in: int) -> bool:
        """Say yes once in so many times."""
        return next(self._bytes) % one_in == one_in - 1


def dice(size: int = 20) -> st.SearchStrategy[Dice]:
    """Enough picks for one object."""
    return st.builds(Dice, st.binary(min_size=size, max_size=size))


def _easy(first: int = 0) -> Dice:
    """Return dice of which the first shows so much, and all others pick what comes first."""
    return Dice(bytes((first, *[0] * 99)))


def interval(die: Dice, quarters: int) -> Object:
    """An interval around some quarters; sometimes without one of its bounds, never without all."""
    below = die.pick(300, 300, 40, 0)
    without = die.pick("", "", "", "", "", "", "", "", "memory", "disk", "vcpus")
    least = bounds(
        0 if without == "memory" else quarters * MEMORY_MIB - below,
        0 if without == "vcpus" else die.pick(quarters, 0),
        0 if without == "disk" else quarters * DISK_MIB - below,
        die.pick(0, 1),
        die.pick(0, 0, 1, quarters),
    )
    wide = die.pick(0, 0, 1, 4)
    most = bounds(
        (quarters + wide) * MEMORY_MIB + 40, quarters + wide, (quarters + wide) * DISK_MIB + 40, 2, quarters + wide
    )
    return Object([("min", least), ("max", most)])


def policy(die: Dice) -> Object:
    """A policy of up to four intervals in any order."""
    ladder = die.pick((1, 2, 4), (4, 2, 1), (1, 2, 3, 4), (2, 1), (1, 1, 2), (1,), (2, 4), ())
    return Object(
        [
            ("minmax", [interval(die, quarters) for quarters in ladder]),
            ("std", bounds(MEMORY_MIB, 1, DISK_MIB, 1, 1)),
            (
                "disk-templates",
                die.pick(["plain", "drbd"], ["plain", "drbd"], ["plain", "drbd", "file", "diskless"], ["plain"]),
            ),
            ("vcpu-ratio", die.pick(1.0, 1.0, 2, 4.0, 4.0, 0.7, -1.0, 0)),
            ("spindle-ratio", die.pick(1.0, 2.0, 32.0, 32.0, 32.0, 0.5, -1)),
        ]
    )


def host(die: Dice, *, group: str, is_exclusive: bool) -> Object:
    """A host filled to some quarters; its figures may disagree."""
    filled = die.pick(0, 0, 0, 1, 1, 2, 3, 4)
    state = die.pick(*(("",) * 12), "offline", "drained", "not capable", "unsaid")
    odd = die.pick(0, 0, 0, 20, 20, -40, 3_000, 0.5)
    spindles = die.pick(4, 4, 4, 8, 8, 2)
    parameters = Object([("exclusive_storage", is_exclusive)])
    if not is_exclusive or die.pick(True, False):
        parameters.append(("spindle_count", spindles))
    body = Object(
        [
            ("group", group),
            ("offline", state == "offline"),
            ("drained", state == "drained"),
            ("ndparams", parameters),
            ("total_memory", 4 * MEMORY_MIB + die.pick(40, 40, 0, 4_096, 9_000, -3_000)),
            ("reserved_memory", die.pick(0, 0, 512)),
            ("free_memory", (4 - filled) * MEMORY_MIB + odd),
            ("total_disk", 4 * DISK_MIB),
            ("free_disk", (4 - filled) * DISK_MIB + die.pick(0, 0, 20, 512, -40)),
            ("total_cpus", die.pick(8, 8, 8.0, 4, 4, 3, *((0,) if die.rarely(4) else ()))),
            ("reserved_cpus", die.pick(0, 0, filled)),
            ("free_spindles", max(0, spindles - filled)),
            ("total_spindles", spindles),
        ]
    )
    if state != "unsaid":
        body.append(("vm_capable", state != "not capable"))
    return body


def instance(die: Dice, *, is_wanted: bool) -> Object:
    """What requests and standing instances share."""
    quarters = die.pick(1, 1, 1, 1, 2, 2, 3, 4)
    size = quarters * DISK_MIB + die.pick(*_SLACK)
    disks = die.pick(1, 1, 1, 1, 1, 1, 2, 0)
    spindles = die.pick(*(quarters,) * 4, 1, 0, *(() if is_wanted and die.pick(True, True, False) else (None,)))
    template = die.pick(*TEMPLATES)
    body = Object(
        [
            ("memory", quarters * MEMORY_MIB + die.pick(*_SLACK)),
            ("vcpus", die.pick(quarters, quarters, quarters, 1, 0)),
            ("disk_space_total", size + (128 if template == "drbd" else 0)),
            ("disks", [Object([("size", size // disks), ("spindles", spindles)]) for _ in range(disks)]),
            ("disk_template", template),
            ("spindle_use", die.pick(quarters, quarters, 1)),
            ("tags", die.pick([], [], [], ["service:a"], ["service:b", "other"], ["service:a", "x:y"])),
            ("nics", die.pick(*([],) * 9, [Object([("network", "n1")])], [Object([("mode", "routed")])])),
        ]
    )
    state = die.pick(*(("up",) * 6), "down", "offline", None, "strange")
    if state is not None:
        body.append(("admin_state", state))
    if die.rarely(10):
        body.append(("forthcoming", True))
    return body


@st.composite
def standing(draw: st.DrawFn, names: Sequence[str]) -> Object:
    """An instance on one host or on two, which may be the same."""
    die = draw(dice())
    places = [die.pick(*names) for _ in range(die.pick(1, 2, 2))]
    return Object([*instance(die, is_wanted=False), ("nodes", places)])


def _wanted(die: Dice, name: str) -> Object:
    body = instance(die, is_wanted=True)
    usual = 2 if dict(body)["disk_template"] == "drbd" else 1
    return Object([("name", name), ("required_nodes", die.pick(*(usual,) * 24, 1, 2, 3)), *body])


@st.composite
def requests(draw: st.DrawFn, groups: Sequence[str], names: Sequence[str]) -> Object:
    """A request of one of the two kinds that allocate."""
    die = draw(dice(40))
    group = die.pick(None, None, None, None, None, None, *groups, *groups, *(("nobody",) if die.rarely(6) else ()))
    rest = [] if group is None else [("group_name", group)]
    if die.pick(False, False, True):
        entries = [_wanted(draw(dice()), f"new{number}") for number in range(die.pick(1, 1, 2, 2, 3, 4, 0))]
        return Object([("type", "multi-allocate"), ("instances", entries), *rest])
    if die.rarely(5):
        rest.append(("restrict-to-nodes", [die.pick(*names, "stranger") for _ in range(die.pick(3, 2, 1, 0))]))
    return Object([("type", "allocate"), *_wanted(die, die.pick("new", "i0")), *rest])


@st.composite
def messages(draw: st.DrawFn) -> Object:
    """A whole message. Few are not dedicated; of some objects a name or key occurs twice.

    Half of them are easy: one group with an ordinary policy and equal hosts that are filled differently.
    """
    die = draw(dice(40))
    is_easy = die.pick(False, True)
    count = 1 if is_easy else die.pick(1, 1, 2, 3)
    uuids = [f"u{number}" for number in range(count)]
    labels = [die.pick(f"g{number}", f"g{number}", f"g{number}", f"g{number}", "g0", "u0") for number in range(count)]
    groups = Object(
        (
            uuid,
            Object(
                [
                    ("name", label),
                    (
                        "alloc_policy",
                        die.pick("preferred", "preferred", "preferred", "last_resort", "last_resort", "unallocable"),
                    ),
                    ("networks", die.pick(["n1"], ["n1", "n2"], ["n1"], [])),
                    ("tags", []),
                    ("ipolicy", policy(_easy() if is_easy else draw(dice(40)))),
                ]
            ),
        )
        for uuid, label in zip(uuids, labels, strict=True)
    )
    exclusive = [not die.rarely(40) for _ in uuids]
    names = [f"n{number}" for number in range(die.pick(3, 4, 4, 5, 6, 7, 8, 2, 1, *((0,) if die.rarely(4) else ())))]
    nodes = Object()
    for name in names:
        at = die.pick(0, *range(count))
        of_host = _easy(die.pick(*range(8))) if is_easy else draw(dice())
        nodes.append((name, host(of_host, group=uuids[at], is_exclusive=exclusive[at])))
    there = Object()
    if names:
        there.extend((f"i{number}", draw(standing(names))) for number in range(die.pick(0, 1, 2, 3, 5)))
    twice = die.pick(*(("",) * 20), "node", "group", "key")
    if twice == "node" and names:
        nodes.append((names[0], host(draw(dice()), group=uuids[0], is_exclusive=True)))
    if twice == "group":
        groups.append((uuids[0], groups[-1][1]))
    if twice == "key" and names:
        nodes[0][1].append(("free_disk", 1))
    tags = die.pick([], [], ["htools:iextags:service"], ["htools:iextags:", "htools:iextags:x"])
    return Object(
        [
            ("cluster_tags", tags),
            ("enabled_hypervisors", die.pick(["xen-pvm"], ["xen-pvm"], ["kvm"], ["fake", "kvm"], [])),
            ("nodegroups", groups),
            ("nodes", nodes),
            ("instances", there),
            ("request", draw(requests(sorted({*labels, *uuids}), names))),
        ]
    )


def arguments() -> st.SearchStrategy[list[str]]:
    """Options of the command line."""
    return st.lists(
        st.sampled_from(
            (
                "--ignore-soft-errors",
                "--ignore-soft-errors",
                "--static-kvm-node-memory=0",
                "--static-kvm-node-memory=1000",
                "--restrict-allocation-to=n0,n1,n2",
                "--no-capacity-checks",
            )
        ),
        max_size=1,
    )


#: What a value is replaced with; sometimes that is still sound.
_WRONG: tuple[Any, ...] = (None, True, "", "x", "plain", 1, -1, 0.5, 1e30, [], ["x"], [1], {"x": 1}, [[]], [{}])


def _spots(value: Any) -> Iterator[tuple[Any, int]]:
    """Yield every place of a value: its list or object, and the position there."""
    if isinstance(value, list):
        for position, each in enumerate(value):
            yield value, position
            yield from _spots(each[1] if isinstance(value, Object) else each)


def _break(message: Object, at: int, how: Dice) -> None:
    spots = list(_spots(message))
    where, position = spots[at % len(spots)]
    # A copy: the next fault may change what this one put in.
    wrong = deepcopy(how.pick(*_WRONG))
    value = Object(wrong.items()) if isinstance(wrong, dict) else wrong
    manner = how.pick("drop", "replace", "replace", "add")
    if manner == "drop":
        del where[position]
    elif manner == "replace":
        where[position] = (where[position][0], value) if isinstance(where, Object) else value
    else:
        where.append((how.pick("x", "min", "memory"), value) if isinstance(where, Object) else value)


@st.composite
def broken_messages(draw: st.DrawFn) -> Object:
    """A message in which one or two places are wrong; few are sound all the same."""
    message: Object = draw(messages())
    for _ in range(draw(st.integers(1, 2))):
        _break(message, draw(st.integers(0, 2_000)), draw(dice(3)))
    return message


def endless_message() -> bytes:
    """Return a sound message whose policy has an interval that nothing limits, so that hail never ends."""
    die = Dice(bytes(200))
    unlimited = Object([("min", bounds(0, 0, 0, 0, 0)), ("max", bounds(100_000, 100, 1_000_000, 10, 100))])
    rules = Object([(key, [unlimited] if key == "minmax" else value) for key, value in policy(die)])
    group = Object([("name", "g0"), ("alloc_policy", "preferred"), ("networks", []), ("tags", []), ("ipolicy", rules)])
    return dumped(
        Object(
            [
                ("cluster_tags", []),
                ("enabled_hypervisors", ["xen-pvm"]),
                ("nodegroups", Object([("u0", group)])),
                ("nodes", Object([("n0", host(die, group="u0", is_exclusive=True))])),
                ("instances", Object()),
                ("request", Object([("type", "allocate"), *_wanted(die, "new")])),
            ]
        )
    ).encode()
