"""Defines the settings of an operator process, after all flags have been checked."""

from dataclasses import dataclass
from pathlib import Path

from bigfleet.cli.operator.token_mode import TokenMode
from bigfleet.model.ids import ClusterId
from bigfleet.rpc.security.tls import TlsFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorProcessSettings:
    """One operator process: which cluster, which shard, how it reaches both."""

    cluster: ClusterId
    shard_address: str
    #: None finds the credentials as kubectl does, or the pod's own.
    kubeconfig: Path | None
    #: "" is the namespace of the credentials.
    namespace: str
    lease_name: str
    #: None serves no HTTP.
    metrics_address: tuple[str, int] | None
    qps: float
    burst: int
    rollup_interval_seconds: float
    status_workers: int
    handler_workers: int
    #: None answers with the stub.
    bootstrap_template: Path | None
    bootstrap_ttl_seconds: int
    token_mode: TokenMode
    #: Namespace and name, in the mode tokenrequest alone.
    service_account: tuple[str, str] | None
    drain_force: bool
    #: None is plain text.
    tls: TlsFiles | None
