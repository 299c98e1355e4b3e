"""The manifests grant exactly the rights that the processes ask for at start: none is missing, none is too many."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from bigfleet.operator.kubernetes.access import Right
from bigfleet.operator.kubernetes.rights import TOKEN_SECRET_NAMESPACE, operator_rights, pod_controller_rights

DEPLOY = Path(__file__).parent.parent.parent / "deploy" / "kubernetes"
NAMESPACE = "bigfleet-system"

#: (group, resource with subresource, verb, namespace, object)
Grant = tuple[str, str, str, str, str]


def asked(rights: Iterable[Right]) -> set[Grant]:
    """Return what a process asks for."""
    return {
        (
            right.resource.group,
            right.resource.plural + (f"/{right.resource.subresource}" if right.resource.subresource else ""),
            verb,
            right.namespace,
            right.name,
        )
        for right in rights
        for verb in right.verbs
    }


def objects(*folders: str) -> Iterator[dict[str, Any]]:
    for folder in folders:
        for path in sorted((DEPLOY / folder).glob("*.yaml")):
            if path.name != "kustomization.yaml":
                yield from (found for found in yaml.safe_load_all(path.read_text(encoding="utf-8")) if found)


def granted(account: str, *folders: str) -> set[Grant]:
    """Return what the roles that are bound to a service account of ours grant."""
    found = list(objects(*folders))
    roles = {
        (role["kind"], role["metadata"].get("namespace", ""), role["metadata"]["name"]): role["rules"]
        for role in found
        if role["kind"] in ("Role", "ClusterRole")
    }
    subject = {"kind": "ServiceAccount", "name": account, "namespace": NAMESPACE}
    grants: set[Grant] = set()
    for binding in found:
        if binding["kind"] not in ("RoleBinding", "ClusterRoleBinding") or subject not in binding["subjects"]:
            continue
        namespace = binding["metadata"].get("namespace", "")
        reference = binding["roleRef"]
        role_namespace = namespace if reference["kind"] == "Role" else ""
        for rule in roles[reference["kind"], role_namespace, reference["name"]]:
            grants |= {
                (group, resource, verb, namespace, name)
                for group in rule["apiGroups"]
                for resource in rule["resources"]
                for verb in rule["verbs"]
                for name in rule.get("resourceNames", [""])
            }
    return grants


@pytest.mark.parametrize(
    ("components", "options"),
    [
        ((), {}),
        (("drain-force",), {"drain_force": True}),
        (("token-secret",), {"token_secret": True}),
        (("token-request",), {"token_service_account": ("kube-system", "bigfleet-node")}),
        (("drain-force", "token-secret", "kubeadm-joining"), {"drain_force": True, "token_secret": True}),
    ],
)
def test_the_operator_is_granted_what_it_asks_for(components: tuple[str, ...], options: dict[str, Any]) -> None:
    folders = ("base", *(f"components/{name}" for name in components))

    assert granted("bigfleet-operator", *folders) == asked(operator_rights(NAMESPACE, **options))


def test_the_pod_controller_is_granted_what_it_asks_for_whatever_the_operator_may() -> None:
    folders = ("base", "components/drain-force", "components/token-secret", "components/token-request")

    assert granted("bigfleet-pod-controller", *folders) == asked(pod_controller_rights(NAMESPACE))


def test_no_rule_has_a_wildcard() -> None:
    for grant in asked((*operator_rights("n", drain_force=True, token_secret=True), *pod_controller_rights("n"))):
        assert "*" not in grant
    for found in objects("base", *(f"components/{path.name}" for path in (DEPLOY / "components").iterdir())):
        for rule in found.get("rules", ()):
            assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]


def test_secrets_are_read_nowhere_but_where_bootstrap_tokens_are() -> None:
    rights = operator_rights("n", drain_force=True, token_secret=True, token_service_account=("a", "b"))

    assert {right.namespace for right in rights if right.resource.plural == "secrets"} == {TOKEN_SECRET_NAMESPACE}
    assert not [right for right in operator_rights("n") if right.resource.plural in ("secrets", "serviceaccounts")]
