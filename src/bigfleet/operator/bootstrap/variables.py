"""Defines the variables of a bootstrap template, from a request or as a sample (docs/spec/operator.md §6).

Values are plain JSON. A variable of this list is always defined, if only as an empty text: templates of users name it.
"""

import hashlib
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from bigfleet.model.frames import BootstrapRequest, Taint
from bigfleet.model.labels import INSTANCE_TYPE, ZONE
from bigfleet.model.profile import Operator, Requirement
from bigfleet.operator.kubernetes.resources import MACHINE_ID

_LABEL_VALUE: Final = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_HASH_CHARACTERS: Final = 40


def machine_id_label(machine_id: str) -> str:
    """Return the value of the label machine-id: the id itself if a label can hold it, else a hash; "" for no id."""
    if not machine_id or _LABEL_VALUE.fullmatch(machine_id):
        return machine_id
    return "h-" + hashlib.sha256(machine_id.encode()).hexdigest()[:_HASH_CHARACTERS]


def rfc3339(unix_seconds: int) -> str:
    """Return the moment in UTC, such as `2026-11-24T12:00:00Z`."""
    return datetime.fromtimestamp(unix_seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


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
        "machine_id_label": machine_id_label(request.machine_id),
        "labels": _labels(request.labels, request.machine_id),
        "taints": [{"key": t.key, "value": t.value, "effect": t.effect} for t in request.taints],
        "instance_type": request.instance_type,
        "zone": request.zone,
        "provider_id": request.provider_id,
        "token": token,
        "expires_at": "" if expires_unix_seconds is None else rfc3339(expires_unix_seconds),
    }


def _labels(labels: Mapping[str, str], machine_id: str) -> dict[str, str]:
    own = {MACHINE_ID: machine_id_label(machine_id)} if machine_id else {}
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
