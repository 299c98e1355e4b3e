"""Mints the tokens with which machines join: none, bootstrap token Secrets, or tokens of a service account.

A Secret is deleted once its machine's node is Ready, or if its token was not handed out; the cluster's token cleaner
deletes the rest when they expire. Secrets are deleted in the background, so that no answer is delayed. A token must
never get into a log, an error text or a `repr`.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Final, Protocol

import structlog

from bigfleet.model.clock import NANOS_PER_SECOND, Clock
from bigfleet.operator.kubernetes.api import ApiError, JsonObject, KubernetesApi
from bigfleet.operator.kubernetes.objects import Secret
from bigfleet.operator.kubernetes.resources import FIELD_MANAGER, MACHINE_ID, MANAGED_BY, SECRETS, TOKEN_REQUESTS
from bigfleet.operator.kubernetes.rights import TOKEN_SECRET_NAMESPACE
from bigfleet.operator.kubernetes.timestamps import rfc3339, unix_seconds
from bigfleet.operator.nodes.names import machine_label

log = structlog.get_logger(__name__)

SECRET_TYPE: Final = "bootstrap.kubernetes.io/token"  # noqa: S105 - a name
SECRET_NAME_PREFIX: Final = "bootstrap-token-"  # noqa: S105 - a name
#: The group that a joining machine authenticates as, beside `system:bootstrappers`.
BOOTSTRAP_GROUP: Final = "system:bootstrappers:bigfleet"
TOKEN_ID_CHARACTERS: Final = 6
TOKEN_SECRET_CHARACTERS: Final = 16
#: API servers refuse a shorter life of a service account's token.
TOKEN_REQUEST_SECONDS_MIN: Final = 600
#: Ids tried when others have the one drawn: of 2 billion, two in a row being taken means that something else is wrong.
_IDS_TRIED_MAX: Final = 3
_RETRY_SECONDS: Final = 5.0


class TokenCharacters(Protocol):
    """Draws the characters of tokens; unguessable outside of tests."""

    def draw(self, count: int) -> str:
        """Return `count` characters of a-z and 0-9, each drawn alike."""
        ...


class TokenFault(Exception):
    """A token that cannot be minted; the message names the cause and nothing secret."""


@dataclass(frozen=True, slots=True)
class JoinToken:
    """What a machine joins with; empty in mode none."""

    text: str = field(default="", repr=False)
    #: None when there is no token.
    expires_unix_seconds: int | None = None
    #: The name of its Secret; "" without one.
    secret_name: str = ""


class TokenMinter(Protocol):
    """One of the token modes."""

    async def mint(self, machine_id: str) -> JoinToken:
        """Return a token for a machine; raises TokenFault."""
        ...

    def discard(self, token: JoinToken) -> None:
        """Note that a token was not handed out."""
        ...

    def node_ready(self, machine_id: str, *, since_unix_seconds: float | None = None) -> None:
        """Note that the machine's node is Ready, since when if that is known: a later token is not its own."""
        ...

    async def run(self) -> None:
        """Do what the notes ask for, until cancelled."""
        ...


class NoTokens:
    """Mode none: templates bring what they need."""

    async def mint(self, machine_id: str) -> JoinToken:
        """Return the empty token."""
        return JoinToken()

    def discard(self, token: JoinToken) -> None:
        """Do nothing."""

    def node_ready(self, machine_id: str, *, since_unix_seconds: float | None = None) -> None:
        """Do nothing."""

    async def run(self) -> None:
        """Return at once: there is nothing to delete."""


class ServiceAccountTokens:
    """Mode tokenrequest: tokens of one service account, which expire by themselves."""

    def __init__(self, api: KubernetesApi, *, namespace: str, name: str, ttl_seconds: int) -> None:
        """Name the account; ValueError when the life is shorter than API servers accept."""
        if ttl_seconds < TOKEN_REQUEST_SECONDS_MIN:
            raise ValueError(
                f"a token of a service account lives at least {TOKEN_REQUEST_SECONDS_MIN} s, not {ttl_seconds} s"
            )
        self._api = api
        self._namespace = namespace
        self._name = name
        self._ttl_seconds = ttl_seconds

    async def mint(self, machine_id: str) -> JoinToken:
        """Request a token; the API server decides how long it lives."""
        body: JsonObject = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": self._ttl_seconds},
        }
        account = f"service account {self._namespace}/{self._name}"
        try:
            answer = await self._api.create(TOKEN_REQUESTS, body, namespace=self._namespace, name=self._name)
        except ApiError as error:
            raise TokenFault(f"no token of {account}: {error}") from None
        expires_unix_seconds = unix_seconds(answer.status.expiration_timestamp)
        if not answer.status.token or expires_unix_seconds is None:
            raise TokenFault(f"no token of {account}: the API server's answer has no token or no expiry")
        return JoinToken(answer.status.token, int(expires_unix_seconds))

    def discard(self, token: JoinToken) -> None:
        """Do nothing: such a token cannot be revoked and expires."""

    def node_ready(self, machine_id: str, *, since_unix_seconds: float | None = None) -> None:
        """Do nothing: such a token cannot be revoked and expires."""

    async def run(self) -> None:
        """Return at once: there is nothing to delete."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """A Secret of ours that may still be there."""

    name: str
    minted_unix_seconds: float


class SecretTokens:
    """Mode secret: bootstrap tokens, each a Secret in kube-system."""

    def __init__(self, api: KubernetesApi, *, clock: Clock, characters: TokenCharacters, ttl_seconds: int) -> None:
        self._api = api
        self._clock = clock
        self._characters = characters
        self._ttl_seconds = ttl_seconds
        #: By machine-id label, since a Secret that was read back has no raw id that could be trusted to be there.
        self._stored: dict[str, dict[str, _Stored]] = {}
        self._to_delete: set[str] = set()
        self._changed = asyncio.Event()
        #: Ready nodes noted before the Secrets of an earlier leader were read.
        self._early: dict[str, float | None] | None = {}
        self.deleted_total = 0

    async def mint(self, machine_id: str) -> JoinToken:
        """Create a Secret; a name that others have is drawn again."""
        for _attempt in range(_IDS_TRIED_MAX):
            token = await self._create(machine_id)
            if token is not None:
                return token
        raise TokenFault(f"no bootstrap token: {_IDS_TRIED_MAX} token ids in a row were taken")

    async def _create(self, machine_id: str) -> JoinToken | None:
        """Return the token, None when its id is taken."""
        now_unix_seconds = self._now_unix_seconds()
        identity = self._characters.draw(TOKEN_ID_CHARACTERS)
        secret = self._characters.draw(TOKEN_SECRET_CHARACTERS)
        token = JoinToken(
            f"{identity}.{secret}", int(now_unix_seconds) + self._ttl_seconds, f"{SECRET_NAME_PREFIX}{identity}"
        )
        label = machine_label(machine_id)
        # Before the request: it may succeed even if its answer is never seen, and the node become Ready meanwhile.
        self._remember(label, _Stored(token.secret_name, now_unix_seconds))
        try:
            await self._api.create(SECRETS, _secret(token, machine_id), namespace=TOKEN_SECRET_NAMESPACE)
        except ApiError as error:
            if error.is_conflict:
                # It is not ours to delete.
                self._forget(token.secret_name)
                return None
            if error.is_transient:
                self.discard(token)
            else:
                self._forget(token.secret_name)
            message = str(error).replace(secret, "…")
            raise TokenFault(f"no bootstrap token: {message}") from None
        except BaseException:
            self.discard(token)
            raise
        return token

    def discard(self, token: JoinToken) -> None:
        """Delete a token that was not handed out, soon."""
        self._forget(token.secret_name)
        self._delete_soon(token.secret_name)

    def node_ready(self, machine_id: str, *, since_unix_seconds: float | None = None) -> None:
        """Delete the tokens of a machine, soon, but those minted after its node became Ready.

        Such a token is for the machine's next life: the Node of the previous one may stay Ready for a while.
        """
        label = machine_label(machine_id)
        if self._early is not None:
            self._early[label] = since_unix_seconds
        for name in list(self._stored.get(label, {})):
            self._delete_if_minted_before(label, name, since_unix_seconds)

    def _delete_if_minted_before(self, label: str, name: str, since_unix_seconds: float | None) -> None:
        if since_unix_seconds is None or self._stored[label][name].minted_unix_seconds <= since_unix_seconds:
            self._forget(name)
            self._delete_soon(name)

    async def run(self) -> None:
        """Read the Secrets of an earlier leader once, then delete what is noted, until cancelled."""
        await self._read_stored()
        while True:
            await self._changed.wait()
            self._changed.clear()
            self._forget_expired()
            failed: set[str] = set()
            while self._to_delete:
                name = self._to_delete.pop()
                if not await self._delete(name):
                    failed.add(name)
            if failed:
                await self._clock.sleep(_RETRY_SECONDS)
                for name in failed:
                    self._delete_soon(name)

    async def _delete(self, name: str) -> bool:
        """Return whether no more is to be done about it."""
        try:
            await self._api.delete(SECRETS, name, namespace=TOKEN_SECRET_NAMESPACE)
        except ApiError as error:
            if error.is_not_found:
                return True
            if error.is_transient:
                return False
            log.warning("operator.token_not_deleted", secret=name, error=str(error), advice="it expires by itself")
            return True
        self.deleted_total += 1
        return True

    async def _read_stored(self) -> None:
        while True:
            try:
                found = await self._list_stored()
                break
            except ApiError as error:
                log.warning("operator.tokens_not_listed", error=str(error), advice="they expire by themselves")
                if not (error.is_transient or error.is_expired):
                    found = []
                    break
                await self._clock.sleep(_RETRY_SECONDS)
        early, self._early = self._early or {}, None
        for secret in found:
            name, label = secret.metadata.name, (secret.metadata.labels or {}).get(MACHINE_ID, "")
            # What is in memory is exact, and may be due for deletion already.
            if not label or name in self._stored.get(label, {}) or name in self._to_delete:
                continue
            self._remember(label, _Stored(name, unix_seconds(secret.metadata.creation_timestamp) or 0.0))
            if label in early:
                self._delete_if_minted_before(label, name, early[label])

    async def _list_stored(self) -> list[Secret]:
        found: list[Secret] = []
        more = ""
        while True:
            page = await self._api.list_page(
                SECRETS,
                namespace=TOKEN_SECRET_NAMESPACE,
                label_selector=f"{MANAGED_BY}={FIELD_MANAGER}",
                continue_token=more,
            )
            found.extend(secret for secret in page.items if secret.metadata.name.startswith(SECRET_NAME_PREFIX))
            more = page.continue_token
            if not more:
                return found

    def _remember(self, label: str, stored: _Stored) -> None:
        self._forget_expired()
        self._stored.setdefault(label, {})[stored.name] = stored

    def _forget(self, name: str) -> None:
        for label, secrets in list(self._stored.items()):
            if secrets.pop(name, None) is not None and not secrets:
                del self._stored[label]

    def _forget_expired(self) -> None:
        """Drop what the token cleaner has deleted."""
        oldest_unix_seconds = self._now_unix_seconds() - self._ttl_seconds
        expired = [
            stored.name
            for secrets in self._stored.values()
            for stored in secrets.values()
            if stored.minted_unix_seconds < oldest_unix_seconds
        ]
        for name in expired:
            self._forget(name)

    def _delete_soon(self, name: str) -> None:
        self._to_delete.add(name)
        self._changed.set()

    def _now_unix_seconds(self) -> float:
        return self._clock.unix_nanos() / NANOS_PER_SECOND


def _secret(token: JoinToken, machine_id: str) -> JsonObject:
    """Return the Secret of a bootstrap token as API servers and kubeadm know it."""
    identity, _dot, secret = token.text.partition(".")
    assert token.expires_unix_seconds is not None
    labels = {MANAGED_BY: FIELD_MANAGER}
    annotations: dict[str, str] = {}
    if machine_id:
        labels[MACHINE_ID] = machine_label(machine_id)
        annotations[MACHINE_ID] = machine_id
    return {
        "apiVersion": SECRETS.api_version,
        "kind": SECRETS.kind,
        "type": SECRET_TYPE,
        "metadata": {
            "name": token.secret_name,
            "namespace": TOKEN_SECRET_NAMESPACE,
            "labels": labels,
            "annotations": annotations,
        },
        "stringData": {
            "description": "Lets one machine join; made by bigfleet operator.",
            "token-id": identity,
            "token-secret": secret,
            "expiration": rfc3339(token.expires_unix_seconds * NANOS_PER_SECOND),
            "usage-bootstrap-authentication": "true",
            "usage-bootstrap-signing": "true",
            "auth-extra-groups": BOOTSTRAP_GROUP,
        },
    }
