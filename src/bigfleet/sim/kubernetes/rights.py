"""Judges requests by rules such as those of RBAC roles.

A client without rules may do everything. `rules_of_role` reads the rules of a Role or ClusterRole manifest.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

_ANY = "*"


@dataclass(frozen=True, slots=True)
class AccessRule:
    """Allows verbs on resources; each part matches one of its values, `*` matches everything."""

    verbs: frozenset[str]
    groups: frozenset[str]
    #: `pods`, `pods/eviction`.
    resources: frozenset[str]
    #: "" allows it in all namespaces and for objects of the cluster.
    namespace: str = ""
    #: Empty allows every name.
    names: frozenset[str] = frozenset()

    def allows(self, verb: str, group: str, resource: str, namespace: str, name: str) -> bool:
        """Return whether the rule allows a request; `resource` includes the subresource."""
        return (
            _matches(verb, self.verbs)
            and _matches(group, self.groups)
            and _matches(resource, self.resources)
            and self.namespace in ("", namespace)
            and (not self.names or name in self.names)
        )


class Rights(Protocol):
    """Decides what one user may do."""

    def allow(self, verb: str, group: str, resource: str, namespace: str, name: str, /) -> bool:
        """Return whether a request is allowed."""
        ...


@dataclass(frozen=True, slots=True)
class AccessRights:
    """What one user may do: what any of the rules allows."""

    rules: tuple[AccessRule, ...]

    def allow(self, verb: str, group: str, resource: str, namespace: str, name: str) -> bool:
        """Return whether a request is allowed."""
        return any(rule.allows(verb, group, resource, namespace, name) for rule in self.rules)


EVERYTHING = AccessRights((AccessRule(frozenset({_ANY}), frozenset({_ANY}), frozenset({_ANY})),))


def allow(verbs: str, resources: str, *, group: str = "", namespace: str = "", names: Iterable[str] = ()) -> AccessRule:
    """Return a rule; verbs and resources are written with commas: `allow("get,list", "pods,nodes")`."""
    return AccessRule(
        frozenset(verbs.split(",")), frozenset({group}), frozenset(resources.split(",")), namespace, frozenset(names)
    )


def rules_of_role(role: Mapping[str, Any], namespace: str = "") -> tuple[AccessRule, ...]:
    """Return the rules of a Role or ClusterRole manifest, bound in one namespace, or in all for ""."""
    return tuple(
        AccessRule(
            frozenset(rule["verbs"]),
            frozenset(rule["apiGroups"]),
            frozenset(rule["resources"]),
            namespace,
            frozenset(rule.get("resourceNames", ())),
        )
        for rule in role.get("rules") or ()
    )


def _matches(value: str, allowed: frozenset[str]) -> bool:
    return value in allowed or _ANY in allowed
