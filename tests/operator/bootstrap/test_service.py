"""How a bootstrap request is answered."""

import asyncio
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from bigfleet.model.frames import BootstrapRequest
from bigfleet.operator.bootstrap.service import (
    ERROR_CHARACTERS_MAX,
    STUB_TTL_SECONDS,
    BootstrapService,
    StubBootstrapService,
)
from bigfleet.operator.bootstrap.template import BootstrapTemplate
from bigfleet.operator.bootstrap.tokens import JoinToken, NoTokens, SecretTokens, TokenMinter
from bigfleet.operator.kubernetes.api import ApiError
from bigfleet.sim.kernel.virtual_time import START_UNIX_SECONDS, LoopClock
from tests.operator.bootstrap.fakes import CountedCharacters, FakeSecretsApi, InProcessRenderer

pytestmark = pytest.mark.virtual_time

TEMPLATE = "{{ cluster_id }}/{{ machine_id }}/{{ labels['topology.kubernetes.io/zone'] }}"
REQUEST = BootstrapRequest(request_id="r", cluster_id="c", machine_id="m", labels={"topology.kubernetes.io/zone": "a"})


class Outcomes:
    """Hears the outcomes."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def on_bootstrap(self, outcome: str, seconds: float) -> None:
        assert seconds >= 0
        self.heard.append(outcome)


class FixedTokens(NoTokens):
    """Hands out one token."""

    def __init__(self, token: JoinToken) -> None:
        self.token = token
        self.discarded: list[JoinToken] = []

    async def mint(self, machine_id: str) -> JoinToken:
        return self.token

    def discard(self, token: JoinToken) -> None:
        self.discarded.append(token)


async def service_of(
    folder: Path, text: str, tokens: TokenMinter, outcomes: Outcomes | None = None, ttl_seconds: int = 3600
) -> BootstrapService:
    path = folder / "t.j2"
    path.write_text(text)
    template = BootstrapTemplate(path, renderer=InProcessRenderer(), cluster_id="c", with_token=True)
    await template.load()
    return BootstrapService(
        cluster_id="c",
        template=template,
        tokens=tokens,
        ttl_seconds=ttl_seconds,
        clock=LoopClock(),
        listener=outcomes,
    )


async def test_a_machine_gets_the_rendered_template(tmp_path: Path) -> None:
    outcomes = Outcomes()
    service = await service_of(tmp_path, TEMPLATE, NoTokens(), outcomes)

    answer = await service.answer(REQUEST)

    assert (answer.request_id, answer.user_data, answer.error) == ("r", b"c/m/a", "")
    assert answer.ttl_seconds == 3600
    assert outcomes.heard == ["ok"]


async def test_without_a_token_and_without_a_life_the_data_does_not_expire(tmp_path: Path) -> None:
    service = await service_of(tmp_path, "x", NoTokens(), ttl_seconds=0)

    assert (await service.answer(REQUEST)).ttl_seconds == 0


async def test_with_a_token_the_data_lives_as_long_as_the_token_rounded_down(tmp_path: Path) -> None:
    tokens = FixedTokens(JoinToken("t.s", START_UNIX_SECONDS + 900))
    service = await service_of(tmp_path, "{{ token }} {{ expires_at }}", tokens)
    await asyncio.sleep(0.25)

    answer = await service.answer(REQUEST)

    assert answer.user_data == b"t.s 2026-01-01T00:15:00Z"
    assert answer.ttl_seconds == 899
    assert tokens.discarded == []


async def test_a_token_that_has_expired_is_an_error_and_not_data_without_end(tmp_path: Path) -> None:
    outcomes = Outcomes()
    tokens = FixedTokens(JoinToken("t.s", START_UNIX_SECONDS))
    service = await service_of(tmp_path, "x", tokens, outcomes)

    answer = await service.answer(REQUEST)

    assert answer.user_data == b""
    assert "expired before it could be sent" in answer.error
    assert outcomes.heard == ["token_error"]
    assert tokens.discarded == [tokens.token]


async def test_a_template_that_fails_for_one_machine_is_an_error_and_its_token_is_deleted(tmp_path: Path) -> None:
    outcomes, fake = Outcomes(), FakeSecretsApi()
    tokens = SecretTokens(fake.api(), clock=LoopClock(), characters=CountedCharacters(), ttl_seconds=3600)
    service = await service_of(tmp_path, "{{ taints[0].key }} {{ token }}", tokens, outcomes)
    running = asyncio.create_task(service.run())

    with capture_logs() as logs:
        answer = await service.answer(REQUEST)
    await asyncio.sleep(1)

    assert answer.error.endswith("t.j2:1: list object has no element 0")
    assert answer.user_data == b""
    assert outcomes.heard == ["template_error"]
    assert [entry["event"] for entry in logs] == ["operator.bootstrap_refused"]
    assert len(fake.created) == 1
    assert not fake.secrets
    running.cancel()


async def test_a_token_that_cannot_be_minted_is_an_error(tmp_path: Path) -> None:
    outcomes, fake = Outcomes(), FakeSecretsApi()
    fake.failures["create"] = [ApiError(403, "Forbidden", "may not create secrets")]
    tokens = SecretTokens(fake.api(), clock=LoopClock(), characters=CountedCharacters(), ttl_seconds=3600)
    service = await service_of(tmp_path, "{{ token }}", tokens, outcomes)

    answer = await service.answer(REQUEST)

    assert (answer.error, answer.user_data) == ("no bootstrap token: may not create secrets", b"")
    assert outcomes.heard == ["token_error"]


async def test_an_answer_that_is_cancelled_leaves_no_token(tmp_path: Path) -> None:
    class SlowRenderer(InProcessRenderer):
        async def render(self, source: object, variables: object) -> str:
            await asyncio.sleep(1000)
            return ""

    tokens = FixedTokens(JoinToken("t.s", START_UNIX_SECONDS + 900))
    service = await service_of(tmp_path, "x", tokens)
    service._template._renderer = SlowRenderer()

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(25):
            await service.answer(REQUEST)

    assert tokens.discarded == [tokens.token]


async def test_no_log_and_no_repr_has_the_token_or_the_user_data(tmp_path: Path) -> None:
    fake = FakeSecretsApi()
    tokens = SecretTokens(fake.api(), clock=LoopClock(), characters=CountedCharacters(), ttl_seconds=3600)
    service = await service_of(tmp_path, "join {{ token }}{% if zone == 'z' %}{{ {}[token] }}{% endif %}", tokens)

    with capture_logs() as logs:
        good = await service.answer(REQUEST)
        bad = await service.answer(BootstrapRequest(request_id="r2", cluster_id="c", machine_id="m", zone="z"))

    assert good.user_data.startswith(b"join aaaaaa.baaaaa")
    assert bad.error
    for said in (repr(logs), repr(good), repr(bad), bad.error):
        assert "baaaaaaaaaaaaaaa" not in said
        assert "daaaaaaaaaaaaaaa" not in said
        assert "join aaaaaa" not in said


async def test_a_long_error_is_cut(tmp_path: Path) -> None:
    fake = FakeSecretsApi()
    fake.failures["create"] = [ApiError(403, "Forbidden", "x" * 5000)]
    tokens = SecretTokens(fake.api(), clock=LoopClock(), characters=CountedCharacters(), ttl_seconds=3600)
    service = await service_of(tmp_path, "x", tokens)

    assert len((await service.answer(REQUEST)).error) == ERROR_CHARACTERS_MAX


async def test_the_stub_answers_with_a_comment_that_lives_ten_minutes() -> None:
    answer = await StubBootstrapService().answer(REQUEST)

    assert answer.user_data.startswith(b"#cloud-config\n#")
    assert answer.ttl_seconds == STUB_TTL_SECONDS == 600
