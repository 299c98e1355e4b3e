"""Reads a shard's counters of operator sessions, over all clusters, from its metrics (docs/spec/shard.md §14).

`ShardRead` lists the sessions that are open; how earlier sessions ended is in the metrics only. This module does not
use gRPC.
"""

from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from bigfleet.cli.flags.values import parse_address
from bigfleet.cli.get.records import Record
from bigfleet.cli.runtime.failures import RunFault

READ_SECONDS_MAX: Final = 10.0
METRICS_BYTES_MAX: Final = 64 * 1024 * 1024
_PREFIX: Final = "bigfleet_shard_"
#: What is shown of each series: the sample's name, the label that distinguishes its rows, and what they count.
_SHOWN: Final[tuple[tuple[str, str, str], ...]] = (
    ("active_sessions", "", "operators connected now"),
    ("clusters_silent", "", "clusters with demand or machines and no operator for too long"),
    ("session_lifecycle_total", "event", "sessions since the process started"),
    ("rollups_total", "result", "roll-ups since the process started"),
    ("session_frames_dropped_total", "kind", "frames that concerned no machine of the cluster"),
    ("session_identity_rejected_total", "", "sessions refused for their certificate"),
    ("outbox_frames", "", "frames waiting in the fullest outbox"),
    ("outbox_dropped_total", "", "frames dropped for lack of room"),
    ("drains_without_session_total", "", "drains without an operator to ask"),
)
#: Per cluster, and only where there is trouble.
_OF_CLUSTERS: Final[tuple[tuple[str, str], ...]] = (
    ("rollup_quarantined", "its roll-up is held: it lost most of its rows at once"),
    ("rollups_rejected_total", "roll-ups refused as malformed"),
)


def session_records(address: str) -> Iterator[Record]:
    """Yield what is counted, one figure each; then the clusters in trouble. Raises RunFault."""
    samples = _samples(address)
    if f"{_PREFIX}active_sessions" not in samples:
        raise RunFault(
            f"http://{address}/metrics is not that of a shard; check --metrics-addr, which is the shard's own one"
        )
    for name, label, meaning in _SHOWN:
        for labels, value in samples.get(_PREFIX + name, []):
            yield _record(name, labels.get(label), None, value, meaning)
    for name, meaning in _OF_CLUSTERS:
        for labels, value in samples.get(_PREFIX + name, []):
            if value:
                yield _record(name, None, labels.get("cluster"), value, meaning)


def _record(name: str, event: str | None, cluster: str | None, value: float, meaning: str) -> Record:
    return {
        "name": name.removesuffix("_total"),
        "event": event,
        "cluster": cluster,
        "count": int(value),
        "meaning": meaning,
    }


def _samples(address: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    text = _read(address)
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found.setdefault(sample.name, []).append((sample.labels, sample.value))
    except ValueError as error:
        raise RunFault(f"http://{address}/metrics is not a list of metrics: {error}; check --metrics-addr") from error
    return found


def _read(address: str) -> str:
    host, port = parse_address(address, "--metrics-addr")
    connection = HTTPConnection(host, port, timeout=READ_SECONDS_MAX)
    try:
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        body = response.read(METRICS_BYTES_MAX)
    except (OSError, HTTPException) as error:
        cause = error.strerror if isinstance(error, OSError) and error.strerror else "there is no HTTP server"
        raise RunFault(
            f"cannot read http://{address}/metrics: {cause.lower()}; check that the shard runs and that --metrics-addr "
            "or BIGFLEET_SHARD_METRICS_ADDR names the address of its --metrics-addr"
        ) from error
    finally:
        connection.close()
    if response.status != 200:
        raise RunFault(f"http://{address}/metrics answers {response.status} {response.reason}; check --metrics-addr")
    return body.decode("utf-8", "replace")
