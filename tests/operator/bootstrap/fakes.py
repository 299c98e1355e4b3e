"""Fakes for the tests of bootstrapping: an API server of Secrets, drawn characters, a renderer without processes."""

import itertools
import string
from collections.abc import Mapping
from typing import Any, cast

from bigfleet.operator.bootstrap.renderer import TemplateFault, TemplateSource
from bigfleet.operator.bootstrap.rendering import RenderingFault, render
from bigfleet.operator.kubernetes.api import ApiError, JsonObject, KubernetesApi, Page, Resource
from bigfleet.operator.kubernetes.objects import ObjectMeta, Secret, TokenRequest, TokenRequestStatus


class InProcessRenderer:
    """Renders in this process: no template of a test that uses it hangs."""

    def __init__(self) -> None:
        self.renderings = 0

    async def render(self, source: TemplateSource, variables: Mapping[str, Any]) -> str:
        self.renderings += 1
        try:
            return render(source.text, source.path, variables)
        except RenderingFault as fault:
            raise TemplateFault(f"{source.path}:{fault.line}: {fault.text}") from None


class CountedCharacters:
    """Draws `aaaa…`, then `baaa…`, and so on."""

    def __init__(self) -> None:
        self._counter = itertools.count()

    def draw(self, count: int) -> str:
        letters = string.ascii_lowercase
        number = next(self._counter)
        return (letters[number % 26] + letters[number // 26 % 26] + "a" * count)[:count]


class FakeSecretsApi:
    """The requests that tokens need; a failure is raised once for each entry of `failures`."""

    def __init__(self) -> None:
        self.secrets: dict[str, JsonObject] = {}
        self.created: list[JsonObject] = []
        self.token_requests: list[tuple[str, str, JsonObject]] = []
        self.answer = TokenRequestStatus(token="jwt", expiration_timestamp="2026-01-01T01:00:00Z")
        self.failures: dict[str, list[ApiError]] = {"create": [], "delete": [], "list": []}
        self.deletes = 0

    def api(self) -> KubernetesApi:
        return cast(KubernetesApi, self)

    def _fail(self, request: str) -> None:
        if self.failures[request]:
            raise self.failures[request].pop(0)

    async def create(
        self, resource: Resource[Any], body: JsonObject, *, namespace: str = "", name: str = ""
    ) -> TokenRequest | Secret:
        if resource.kind == "TokenRequest":
            self._fail("create")
            self.token_requests.append((namespace, name, body))
            return TokenRequest(status=self.answer)
        assert namespace == "kube-system"
        self.created.append(body)
        self._fail("create")
        metadata = cast(dict[str, Any], body["metadata"])
        if metadata["name"] in self.secrets:
            raise ApiError(409, "AlreadyExists", "it exists")
        self.secrets[metadata["name"]] = body
        return Secret()

    async def delete(
        self,
        resource: Resource[Any],
        name: str,
        *,
        namespace: str = "",
        uid: str = "",
        grace_seconds: int | None = None,
    ) -> None:
        assert (resource.kind, namespace) == ("Secret", "kube-system")
        self.deletes += 1
        self._fail("delete")
        if self.secrets.pop(name, None) is None:
            raise ApiError(404, "NotFound", "it is gone")

    async def list_page(
        self, resource: Resource[Any], *, namespace: str = "", label_selector: str = "", continue_token: str = ""
    ) -> Page[Secret]:
        self._fail("list")
        assert namespace == "kube-system"
        key, _equals, value = label_selector.partition("=")
        found = []
        for body in self.secrets.values():
            metadata = cast(dict[str, Any], body["metadata"])
            if metadata["labels"].get(key) == value:
                created = metadata.get("creationTimestamp", "2026-01-01T00:00:00Z")
                meta = ObjectMeta(name=metadata["name"], labels=metadata["labels"], creation_timestamp=created)
                found.append(Secret(metadata=meta))
        # One object a page.
        position = int(continue_token or "0")
        more = str(position + 1) if position + 1 < len(found) else ""
        return Page(items=found[position : position + 1], resource_version="1", continue_token=more)
