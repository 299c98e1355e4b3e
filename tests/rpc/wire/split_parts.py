"""Puts the parts of a record together again."""

from dataclasses import replace

from bigfleet.model.machine import HostRef
from bigfleet.shard.inventory.host_texts import unpack
from bigfleet.shard.ports import ListedMachine, SplitRecords


def composed(split: SplitRecords, number: int) -> ListedMachine:
    """Return a record of its parts."""
    facts, binding = split.facts_values[split.facts[number]], split.binding_values[split.bindings[number]]
    ref, node_name, last_error = unpack(split.texts[number])
    machine = replace(
        facts,
        id=split.ids[number],
        state=binding.state,
        cluster=binding.cluster,
        host=HostRef(facts.host.provider, ref),
        node_name=node_name,
        last_error=last_error,
    )
    return ListedMachine(machine, binding.metadata)
