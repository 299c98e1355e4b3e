"""What a program says about itself: what is accepted, and which key is refused with which words."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bigfleet.cli.runtime.system import SystemClock
from bigfleet.provider.backend import Reset
from bigfleet.provider.backends.exec.description import Description, DescriptionFault, describe
from bigfleet.provider.programs.runner import ProgramRunner
from bigfleet.provider.records.kinds import TIMEOUT_SECONDS, Kind

SOUND: Mapping[str, Any] = {
    "api": 1,
    "provider": "rack-7",
    "verbs": ["inventory", "create", "configure", "drain"],
    "reset": "reimage",
}


async def described(folder: Path, answer: str, *, needs_inventory: bool = True, code: int = 0) -> Description:
    (folder / "answer").write_text(answer)
    program = folder / "program"
    program.write_text(f'#!/bin/sh\ncat "{folder}/answer"\necho why >&2\nexit {code}\n')
    program.chmod(0o700)
    runner = ProgramRunner(str(program), clock=SystemClock())
    return await describe(runner, needs_inventory=needs_inventory, concurrency=16)


async def test_what_a_program_leaves_out_has_defaults(tmp_path: Path) -> None:
    description = await described(tmp_path, json.dumps(SOUND))

    assert (description.provider, description.inventory_seconds_max) == ("rack-7", 60.0)
    assert description.limits.resumable == frozenset()
    for kind, limits in description.limits.kinds.items():
        assert (limits.timeout_seconds, limits.concurrency_max) == (TIMEOUT_SECONDS[kind], 16)
        assert limits.rate_per_second is None


@pytest.mark.parametrize("reset", list(Reset))
async def test_the_reset_is_taken(reset: Reset, tmp_path: Path) -> None:
    description = await described(tmp_path, json.dumps({**SOUND, "reset": reset.value}))

    assert description.limits.reset is reset


async def test_limits_are_taken(tmp_path: Path) -> None:
    limits = {"create": {"concurrency": 4, "timeout": "10m", "rate": 2}, "inventory": {"timeout": "90s"}}
    description = await described(tmp_path, json.dumps({**SOUND, "resumable": ["create"], "limits": limits}))

    create = description.limits.kinds[Kind.CREATE]
    assert (create.concurrency_max, create.timeout_seconds, create.rate_per_second) == (4, 600.0, 2.0)
    assert description.limits.resumable == {Kind.CREATE}
    assert description.inventory_seconds_max == 90.0


WRONG = [
    ({"api": 2, "new": 1}, "describe: api is 2, this version runs programs of api 1"),
    ({"colour": "red"}, "Object contains unknown field `colour`"),
    ({"provider": ""}, "describe: provider is empty"),
    ({"reset": ""}, "describe: reset: is missing; say what a drain does to the host: none, reboot, reimage"),
    ({"reset": "wipe"}, "describe: reset: 'wipe' is unknown; say what a drain does to the host: none, reboot, reimage"),
    ({"provider": "rack 7"}, "describe: provider has the character ' '"),
    ({"verbs": ["inventory", "create", "drain"]}, "describe: verbs: configure is missing"),
    ({"verbs": ["create", "configure", "drain"]}, "describe: verbs: inventory is missing"),
    ({"verbs": [*SOUND["verbs"], "explode"]}, "describe: verbs: 'explode' is unknown; choose from describe"),
    ({"resumable": ["delete"]}, "describe: resumable: delete is not among the verbs"),
    ({"resumable": ["ready"]}, "describe: resumable: 'ready' is none of create"),
    ({"limits": {"delete": {}}}, "describe: limits: 'delete' has none"),
    ({"limits": {"create": {"speed": 1}}}, "unknown field `speed`"),
    ({"limits": {"create": {"concurrency": 0}}}, "describe: limits.create.concurrency: 0 is not from 1 to 1000"),
    ({"limits": {"create": {"rate": 0}}}, "describe: limits.create.rate: 0 is not above 0"),
    ({"limits": {"create": {"timeout": "soon"}}}, "describe: limits.create.timeout: 'soon' is not a duration"),
    ({"limits": {"create": {"timeout": "0s"}}}, "describe: limits.create.timeout: '0s' is not a duration above 0"),
    ({"limits": {"inventory": {"rate": 1}}}, "describe: limits.inventory.rate: inventory has a timeout only"),
]


@pytest.mark.parametrize(("change", "text"), WRONG, ids=[text for _change, text in WRONG])
async def test_what_is_wrong_is_refused_by_name(change: Mapping[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(DescriptionFault) as refused:
        await described(tmp_path, json.dumps({**SOUND, **change}))
    assert text in str(refused.value)


async def test_slots_from_elsewhere_need_no_inventory(tmp_path: Path) -> None:
    answer = json.dumps({**SOUND, "verbs": ["create", "configure", "drain"]})
    assert "inventory" not in (await described(tmp_path, answer, needs_inventory=False)).verbs


async def test_a_program_that_fails_or_answers_garbage_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DescriptionFault, match="describe ended with exit code 3: why"):
        await described(tmp_path, json.dumps(SOUND), code=3)
    with pytest.raises(DescriptionFault, match="describe answered what is not understood"):
        await described(tmp_path, "hello")
