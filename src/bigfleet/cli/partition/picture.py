"""Draws partitioned hosts in a terminal or as SVG: each a bar of its disk, its instances, and what still fits.

What still fits is the allocation vector (docs/spec/partition.md §8): its sizes are alternatives for the same room, not
a sum. This module does not read a file or changes a host.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final
from xml.sax.saxutils import escape

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bigfleet.partition.cluster import GanetiCluster
from bigfleet.partition.hosts import HostGroup, PartitionedHost, Role
from bigfleet.partition.metric import UnlimitedSize

#: Characters of a bar in a terminal.
BAR_CELLS: Final = 40
#: Colours by turns, so that neighbours on a host differ: of instances, and of their mirrors.
_TERMINAL: Final = {"own": ("blue", "cyan"), "mirror": ("magenta", "bright_magenta"), "unknown": ("bright_black",) * 2}
_SVG: Final = {"own": ("#3b6ea8", "#5b94d1"), "mirror": ("#8a5aa3", "#ab7cc4"), "unknown": ("#8c8c8c",) * 2}
#: How a block begins, is filled and ends, for terminals without colours.
_EDGES: Final = {"own": ("[", " ", "]"), "mirror": ("(", " ", ")"), "unknown": ("", "░", "")}
_MEANINGS: Final = {"own": "instance", "mirror": "mirror of one", "unknown": "taken by no instance"}


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a host's disk that something takes."""

    label: str
    #: Of the host's disk, 0 to 1.
    share: float
    #: One of the keys of the colours.
    kind: str


@dataclass(frozen=True, slots=True)
class HostBar:
    """One host as it is drawn."""

    name: str
    #: Empty for one that takes instances.
    state: str
    blocks: tuple[Block, ...]
    memory_free_mib: int
    disk_free_mib: int
    #: One text for each size of the group.
    fits: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GroupPicture:
    """One group as it is drawn."""

    title: str
    #: What each size is, by decreasing disk.
    sizes: tuple[str, ...]
    hosts: tuple[HostBar, ...]


def picture_of(cluster: GanetiCluster, groups: Sequence[HostGroup]) -> list[GroupPicture]:
    """Return the picture of these groups, in the order of the message."""
    return [
        GroupPicture(
            title=f"{group.name} ({group.allocation.value})",
            sizes=tuple(f"{size.memory_mib:,}/{size.disk_mib:,}" for size in group.policy.sizes),
            hosts=tuple(_bar(host) for host in cluster.hosts if host.group is group),
        )
        for group in groups
    ]


def _bar(host: PartitionedHost) -> HostBar:
    blocks = []
    total_mib = max(1.0, host.disk_total_mib)
    known_mib = 0
    for instance, role in host.instances:
        if instance.is_local and not instance.is_forthcoming:
            known_mib += instance.disk_mib
            kind = "own" if role is Role.PRIMARY else "mirror"
            blocks.append(Block(instance.name, max(0.0, instance.disk_mib / total_mib), kind))
    unknown_mib = host.disk_total_mib - known_mib - host.room.disk_mib
    if unknown_mib > 0 and host.is_candidate:
        blocks.append(Block("", unknown_mib / total_mib, "unknown"))
    return HostBar(
        name=host.name,
        state="" if host.is_candidate else "takes nothing",
        blocks=tuple(blocks),
        memory_free_mib=host.room.memory_mib,
        disk_free_mib=host.room.disk_mib,
        fits=_fits(host),
    )


def _fits(host: PartitionedHost) -> tuple[str, ...]:
    sizes = host.group.policy.sizes
    if not host.is_candidate:
        return ("–",) * len(sizes)
    try:
        return tuple(map(str, host.allocation_vector()))
    except UnlimitedSize:
        return ("∞",) * len(sizes)


def _cells(blocks: Sequence[Block], width: int) -> list[int]:
    """Return how many cells each block takes: its share, rounded so that the sum is right, and at most all."""
    edges, at = [0], 0.0
    for block in blocks:
        at += block.share
        edges.append(min(width, round(at * width)))
    return [end - begin for begin, end in pairwise(edges)]


def _block_text(block: Block, cells: int) -> str:
    begin, fill, end = _EDGES[block.kind]
    inner = max(0, cells - len(begin) - len(end))
    return (begin + block.label[:inner].ljust(inner, fill) + end)[:cells]


def _bar_text(bar: HostBar) -> Text:
    text = Text()
    for number, (block, cells) in enumerate(zip(bar.blocks, _cells(bar.blocks, BAR_CELLS), strict=True)):
        text.append(_block_text(block, cells), style=f"white on {_TERMINAL[block.kind][number % 2]}")
    return text.append("·" * (BAR_CELLS - len(text)), style="green")


def print_picture(console: Console, picture: Sequence[GroupPicture]) -> None:
    """Print one table for each group."""
    for group in picture:
        table = Table(title=group.title, title_justify="left", title_style="bold", box=None, pad_edge=False)
        table.add_column("host", no_wrap=True)
        table.add_column("disk", no_wrap=True, min_width=BAR_CELLS)
        table.add_column("memory\nfree", justify="right")
        table.add_column("disk\nfree", justify="right")
        for size in group.sizes:
            table.add_column("fits\n" + size.replace("/", "\n/"), justify="right", min_width=8, no_wrap=True)
        for bar in group.hosts:
            name = f"{bar.name} {bar.state}".rstrip()
            free = (f"{bar.memory_free_mib:,}", f"{bar.disk_free_mib:,}") if not bar.state else ("–", "–")
            table.add_row(Text(name), _bar_text(bar), *free, *bar.fits)
        console.print(table)
        console.print()
    legend = Text("MiB; sizes are memory/disk and share the room.")
    for kind, meaning in _MEANINGS.items():
        legend.append("  ").append(_block_text(Block("", 0.0, kind), 3), style=f"white on {_TERMINAL[kind][0]}")
        legend.append(f" {meaning}")
    console.print(legend.append("  ·", style="green").append(" free"))


# ---- SVG -------------------------------------------------------------------------------------------------------------

_ROW: Final = 26
_BAR_WIDTH: Final = 520
_FITS_WIDTH: Final = 110


def svg_of(picture: Sequence[GroupPicture]) -> str:
    """Return the picture as an SVG document that needs nothing from anywhere else."""
    parts: list[str] = []
    y = 10
    widest = max((len(group.sizes) for group in picture), default=0)
    left = 30 + 7 * max((len(f"{bar.name} {bar.state}") for group in picture for bar in group.hosts), default=0)
    for group in picture:
        parts.append(_svg_text(10, y + 18, group.title, weight="bold"))
        for column, size in enumerate(group.sizes):
            parts.append(_svg_text(_fits_x(left, column), y + 18, size, anchor="end", size=10))
        y += _ROW
        for bar in group.hosts:
            parts += _svg_host(bar, left, y)
            y += _ROW
        y += _ROW // 2
    x = left
    for kind, meaning in _MEANINGS.items():
        parts.append(f'<rect x="{x}" y="{y + 4}" width="14" height="14" fill="{_SVG[kind][0]}"/>')
        parts.append(_svg_text(x + 20, y + 16, meaning))
        x += 60 + 7 * len(meaning)
    width = left + _BAR_WIDTH + 20 + _FITS_WIDTH * widest + 10
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y + 2 * _ROW}"'
        f' font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join([*parts, _svg_text(left, y + 36, "Right: how many of each size still fit; they share the room.")])
        + "\n</svg>\n"
    )


def _fits_x(left: int, column: int) -> int:
    return left + _BAR_WIDTH + 20 + _FITS_WIDTH * (column + 1)


def _svg_text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal", size: int = 12) -> str:
    # A control character has no place in XML, not even as an escape.
    shown = escape("".join(each if each.isprintable() else "\ufffd" for each in text))
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-weight="{weight}" font-size="{size}">{shown}</text>'


def _svg_host(bar: HostBar, left: int, y: int) -> list[str]:
    parts = [
        _svg_text(10, y + 16, f"{bar.name} {bar.state}".rstrip()),
        f'<rect x="{left}" y="{y + 2}" width="{_BAR_WIDTH}" height="{_ROW - 6}" fill="#e8f2e4" stroke="#9ab08f"/>',
    ]
    x = 0
    for number, (block, width) in enumerate(zip(bar.blocks, _cells(bar.blocks, _BAR_WIDTH), strict=True)):
        colour = _SVG[block.kind][number % 2]
        parts.append(
            f'<rect x="{left + x}" y="{y + 2}" width="{width}" height="{_ROW - 6}" fill="{colour}" stroke="white"/>'
        )
        label = block.label[: max(0, width // 7 - 1)]
        if label:
            parts.append(f'<g fill="white">{_svg_text(left + x + 5, y + 16, label, size=10)}</g>')
        x += width
    parts += [_svg_text(_fits_x(left, column), y + 16, fits, anchor="end") for column, fits in enumerate(bar.fits)]
    return parts
