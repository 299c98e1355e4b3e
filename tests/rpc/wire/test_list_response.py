"""An answer to List that is read record by record says what reading it as a whole does."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigfleet.rpc.wire.convert_machine import machine_from_wire
from bigfleet.rpc.wire.gen import provider_pb2
from bigfleet.rpc.wire.list_response import read_listing
from bigfleet.shard.ports import ListedMachine, ProviderRefusal, RefusalKind
from bigfleet.sim.kernel.virtual_time import LoopClock, run_virtual
from tests.engine.proof import in_proportion

messages = st.builds(
    provider_pb2.MachineList,
    machines=st.lists(
        st.builds(
            provider_pb2.Machine,
            id=st.sampled_from(["m1", "m2"]),
            state=st.sampled_from([0, 1, 3, 5]),
            labels=st.dictionaries(st.sampled_from("ab"), st.text(max_size=3), max_size=2),
            shard_metadata=st.dictionaries(st.sampled_from("ab"), st.text(max_size=3), max_size=2),
        ),
        max_size=8,
    ),
    revision=st.binary(max_size=9),
    removed_ids=st.lists(st.text(max_size=5), max_size=3),
    tombstones=st.booleans(),
)


@given(messages)
@settings(max_examples=in_proportion(150), deadline=None)
def test_a_listing_says_what_the_whole_message_says(message: provider_pb2.MachineList) -> None:
    """Records in their order, and equal digests for equal bytes alone."""

    async def read() -> None:
        listing = await read_listing(message.SerializeToString(), LoopClock())
        expected = [ListedMachine(*machine_from_wire(machine)) for machine in message.machines]

        assert list(listing.records) == expected
        assert listing.records[1:] == expected[1:]
        assert len(listing.records) == len(expected)
        assert (listing.revision, list(listing.removed_ids)) == (message.revision, list(message.removed_ids))
        assert listing.tombstones == message.tombstones
        digests = [listing.digests[place : place + 16] for place in range(0, len(listing.digests), 16)]
        written = [machine.SerializeToString() for machine in message.machines]
        assert len(digests) == len(written)
        for one, digest in zip(written, digests, strict=True):
            assert [digest == other for other in digests] == [one == other for other in written]

    run_virtual(read)


@pytest.mark.parametrize("content", [b"\x0a\x05ab", b"no machine list", b"\x12\x7f"])
async def test_bytes_that_are_no_list_are_refused(content: bytes) -> None:
    """Nobody can say what was answered."""
    with pytest.raises(ProviderRefusal, match="is no MachineList") as refusal:
        await read_listing(content, LoopClock())

    assert refusal.value.kind is RefusalKind.UNKNOWN_OUTCOME


async def test_a_record_that_is_no_machine_is_refused_when_it_is_read() -> None:
    """The others can be read; whoever needs them all reads them before using any."""
    listing = await read_listing(b"\x0a\x03\x0a\x01m" + b"\x0a\x02\x0a\x07", LoopClock())

    assert listing.records[0].machine.id == "m"
    with pytest.raises(ProviderRefusal, match="is no MachineList"):
        listing.records[1]
