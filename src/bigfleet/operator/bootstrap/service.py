"""Answers the shard's bootstrap requests: mints a token and renders the template, or returns the reason for a failure.

`bigfleet.operator.session` limits the time of an answer and the number of concurrent ones. An error names the cause for
a person. Neither user data nor tokens may get into a log or an error.
"""

import asyncio
from typing import Final, Protocol

import structlog

from bigfleet.model.clock import NANOS_PER_SECOND, Clock
from bigfleet.model.frames import BootstrapRequest, BootstrapResponse
from bigfleet.operator.bootstrap.renderer import TemplateFault
from bigfleet.operator.bootstrap.template import BootstrapTemplate
from bigfleet.operator.bootstrap.tokens import JoinToken, TokenFault, TokenMinter
from bigfleet.operator.bootstrap.variables import template_variables

log = structlog.get_logger(__name__)

STUB_USER_DATA: Final = (
    b"#cloud-config\n# bigfleet operator runs with --bootstrap-stub: this machine joins no cluster.\n"
)
STUB_TTL_SECONDS: Final = 600
#: An error goes into conditions of every request of the need; the first characters say enough.
ERROR_CHARACTERS_MAX: Final = 1024


class BootstrapListener(Protocol):
    """Hears of each answer, for metrics."""

    def on_bootstrap(self, outcome: str, seconds: float) -> None:
        """Hear the outcome (ok, template_error, token_error) and how long the answer took."""
        ...


class _NoListener:
    def on_bootstrap(self, outcome: str, seconds: float) -> None:
        """Do nothing."""


class BootstrapService:
    """Answers for one cluster."""

    def __init__(
        self,
        *,
        cluster_id: str,
        template: BootstrapTemplate,
        tokens: TokenMinter,
        ttl_seconds: int,
        clock: Clock,
        listener: BootstrapListener | None = None,
    ) -> None:
        """Take a loaded template; `ttl_seconds` is for answers without a token, 0 = does not expire."""
        self._cluster_id = cluster_id
        self._template = template
        self._tokens = tokens
        self._ttl_seconds = ttl_seconds
        self._clock = clock
        self._listener = listener or _NoListener()

    @property
    def reload_errors_total(self) -> int:
        """How many versions of the template were not taken into use."""
        return self._template.reload_errors_total

    async def answer(self, request: BootstrapRequest) -> BootstrapResponse:
        """Return what boots the machine, or an answer with an error."""
        started_seconds = self._clock.monotonic_seconds()
        try:
            response = await self._answer(request)
            outcome = "ok"
        except TokenFault as fault:
            response, outcome = self._refusal(request, fault), "token_error"
        except TemplateFault as fault:
            response, outcome = self._refusal(request, fault), "template_error"
        self._listener.on_bootstrap(outcome, self._clock.monotonic_seconds() - started_seconds)
        return response

    async def _answer(self, request: BootstrapRequest) -> BootstrapResponse:
        token = await self._tokens.mint(request.machine_id)
        try:
            user_data = await self._template.render(
                template_variables(
                    self._cluster_id, request, token=token.text, expires_unix_seconds=token.expires_unix_seconds
                )
            )
            ttl_seconds = self._left_seconds(token)
        except BaseException:
            # Also when the answer takes too long and is cancelled: nothing will ever join with it.
            self._tokens.discard(token)
            raise
        return BootstrapResponse(request_id=request.request_id, user_data=user_data, ttl_seconds=ttl_seconds)

    def _left_seconds(self, token: JoinToken) -> int:
        """Return the life of the user data in whole seconds; TokenFault when its token has expired already."""
        if token.expires_unix_seconds is None:
            return self._ttl_seconds
        left_seconds = (token.expires_unix_seconds * NANOS_PER_SECOND - self._clock.unix_nanos()) // NANOS_PER_SECOND
        if left_seconds <= 0:
            # 0 would mean on the wire that it never expires.
            raise TokenFault("the token had expired before it could be sent; check the clock and --bootstrap-ttl")
        return left_seconds

    def _refusal(self, request: BootstrapRequest, fault: Exception) -> BootstrapResponse:
        error = str(fault)[:ERROR_CHARACTERS_MAX]
        log.warning("operator.bootstrap_refused", machine=request.machine_id, error=error)
        return BootstrapResponse(request_id=request.request_id, error=error)

    def node_ready(self, machine_id: str, *, since_unix_seconds: float | None = None) -> None:
        """Note that a machine's node is Ready (since when, by its condition): its token is deleted."""
        self._tokens.node_ready(machine_id, since_unix_seconds=since_unix_seconds)

    async def run(self) -> None:
        """Watch the template's file and delete tokens, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._template.watch(self._clock))
            tasks.create_task(self._tokens.run())


class StubBootstrapService:
    """Answers every request with a fixed comment (`--bootstrap-stub`), for tests and demonstrations."""

    #: There is no template.
    reload_errors_total: Final = 0

    async def answer(self, request: BootstrapRequest) -> BootstrapResponse:
        """Return user data that does nothing and lives 10 minutes."""
        return BootstrapResponse(request_id=request.request_id, user_data=STUB_USER_DATA, ttl_seconds=STUB_TTL_SECONDS)

    def node_ready(self, machine_id: str, *, since_unix_seconds: float | None = None) -> None:
        """Do nothing."""

    async def run(self) -> None:
        """Return at once."""
