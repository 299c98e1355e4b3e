"""Checks LIST: filters, caps, cursors and the deltas between them (docs/spec/provider.md §10).

A cursor is opaque: it is stored, altered and handed back, never read. This module must not depend on the order of an
answer.
"""

from collections import Counter
from collections.abc import Iterable

from bigfleet.conformance.behaviour import Area
from bigfleet.conformance.calls import machine_text
from bigfleet.conformance.draws import BehaviourDraws
from bigfleet.conformance.expecting import expect
from bigfleet.conformance.lab import Lab
from bigfleet.conformance.ports import List, ListSeen, MachineSeen
from bigfleet.conformance.profiles import ConformanceProfile
from bigfleet.model.states import MachineState

AREA = Area("LIST")

_S = MachineState
_STATES = tuple(state for state in MachineState if state is not _S.UNSPECIFIED)
_CAPS = (1, 2, 3)
_NO_CAP = 2**31 - 1
_QUIET_SECONDS = 0.75
_PAGE = 7
_CHANGES = 5
_NOISE_BYTES = 4096
#: Of a long cursor so many bytes are altered, each by itself.
_FLIPS_MAX = 64


def ids_of(machines: Iterable[MachineSeen], what: str) -> set[str]:
    """Return the ids of an answer. Raises Broken when one stands in it twice."""
    counts = Counter(machine.id for machine in machines)
    twice = [machine_id for machine_id, count in counts.items() if count > 1]
    expect(not twice, f"{what} names each machine once", sorted(twice)[:3])
    return {*counts}


def expect_ids(seen: set[str], wanted: set[str], expectation: str) -> None:
    """Raise Broken unless two sets of ids are equal, naming some of those that differ."""
    missing, extra = sorted(wanted - seen), sorted(seen - wanted)
    expect(seen == wanted, expectation, f"missing {missing[:3]}, unexpected {extra[:3]}")


async def cursor_now(lab: Lab) -> bytes:
    """Return the cursor of the full list of now. Raises Broken when there is none."""
    revision = (await lab.list_machines()).revision
    expect(revision != b"", "a full list comes with a revision", revision)
    return revision


async def delta_since(lab: Lab, cursor: bytes) -> ListSeen:
    """Return List's answer to a cursor. Raises Broken."""
    return await lab.list_machines(List(since=cursor))


@AREA.behaviour(1, ConformanceProfile.CORE)
async def filters_are_exact(lab: Lab) -> None:
    """Single-state filters are exact, and so is their union."""
    await lab.slot()
    await lab.idle()
    await lab.configured()
    by_state: dict[MachineState, set[str]] = {state: set() for state in _STATES}
    for machine in (await lab.list_machines()).machines:
        by_state.setdefault(machine.state, set()).add(machine.id)
    filters: list[tuple[MachineState, ...]] = [(state,) for state in _STATES]
    filters += [(one, two) for one in (_S.SPECULATIVE, _S.IDLE) for two in (_S.CONFIGURED, _S.FAILED)]
    filters += [(_S.IDLE, _S.CONFIGURED, _S.IDLE), _STATES]
    for states in filters:
        machines = (await lab.list_machines(List(states=states))).machines
        names = "|".join(state.name for state in states)
        wanted = set[str]().union(*(by_state[state] for state in states))
        expect_ids(ids_of(machines, f"List({names})"), wanted, f"List({names}) is exactly what is in these states")
        for machine in machines:
            expect(machine.state in states, f"List({names}) shows these states alone", machine_text(machine))


@AREA.behaviour(2, ConformanceProfile.CORE)
async def caps_hold(lab: Lab) -> None:
    """Caps 1, 2, 3 hold; 0 = everything."""
    lent = {await lab.slot(), await lab.idle(), await lab.slot(), await lab.slot()}
    everything = ids_of((await lab.list_machines()).machines, "the full list")
    expect(lent <= everything, "a cap of 0 is everything", sorted(lent - everything))
    far_above = ids_of((await lab.list_machines(List(results_max=_NO_CAP))).machines, "a list under a high cap")
    expect_ids(everything, far_above, "a cap of 0 shows what a cap above the fleet shows")
    for states in ((), (_S.SPECULATIVE,)):
        for cap in _CAPS:
            machines = (await lab.list_machines(List(states=states, results_max=cap))).machines
            ids = ids_of(machines, f"a list of at most {cap}")
            expect(0 < len(ids) <= cap, f"a cap of {cap} gives at most {cap}, of a fleet not none", len(ids))
            expect(ids <= everything, "a capped list shows machines of the full one", sorted(ids - everything))


@AREA.behaviour(3, ConformanceProfile.DELTA)
async def delta_holds_a_mutation(lab: Lab) -> None:
    """A mutation moves the revision, and the delta holds it."""
    machine_id = await lab.idle()
    before = await cursor_now(lab)
    for step in (lab.configure, lab.drain):
        moved = await step(machine_id)
        after = await cursor_now(lab)
        expect(after != before, "a mutation moves the revision", f"{after.hex()} again")
        _expect_holds(await delta_since(lab, before), moved, "the delta holds the mutation")
        before = after


def _expect_holds(delta: ListSeen, machine: MachineSeen, expectation: str) -> None:
    entries = [entry for entry in delta.machines if entry.id == machine.id]
    expect(len(entries) == 1, f"{expectation}: {machine.id} once", f"{len(entries)} times")
    is_same = (entries[0].state, entries[0].cluster) == (machine.state, machine.cluster)
    expect(is_same, f"{expectation}: {machine_text(machine)}", machine_text(entries[0]))


@AREA.behaviour(4, ConformanceProfile.DELTA)
async def delta_from_now_is_empty(lab: Lab) -> None:
    """A delta from now is empty."""
    await lab.configured()
    cursor = await cursor_now(lab)
    for _ in range(2):
        delta = await delta_since(lab, cursor)
        expect(not delta.machines, "a delta from now is empty", [machine_text(m) for m in delta.machines[:3]])
        expect(delta.revision != b"", "an empty delta comes with a revision")
        cursor = delta.revision


@AREA.behaviour(5, ConformanceProfile.DELTA)
async def older_cursors_yield_what_came_later(lab: Lab) -> None:
    """Each older cursor yields all later mutations."""
    machine_ids = [await lab.idle() for _ in range(_CHANGES)]
    cursors, moved = [], []
    for machine_id in machine_ids:
        cursors.append(await cursor_now(lab))
        moved.append(await lab.configure(machine_id))
    for place, cursor in enumerate(cursors):
        delta = await delta_since(lab, cursor)
        expectation = f"a cursor from before {_CHANGES - place} mutations names exactly their machines"
        expect_ids(ids_of(delta.machines, "a delta"), {*machine_ids[place:]}, expectation)
        for machine in moved[place:]:
            _expect_holds(delta, machine, expectation)


@AREA.behaviour(6, ConformanceProfile.CORE)
async def garbage_gives_the_full_list(lab: Lab) -> None:
    """Garbage cursors give the full list."""
    noise = bytes(lab.draws.below(256) for _ in range(_NOISE_BYTES))
    wanted = ids_of((await lab.list_machines()).machines, "the full list")
    for cursor in (b"\0", b"x", b"0", b"garbage", b"\xff" * 8, bytes(28), noise[:28], noise[:64], noise):
        await _expect_full(lab, cursor, wanted, f"a cursor of {len(cursor)} bytes of garbage")


async def _expect_full(lab: Lab, cursor: bytes, wanted: set[str], what: str) -> None:
    listing = await delta_since(lab, cursor)
    expect_ids(ids_of(listing.machines, f"the answer to {what}"), wanted, f"{what} gives the full list")
    expect(not listing.tombstones, f"the answer to {what} does not call itself a delta")


async def listed_by_pages(lab: Lab, cap: int, since: bytes, machines_max: int) -> list[MachineSeen]:
    """Return what pages under a cap show from a cursor on, each page's cursor handed to the next, until a short one.

    Raises Broken for a page that is too long, and for pages that show more than `machines_max`.
    """
    machines: list[MachineSeen] = []
    cursor = since
    while True:
        page = await lab.list_machines(List(results_max=cap, since=cursor))
        expect(len(page.machines) <= cap, f"a page holds at most {cap}", len(page.machines))
        machines += page.machines
        # Every page but the last is full, so a list that never ends gets here.
        expectation = f"a List in pages of {cap} shows at most the {machines_max} machines that there are"
        expect(len(machines) <= machines_max, expectation, len(machines))
        if len(page.machines) < cap:
            return machines
        expect(page.revision != b"", "a full page comes with a revision")
        cursor = page.revision


@AREA.behaviour(7, ConformanceProfile.DELTA)
async def pages_neither_repeat_nor_lose(lab: Lab) -> None:
    """Paging by cap and cursor neither repeats nor loses."""
    machine_ids = [await lab.idle() for _ in range(_CHANGES)]
    full = await lab.list_machines()
    wanted = ids_of(full.machines, "the full list")
    for cap in (_PAGE, len(wanted) // 2):
        listed = await listed_by_pages(lab, cap, b"", len(wanted))
        expect_ids(ids_of(listed, f"a List in pages of {cap}"), wanted, f"a List in pages of {cap} is the full list")
    for machine_id in machine_ids:
        await lab.configure(machine_id)
    for cap in _CAPS:
        listed = await listed_by_pages(lab, cap, full.revision, len(wanted))
        expectation = f"a delta in pages of {cap} is the {_CHANGES} machines that changed"
        expect_ids(ids_of(listed, f"a delta in pages of {cap}"), {*machine_ids}, expectation)


@AREA.behaviour(8, ConformanceProfile.DELTA)
async def quiet_brings_no_delta(lab: Lab) -> None:
    """750 ms of quiet bring no delta."""
    await lab.configured()
    await lab.idle()
    cursor = await cursor_now(lab)
    await lab.clock.sleep(_QUIET_SECONDS)
    delta = await delta_since(lab, cursor)
    expect(not delta.machines, "quiet brings no delta", [machine_text(m) for m in delta.machines[:3]])
    expect(not delta.removed_ids, "quiet removes nothing", delta.removed_ids[:3])


@AREA.behaviour(9, ConformanceProfile.DELTA)
async def altered_cursors_give_the_full_list(lab: Lab) -> None:
    """The exact cursor works; altered ones never fail and give the full list."""
    machine_id = await lab.idle()
    cursor = await cursor_now(lab)
    await lab.configure(machine_id)
    wanted = ids_of((await lab.list_machines()).machines, "the full list")
    for what, altered in _altered(cursor, lab.draws):
        await _expect_full(lab, altered, wanted, f"a cursor {what}")
    delta = await delta_since(lab, cursor)
    expect_ids(ids_of(delta.machines, "a delta"), {machine_id}, "the exact cursor gives what changed since")


def _altered(cursor: bytes, draws: BehaviourDraws) -> list[tuple[str, bytes]]:
    """Return cursors that are a little wrong, each with what was done to it."""
    places = list(range(len(cursor)))
    while len(places) > _FLIPS_MAX:
        del places[draws.below(len(places))]
    altered = [
        (f"with a bit of byte {place} flipped", _flipped(cursor, place, 1 << draws.below(8))) for place in places
    ]
    altered += [
        ("cut by a byte", cursor[:-1]),
        ("without its first byte", cursor[1:]),
        ("with a byte behind it", cursor + b"\0"),
        ("twice", cursor + cursor),
        ("with its second half cleared", cursor[: len(cursor) // 2] + bytes(len(cursor) - len(cursor) // 2)),
        ("read backwards", cursor[::-1]),
    ]
    # An empty cursor is none, and some cursors are the same read backwards.
    return [(what, text) for what, text in altered if text not in (b"", cursor)]


def _flipped(cursor: bytes, place: int, bit: int) -> bytes:
    return cursor[:place] + bytes([cursor[place] ^ bit]) + cursor[place + 1 :]
