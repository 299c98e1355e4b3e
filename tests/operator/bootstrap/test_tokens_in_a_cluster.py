"""The rights that deploy/kubernetes grants are enough for tokens: an API server in memory judges each call."""

import asyncio
from pathlib import Path

import pytest
import yaml

from bigfleet.operator.bootstrap.tokens import SecretTokens, ServiceAccountTokens, TokenFault, TokenMinter
from bigfleet.operator.kubernetes.api import KubernetesApi
from bigfleet.operator.kubernetes.resources import SECRETS
from bigfleet.sim.kernel.virtual_time import LoopClock
from bigfleet.sim.kubernetes.client import InMemoryApi
from bigfleet.sim.kubernetes.kinds import SERVICE_ACCOUNTS
from bigfleet.sim.kubernetes.rights import AccessRights, rules_of_role
from bigfleet.sim.kubernetes.server import InMemoryApiServer
from tests.operator.bootstrap.fakes import CountedCharacters

pytestmark = pytest.mark.virtual_time

COMPONENTS = Path(__file__).parent.parent.parent.parent / "deploy" / "kubernetes" / "components"


def client(server: InMemoryApiServer, component: str) -> InMemoryApi:
    """Return a client with the rights that a component grants the operator, and no others."""
    text = (COMPONENTS / component / "rights.yaml").read_text(encoding="utf-8")
    rules = [
        rule
        for found in yaml.safe_load_all(text)
        if found["kind"] == "Role"
        for rule in rules_of_role(found, found["metadata"]["namespace"])
    ]
    assert rules
    return InMemoryApi(server, user="operator", rights=AccessRights(tuple(rules)))


def secret_tokens(api: KubernetesApi) -> SecretTokens:
    return SecretTokens(api, clock=LoopClock(), characters=CountedCharacters(), ttl_seconds=3600)


async def test_a_secret_is_made_and_goes_when_the_node_is_ready() -> None:
    server = InMemoryApiServer(LoopClock())
    tokens = secret_tokens(client(server, "token-secret"))
    running = asyncio.create_task(tokens.run())
    token = await tokens.mint("aws/i-1")
    stored = server.raw(SECRETS, token.secret_name, "kube-system")
    assert stored["type"] == "bootstrap.kubernetes.io/token"

    tokens.node_ready("aws/i-1")
    await asyncio.sleep(1)

    assert server.read_all(SECRETS) == []
    running.cancel()


async def test_the_next_leader_deletes_what_the_former_made() -> None:
    server = InMemoryApiServer(LoopClock())
    former = secret_tokens(client(server, "token-secret"))
    for machine in range(3):
        await former.mint(f"m{machine}")
    tokens = secret_tokens(client(server, "token-secret"))
    running = asyncio.create_task(tokens.run())
    await asyncio.sleep(1)

    tokens.node_ready("m1")
    await asyncio.sleep(1)

    left = [secret.metadata.labels or {} for secret in server.read_all(SECRETS)]
    assert sorted(labels["bigfleet.lucy.sh/machine-id"] for labels in left) == ["m0", "m2"]
    running.cancel()


async def test_the_token_of_a_service_account_lives_an_hour() -> None:
    clock = LoopClock()
    server = InMemoryApiServer(clock)
    server.put(SERVICE_ACCOUNTS, {"metadata": {"name": "bigfleet-node", "namespace": "kube-system"}})
    tokens = ServiceAccountTokens(
        client(server, "token-request"), namespace="kube-system", name="bigfleet-node", ttl_seconds=3600
    )

    token = await tokens.mint("m")

    assert token.text
    assert token.expires_unix_seconds == clock.unix_nanos() // 10**9 + 3600


@pytest.mark.parametrize("component", ["token-secret", "token-request"])
async def test_a_missing_right_is_a_fault_that_names_it(component: str) -> None:
    server = InMemoryApiServer(LoopClock())
    api = client(server, component)
    minter: TokenMinter = secret_tokens(api)
    if component == "token-secret":
        minter = ServiceAccountTokens(api, namespace="kube-system", name="bigfleet-node", ttl_seconds=3600)

    with pytest.raises(TokenFault, match=r"^no (bootstrap )?token.*(forbidden|cannot create)"):
        await minter.mint("m")
