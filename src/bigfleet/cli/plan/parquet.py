"""Reads the rows of a Parquet file, with nested values in the forms that JSON lines have (docs/planning.md).

A map, a struct and a list of pairs each become a mapping; text stays text. `bigfleet.cli.plan.inputs` interprets the
columns. Nothing is guessed: a file, a column or a cell that cannot be read is reported by name.
"""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from bigfleet.cli.runtime.failures import UsageFault, one_line

#: Rows that are turned into objects at a time.
BATCH_ROWS: Final = 10_000
#: Fields of a struct that stands for one pair.
_PAIR_FIELDS: Final = (("key", "value"), ("name", "value"))


def parquet_rows(path: Path, *, known: Collection[str], required: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, cells by column) of every row, rows from 1; a cell that is null or empty text is left out.

    Raises UsageFault for a file that is no Parquet file, a column that is not `known`, stands twice or is `required`
    and missing, and without pyarrow.
    """
    pyarrow, parquet = _pyarrow(path)
    try:
        with path.open("rb") as handle, parquet.ParquetFile(handle) as file:
            _check_columns(file.schema_arrow.names, path, known=known, required=required)
            first = 1
            for batch in file.iter_batches(batch_size=BATCH_ROWS):
                rows = batch.to_pylist()
                for number, row in enumerate(rows, start=first):
                    yield f"{path} row {number}", {name: cell for name, cell in row.items() if cell not in (None, "")}
                first += len(rows)
    except pyarrow.ArrowException as error:
        raise UsageFault(f"{path}: not a Parquet file that can be read ({one_line(error)})") from error
    except UnicodeDecodeError as error:
        raise UsageFault(f"{path}: a text is not UTF-8 ({error.reason})") from error
    except OSError as error:
        # pyarrow raises bare ones for broken metadata; those of the system have a number.
        text = one_line(error) if error.errno is None else ""
        why = f"not a Parquet file that can be read ({text})" if text else f"{error.strerror}; name a Parquet file"
        raise UsageFault(f"{path}: {why}") from error


def mapping_of(cell: object, place: str) -> object:
    """Return a map, a struct or a list of pairs as a mapping without its nulls, and anything else as it is.

    Raises UsageFault for a name that stands twice and for a list of something else.
    """
    if isinstance(cell, Mapping):
        return {name: value for name, value in cell.items() if value is not None}
    if not isinstance(cell, list):
        return cell
    found: dict[Any, Any] = {}
    for entry in cell:
        name, value = _pair(entry, place)
        if name in found:
            raise UsageFault(f"{place}: {name!r} is given twice")
        if value is not None:
            found[name] = value
    return found


def _pair(entry: object, place: str) -> tuple[Any, Any]:
    if isinstance(entry, tuple) and len(entry) == 2:
        return entry
    if isinstance(entry, str) and "=" in entry:
        name, _, value = entry.partition("=")
        return (name.strip(), value.strip())
    if isinstance(entry, Mapping):
        for fields in _PAIR_FIELDS:
            if set(entry) == set(fields):
                return (entry[fields[0]], entry[fields[1]])
    raise UsageFault(f"{place}: {entry!r} is not a pair; use a map, a struct, or a list of (key, value)")


def _check_columns(columns: list[str], path: Path, *, known: Collection[str], required: str) -> None:
    for column in columns:
        if column not in known:
            raise UsageFault(f"{path}: column {column!r} is unknown; write {', '.join(known)}")
    if len(set(columns)) != len(columns):
        raise UsageFault(f"{path}: a column is given twice")
    if required not in columns:
        raise UsageFault(f"{path}: there is no column {required!r}, which every machine needs")


def _pyarrow(path: Path) -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UsageFault(
            f"{path}: Parquet needs pyarrow, which is not installed; "
            "run make setup in a checkout, or pip install 'pyarrow>=21'"
        ) from error
    return pyarrow, parquet
