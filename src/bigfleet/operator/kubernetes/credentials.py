"""Reads the credentials of a client: tokens, client certificates, files that rotate, credential plugins.

A `CredentialSource` is asked before each request and answers from memory unless something has changed. Secrets are
never logged and are in no message.
"""

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from bigfleet.files.bounded import read_bounded
from bigfleet.model.clock import NANOS_PER_SECOND, Clock
from bigfleet.operator.kubernetes.timestamps import unix_seconds

#: Of a file with a token, a certificate, a key or authorities.
CREDENTIAL_BYTES_MAX = 1024 * 1024
#: A plugin that asks a cloud for a token takes seconds; one that waits for a person never ends.
PLUGIN_SECONDS_MAX = 60.0
#: What of a plugin's standard error is quoted.
_QUOTED_CHARACTERS_MAX = 300


class CredentialError(Exception):
    """A credential cannot be read; the message names its source and says what to do."""


@dataclass(frozen=True, slots=True)
class Credential:
    """What one request is sent with; empty parts are absent."""

    token: str = field(default="", repr=False)
    certificate_pem: bytes = field(default=b"", repr=False)
    key_pem: bytes = field(default=b"", repr=False)


class CredentialSource(Protocol):
    """Where credentials come from."""

    async def current(self) -> Credential:
        """Return the credential to use now. Raises CredentialError."""
        ...

    def invalidate(self, refused: Credential) -> None:
        """Hear that the server refused a credential: the next `current` reads its source again.

        Nothing happens if the credential is no longer the current one.
        """
        ...


class Content(Protocol):
    """Bytes that may change while the process runs."""

    def read(self) -> bytes:
        """Return the bytes as they are now. Raises CredentialError."""
        ...

    def invalidate(self) -> None:
        """Read the source again at the next `read`, even if it looks unchanged."""
        ...


@dataclass(frozen=True, slots=True)
class InlineContent:
    """Bytes that never change."""

    data: bytes = field(repr=False)

    def read(self) -> bytes:
        """Return the bytes."""
        return self.data

    def invalidate(self) -> None:
        """Do nothing: there is no source to read again."""


class FileContent:
    """The bytes of a file, read again when the file changes; one that cannot be read leaves the last ones valid."""

    def __init__(self, path: Path, *, place: str) -> None:
        """Take the path, and the place that names it in messages, such as `config: users[dev].user.tokenFile`."""
        self._path = path
        self._place = place
        self._data: bytes | None = None
        self._version: tuple[int, int, int] | None = None

    def read(self) -> bytes:
        """Return the bytes as of now. Raises CredentialError when the file was never readable."""
        try:
            # A projected volume swaps a symbolic link: the file behind it is another one then.
            stat = self._path.stat()
            version = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
            if version != self._version:
                self._data = read_bounded(self._path, CREDENTIAL_BYTES_MAX)
                self._version = version
        except OSError as error:
            if self._data is None:
                raise CredentialError(
                    f"{self._place}: {self._path} cannot be read: {error.strerror or error}; "
                    "name a file that this process may read"
                ) from error
        return self._data or b""

    def invalidate(self) -> None:
        """Read the file again at the next `read`."""
        self._version = None


class StoredCredentials:
    """A token, a client certificate with its key, both, or none, inline or in files."""

    def __init__(
        self, *, token: Content | None = None, certificate: Content | None = None, key: Content | None = None
    ) -> None:
        self._token = token
        self._certificate = certificate
        self._key = key

    async def current(self) -> Credential:
        """Return what the files hold now. Raises CredentialError."""
        return Credential(
            token=_token_text(self._token.read()) if self._token else "",
            certificate_pem=self._certificate.read() if self._certificate else b"",
            key_pem=self._key.read() if self._key else b"",
        )

    def invalidate(self, refused: Credential) -> None:
        """Read all files again at the next `current`."""
        for content in (self._token, self._certificate, self._key):
            if content is not None:
                content.invalidate()


def _token_text(data: bytes) -> str:
    try:
        return data.decode("ascii").strip()
    except UnicodeDecodeError:
        raise CredentialError("the token holds characters that no token has; write it again") from None


# ---- credential plugins -----------------------------------------------------------------------------------------

PLUGIN_API_VERSIONS = ("client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1")


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginCommand:
    """A credential plugin as a kubeconfig names it (client.authentication.k8s.io/v1)."""

    #: Names it in messages, such as `config: users[dev].user.exec`.
    place: str
    api_version: str
    command: str
    arguments: tuple[str, ...] = ()
    #: The whole environment of the process.
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    #: What to do when the command is absent, as the kubeconfig's author says it.
    install_hint: str = ""
    #: `spec.cluster` of the ExecCredential that the plugin is given; None when it does not want it.
    cluster: Mapping[str, object] | None = None


class _PluginStatus(msgspec.Struct, rename="camel"):
    token: str = ""
    client_certificate_data: str = ""
    client_key_data: str = ""
    expiration_timestamp: str | None = None


class _ExecCredential(msgspec.Struct, rename="camel"):
    api_version: str
    kind: str
    status: _PluginStatus | None = None


class PluginCredentials:
    """Runs a credential plugin, and uses what it printed until that expires or the server refuses it."""

    def __init__(self, plugin: PluginCommand, *, clock: Clock) -> None:
        self._plugin = plugin
        self._clock = clock
        self._credential: Credential | None = None
        self._expires_unix_nanos: int | None = None
        self._running = asyncio.Lock()

    async def current(self) -> Credential:
        """Return the last credential, or run the plugin; requests at the same time share one run."""
        async with self._running:
            expired = self._expires_unix_nanos is not None and self._clock.unix_nanos() >= self._expires_unix_nanos
            if self._credential is None or expired:
                self._credential, self._expires_unix_nanos = self._parsed(await self._run())
            return self._credential

    def invalidate(self, refused: Credential) -> None:
        """Run the plugin again at the next `current`, once for all requests that were refused with one credential."""
        if self._credential == refused:
            self._credential = None

    def _fault(self, what: str, advice: str) -> CredentialError:
        return CredentialError(f"{self._plugin.place}: {self._plugin.command!r} {what}; {advice}")

    async def _run(self) -> bytes:
        plugin = self._plugin
        spec: dict[str, object] = {"interactive": False}
        if plugin.cluster is not None:
            spec["cluster"] = plugin.cluster
        info = msgspec.json.encode({"apiVersion": plugin.api_version, "kind": "ExecCredential", "spec": spec})
        try:
            process = await asyncio.create_subprocess_exec(
                plugin.command,
                *plugin.arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={**plugin.environment, "KUBERNETES_EXEC_INFO": info.decode()},
            )
        except OSError as error:
            advice = plugin.install_hint.strip() or "install it, or name its path in `command`"
            raise self._fault(f"cannot be started: {error.strerror or error}", advice) from error
        try:
            async with asyncio.timeout(PLUGIN_SECONDS_MAX):
                output, errors = await process.communicate()
        except TimeoutError:
            raise self._fault(f"did not end within {PLUGIN_SECONDS_MAX:g} s", "run it by hand to see why") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if process.returncode:
            quoted = errors.decode("utf-8", "replace").strip()[-_QUOTED_CHARACTERS_MAX:]
            raise self._fault(
                f"ended with exit code {process.returncode}: {quoted or 'it printed no error'}",
                "run it by hand to see why",
            )
        return output

    def _parsed(self, output: bytes) -> tuple[Credential, int | None]:
        try:
            answer = msgspec.json.decode(output, type=_ExecCredential)
        except msgspec.MsgspecError as error:
            # The error quotes no values, so no secret.
            raise self._fault(f"printed no ExecCredential: {error}", "it must print one as JSON") from None
        if answer.kind != "ExecCredential" or answer.api_version != self._plugin.api_version:
            raise self._fault(
                f"printed {answer.kind!r} of {answer.api_version!r}",
                f"the kubeconfig asks for an ExecCredential of {self._plugin.api_version!r}",
            )
        status = answer.status or _PluginStatus()
        if bool(status.client_certificate_data) != bool(status.client_key_data):
            raise self._fault("printed one of clientCertificateData and clientKeyData", "it must print both or none")
        if not status.token and not status.client_certificate_data:
            raise self._fault("printed neither token nor clientCertificateData", "log in with it again")
        credential = Credential(
            token=status.token,
            certificate_pem=status.client_certificate_data.encode(),
            key_pem=status.client_key_data.encode(),
        )
        return credential, self._expiry(status.expiration_timestamp)

    def _expiry(self, text: str | None) -> int | None:
        if not text:
            return None
        moment_seconds = unix_seconds(text)
        if moment_seconds is None:
            raise self._fault(f"printed expirationTimestamp {text!r}", "it must be an RFC 3339 time")
        return int(moment_seconds * NANOS_PER_SECOND)
