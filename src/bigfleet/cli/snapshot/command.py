"""Defines `bigfleet snapshot save` and `restore`: copies the coordinator's tables, and writes a copy to a store.

docs/spec/coordinator.md §10. `save` calls the leader. `restore` is offline and writes to the store itself, under a term
higher than every term that may have been in use. Existing tables are replaced only with `--force`.
"""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bigfleet.cli.flags.help_text import HelpGroup
from bigfleet.cli.flags.switches import SwitchCommand
from bigfleet.cli.flags.tls import TlsCa, TlsCert, TlsKey, read_tls
from bigfleet.cli.get.coordinator_asking import ADDRESS, _Addr
from bigfleet.cli.runtime.failures import RunFault, UsageFault
from bigfleet.cli.runtime.terminal import echo

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bigfleet.cli.coordinator.store_url import EtcdUrl, SqliteUrl
    from bigfleet.coordinator.stores.snapshot import Restored, TablesSnapshot
    from bigfleet.rpc.security.tls import TlsFiles
    from bigfleet.rpc.wire.gen import coordinator_pb2

app = typer.Typer(
    cls=HelpGroup, help="Save the coordinator's tables, and restore a store from them.", no_args_is_help=True
)

_StoreFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="TLS file for etcd (PEM), as for the coordinator.")
]


@app.callback()
def snapshot() -> None:
    """Hold the subcommands together."""


@app.command(cls=SwitchCommand)
def save(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory to create; must not exist.")],
    addr: _Addr = ADDRESS,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
) -> None:
    """Save the leader's tables as meta.json and state.json in a new directory."""
    from bigfleet.cli.get.coordinator_asking import fault_of
    from bigfleet.cli.get.flag_values import dialled
    from bigfleet.cli.runtime.early_end import ended_by_interrupt
    from bigfleet.coordinator.stores.snapshot import SnapshotFault, write_snapshot
    from bigfleet.rpc.clients.coordinator import CoordinatorCaller, CoordinatorFault

    caller = CoordinatorCaller(dialled(addr, "--addr"), tls=read_tls(tls_cert, tls_key, tls_ca))
    if directory.exists():
        raise UsageFault(f"{directory}: exists already; choose another directory")
    try:
        with ended_by_interrupt():
            taken = caller.snapshot(_taken)
        write_snapshot(directory, taken)
    except CoordinatorFault as fault:
        raise fault_of(fault) from fault
    except SnapshotFault as fault:
        raise RunFault(str(fault)) from fault
    echo(f"{directory}: term {taken.meta.term}, index {taken.meta.index}, {taken.meta.size} bytes")


@app.command(cls=SwitchCommand)
def restore(
    source: Annotated[Path, typer.Argument(metavar="FILE_OR_DIR", help="Saved or exported snapshot.")],
    store: Annotated[str, typer.Option(metavar="URL", help="Store, as in the coordinator's --store. Required.")] = "",
    force: Annotated[bool, typer.Option("--force", help="Replace the tables in the store.")] = False,
    min_term: Annotated[
        int,
        typer.Option(
            min=0, metavar="TERM", help="Highest term that was ever in use, if the snapshot does not know it."
        ),
    ] = 0,
    store_tls_cert: _StoreFile = None,
    store_tls_key: _StoreFile = None,
    store_tls_ca: _StoreFile = None,
) -> None:
    """Restore a snapshot into a store that no coordinator uses, under a higher term."""
    from bigfleet.cli.coordinator.store_url import EtcdUrl, parse_store, read_store_tls
    from bigfleet.coordinator.stores.snapshot import SnapshotFault, read_snapshot

    url = parse_store(store)
    tls = read_store_tls(store_tls_cert, store_tls_key, store_tls_ca)
    if tls is not None and not isinstance(url, EtcdUrl):
        raise UsageFault("--store-tls-cert, --store-tls-key and --store-tls-ca are for etcd; --store names a file")
    try:
        restored = read_snapshot(source)
    except SnapshotFault as fault:
        raise UsageFault(str(fault)) from fault
    term = restored.term_above(min_term)
    asyncio.run(_restore(url, tls, restored, term=term, is_forced=force))
    tables = sorted({key.table.value for key, _ in restored.rows})
    counts = ", ".join(f"{sum(key.table.value == name for key, _ in restored.rows)} {name}" for name in tables)
    echo(f"{store}: {counts or 'no rows'}, saved at {restored.meta.saved_at}; terms begin above {term}")


async def _restore(
    url: "EtcdUrl | SqliteUrl", tls: "TlsFiles | None", restored: "Restored", *, term: int, is_forced: bool
) -> None:
    from bigfleet.cli.coordinator.store_url import SqliteUrl, open_store
    from bigfleet.cli.runtime.system import SystemClock
    from bigfleet.coordinator.stores.protocol import LeaderInfo, StoreUnavailable
    from bigfleet.coordinator.stores.sqlite import SqliteStateStore
    from bigfleet.files.checked_database import forget_lost

    if isinstance(url, SqliteUrl):
        forget_lost(url.path)
    opened = open_store(url, me=LeaderInfo("restore", ""), tls=tls, lease_ttl_seconds=10, clock=SystemClock())
    try:
        if isinstance(opened, SqliteStateStore):
            there = sum(1 for _ in (await opened.load()).rows())
            if there and not is_forced:
                raise RunFault(f"--store: the file has {there} rows already; --force replaces them")
            opened.restore(restored.rows, term=term)
        else:
            await opened.restore(restored.rows, term=term, is_forced=is_forced)
    except StoreUnavailable as error:
        raise RunFault(f"--store: {error}") from error
    finally:
        await opened.close()


def _taken(frames: "Iterator[coordinator_pb2.SnapshotSaveChunk]") -> "TablesSnapshot":
    """Return the snapshot of a stream. Raises SnapshotFault when it is not whole."""
    from bigfleet.coordinator.stores.snapshot import (
        DOCUMENT_BYTES_MAX,
        SnapshotFault,
        TablesSnapshot,
        read_document,
        read_meta,
    )

    meta, document = b"", bytearray()
    for frame in frames:
        meta = meta or frame.meta_json
        document += frame.data
        if len(document) > DOCUMENT_BYTES_MAX:
            raise SnapshotFault(f"the snapshot is larger than {DOCUMENT_BYTES_MAX} bytes")
    known = read_meta(meta, "the coordinator's answer")
    # What cannot be restored is no snapshot: better known today than on the day it is needed.
    read_document(known, bytes(document), "the coordinator's answer")
    return TablesSnapshot(known, bytes(document))
