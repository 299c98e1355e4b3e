"""Counts free capacity per offer line, summed over its hosts, and updates it on each placement.

docs/spec/provider.md §22. Each host's vector is lowered where the real instance, with disks and spindles, fits less
often. Only the changed host is counted again. This module must not know ids of slots.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from bigfleet.provider.backends.partitioned.hosts_file import HostsFile, Line
from bigfleet.provider.backends.partitioned.ports import Carved, HostPlacement, NoRoom, Willingness


class RoomCounts:
    """The room of one fleet. Placements are serial."""

    def __init__(self, fleet: HostsFile, standing: Iterable[Carved] = ()) -> None:
        """`standing` are instances of ours, which a document counts no room for."""
        self.fleet = fleet
        self._lines_of: defaultdict[tuple[str, str], list[Line]] = defaultdict(list)
        self._lines_in: defaultdict[str, list[Line]] = defaultdict(list)
        for line in fleet.lines.values():
            self._lines_of[line.group, line.zone].append(line)
            self._lines_in[line.zone].append(line)
        self._hosts_of: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
        for name, place in fleet.hosts.items():
            self._hosts_of[place.group, place.zone].append(name)
        #: Instances whose room is taken, by name.
        self._placed: dict[str, Carved] = {}
        self._counts: dict[str, tuple[int, ...]] = {}
        self._totals: defaultdict[str, int] = defaultdict(int)
        for carved in standing:
            if carved.host in fleet.hosts:
                fleet.allocator.restore(carved.host, carved.instance, carved.size)
                self._placed[carved.instance] = carved
        for name in fleet.hosts:
            self._count(name)

    def _count(self, host: str) -> None:
        """Count again what fits on a host."""
        allocator, place = self.fleet.allocator, self.fleet.hosts[host]
        lines = self._lines_of[place.group, place.zone]
        vector = allocator.vector(host)
        counts = tuple(
            min(count, allocator.how_often(host, line.size)) if count else 0
            for line, count in zip(lines, vector, strict=True)
        )
        before = self._counts.get(host, (0,) * len(lines))
        for line, old, new in zip(lines, before, counts, strict=True):
            self._totals[line.prefix] += new - old
        self._counts[host] = counts

    def place(self, line: Line, instance: str) -> HostPlacement | NoRoom:
        """Choose a host for an instance of a line and take its room."""
        among = self._hosts_of[line.group, line.zone]
        answer = self.fleet.allocator.place(line.group, instance, line.size, among)
        if isinstance(answer, HostPlacement):
            self._placed[instance] = Carved(answer.host, instance, line.size)
            self._count(answer.host)
        return answer

    def put(self, carved: Carved) -> bool:
        """Take the room of an instance that stands; say whether its host is known."""
        if carved.host not in self.fleet.hosts:
            return False
        self.fleet.allocator.restore(carved.host, carved.instance, carved.size)
        self._placed[carved.instance] = carved
        self._count(carved.host)
        return True

    def release(self, instance: str) -> str | None:
        """Give the room of an instance back and return the zone of its host; None when it took none."""
        carved = self._placed.pop(instance, None)
        if carved is None:
            return None
        self.fleet.allocator.release(instance)
        self._count(carved.host)
        return self.fleet.hosts[carved.host].zone

    @property
    def zones(self) -> Iterable[str]:
        """Every zone with a line."""
        return self._lines_in.keys()

    def wanted(self, zone: str) -> Iterator[tuple[Line, int]]:
        """Yield how many slots each line of a zone is to have on offer."""
        lines = self._lines_in.get(zone, ())
        preferred = {
            line.interval
            for line in lines
            if line.willingness is Willingness.PREFERRED and self._totals[line.prefix] > 0
        }
        for line in lines:
            is_last_resort = line.willingness is Willingness.LAST_RESORT
            is_closed = line.willingness is Willingness.UNALLOCABLE or (is_last_resort and line.interval in preferred)
            yield line, 0 if is_closed else max(0, self._totals[line.prefix])

    def free_disk_mib(self) -> dict[str, int]:
        """Return the free disk of each group's candidates."""
        free: defaultdict[str, int] = defaultdict(int)
        for host in self.fleet.allocator.hosts:
            free[host.group] += self.fleet.allocator.free_disk_mib(host.name) if host.is_candidate else 0
        return dict(free)
