"""What a shard owns, on a real disk: what was committed is what the next process reads (docs/spec/shard.md §2)."""

import math
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bigfleet.model.ids import MachineId, ShardId
from bigfleet.model.machine import HostRef, Machine
from bigfleet.model.ownership import Base, Domain, Owned, OwnershipRow, OwnershipVersion, Reservation, RowKind
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.model.validation import InvariantBroken
from bigfleet.shard.ownership.ownership_file import OwnershipFile, OwnershipNotWritten
from bigfleet.shard.ownership.state_file import FILE_NAME, StateFile, StateFileFault
from tests.engine.proof import in_proportion
from tests.files.editing import edit

ME, OTHER = ShardId("shard-0"), ShardId("shard-1")
IDS = [MachineId(f"m{number}") for number in range(4)]
DOMAINS = [Domain("zone", "a"), Domain("zone", "b"), Domain("rack", "a")]


class NoClock:
    """A clock of which only the wall is read."""

    def monotonic_seconds(self) -> float:
        raise AssertionError("not asked")

    def unix_nanos(self) -> int:
        return 1_800_000_000 * 10**9

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("a file never waits")


def opened(directory: Path, **more: Any) -> StateFile:
    return StateFile.open(directory, shard_id="shard-0", clock=NoClock(), **more)


def held(directory: Path) -> tuple[Owned, dict[MachineId, Reservation], int]:
    """Return what a new process reads."""
    with opened(directory) as state_file:
        kept = state_file.ownership
        return kept.owned, dict(kept.reservations), kept.accepted_term


def execute(directory: Path, *statements: str) -> None:
    edit(directory / FILE_NAME, *statements)


texts = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=5)
machines = st.builds(
    lambda machine_id, state, **facts: Machine(
        id=machine_id, state=state, host=HostRef("p", "h") if state is MachineState.IDLE else HostRef(), **facts
    ),
    st.sampled_from(IDS),
    st.sampled_from([MachineState.IDLE, MachineState.SPECULATIVE]),
    instance_type=texts,
    zone=texts,
    capacity_type=st.sampled_from(CapacityType),
    resources=st.dictionaries(st.sampled_from(["cpu", "memory"]), st.sampled_from(["1", "2500m", "16Gi"])),
    labels=st.dictionaries(texts, texts, max_size=3),
    price_usd_per_hour=st.floats(0, math.inf),
    interruption_probability=st.floats(0, 1),
    node_name=texts,
)
versions = st.builds(OwnershipVersion, st.integers(0, 2**62), st.integers(0, 9))
ids = st.sampled_from(IDS)
domains = st.sampled_from(DOMAINS)
Change = Callable[[Owned], Owned]
changes: st.SearchStrategy[Change] = st.one_of(
    domains.map(lambda domain: lambda owned: owned.assigned(domain)),
    domains.map(lambda domain: lambda owned: owned.unassigned(domain)),
    domains.map(lambda domain: lambda owned: owned.left(domain)),
    st.builds(lambda machine, version: lambda owned: owned.released(machine, version, to=OTHER), machines, versions),
    st.builds(lambda each, version: lambda owned: owned.adopted(each, version, by_gift_of=OTHER), ids, versions),
    st.builds(lambda each, version: lambda owned: owned.taken_back(each, version, me=ME), ids, versions),
    st.builds(lambda each, version: lambda owned: owned.noted(each, version, at=OTHER), ids, versions),
    st.builds(lambda each, version: lambda owned: owned.forgotten(each, version), ids, versions),
    st.lists(ids).map(lambda several: lambda owned: owned.confirmed(several)),
    st.lists(ids).map(lambda several: lambda owned: owned.without(several)),
)
reservations = st.builds(
    Reservation,
    machine_id=ids,
    to_shard=st.just(OTHER),
    instruction_id=texts,
    is_ready=st.booleans(),
    expires_unix_nanos=st.integers(0, 2**62),
    instance_type=texts,
    zone=texts,
)
steps = st.lists(st.tuples(st.lists(changes, max_size=3), st.lists(reservations, max_size=3)), max_size=6)


@pytest.mark.rule("shard 2/11", "coordinator 9.1/4")
@settings(max_examples=in_proportion(240), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps, st.integers(0, 2**62), st.sampled_from(Base))
def test_any_sequence_of_changes_is_read_back_as_it_was(
    sequence: list[tuple[list[Change], list[Reservation]]], term: int, base: Base
) -> None:
    with TemporaryDirectory() as name:
        directory = Path(name)
        with opened(directory, new_file_owns=base) as state_file:
            kept = state_file.ownership
            assert kept.owned == Owned(base=base)
            for several, reserved in sequence:
                owned = kept.owned
                for change in several:
                    owned = change(owned)
                kept.commit(owned, {each.machine_id: each for each in reserved})
            kept.accept_term(term)
            expected = kept.owned, dict(kept.reservations), kept.accepted_term

        assert held(directory) == expected


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("INSERT INTO domains VALUES ('zone', 'c', 'held')", "other machines or domains"),
        ("INSERT INTO reservations VALUES ('m1', 'shard-1', 'i', 0, 0, '', '')", "other reservations"),
        ("UPDATE meta SET value = '9' WHERE key = 'coordinator_term'", "holds term 9, not 7"),
    ],
)
def test_a_file_that_says_otherwise_than_its_process_is_found(tmp_path: Path, statement: str, said: str) -> None:
    """By the validator, which finds nothing before."""
    with opened(tmp_path) as state_file:
        state_file.ownership.accept_term(7)
        state_file.ownership.validate()
        state_file.ownership._connection.execute(statement)

        with pytest.raises(InvariantBroken, match=said):
            state_file.ownership.validate()


@pytest.mark.rule("shard 2/11", "coordinator 9.1/4")
def test_a_lower_term_never_replaces_a_higher_one(tmp_path: Path) -> None:
    with opened(tmp_path) as state_file:
        state_file.ownership.accept_term(7)
        state_file.ownership.accept_term(3)

    assert held(tmp_path)[2] == 7


@pytest.mark.rule("shard 1/19")
@pytest.mark.parametrize(("first", "later"), [(Base.DOMAINS, Base.ALL), (Base.ALL, Base.DOMAINS)])
def test_the_base_of_a_file_is_asked_of_a_new_one_alone(tmp_path: Path, first: Base, later: Base) -> None:
    """So a chart may add --ownership=assigned to shards that run."""
    opened(tmp_path, new_file_owns=first).close()

    with opened(tmp_path, new_file_owns=later) as state_file:
        assert state_file.ownership.owned.base is first


@pytest.mark.rule("shard 2/12")
def test_a_file_of_the_former_schema_goes_on_owning_everything(tmp_path: Path) -> None:
    tmp_path.joinpath(FILE_NAME).touch()
    execute(
        tmp_path,
        "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT",
        "INSERT INTO meta VALUES ('schema', '1'), ('shard_id', 'shard-0'), ('epoch', '41')",
    )

    with opened(tmp_path, new_file_owns=Base.DOMAINS) as state_file:
        assert state_file.epoch == 42
        assert state_file.ownership.owned == Owned(base=Base.ALL)


def released(name: str) -> Owned:
    machine = Machine(id=MachineId(name), state=MachineState.IDLE, host=HostRef("p", name))
    return Owned(base=Base.DOMAINS).released(machine, OwnershipVersion(1, 1), to=OTHER)


@pytest.mark.rule("shard 2/13")
def test_a_change_that_cannot_be_written_is_not_made(tmp_path: Path) -> None:
    """Neither on disk nor in memory: whoever wanted it is told."""
    with opened(tmp_path) as state_file:
        kept = state_file.ownership
        before = kept.owned
        kept._connection.execute(
            "CREATE TEMP TRIGGER full BEFORE INSERT ON main.reservations"
            " BEGIN SELECT RAISE(ABORT, 'database or disk is full'); END"
        )
        reservation = Reservation(machine_id=IDS[0], to_shard=OTHER, instruction_id="1-1")
        with pytest.raises(OwnershipNotWritten, match="disk is full"):
            kept.commit(released("m0"), {IDS[0]: reservation})
        assert kept.owned == before
        assert not kept.reservations

    assert held(tmp_path) == (before, {}, 0)


@pytest.mark.rule("shard 2/11")
def test_a_process_that_dies_within_a_change_leaves_nothing_of_it(tmp_path: Path) -> None:
    with opened(tmp_path) as state_file:
        kept = state_file.ownership
        kept.commit(released("m0"))
        before = kept.owned

        class Dies(Exception):
            pass

        class Rows(dict[MachineId, OwnershipRow]):
            def items(self) -> Any:
                yield from super().items()
                raise Dies

        with pytest.raises(Dies):
            kept.commit(Owned(base=Base.DOMAINS, domains=frozenset(DOMAINS), rows=Rows(released("m1").rows)))
        assert kept.owned == before

    assert held(tmp_path)[0] == before


@pytest.mark.rule("shard 2/12")
@pytest.mark.parametrize(
    ("damage", "finding"),
    [
        ("UPDATE rows SET kind = 'lost'", "table rows: machine 'm0': 'lost' is not a valid RowKind"),
        ("UPDATE rows SET record = x'c1'", "table rows: machine 'm0': "),
        ("UPDATE rows SET record = x'80'", "table rows: machine 'm0': 'host'"),
        ("UPDATE rows SET term = -1", "table rows: machine 'm0': its turn -1-1 is below zero"),
        ("UPDATE domains SET standing = 'lent'", "table domains: zone=a is 'lent', and must be held or leaving"),
        ("UPDATE reservations SET is_ready = 7", "table reservations: machine 'm1': is_ready is 7"),
        ("UPDATE meta SET value = 'some' WHERE key = 'base'", "table meta: base is 'some'"),
        ("UPDATE meta SET value = '-3' WHERE key = 'coordinator_term'", "table meta: coordinator_term is '-3'"),
        ("DROP TABLE rows", "no such table: rows"),
    ],
)
def test_what_cannot_be_read_is_named_and_kept(tmp_path: Path, damage: str, finding: str) -> None:
    """A shard that forgot what it gave away would have it twice."""
    with opened(tmp_path) as state_file:
        kept: OwnershipFile = state_file.ownership
        reservation = Reservation(machine_id=IDS[1], to_shard=OTHER, instruction_id="1-1")
        kept.commit(released("m0").assigned(DOMAINS[0]), {IDS[1]: reservation})
        kept.accept_term(3)
    execute(tmp_path, damage)

    for _ in range(2):
        with pytest.raises(StateFileFault) as fault:
            opened(tmp_path)
        assert finding in str(fault.value)
        assert "restore the file from a backup" in str(fault.value)


@pytest.mark.rule("shard 2/11")
def test_the_records_of_released_machines_survive(tmp_path: Path) -> None:
    with opened(tmp_path) as state_file:
        state_file.ownership.commit(released("m0"))

    row = held(tmp_path)[0].rows[MachineId("m0")]
    assert row.kind is RowKind.RELEASED
    assert row.machine is not None
    assert row.machine.host == HostRef("p", "m0")
