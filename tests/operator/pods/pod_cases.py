"""Reads the cases of tests/cases/pods: pods, the cluster's volumes, and the request that must come of them."""

import copy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import yaml

from bigfleet.operator.kubernetes.objects import PersistentVolume, PersistentVolumeClaim, PodObject
from bigfleet.operator.pods.defaults import PenaltyDefaults, read_penalty_defaults

CASES_DIRECTORY = Path(__file__).parents[2] / "cases" / "pods"

PLAIN_POD: dict[str, Any] = {
    "metadata": {"name": "web-0", "namespace": "shop", "uid": "uid-0", "labels": {"app": "web"}},
    "spec": {"containers": [{"name": "main", "resources": {"requests": {"cpu": "1"}}}]},
}
PLAIN_REQUEST: dict[str, Any] = {
    "priority": 0,
    "resources": {"cpu": "1"},
    "requirements": [{"key": "node.kubernetes.io/instance-type", "operator": "Exists"}],
}
FIELDS = {"name", "pod", "claims", "volumes", "defaults", "request", "none", "findings"}


@dataclass(frozen=True)
class PodCase:
    """One pod and what must come of it."""

    file: str
    name: str
    fields: dict[str, Any]

    @property
    def pod(self) -> PodObject:
        return plain_pod(**self.fields.get("pod", {}))

    @property
    def volumes(self) -> "CaseVolumes":
        return CaseVolumes(
            msgspec.convert(self.fields.get("claims", []), list[PersistentVolumeClaim]),
            msgspec.convert(self.fields.get("volumes", []), list[PersistentVolume]),
        )

    def defaults(self, directory: Path) -> PenaltyDefaults:
        path = directory / "defaults.yaml"
        path.write_text(yaml.safe_dump(self.fields.get("defaults", {})), encoding="utf-8")
        return read_penalty_defaults(path)

    @property
    def request(self) -> dict[str, Any]:
        request: dict[str, Any] = PLAIN_REQUEST | self.fields.get("request", {})
        return request

    @property
    def findings(self) -> list[tuple[str, str]]:
        return [item for each in self.fields.get("findings", []) for item in each.items()]


class CaseVolumes:
    """The claims and volumes of a case."""

    def __init__(self, claims: list[PersistentVolumeClaim], volumes: list[PersistentVolume]) -> None:
        self._claims = {claim.metadata.key: claim for claim in claims}
        self._volumes = {volume.metadata.name: volume for volume in volumes}

    def claim(self, namespace: str, name: str) -> PersistentVolumeClaim | None:
        return self._claims.get((namespace, name))

    def volume(self, name: str) -> PersistentVolume | None:
        return self._volumes.get(name)


def plain_manifest(*, metadata: Any = None, spec: Any = None, status: Any = None) -> dict[str, Any]:
    """Return the plain pod with some fields replaced."""
    manifest = copy.deepcopy(PLAIN_POD)
    manifest["metadata"] |= metadata or {}
    manifest["spec"] |= spec or {}
    return manifest | ({} if status is None else {"status": status})


def plain_pod(*, metadata: Any = None, spec: Any = None, status: Any = None) -> PodObject:
    """Return the plain pod with some fields replaced, as the API server sends it."""
    manifest = plain_manifest(metadata=metadata, spec=spec, status=status)
    return msgspec.json.decode(msgspec.json.encode(manifest), type=PodObject)


@cache
def pod_cases() -> tuple[PodCase, ...]:
    """Return the cases of all files, by file name, then in file order."""
    cases = []
    for path in sorted(CASES_DIRECTORY.glob("*.yaml")):
        for fields in yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader):
            unknown = set(fields) - FIELDS
            assert not unknown, f"{path.name}: {fields.get('name')}: unknown fields {unknown}"
            cases.append(PodCase(path.stem, fields["name"], fields))
    return tuple(cases)
