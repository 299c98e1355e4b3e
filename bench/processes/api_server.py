"""Serves as much of the Kubernetes API as the operator and the pod controller use, over plain HTTP on loopback.

`bench.workloads.operator` runs it as a process of its own, so that what serving costs is not counted with what is
measured. Objects are kept as the bytes that they are sent as. A line on standard input is a command, a line on standard
output its answer, in JSON. No rule of an API server is checked here beside the resource version of a write.
"""

import asyncio
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from bench.cluster_objects import Object, daemon_set, node, pod, request
from bench.processes.streams import next_command, say, share_of, until
from bigfleet.cli.runtime.system import configure_logging, run_loop
from bigfleet.operator.kubernetes.resources import OWNED_BY_POD

#: How long a pod may wait for its request.
ANSWER_SECONDS_MAX = 60.0
_DAEMON_SETS = 10
_TICK_SECONDS = 0.02

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Object).decode


@dataclass
class Collection:
    """The objects of one kind, and all events since the start."""

    objects: dict[str, bytes] = field(default_factory=dict)
    history: list[bytes] = field(default_factory=list)
    #: The version after each event.
    versions: list[int] = field(default_factory=list)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)


class ApiServer:
    """One cluster's objects."""

    def __init__(self) -> None:
        self.collections: defaultdict[str, Collection] = defaultdict(Collection)
        self.version = 1
        #: Requests by method and resource, such as `PATCH capacityrequests/status`.
        self.served: Counter[str] = Counter()
        #: When the request of a pod was first written, by the pod's uid.
        self.requested_seconds: dict[str, float] = {}

    def seed(self, plural: str, objects: list[Object]) -> None:
        """Store objects without events."""
        collection = self.collections[plural]
        for found in objects:
            found["metadata"]["resourceVersion"] = str(self.version)
            collection.objects[_key(found)] = _encode(found)

    def store(self, plural: str, found: Object) -> bytes:
        """Store a new or changed object and send its event."""
        collection = self.collections[plural]
        self.version += 1
        metadata = found["metadata"]
        metadata["resourceVersion"] = str(self.version)
        key, content = _key(found), _encode(found)
        kind = b"MODIFIED" if key in collection.objects else b"ADDED"
        collection.objects[key] = content
        collection.history.append(b'{"type":"%b","object":%b}\n' % (kind, content))
        collection.versions.append(self.version)
        if plural == "capacityrequests":
            uid = (metadata.get("labels") or {}).get(OWNED_BY_POD, "")
            self.requested_seconds.setdefault(uid, time.monotonic())
        return content

    async def flush(self, plural: str) -> None:
        """Wake the watches of a kind."""
        collection = self.collections[plural]
        async with collection.changed:
            collection.changed.notify_all()

    # ---- HTTP ---------------------------------------------------------------------------------------------------

    async def handle(self, asked: web.Request) -> web.StreamResponse:
        """Answer one request."""
        plural, key, subresource = _parsed(asked.path)
        self.served[f"{asked.method} {plural}{'/' + subresource if subresource else ''}"] += 1
        if asked.method == "GET":
            if "watch" in asked.query:
                return await self._watch(asked, plural)
            return self._list(asked, plural) if not key.rpartition("/")[2] else self._get(plural, key)
        body = _decode(await asked.read())
        if plural == "selfsubjectaccessreviews":
            return _json(_encode(body | {"status": {"allowed": True}}), 201)
        if asked.method == "DELETE":
            return _refused(405, "MethodNotAllowed")
        answer = self._write(asked, plural, key, subresource, body)
        await self.flush(plural)
        return answer

    def _get(self, plural: str, key: str) -> web.Response:
        content = self.collections[plural].objects.get(key)
        return _refused(404, "NotFound") if content is None else _json(content)

    def _list(self, asked: web.Request, plural: str) -> web.Response:
        contents = list(self.collections[plural].objects.values())
        start, limit = int(asked.query.get("continue") or 0), int(asked.query.get("limit") or 0) or len(contents)
        end = min(start + limit, len(contents))
        token = str(end) if end < len(contents) else ""
        metadata = _encode({"resourceVersion": str(self.version), "continue": token})
        return _json(b'{"kind":"List","metadata":%b,"items":[%b]}' % (metadata, b",".join(contents[start:end])))

    async def _watch(self, asked: web.Request, plural: str) -> web.StreamResponse:
        collection, since = self.collections[plural], int(asked.query["resourceVersion"])
        position = sum(version <= since for version in collection.versions)
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        answer.enable_chunked_encoding()
        await answer.prepare(asked)
        while True:
            if position < len(collection.history):
                lines = collection.history[position : position + 100]
                position += len(lines)
                await answer.write(b"".join(lines))
                continue
            async with collection.changed:
                await collection.changed.wait()

    def _write(self, asked: web.Request, plural: str, key: str, subresource: str, body: Object) -> web.Response:
        stored = self.collections[plural].objects.get(key)
        if asked.method == "POST" or (stored is None and "apply" in asked.content_type):
            name = body["metadata"].get("name") or f"{body['metadata'].get('generateName', '')}{self.version}"
            metadata = body["metadata"] | {"name": name, "uid": f"made-{self.version}", "generation": 1}
            return _json(self.store(plural, body | {"metadata": metadata}), 201)
        if stored is None:
            return _refused(404, "NotFound")
        found = _decode(stored)
        named = body.get("metadata", {}).pop("resourceVersion", "")
        if named not in ("", found["metadata"]["resourceVersion"]):
            return _refused(409, "Conflict")
        if subresource == "status":
            body = {"status": body["status"]}
        elif "spec" in body:
            found["metadata"]["generation"] = found["metadata"].get("generation", 1) + 1
        return _json(self.store(plural, _merged(found, body)))

    # ---- what the workload says ---------------------------------------------------------------------------------

    def count_behind(self) -> int:
        """Return how many requests have not been acknowledged as they are."""
        decoded = map(_decode, self.collections["capacityrequests"].objects.values())
        return sum(
            found["status"]["phase"] != "Acknowledged"
            or found["status"]["observedGeneration"] != found["metadata"]["generation"]
            for found in decoded
        )

    async def change(self, plural: str, count: int, change: Callable[[Object], None]) -> None:
        """Change the first objects of a kind, as fast as they can be sent."""
        contents = list(self.collections[plural].objects.values())[:count]
        for position, content in enumerate(contents):
            found = _decode(content)
            change(found)
            self.store(plural, found)
            if position % 100 == 0:
                await self.flush(plural)
                await asyncio.sleep(0)
        await self.flush(plural)

    async def create_pods(self, first: int, count: int, per_second: float) -> dict[str, float]:
        """Create pods at a rate, and return after how long each had its request, milliseconds."""
        made_seconds: dict[str, float] = {}
        began = time.monotonic()
        while len(made_seconds) < count:
            while len(made_seconds) < min(count, (time.monotonic() - began) * per_second):
                created = pod(first + len(made_seconds), 0)
                made_seconds[created["metadata"]["uid"]] = time.monotonic()
                self.store("pods", created)
            await self.flush("pods")
            await asyncio.sleep(_TICK_SECONDS)
        deadline = time.monotonic() + ANSWER_SECONDS_MAX
        await until(lambda: made_seconds.keys() <= self.requested_seconds.keys() or time.monotonic() > deadline)
        waits = sorted(
            (self.requested_seconds[uid] - since) * 1000
            for uid, since in made_seconds.items()
            if uid in self.requested_seconds
        )
        return {"count": len(waits), "p50_ms": share_of(waits, 50), "p99_ms": share_of(waits, 99), "max_ms": waits[-1]}


def _touch(found: Object) -> None:
    annotations = found["metadata"].setdefault("annotations", {})
    annotations["touched"] = str(int(annotations.get("touched", "0")) + 1)


def _ask_for_more(found: Object) -> None:
    found["metadata"]["generation"] += 1
    found["spec"]["resources"]["cpu"] = "1500m"


def _key(found: Object) -> str:
    return f"{found['metadata'].get('namespace', '')}/{found['metadata']['name']}"


def _parsed(path: str) -> tuple[str, str, str]:
    """Return the kind's plural, the object's key (`namespace/name`, either may be empty) and the subresource."""
    parts = path.strip("/").split("/")
    parts = parts[2:] if parts[0] == "api" else parts[3:]
    namespace = ""
    if parts[0] == "namespaces" and len(parts) > 2:
        namespace, parts = parts[1], parts[2:]
    plural, name, subresource = [*parts, "", ""][:3]
    return plural, f"{namespace}/{name}", subresource


def _merged(found: Object, patch: Object) -> Object:
    """Return an object with a merge patch on it."""
    merged = dict(found)
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        elif isinstance(value, dict):
            merged[name] = _merged(merged.get(name) or {}, value)
        else:
            merged[name] = value
    return merged


def _json(content: bytes, status: int = 200) -> web.Response:
    return web.Response(body=content, status=status, content_type="application/json")


def _refused(code: int, reason: str) -> web.Response:
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code}
    return _json(_encode(status), code)


async def serve(requests: int, pods: int, nodes: int) -> int:
    """Serve until standard input ends."""
    server = ApiServer()
    server.seed("nodes", [node(index) for index in range(nodes)])
    server.seed("daemonsets", [daemon_set(index) for index in range(_DAEMON_SETS)])
    server.seed("pods", [pod(index, nodes) for index in range(pods)])
    server.seed("capacityrequests", [request(index, nodes) for index in range(requests)])
    application = web.Application(client_max_size=1 << 24)
    application.router.add_route("*", "/{tail:.*}", server.handle)
    runner = web.AppRunner(application, shutdown_timeout=0.1, handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    stored = {plural: len(each.objects) for plural, each in server.collections.items()}
    sizes = [len(content) for content in server.collections["capacityrequests"].objects.values()]
    say(port=runner.addresses[0][1], request_bytes=sum(sizes) / max(1, len(sizes)), **stored)
    while line := await next_command():
        word, *arguments = line.split()
        answer: dict[str, Any] = {}
        if word == "touch":
            await server.change(arguments[0], int(arguments[1]), _touch)
        elif word == "more":
            await server.change("capacityrequests", int(arguments[0]), _ask_for_more)
        elif word == "pods":
            answer = await server.create_pods(pods, int(arguments[0]), float(arguments[1]))
        elif word == "count":
            answer = dict(server.served)
        elif word == "behind":
            answer = {"behind": server.count_behind()}
        say(**answer)
    await runner.cleanup()
    return 0


def main() -> None:
    """Serve so many requests, pods and nodes."""
    requests, pods, nodes = (int(number) for number in sys.argv[1:])
    configure_logging("bench-api-server", "error")
    sys.exit(run_loop(lambda: serve(requests, pods, nodes)))


if __name__ == "__main__":
    main()
