"""Starts and stops one real Kubernetes control plane on loopback, and kills and restarts its components.

The plane is etcd, the API server, the controller manager and the scheduler in their default configuration, from the
program that `make controlplane` builds. It has no nodes; `bigfleet.demo.kubernetes.kubelet` adds them. The folder of a
plane is never used by another one.
"""

import asyncio
import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import ssl
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from bigfleet.demo.kubernetes.component_process import ComponentProcess
from bigfleet.demo.kubernetes.components import (
    ADMIN,
    LOOPBACK,
    STATIC_USERS,
    Component,
    PlaneFiles,
    PlanePorts,
    api_server_flags,
    controller_manager_flags,
    etcd_flags,
    scheduler_flags,
    write_audit_policy,
    write_kubeconfig,
    write_service_account_key,
    write_tokens,
)
from bigfleet.model.clock import Clock
from bigfleet.model.ids import IdSource, Rng

#: Names the program of the control plane, for tests and for the demonstration.
PROGRAM_VARIABLE: Final = "BIGFLEET_CONTROLPLANE"
#: Below the ephemeral ports of Linux (32768 and up): while a component is down, no outgoing connection gets its port.
_PORT_MIN: Final = 20_000
_PORT_MAX: Final = 32_000
_PORT_ATTEMPTS_MAX: Final = 1_000
_POLL_SECONDS: Final = 0.05
#: For one request; a component that is paused or overloaded is asked again.
_REQUEST_SECONDS_MAX: Final = 10.0
#: Pods are refused in a namespace that has no service account; the controller manager creates it.
_DEFAULT_ACCOUNT: Final = "/api/v1/namespaces/default/serviceaccounts/default"


class ControlPlaneError(Exception):
    """A control plane does not do what it was asked; the message says which part, why, and where its log is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlPlaneSettings:
    """What a control plane is started with."""

    #: The program that `make controlplane` builds.
    program: Path
    #: For data, logs, certificates and kubeconfigs; it must be empty or absent.
    folder: Path
    #: Whether the API server writes each change to `PlaneFiles.audit_log` (`bigfleet.demo.kubernetes.audit_log`).
    audit: bool = False
    #: Further arguments of components, after ours, such as `--node-monitor-grace-period=5s`.
    flags: Mapping[Component, Sequence[str]] = field(default_factory=dict)
    #: How long a component may take to serve.
    ready_seconds_max: float = 120.0


@dataclass(frozen=True, slots=True)
class ApiAnswer:
    """What the API server answered to a plain request."""

    status: int
    body: bytes

    def json(self) -> dict[str, object]:
        """Return the body as an object. Raises msgspec.DecodeError when it is none."""
        return msgspec.json.decode(self.body, type=dict[str, object])


def program_from(environment: Mapping[str, str]) -> Path:
    """Return the program that $BIGFLEET_CONTROLPLANE names. Raises ControlPlaneError."""
    named = environment.get(PROGRAM_VARIABLE, "")
    if not named:
        raise ControlPlaneError(
            f"{PROGRAM_VARIABLE} is not set; run `make controlplane` and set it to the path that this prints"
        )
    path = Path(named)
    if not os.access(path, os.X_OK) or path.is_dir():
        raise ControlPlaneError(f'{PROGRAM_VARIABLE}: "{named}" is not a program; run `make controlplane` to build it')
    return path


def free_ports(rng: Rng, number: int, claims: contextlib.ExitStack) -> list[int]:
    """Return different free loopback ports below the ephemeral ones. Raises ControlPlaneError.

    Until `claims` is closed no other call gets them, in any process: a component listens on its port seconds later, and
    not while it is down.
    """
    found: list[int] = []
    for _ in range(_PORT_ATTEMPTS_MAX):
        port = _PORT_MIN + int(rng.random() * (_PORT_MAX - _PORT_MIN))
        # Components use TCP, so the UDP port of the same number is a lock that the kernel releases with the process.
        with contextlib.suppress(OSError), contextlib.ExitStack() as claim, socket.socket() as probe:
            probe.bind((LOOPBACK, port))
            claim.enter_context(socket.socket(type=socket.SOCK_DGRAM)).bind((LOOPBACK, port))
            claims.push(claim.pop_all())
            found.append(port)
        if len(found) == number:
            return found
    raise ControlPlaneError(f"{LOOPBACK} has no {number} free ports from {_PORT_MIN} to {_PORT_MAX}")


class ControlPlane:
    """One control plane. Its objects survive the restart of any component, and end with the plane."""

    def __init__(self, settings: ControlPlaneSettings, *, clock: Clock, ids: IdSource, rng: Rng) -> None:
        self.files = PlaneFiles(settings.folder.absolute())
        self._settings = settings
        self._clock = clock
        self._claims = contextlib.ExitStack()
        # A plane that is never started has nothing to stop.
        weakref.finalize(self, self._claims.close)
        names = list(PlanePorts.__dataclass_fields__)
        self._ports = PlanePorts(**dict(zip(names, free_ports(rng, len(names), self._claims), strict=True)))
        self._tokens = {user.short_name: ids.new_id() for user in STATIC_USERS}
        self._processes = {each: self._process(each) for each in Component}

    @property
    def url(self) -> str:
        """The address of the API server."""
        return self._ports.api_url

    @property
    def admin_kubeconfig(self) -> Path:
        """The kubeconfig of a member of system:masters."""
        return self.files.kubeconfig(ADMIN.short_name)

    @property
    def admin_token(self) -> str:
        """The token of that user."""
        return self._tokens[ADMIN.short_name]

    async def start(self) -> None:
        """Start all components; return once each is ready.

        Raises ControlPlaneError, after it has stopped what it started.
        """
        folder = self.files.folder
        if folder.exists() and any(folder.iterdir()):
            raise ControlPlaneError(f"{folder} is not empty; a control plane starts in an empty folder")
        try:
            await self._write_files()
            for component in (Component.ETCD, Component.API_SERVER):
                self._launch(component)
            await self._wait_for_certificate()
            certificate = self.files.certificate.read_bytes()
            for user in STATIC_USERS:
                self._write_kubeconfig(user.short_name, certificate, self._tokens[user.short_name])
            await self.wait_ready(Component.API_SERVER)
            for component in (Component.CONTROLLER_MANAGER, Component.SCHEDULER):
                self._launch(component)
            for component in (Component.CONTROLLER_MANAGER, Component.SCHEDULER):
                await self.wait_ready(component)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Kill all components, those that started last first. Logs and data stay in the folder."""
        for component in reversed(Component):
            await self._processes[component].kill()
        self._claims.close()

    def pid(self, component: Component) -> int:
        """Return the id of a component's process."""
        return self._processes[component].pid

    async def kill(self, component: Component) -> None:
        """End a component at once, as a crash does; it stays down until `restart`."""
        await self._processes[component].kill()

    async def restart(self, component: Component) -> None:
        """Start a component, killing it if it runs, and return once it is ready. Raises ControlPlaneError."""
        await self.kill(component)
        self._launch(component)
        await self.wait_ready(component)

    def pause(self, component: Component) -> None:
        """Stop a component from running; connections to it stay open and silent."""
        self._processes[component].send_signal(signal.SIGSTOP)

    def resume(self, component: Component) -> None:
        """Let a paused component run again."""
        self._processes[component].send_signal(signal.SIGCONT)

    async def wait_ready(self, component: Component) -> None:
        """Return once a component serves. Raises ControlPlaneError when it ends, or not before `ready_seconds_max`."""
        deadline = self._clock.monotonic_seconds() + self._settings.ready_seconds_max
        process = self._processes[component]
        while (fault := await self._readiness_fault(component)) is not None:
            self._check_running(component)
            if self._clock.monotonic_seconds() >= deadline:
                raise ControlPlaneError(
                    f"{component.value} is not ready after {self._settings.ready_seconds_max:g} s: {fault}; "
                    f"last lines of {process.log}:\n{process.log_tail()}"
                )
            await self._clock.sleep(_POLL_SECONDS)

    async def request(self, method: str, path: str, body: object = None, *, token: str = "") -> ApiAnswer:
        """Send one plain request to the API server, as its administrator unless a token is given.

        A body is sent as JSON. Raises ControlPlaneError when there is no answer; any status is an answer.
        """
        bearer = token or self.admin_token
        try:
            return await asyncio.to_thread(self._request, method, path, body, bearer)
        except (OSError, http.client.HTTPException) as error:
            raise ControlPlaneError(f"{method} {self.url}{path} was not answered: {error!r}") from error

    async def service_account_token(self, namespace: str, name: str, *, seconds: int = 24 * 3600) -> str:
        """Return a token of an existing service account. Raises ControlPlaneError."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
        wanted = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": seconds},
        }
        answer = await self.request("POST", path, wanted)
        if answer.status != 201:
            raise ControlPlaneError(f"no token of service account {namespace}/{name}: {answer.body.decode()}")
        status = answer.json()["status"]
        assert isinstance(status, dict)
        return str(status["token"])

    async def service_account_kubeconfig(self, namespace: str, name: str) -> Path:
        """Write a kubeconfig with a token of an existing service account, and return its path."""
        token = await self.service_account_token(namespace, name)
        return self._write_kubeconfig(f"{namespace}.{name}", self.files.certificate.read_bytes(), token)

    async def kubectl(self, *arguments: str, standard_input: str = "") -> str:
        """Run kubectl as administrator and return what it printed. Raises ControlPlaneError when it fails."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            self._settings.program,
            "kubectl",
            *arguments,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            env={"KUBECONFIG": str(self.admin_kubeconfig), "HOME": str(self.files.folder), "PATH": "/usr/bin:/bin"},
        )
        printed, complaint = await process.communicate(standard_input.encode())
        if process.returncode != 0:
            raise ControlPlaneError(
                f"kubectl {' '.join(arguments)} failed with exit {process.returncode}: {complaint.decode().strip()}"
            )
        return printed.decode()

    # ---- parts

    def _process(self, component: Component) -> ComponentProcess:
        files, ports = self.files, self._ports
        if component is Component.ETCD:
            flags = etcd_flags(files, ports)
        elif component is Component.API_SERVER:
            flags = api_server_flags(files, ports, audit=self._settings.audit)
        elif component is Component.CONTROLLER_MANAGER:
            flags = controller_manager_flags(files, ports)
        else:
            flags = scheduler_flags(files, ports)
        further = self._settings.flags.get(component, ())
        command = (str(self._settings.program), component.value, *flags, *further)
        return ComponentProcess(command, files.log(component))

    async def _write_files(self) -> None:
        files = self.files
        files.folder.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(write_service_account_key, files.service_account_key)
        write_tokens(files.tokens, self._tokens)
        if self._settings.audit:
            write_audit_policy(files.audit_policy)

    def _write_kubeconfig(self, name: str, certificate: bytes, token: str) -> Path:
        path = self.files.kubeconfig(name)
        write_kubeconfig(path, url=self.url, certificate=certificate, token=token)
        return path

    def _launch(self, component: Component) -> None:
        try:
            self._processes[component].start()
        except OSError as error:
            raise ControlPlaneError(
                f"{component.value}: {self._settings.program} cannot be run: {error.strerror}; "
                "run `make controlplane` to build it"
            ) from error

    def _check_running(self, component: Component) -> None:
        process = self._processes[component]
        if not process.is_running:
            raise ControlPlaneError(
                f"{component.value} ended before it was ready ({process.describe_exit()}); "
                f"last lines of {process.log}:\n{process.log_tail()}"
            )

    async def _wait_for_certificate(self) -> None:
        """Return once the API server has written its certificate, the last of its files."""
        deadline = self._clock.monotonic_seconds() + self._settings.ready_seconds_max
        key = self.files.certificate.with_suffix(".key")
        while not (self.files.certificate.exists() and key.exists()):
            self._check_running(Component.ETCD)
            self._check_running(Component.API_SERVER)
            if self._clock.monotonic_seconds() >= deadline:
                raise ControlPlaneError(
                    f"{Component.API_SERVER.value} wrote no certificate in {self._settings.ready_seconds_max:g} s; "
                    f"last lines of its log:\n{self._processes[Component.API_SERVER].log_tail()}"
                )
            await self._clock.sleep(_POLL_SECONDS)

    async def _readiness_fault(self, component: Component) -> str | None:
        """Return None when a component serves, else why it does not."""
        try:
            answer = await asyncio.to_thread(self._probe, component)
            if answer.status == 200 and component is Component.CONTROLLER_MANAGER:
                answer = await self.request("GET", _DEFAULT_ACCOUNT)
        except (OSError, http.client.HTTPException, ControlPlaneError) as error:
            return str(error)
        return None if answer.status == 200 else f"HTTP {answer.status} {answer.body[:300].decode(errors='replace')}"

    def _probe(self, component: Component) -> ApiAnswer:
        """Ask a component whether it is well, and wait for its answer, on the thread that calls."""
        if component is Component.ETCD:
            return _exchange(
                http.client.HTTPConnection(LOOPBACK, self._ports.etcd, timeout=_REQUEST_SECONDS_MAX), "/health"
            )
        if component is Component.API_SERVER:
            return self._request("GET", "/readyz", None, self.admin_token)
        manager = component is Component.CONTROLLER_MANAGER
        port = self._ports.controller_manager if manager else self._ports.scheduler
        certificate = self.files.certificates(component) / f"{component.value}.crt"
        return _exchange(_secure_connection(port, certificate), "/healthz" if manager else "/readyz")

    def _request(self, method: str, path: str, body: object, bearer: str) -> ApiAnswer:
        """Send one request to the API server and wait for its answer, on the thread that calls."""
        headers = {
            "Accept": "application/json",
            "Authorization": f"Bearer {bearer}",
            "Content-Type": "application/json",
        }
        connection = _secure_connection(self._ports.api_server, self.files.certificate)
        return _exchange(connection, path, method, None if body is None else json.dumps(body), headers)


def _secure_connection(port: int, certificate: Path) -> http.client.HTTPSConnection:
    context = ssl.create_default_context(cafile=str(certificate))
    return http.client.HTTPSConnection(LOOPBACK, port, timeout=_REQUEST_SECONDS_MAX, context=context)


def _exchange(
    connection: http.client.HTTPConnection,
    path: str,
    method: str = "GET",
    body: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> ApiAnswer:
    with contextlib.closing(connection):
        connection.request(method, path, body, dict(headers or {}))
        answer = connection.getresponse()
        return ApiAnswer(answer.status, answer.read())


@asynccontextmanager
async def running_control_plane(
    settings: ControlPlaneSettings, *, clock: Clock, ids: IdSource, rng: Rng, keep_files: bool = True
) -> AsyncIterator[ControlPlane]:
    """Run a control plane while the context lasts; its folder is removed afterwards unless `keep_files`."""
    plane = ControlPlane(settings, clock=clock, ids=ids, rng=rng)
    await plane.start()
    try:
        yield plane
    finally:
        await plane.stop()
        if not keep_files:
            shutil.rmtree(plane.files.folder, ignore_errors=True)
