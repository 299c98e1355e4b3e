"""Finds excess machines that must serve until their replacements, which the decision counts on, serve.

docs/spec/shard.md §6, limit 6. A decision that follows a target composition claims a machine that is being created or
bound before one that serves. So a machine that serves may be excess before its replacement is available, or although it
never comes. Pure functions of a decision and its snapshot: they may run in any thread.
"""

from collections import Counter
from collections.abc import Iterable, Sequence, Set

from bigfleet.engine.columns.objects import example_of
from bigfleet.engine.columns.store import ColumnSnapshot
from bigfleet.engine.decision import Decision, RowResult
from bigfleet.model import vector
from bigfleet.model.ids import MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.need import Need
from bigfleet.model.states import MachineState
from bigfleet.model.vector import Vector


def serving_for_replacements(view: ColumnSnapshot, due: Sequence[MachineId], decision: Decision) -> Set[MachineId]:
    """Return those of the due machines that must serve on; `due` is in the order in which they would be reclaimed.

    The last of them serve on, as many as make up for the machines that do not serve yet, are claimed or acquired by
    rows of their cluster, and whose pods they could host. Clusters without a target composition have none.
    """
    targets = decision.basis.options.targets if due and decision.basis is not None else {}
    if not targets:
        return frozenset()
    columns, vocabulary = view.columns, view.vocabulary
    rows = {machine_id: row for machine_id in due if (row := view.rows.get(machine_id)) is not None}
    cluster_of = {machine_id: vocabulary.clusters[columns.cluster[row]] for machine_id, row in rows.items()}
    clusters = targets.keys() & set(cluster_of.values())
    coming = _coming_to(view, decision.rows, clusters) if clusters else []
    examples: dict[int, Machine] = {}
    found = set()
    for machine_id, row in reversed(rows.items()) if coming else ():
        shape = int(columns.shape[row])
        if shape not in examples:
            examples[shape] = example_of(vocabulary, shape)
        if any(each.takes(examples[shape]) for each in coming if each.cluster == cluster_of[machine_id]):
            found.add(machine_id)
    return found


def _coming_to(view: ColumnSnapshot, rows: Iterable[RowResult], clusters: Set[str]) -> "list[_Coming]":
    """Return what does not serve yet of the machines that rows of these clusters have, by the rows that share it."""
    columns, vocabulary = view.columns, view.vocabulary
    sharing: dict[MachineId, list[Need]] = {}
    for result in rows:
        if result.need.cluster not in clusters:
            continue
        for machine_id in _for_pods_that_ran(result):
            if columns.state[view.rows[machine_id]] != MachineState.CONFIGURED:
                sharing.setdefault(machine_id, []).append(result.need)
    groups: dict[tuple[int, ...], tuple[list[Need], Counter[str]]] = {}
    for machine_id, needs in sharing.items():
        _, supply = groups.setdefault(tuple(map(id, needs)), (needs, Counter()))
        supply.update(vocabulary.supplies[vocabulary.supply_of_shape[columns.shape[view.rows[machine_id]]]])
    return [_Coming(needs, supply) for needs, supply in groups.values()]


def _for_pods_that_ran(result: RowResult) -> Iterable[MachineId]:
    """Return the machines that a row has for pods other than those that wait, for which what serves was no help."""
    need = result.need
    claimed = {placement.machine_id: None for placement in result.placements if placement.shape < len(need.shapes)}
    return claimed if need.waiting else (*claimed, *result.bootstraps, *result.provisions)


class _Coming:
    """Rows that share machines which do not serve yet, and what of their supply no serving machine makes up for."""

    def __init__(self, needs: Sequence[Need], supply: Vector) -> None:
        self.cluster = needs[0].cluster
        self._needs = needs
        # A dimension that no pod asks for needs no replacement.
        wanted = {name for need in needs for name in need.aggregate}
        self._left: Vector = {name: amount for name, amount in supply.items() if name in wanted}

    def takes(self, machine: Machine) -> bool:
        """Return whether the machine makes up for some of what is left, and take it off."""
        if not vector.is_useful(machine.supply, self._left) or not any(_hosts(machine, need) for need in self._needs):
            return False
        self._left = vector.subtract(self._left, machine.supply)
        return True


def _hosts(machine: Machine, need: Need) -> bool:
    """Return whether the machine hosts a pod of the row."""
    units = [shape.resources for shape in need.shapes] or [need.min_unit]
    fits = any(vector.covers(machine.supply, unit) for unit in units)
    return fits and all(each.holds(machine.attribute(each.key)) for each in need.profile.requirements)
