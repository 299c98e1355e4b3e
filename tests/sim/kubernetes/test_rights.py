"""The rules by which the simulated API server judges requests."""

import pytest

from bigfleet.sim.kubernetes.rights import EVERYTHING, AccessRights, allow, rules_of_role

ROLE = {
    "kind": "Role",
    "rules": [
        {"apiGroups": [""], "resources": ["serviceaccounts/token"], "resourceNames": ["joiner"], "verbs": ["create"]},
        {"apiGroups": ["bigfleet.lucy.sh"], "resources": ["*"], "verbs": ["get", "list"]},
    ],
}


@pytest.mark.parametrize(
    ("request_", "allowed"),
    [
        (("create", "", "serviceaccounts/token", "bigfleet", "joiner"), True),
        (("create", "", "serviceaccounts/token", "bigfleet", "other"), False),
        (("create", "", "serviceaccounts/token", "elsewhere", "joiner"), False),
        (("create", "", "serviceaccounts", "bigfleet", "joiner"), False),
        (("get", "bigfleet.lucy.sh", "capacityrequests/status", "bigfleet", "a"), True),
        (("list", "", "capacityrequests", "bigfleet", ""), False),
        (("delete", "bigfleet.lucy.sh", "capacityrequests", "bigfleet", "a"), False),
    ],
)
def test_a_role_allows_what_one_of_its_rules_allows(request_: tuple[str, str, str, str, str], allowed: bool) -> None:
    """Verb, group, resource with subresource, namespace and name must all match."""
    rights = AccessRights(rules_of_role(ROLE, "bigfleet"))

    assert rights.allow(*request_) is allowed


def test_a_role_that_is_bound_for_the_cluster_allows_in_every_namespace() -> None:
    """And for objects of the cluster."""
    rights = AccessRights((allow("get,list", "pods,nodes"),))

    assert rights.allow("list", "", "pods", "", "")
    assert rights.allow("get", "", "nodes", "", "n")
    assert not rights.allow("watch", "", "pods", "", "")
    assert not AccessRights((allow("list", "pods", namespace="a"),)).allow("list", "", "pods", "", "")
    assert EVERYTHING.allow("delete", "apps", "daemonsets", "kube-system", "x")
