"""Defines the settings of a shard process: identity, state directory, addresses (docs/spec/shard.md §1).

`bigfleet.cli.shard.command` makes them from its flags; this module does not open or check anything.
"""

from dataclasses import dataclass
from pathlib import Path

from bigfleet.exchange.values import ExchangeMode
from bigfleet.model.ids import ShardId
from bigfleet.model.ownership import Base
from bigfleet.rpc.security.tls import TlsFiles
from bigfleet.rpc.servers.session import FRAME_BYTES_MAX, HELLO_BYTES_MAX
from bigfleet.shard.cluster_policy import PolicyFile


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardProcessSettings:
    """The identity of the shard, its state directory, the addresses it dials and those it listens on."""

    shard_id: ShardId
    data_dir: Path
    #: None: `fake_slots` in this process.
    provider_address: tuple[str, int] | None
    listen_address: tuple[str, int]
    #: None serves no HTTP.
    metrics_address: tuple[str, int] | None
    #: How many slots a fake provider in this process has; None with a provider's address, and only then.
    fake_slots: int | None = None
    #: HOST:PORT of each; without one nothing is reported.
    coordinators: tuple[str, ...] = ()
    #: HOST:PORT at which others reach the shard; empty: the host's name and the port that is listened on.
    advertised_address: str = ""
    #: The base of a state file that is new.
    new_file_owns: Base = Base.ALL
    #: One identity for server, coordinator and provider; None is plain text.
    tls: TlsFiles | None = None
    #: Processes that plan target compositions; 0 plans within the cycle.
    plan_workers: int = 1
    #: What is done about cheaper machines, where the cluster policy says nothing.
    exchange: ExchangeMode = ExchangeMode.PROPOSE
    #: None keeps no audit log.
    audit_log: Path | None = None
    audit_log_bytes_max: int = 256 * 1024 * 1024
    #: None records nothing.
    record: Path | None = None
    record_bytes_max: int = 256 * 1024 * 1024
    #: Settings of single clusters, as read at the start; None treats all alike.
    cluster_policy: PolicyFile | None = None
    #: Bounds of a session's first frame, and of every other frame of an operator.
    hello_bytes_max: int = HELLO_BYTES_MAX
    frame_bytes_max: int = FRAME_BYTES_MAX
