"""Checks META: metadata comes back exactly, and goes with the binding (docs/spec/provider.md §8).

This module must not assume that a key means anything.
"""

from bigfleet.conformance.areas.edge import big_map, exact_or_refused
from bigfleet.conformance.areas.life import expect_unbound
from bigfleet.conformance.behaviour import Area
from bigfleet.conformance.expecting import expect, expect_same_map
from bigfleet.conformance.lab import Lab
from bigfleet.conformance.ports import Configure
from bigfleet.conformance.profiles import ConformanceProfile
from bigfleet.model.states import MachineState

AREA = Area("META")

_READS = 3
_HUGE_BYTES = 2 * 1024 * 1024
_PREFIX = "bigfleet.lucy.sh/"
_S = MachineState

_CONTROLS = [f"control-{number:02x}{chr(number)}" for number in (*range(32), 127)]
_PLAIN = (
    *(f"{_PREFIX}{name}" for name in ("assigned-priority", "assigned-group", "assigned-shard", "unknown", "")),
    "",
    " ",
    " leading",
    "trailing ",
    "Case",
    "case",
    "a=b,c;d",
    "quote\"'`",
    "back\\slash",
    "%2e%2e/../..",
    "${HOME} {{x}} <b>",
    "ключ",
    "鍵",
    "🔑",
    "e\N{COMBINING ACUTE ACCENT}",
    "\N{LATIN SMALL LETTER E WITH ACUTE}",
    "\N{ZERO WIDTH JOINER}\N{RIGHT-TO-LEFT OVERRIDE}",
)
#: 55 keys that some store, encoding or template would bend; values take the shapes of the keys around them.
HOSTILE = dict(zip((*_CONTROLS, *_PLAIN), (*_PLAIN, *_CONTROLS), strict=True))
assert len(HOSTILE) == 55, f"{len(HOSTILE)} hostile keys"


@AREA.behaviour(1, ConformanceProfile.CORE)
async def hostile_keys(lab: Lab) -> None:
    """55 hostile keys come back exactly from Get and List, repeatedly."""
    machine_id = await lab.idle()
    await lab.configure(machine_id, metadata=HOSTILE)
    for number in range(_READS):
        expect_same_map((await lab.get(machine_id)).metadata, HOSTILE, f"Get {number + 1}")
        expect_same_map((await lab.listed(machine_id)).metadata, HOSTILE, f"List {number + 1}")


@AREA.behaviour(2, ConformanceProfile.CORE)
async def drain_clears(lab: Lab) -> None:
    """A drain clears cluster and metadata; the next binding shows no old key."""
    machine_id = await lab.idle()
    await lab.configure(machine_id, metadata={"first": "1", "both": "1"})
    expect_unbound(await lab.drain(machine_id), "a drain clears cluster, metadata and error")
    expect_unbound(await lab.listed(machine_id), "List shows what the drain cleared")
    second = {"second": "2", "both": "2"}
    machine = await lab.configure(machine_id, metadata=second)
    expect_same_map(machine.metadata, second, "the next binding")


@AREA.behaviour(3, ConformanceProfile.CORE)
async def two_mebibytes(lab: Lab) -> None:
    """A 2 MiB map: exact echo or INVALID_ARGUMENT."""
    await exact_or_refused(lab, big_map(_HUGE_BYTES), "a 2 MiB map")


@AREA.behaviour(4, ConformanceProfile.CORE)
async def visible_while_configuring(lab: Lab) -> None:
    """Metadata is visible in CONFIGURING if that state is seen."""
    machine_id, metadata = await lab.idle(), {"a": "1", "b": ""}
    way = await lab.way(Configure(machine_id, lab.new_cluster(), metadata, lab.blob), _S.CONFIGURED)
    for reading in way.readings:
        expect_same_map(reading.metadata, metadata, reading.state.name)


@AREA.behaviour(5, ConformanceProfile.CORE)
async def stored_by_value(lab: Lab) -> None:
    """Changing the sender's map afterwards does not change the stored one."""
    machine_id = await lab.idle()
    sent = {"kept": "before", "only": "x"}
    await lab.done(Configure(machine_id, lab.new_cluster(), sent, lab.blob))
    before = dict(sent)
    sent["kept"] = "after"
    sent["added"] = "y"
    del sent["only"]
    end = (await lab.way_of(machine_id)).end
    expect(end.state is _S.CONFIGURED, "Configure ends in CONFIGURED", end.state.name)
    expect_same_map(end.metadata, before, "Get")
    expect_same_map((await lab.listed(machine_id)).metadata, before, "List")
