"""Defines the variables of a bootstrap template, from a request or as a sample (docs/spec/operator.md §6).

Values are plain JSON. A variable of this list is always defined, if only as an empty text: templates of users name it.
"""

from collections.abc import Mapping
from typing import Any

from bigfleet.model.clock import NANOS_PER_SECOND
from bigfleet.model.frames import BootstrapRequest, Taint
from bigfleet.model.labels import INSTANCE_TYPE, ZONE
from bigfleet.model.profile import Operator, Requirement
from bigfleet.operator.kubernetes.resources import MACHINE_ID
from bigfleet.operator.kubernetes.timestamps import rfc3339
from bigfleet.operator.nodes.names import machine_label


def template_variables(
    cluster_id: str, request: BootstrapRequest, *, token: str = "", expires_unix_seconds: int | None = None
) -> dict[str, Any]:
    """Return the variables for one machine; those that an older shard does not send are empty."""
    return {
        "cluster_id": cluster_id,
        "requirements": [
            {"key": r.key, "operator": r.operator.label, "values": list(r.values)} for r in request.requirements
        ],
        "machine_id": request.machine_id,
        "machine_id_label": machine_label(request.machine_id) if request.machine_id else "",
        "labels": _labels(request.labels, request.machine_id),
        "taints": [{"key": t.key, "value": t.value, "effect": t.effect} for t in request.taints],
        "instance_type": request.instance_type,
        "zone": request.zone,
        "provider_id": request.provider_id,
        "token": token,
        "expires_at": "" if expires_unix_seconds is None else rfc3339(expires_unix_seconds * NANOS_PER_SECOND),
    }


def _labels(labels: Mapping[str, str], machine_id: str) -> dict[str, str]:
    own = {MACHINE_ID: machine_label(machine_id)} if machine_id else {}
    return dict(sorted({**labels, **own}.items()))


def sample_variables(cluster_id: str, *, with_token: bool) -> dict[str, Any]:
    """Return variables of a machine that has everything; they show whether a template renders at all."""
    request = BootstrapRequest(
        request_id="sample",
        cluster_id=cluster_id,
        requirements=(Requirement("topology.kubernetes.io/zone", Operator.IN, ("zone-a", "zone-b")),),
        machine_id="provider/host-1",
        instance_type="example.4x16",
        zone="zone-a",
        provider_id="provider://host-1",
        labels={INSTANCE_TYPE: "example.4x16", ZONE: "zone-a", "example.com/purpose": "sample"},
        taints=(Taint("example.com/dedicated", "sample", "NoSchedule"),),
    )
    token = "abcdef.0123456789abcdef" if with_token else ""
    return template_variables(
        cluster_id, request, token=token, expires_unix_seconds=1_767_229_200 if with_token else None
    )
