"""Defines the provider's metrics, each once (docs/spec/provider.md §18).

No label may carry a machine, cluster or shard id. Series whose increase an alert reads are exported from the start, at
0: the first event of a series that begins with it is no increase.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from bigfleet.provider.records.kinds import Kind

PREFIX = "bigfleet_provider"
#: How a call of the backend ends.
BACKEND_OUTCOMES = ("ok", "transient", "final", "timeout", "late")
_RPC_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_WORK_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0)
_COMMIT_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_LIST_BYTES = tuple(float(1024 * 4**power) for power in range(11))


class ProviderMetrics:
    """All series of one provider, on one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{PREFIX}_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"{PREFIX}_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"{PREFIX}_{name}", text, labels, registry=registry, buckets=buckets)

        self.rpc_requests = counter("rpc_requests_total", "Calls answered.", "method", "code")
        self.rpc_seconds = histogram("rpc_duration_seconds", "Time to answer a call.", _RPC_SECONDS, "method")
        self.fence_rejections = counter("fence_rejections_total", "Calls that the fence refused.", "method")
        self.fence_marks = gauge("fence_marks", "Fence marks stored.", "scope")
        self.repeats = counter("repeats_total", "Calls that repeated the latest operation.", "method", "result")
        self.machines = gauge("machines", "Machines and slots.", "state", "capacity_type")
        self.failed_oldest_seconds = gauge("failed_oldest_seconds", "Age of the oldest FAILED machine's failure.")
        self.transition_seconds = histogram(
            "transition_duration_seconds", "From acceptance to settled.", _WORK_SECONDS, "kind", "outcome"
        )
        self.backend_calls = counter("backend_calls_total", "Backend calls ended.", "kind", "outcome")
        self.backend_seconds = histogram("backend_duration_seconds", "Backend calls.", _WORK_SECONDS, "kind")
        self.in_flight = gauge("operations_in_flight", "Operations in the backend's hands.", "kind")
        self.queued = gauge("operations_queued", "Operations waiting for a dispatch slot.", "kind")
        self.queue_wait_seconds = histogram("queue_wait_seconds", "Wait for a dispatch slot.", _WORK_SECONDS, "kind")
        self.readiness_wait_seconds = histogram(
            "readiness_wait_seconds", "From the end of configure to Ready.", _WORK_SECONDS
        )
        self.retries = counter("retries_total", "Backend calls repeated after a transient error.", "kind")
        self.breaker_state = gauge("breaker_state", "0 closed, 1 half open, 2 open.", "kind")
        self.late_results = counter("late_results_total", "Effects after their verdict.", "kind", "compensated")
        self.commit_seconds = histogram("store_commit_duration_seconds", "Commits of the store.", _COMMIT_SECONDS)
        self.store_errors = counter("store_errors_total", "Commits that failed.")
        self.store_bytes = gauge("store_size_bytes", "Size of the state on disk.")
        self.revision = gauge("revision", "Revision of the last change.")
        self.tombstones = gauge("tombstones", "Removed ids still reported to readers.")
        self.list_requests = counter("list_requests_total", "List answers.", "view")
        self.list_bytes = histogram("list_response_bytes", "Size of List answers.", _LIST_BYTES, "view")
        self.cursor_rejections = counter("cursor_rejections_total", "Cursors answered with a full list.", "reason")
        self.reconcile_seconds = histogram("reconcile_duration_seconds", "Inventory passes.", _WORK_SECONDS, "outcome")
        self.reconcile_changes = counter("reconcile_changes_total", "What inventory passes changed.", "change")
        self.reconcile_last_success = gauge(
            "reconcile_last_success_timestamp_seconds", "Unix time of the last complete inventory pass."
        )
        self.brake_engaged = gauge("reconcile_brake_engaged", "1 while losses are held back by the brake.")
        self.quarantined = gauge("records_quarantined", "Facts refused in the last inventory pass.", "reason")
        self.pushes = counter("pushes_total", "Facts pushed by the backend.", "kind")
        self.interruptions = counter("interruptions_total", "Hosts taken away.", "notice")
        self.recoveries = counter("recoveries_total", "Ways out of FAILED taken.", "by", "result")
        self.insecure = gauge("insecure", "1 when plain text is served beyond this machine, or an admin may certify.")
        self.build_info = gauge("build_info", "Always 1.", "version")
        self._export_zeros()

    def _export_zeros(self) -> None:
        for kind in Kind:
            self.fence_rejections.labels(kind.method)
            for outcome in BACKEND_OUTCOMES:
                self.backend_calls.labels(kind.value, outcome)
            for compensated in ("yes", "no"):
                self.late_results.labels(kind.value, compensated)
