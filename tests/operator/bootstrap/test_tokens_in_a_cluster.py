"""The rights that deploy/kubernetes grants are enough for tokens: an API server in memory judges each call."""

import asyncio
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from bigfleet.operator.bootstrap.tokens import SecretTokens, ServiceAccountTokens, TokenFault, TokenMinter
from bigfleet.operator.kubernetes.api import KubernetesApi
from bigfleet.operator.kubernetes.resources import MACHINE_ID, SECRETS
from bigfleet.sim.kernel.virtual_time import LoopClock, run_virtual
from bigfleet.sim.kubernetes.client import InMemoryApi
from bigfleet.sim.kubernetes.kinds import SERVICE_ACCOUNTS
from bigfleet.sim.kubernetes.rights import AccessRights, rules_of_role
from bigfleet.sim.kubernetes.server import InMemoryApiServer
from tests.operator.bootstrap.fakes import CountedCharacters

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


@pytest.mark.virtual_time
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


@pytest.mark.virtual_time
async def test_the_next_leader_deletes_what_the_previous_one_made() -> None:
    server = InMemoryApiServer(LoopClock())
    previous = secret_tokens(client(server, "token-secret"))
    for machine in range(3):
        await previous.mint(f"m{machine}")
    tokens = secret_tokens(client(server, "token-secret"))
    running = asyncio.create_task(tokens.run())
    await asyncio.sleep(1)

    tokens.node_ready("m1")
    await asyncio.sleep(1)

    left = [secret.metadata.labels or {} for secret in server.read_all(SECRETS)]
    assert sorted(labels["bigfleet.lucy.sh/machine-id"] for labels in left) == ["m0", "m2"]
    running.cancel()


@pytest.mark.virtual_time
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


@pytest.mark.virtual_time
@pytest.mark.parametrize("component", ["token-secret", "token-request"])
async def test_a_missing_right_is_a_fault_that_names_it(component: str) -> None:
    server = InMemoryApiServer(LoopClock())
    api = client(server, component)
    minter: TokenMinter = secret_tokens(api)
    if component == "token-secret":
        minter = ServiceAccountTokens(api, namespace="kube-system", name="bigfleet-node", ttl_seconds=3600)

    with pytest.raises(TokenFault, match=r"^no (bootstrap )?token.*(forbidden|cannot create)"):
        await minter.mint("m")


MACHINES = st.sampled_from(["m1", "aws/i-2"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("mint"), MACHINES),
        st.tuples(st.just("mint and discard"), MACHINES),
        # The Secret is stored, its answer is lost on the way.
        st.tuples(st.just("mint unanswered"), MACHINES),
        st.tuples(st.just("ready"), MACHINES),
        st.tuples(st.just("new leader"), MACHINES),
        st.tuples(st.just("server away"), MACHINES),
    ),
    max_size=12,
)


async def secrets_after(steps: list[tuple[str, str]]) -> tuple[list[str], list[str]]:
    """Return the machines whose tokens should be left after these steps, and those whose Secrets are."""
    server = InMemoryApiServer(LoopClock())
    characters = CountedCharacters()
    expected: list[str] = []

    def leader() -> tuple[InMemoryApi, SecretTokens, "asyncio.Task[None]"]:
        api = client(server, "token-secret")
        tokens = SecretTokens(api, clock=LoopClock(), characters=characters, ttl_seconds=3600)
        return api, tokens, asyncio.create_task(tokens.run())

    api, tokens, running = leader()
    for step, machine in steps:
        if step == "mint":
            await tokens.mint(machine)
            expected.append(machine)
        elif step == "mint and discard":
            tokens.discard(await tokens.mint(machine))
        elif step == "mint unanswered":
            api.faults.lose_answer = lambda call: call.verb == "create"
            with pytest.raises(TokenFault):
                await tokens.mint(machine)
            api.faults.lose_answer = lambda call: False
        elif step == "ready":
            tokens.node_ready(machine)
            expected = [other for other in expected if other != machine]
        elif step == "new leader":
            await asyncio.sleep(60)
            running.cancel()
            api, tokens, running = leader()
        else:
            server.go_down()
            await asyncio.sleep(30)
            server.come_up()
    await asyncio.sleep(60)
    running.cancel()
    left = [(secret.metadata.annotations or {})[MACHINE_ID] for secret in server.read_all(SECRETS)]
    return sorted(expected), sorted(left)


@given(STEPS)
def test_whatever_happens_the_secrets_of_joining_machines_are_left_and_no_others(steps: list[tuple[str, str]]) -> None:
    expected, left = run_virtual(lambda: secrets_after(steps))

    assert left == expected
