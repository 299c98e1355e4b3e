"""When a template file is taken into use: at start if it renders, later if the new version renders."""

import asyncio
import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from bigfleet.operator.bootstrap.renderer import TemplateFault
from bigfleet.operator.bootstrap.template import SOURCE_BYTES_MAX, BootstrapTemplate
from bigfleet.operator.bootstrap.variables import sample_variables
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.operator.bootstrap.fakes import InProcessRenderer

pytestmark = pytest.mark.virtual_time

VARIABLES = sample_variables("c", with_token=True)


def template_of(path: Path, *, with_token: bool = True) -> BootstrapTemplate:
    return BootstrapTemplate(path, renderer=InProcessRenderer(), cluster_id="c", with_token=with_token)


async def test_a_template_that_renders_is_used(tmp_path: Path) -> None:
    path = tmp_path / "t.j2"
    path.write_text("#cloud-config\n# {{ cluster_id }} {{ machine_id_label }} {{ expires_at }}\n")
    template = template_of(path)
    await template.load()

    rendered = (await template.render(VARIABLES)).decode()
    assert rendered.startswith("#cloud-config\n# c h-")
    assert rendered.endswith(" 2026-01-01T01:00:00Z\n")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a\n{{ b }}\n", "t.j2:2: 'b' is undefined"),
        (b"a\n\n{% endif %}", "t.j2:3: Encountered unknown tag 'endif'"),
        (b"a\n\xff", "t.j2:2: is not UTF-8 at byte 2"),
        (b" " * (SOURCE_BYTES_MAX + 1), "t.j2: is larger than 1048576 bytes"),
        (b"", "t.j2: renders to nothing"),
        (b"\n{% if not cluster_id %}\n#cloud-config\n{% endif %}\n", "t.j2: renders to nothing"),
    ],
)
async def test_a_template_that_cannot_be_used_at_start_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "t.j2"
    path.write_bytes(content)

    with pytest.raises(TemplateFault) as caught:
        await template_of(path).load()

    assert message in str(caught.value)
    assert str(path) in str(caught.value)


async def test_a_template_that_is_absent_at_start_is_named(tmp_path: Path) -> None:
    with pytest.raises(TemplateFault, match=r"t\.j2: cannot be read: No such file"):
        await template_of(tmp_path / "t.j2").load()


async def test_a_template_is_checked_without_a_token_when_there_will_be_none(tmp_path: Path) -> None:
    path = tmp_path / "t.j2"
    path.write_text("{{ token.split('.')[1] }}")

    await template_of(path, with_token=True).load()
    with pytest.raises(TemplateFault, match="no element 1"):
        await template_of(path, with_token=False).load()


async def test_a_changed_template_is_used_for_the_next_answer(tmp_path: Path) -> None:
    path = tmp_path / "t.j2"
    path.write_text("one")
    template = template_of(path)
    await template.load()

    path.write_text("second")

    assert await template.render(VARIABLES) == b"second"
    assert template.reload_errors_total == 0


async def test_a_mounted_config_map_swaps_a_link_and_is_seen(tmp_path: Path) -> None:
    for name, content in (("..v1", "one"), ("..v2", "two")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "t.j2").write_text(content)
        os.utime(tmp_path / name / "t.j2", (1_000_000_000, 1_000_000_000))
    (tmp_path / "..data").symlink_to("..v1")
    (tmp_path / "t.j2").symlink_to("..data/t.j2")
    template = template_of(tmp_path / "t.j2")
    await template.load()
    assert await template.render(VARIABLES) == b"one"

    (tmp_path / "..swap").symlink_to("..v2")
    os.replace(tmp_path / "..swap", tmp_path / "..data")

    assert await template.render(VARIABLES) == b"two"


async def test_a_bad_new_template_leaves_the_previous_in_use_and_is_logged_and_counted_once(tmp_path: Path) -> None:
    path = tmp_path / "t.j2"
    path.write_text("good")
    template = template_of(path)
    await template.load()
    path.write_text("{{ typo }}")

    with capture_logs() as logs:
        assert await template.render(VARIABLES) == b"good"
        assert await template.render(VARIABLES) == b"good"

    assert template.reload_errors_total == 1
    (entry,) = logs
    assert entry["event"] == "operator.template_rejected"
    assert "t.j2:1: 'typo' is undefined" in entry["error"]

    path.write_text("good again")
    assert await template.render(VARIABLES) == b"good again"


async def test_a_template_that_vanishes_leaves_the_previous_in_use(tmp_path: Path) -> None:
    path = tmp_path / "t.j2"
    path.write_text("good")
    template = template_of(path)
    await template.load()
    path.unlink()

    assert await template.render(VARIABLES) == b"good"
    assert template.reload_errors_total == 1


async def test_a_mistake_shows_before_a_machine_needs_the_template(tmp_path: Path) -> None:
    path = tmp_path / "t.j2"
    path.write_text("good")
    template = template_of(path)
    await template.load()
    watching = asyncio.create_task(template.watch(LoopClock()))

    path.write_text("{{ typo }}")
    await asyncio.sleep(11)

    assert template.reload_errors_total == 1
    watching.cancel()


async def test_answers_at_the_same_time_check_a_new_template_once(tmp_path: Path) -> None:
    path = tmp_path / "t.j2"
    path.write_text("good")
    renderer = InProcessRenderer()
    template = BootstrapTemplate(path, renderer=renderer, cluster_id="c", with_token=True)
    await template.load()
    path.write_text("better")

    answers = await asyncio.gather(*(template.render(VARIABLES) for _ in range(16)))

    assert answers == [b"better"] * 16
    assert renderer.renderings == 1 + 1 + 16
