"""Reads instance types with their shapes and prices from CSV (docs/spec/provider.md §21).

A bad row ends the reading with file, line and column. This module must not invent a type that the file does not have.
"""

import csv
import io
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from bigfleet.files.bounded import CONFIGURATION_BYTES_MAX, read_bounded
from bigfleet.model import labels as keys

T = TypeVar("T")

TYPES_MAX = 10_000
#: Far above what machines have: a larger number is a slip of the unit.
VCPU_MAX = 1_000_000
MEMORY_GIB_MAX = 1_000_000.0
GPUS_MAX = 10_000
_CPU_SHARE_PER_MILLE = 960
_MEMORY_SHARE_PERCENT = 90
_MEBIBYTES_PER_GIBIBYTE = 1024
_COLUMNS = ("instance_type", "vcpu", "memory_gib", "gpus", "gpu_model", "on_demand_usd_per_hour", "architecture")


class CatalogueFault(ValueError):
    """The catalogue cannot be used; the message names file, line and column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceType:
    """One row."""

    name: str
    vcpu: int
    memory_gib: float
    gpus: int
    gpu_model: str
    on_demand_usd_per_hour: float
    architecture: str

    @property
    def allocatable(self) -> Mapping[str, str]:
        """What pods get: 96 % of the cores in whole milli-cores, 90 % of the memory in whole MiB, every GPU."""
        shape = {"cpu": f"{self.vcpu * _CPU_SHARE_PER_MILLE}m", "memory": f"{_pod_mebibytes(self.memory_gib)}Mi"}
        if self.gpus:
            shape["nvidia.com/gpu"] = str(self.gpus)
        return MappingProxyType(shape)

    @property
    def labels(self) -> Mapping[str, str]:
        """Labels that come with the type."""
        labels = {keys.ARCH: self.architecture}
        if self.gpus:
            labels[keys.GPU_PRODUCT] = self.gpu_model
        return labels


def _pod_mebibytes(memory_gib: float) -> int:
    """Return 90 % of the memory in whole MiB, from the digits of the file: 1.1 GiB is not a hair more than 1.1."""
    exact = Decimal(repr(memory_gib)) * _MEBIBYTES_PER_GIBIBYTE * _MEMORY_SHARE_PERCENT / 100
    return int(exact)


def load_catalogue(path: Path | None) -> Mapping[str, InstanceType]:
    """Return the types of a file by name, or those of the sample for None. Raises CatalogueFault."""
    if path is None:
        text = resources.files("bigfleet.provider.backends.simulated").joinpath("sample.csv").read_text("utf-8")
        return parse_catalogue(text.splitlines(), "sample.csv")
    try:
        content = read_bounded(path, CONFIGURATION_BYTES_MAX)
        return parse_catalogue(io.StringIO(content.decode("utf-8-sig"), newline=""), str(path))
    except OSError as error:
        raise CatalogueFault(f"{path}: {error.strerror}; name a file that can be read") from error
    except UnicodeDecodeError as error:
        raise CatalogueFault(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    except csv.Error as error:
        raise CatalogueFault(f"{path}: not a CSV file: {error}") from error


def parse_catalogue(lines: Iterable[str], file: str) -> Mapping[str, InstanceType]:
    """Return the types by name. Raises CatalogueFault naming file, line and column."""
    try:
        return _parsed(lines, file)
    except csv.Error as error:
        raise CatalogueFault(f"{file}: not CSV: {error}") from error


def _parsed(lines: Iterable[str], file: str) -> Mapping[str, InstanceType]:
    reader = csv.DictReader(lines)
    missing = [column for column in _COLUMNS if column not in (reader.fieldnames or ())]
    if missing:
        raise CatalogueFault(f"{file}: line 1: column {missing[0]} is missing")
    types: dict[str, InstanceType] = {}
    for row in reader:
        place = f"{file}: line {reader.line_num}"
        instance_type = _read_row(row, place)
        if instance_type.name in types:
            raise CatalogueFault(f"{place}: column instance_type: {instance_type.name!r} was there before")
        if len(types) >= TYPES_MAX:
            raise CatalogueFault(f"{place}: more than {TYPES_MAX} instance types")
        types[instance_type.name] = instance_type
    if not types:
        raise CatalogueFault(f"{file}: has no instance type; write one line for each type")
    return MappingProxyType(types)


def _read_row(row: Mapping[str, str | None], place: str) -> InstanceType:
    def read(column: str, convert: Callable[[str], T], is_good: Callable[[T], bool], wanted: str) -> T:
        text = (row.get(column) or "").strip()
        try:
            value = convert(text)
        except ValueError as error:
            raise CatalogueFault(f"{place}: column {column}: {text!r} is not {wanted}") from error
        if not is_good(value):
            raise CatalogueFault(f"{place}: column {column}: {text!r} is not {wanted}")
        return value

    gpus = read("gpus", lambda text: int(text or "0"), lambda n: 0 <= n <= GPUS_MAX, f"a whole number up to {GPUS_MAX}")
    return InstanceType(
        name=read("instance_type", str, _is_name, "a name of A-Za-z0-9._-"),
        vcpu=read("vcpu", int, lambda n: 0 < n <= VCPU_MAX, f"a whole number from 1 to {VCPU_MAX}"),
        memory_gib=read("memory_gib", float, _is_memory, f"a number of GiB up to {MEMORY_GIB_MAX:.0f}, at least 2 MiB"),
        gpus=gpus,
        gpu_model=read("gpu_model", str, lambda text: bool(text) or not gpus, "the model of the GPUs"),
        on_demand_usd_per_hour=read(
            "on_demand_usd_per_hour", float, lambda n: math.isfinite(n) and n > 0, "a price above 0"
        ),
        architecture=read("architecture", str, bool, "an architecture such as amd64"),
    )


def _is_memory(memory_gib: float) -> bool:
    return math.isfinite(memory_gib) and memory_gib <= MEMORY_GIB_MAX and _pod_mebibytes(memory_gib) > 0


def _is_name(text: str) -> bool:
    return bool(text) and text.isascii() and all(c.isalnum() or c in "._-" for c in text)
