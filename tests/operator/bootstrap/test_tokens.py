"""How tokens are minted in each mode, and when their Secrets go."""

import asyncio
from datetime import UTC, datetime
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from bigfleet.operator.bootstrap.tokens import JoinToken, NoTokens, SecretTokens, ServiceAccountTokens, TokenFault
from bigfleet.operator.kubernetes.api import ApiError
from bigfleet.operator.kubernetes.objects import TokenRequestStatus
from bigfleet.operator.nodes.names import machine_label
from bigfleet.sim.kernel.virtual_time import START_UNIX_SECONDS, LoopClock
from tests.operator.bootstrap.fakes import CountedCharacters, FakeSecretsApi

pytestmark = pytest.mark.virtual_time

UNREACHABLE = ApiError(0, "Unreachable", "no answer")


def secrets_of(fake: FakeSecretsApi, *, ttl_seconds: int = 3600) -> SecretTokens:
    return SecretTokens(fake.api(), clock=LoopClock(), characters=CountedCharacters(), ttl_seconds=ttl_seconds)


async def test_without_tokens_the_token_is_empty() -> None:
    assert await NoTokens().mint("m") == JoinToken("", None)


async def test_a_secret_is_a_bootstrap_token_as_kubernetes_knows_it() -> None:
    fake = FakeSecretsApi()

    token = await secrets_of(fake).mint("aws/i-1")

    assert token.text == "aaaaaa.baaaaaaaaaaaaaaa"
    assert token.expires_unix_seconds == START_UNIX_SECONDS + 3600
    assert fake.secrets == {
        "bootstrap-token-aaaaaa": {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "bootstrap.kubernetes.io/token",
            "metadata": {
                "name": "bootstrap-token-aaaaaa",
                "namespace": "kube-system",
                "labels": {
                    "app.kubernetes.io/managed-by": "bigfleet-operator",
                    "bigfleet.lucy.sh/machine-id": machine_label("aws/i-1"),
                },
                "annotations": {"bigfleet.lucy.sh/machine-id": "aws/i-1"},
            },
            "stringData": {
                "description": "Lets one machine join; made by bigfleet operator.",
                "token-id": "aaaaaa",
                "token-secret": "baaaaaaaaaaaaaaa",
                "expiration": "2026-01-01T01:00:00Z",
                "usage-bootstrap-authentication": "true",
                "usage-bootstrap-signing": "true",
                "auth-extra-groups": "system:bootstrappers:bigfleet",
            },
        }
    }


async def test_a_token_says_nothing_of_itself() -> None:
    token = await secrets_of(FakeSecretsApi()).mint("m")

    assert token.text not in repr(token)
    assert token.text.split(".")[1] not in f"{token}"


async def test_an_id_that_is_taken_is_drawn_again_and_the_other_secret_stays() -> None:
    fake = FakeSecretsApi()
    foreign = {"metadata": {"name": "bootstrap-token-aaaaaa", "labels": {}}}
    fake.secrets["bootstrap-token-aaaaaa"] = cast(Any, foreign)
    tokens = secrets_of(fake)
    running = asyncio.create_task(tokens.run())

    assert (await tokens.mint("m")).text.startswith("caaaaa.")
    tokens.node_ready("m")
    await asyncio.sleep(1)

    assert list(fake.secrets) == ["bootstrap-token-aaaaaa"]
    running.cancel()


async def test_ids_that_are_always_taken_are_a_fault() -> None:
    fake = FakeSecretsApi()
    fake.failures["create"] = [ApiError(409, "AlreadyExists", "it exists")] * 3

    with pytest.raises(TokenFault, match="3 token ids in a row were taken"):
        await secrets_of(fake).mint("m")


async def test_a_refused_secret_is_a_fault_without_the_secret() -> None:
    fake = FakeSecretsApi()
    fake.failures["create"] = [ApiError(403, "Forbidden", "may not create baaaaaaaaaaaaaaa in kube-system")]

    with pytest.raises(TokenFault, match=r"^no bootstrap token: may not create … in kube-system$"):
        await secrets_of(fake).mint("m")


async def test_the_secret_of_a_machine_goes_when_its_node_is_ready() -> None:
    fake = FakeSecretsApi()
    tokens = secrets_of(fake)
    running = asyncio.create_task(tokens.run())
    for machine in ("m1", "m2", "m1"):
        await tokens.mint(machine)

    tokens.node_ready("m1")
    await asyncio.sleep(1)

    assert [cast(Any, body)["metadata"]["annotations"] for body in fake.secrets.values()] == [
        {"bigfleet.lucy.sh/machine-id": "m2"}
    ]
    tokens.node_ready("m1")
    await asyncio.sleep(1)
    assert fake.deletes == 2
    running.cancel()


async def test_the_node_of_a_previous_life_does_not_take_the_token_of_the_next() -> None:
    fake = FakeSecretsApi()
    tokens = secrets_of(fake)
    running = asyncio.create_task(tokens.run())
    await asyncio.sleep(100)
    await tokens.mint("m")

    tokens.node_ready("m", since_unix_seconds=START_UNIX_SECONDS + 50)
    await asyncio.sleep(1)
    assert len(fake.secrets) == 1

    tokens.node_ready("m", since_unix_seconds=START_UNIX_SECONDS + 150)
    await asyncio.sleep(1)
    assert not fake.secrets
    running.cancel()


@pytest.mark.parametrize("early", [True, False])
async def test_a_new_leader_deletes_the_secrets_of_the_previous_one(early: bool) -> None:
    fake = FakeSecretsApi()
    for machine in ("m1", "aws/i-2", "m3"):
        await secrets_of_another(fake, machine)
    tokens = secrets_of(fake)
    fake.failures["list"] = [UNREACHABLE, ApiError(410, "Expired", "the list took too long")]

    if early:
        tokens.node_ready("aws/i-2")
    running = asyncio.create_task(tokens.run())
    await asyncio.sleep(20)
    if not early:
        tokens.node_ready("aws/i-2")
    await asyncio.sleep(1)

    machines = [cast(Any, body)["metadata"]["annotations"].popitem()[1] for body in fake.secrets.values()]
    assert machines == ["m1", "m3"]
    running.cancel()


async def secrets_of_another(fake: FakeSecretsApi, machine: str) -> None:
    """Mint as a previous leader did, whose ids differ from those of the next."""
    previous = secrets_of(fake)
    token = await previous.mint(machine)
    body = cast(dict[str, Any], fake.secrets.pop(token.secret_name))
    name = f"bootstrap-token-previous{len(fake.secrets)}"
    fake.secrets[name] = {**body, "metadata": {**body["metadata"], "name": name}}


async def test_a_delete_that_fails_is_tried_again_and_one_that_may_not_be_is_left_to_the_cleaner() -> None:
    fake = FakeSecretsApi()
    tokens = secrets_of(fake)
    running = asyncio.create_task(tokens.run())
    await tokens.mint("m1")
    await tokens.mint("m2")
    fake.failures["delete"] = [UNREACHABLE, UNREACHABLE]

    tokens.node_ready("m1")
    await asyncio.sleep(60)
    assert (len(fake.secrets), fake.deletes, tokens.deleted_total) == (1, 3, 1)

    fake.failures["delete"] = [ApiError(403, "Forbidden", "may not")]
    with capture_logs() as logs:
        tokens.node_ready("m2")
        await asyncio.sleep(60)
    assert [entry["event"] for entry in logs] == ["operator.token_not_deleted"]
    assert len(fake.secrets) == 1
    running.cancel()


async def test_a_token_whose_making_was_not_answered_is_deleted() -> None:
    fake = FakeSecretsApi()
    tokens = secrets_of(fake)
    running = asyncio.create_task(tokens.run())
    fake.failures["create"] = [UNREACHABLE]
    with pytest.raises(TokenFault, match="no answer"):
        await tokens.mint("m")
    # It was stored all the same.
    fake.secrets["bootstrap-token-aaaaaa"] = fake.created[0]

    await asyncio.sleep(1)

    assert not fake.secrets
    running.cancel()


async def test_what_has_expired_is_forgotten() -> None:
    fake = FakeSecretsApi()
    tokens = secrets_of(fake, ttl_seconds=600)
    await tokens.mint("m1")
    await asyncio.sleep(700)
    await tokens.mint("m2")

    assert list(tokens._stored) == ["m2"]


async def test_a_token_of_a_service_account_lives_as_long_as_the_api_server_says() -> None:
    fake = FakeSecretsApi()
    fake.answer = TokenRequestStatus(token="jwt", expiration_timestamp="2026-01-01T02:00:00Z")

    token = await ServiceAccountTokens(fake.api(), namespace="kube-system", name="joiner", ttl_seconds=3600).mint("m")

    assert token == JoinToken("jwt", int(datetime(2026, 1, 1, 2, tzinfo=UTC).timestamp()))
    ((namespace, name, body),) = fake.token_requests
    assert (namespace, name) == ("kube-system", "joiner")
    assert body["spec"] == {"expirationSeconds": 3600}


@pytest.mark.parametrize(
    "answer",
    [
        TokenRequestStatus(),
        TokenRequestStatus(token="", expiration_timestamp="2026-01-01T02:00:00Z"),
        TokenRequestStatus(token="jwt", expiration_timestamp="soon"),
    ],
)
async def test_an_answer_without_a_token_is_a_fault_and_not_an_empty_token(answer: TokenRequestStatus) -> None:
    fake = FakeSecretsApi()
    fake.answer = answer

    with pytest.raises(TokenFault, match="service account ns/n: the API server's answer has no token"):
        await ServiceAccountTokens(fake.api(), namespace="ns", name="n", ttl_seconds=3600).mint("m")


async def test_a_service_account_without_the_right_is_a_fault() -> None:
    fake = FakeSecretsApi()
    fake.failures["create"] = [ApiError(403, "Forbidden", "may not create serviceaccounts/token")]

    with pytest.raises(TokenFault, match="no token of service account ns/n: may not create serviceaccounts/token"):
        await ServiceAccountTokens(fake.api(), namespace="ns", name="n", ttl_seconds=600).mint("m")


def test_a_life_that_api_servers_refuse_is_refused_at_start() -> None:
    with pytest.raises(ValueError, match="at least 600 s, not 599 s"):
        ServiceAccountTokens(FakeSecretsApi().api(), namespace="ns", name="n", ttl_seconds=599)
