"""What a hostile or broken template can do to the process that asks for a rendering: nothing."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest

from bigfleet.operator.bootstrap.renderer import SubprocessRenderer, TemplateFault, TemplateSource
from tests.patience import PATIENCE_SECONDS

VARIABLES: dict[str, Any] = {"token": "", "name": "Zoë", "nul": "\0"}


@pytest.fixture
async def renderer() -> AsyncIterator[SubprocessRenderer]:
    """A renderer that has no hurry."""
    made = SubprocessRenderer(seconds_max=PATIENCE_SECONDS)
    yield made
    await made.close()


@pytest.fixture
async def hasty() -> AsyncIterator[SubprocessRenderer]:
    """A renderer whose templates are meant to take too long."""
    made = SubprocessRenderer(seconds_max=0.5)  # expires
    yield made
    await made.close()


def source(text: str) -> TemplateSource:
    return TemplateSource("/etc/bigfleet/template.j2", text)


async def test_a_template_is_rendered_in_another_process(renderer: SubprocessRenderer) -> None:
    assert await renderer.render(source("hello {{ name }}\n"), VARIABLES) == "hello Zoë\n"


async def test_an_error_names_file_line_and_cause(renderer: SubprocessRenderer) -> None:
    with pytest.raises(TemplateFault, match=r"^/etc/bigfleet/template.j2:2: 'nothing' is undefined$"):
        await renderer.render(source("a\n{{ nothing }}"), VARIABLES)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        # One operation inside the interpreter, which no check between two statements would end.
        "{{ 9 ** (9 ** 9) }}",
        "{{ 7 ** 99999999 % 1000 }}",
        "{% for i in range(99999) %}{% set x = range(99999)|sort|join %}{% endfor %}",
    ],
)
async def test_a_template_that_never_ends_is_ended_and_the_next_is_rendered(
    hasty: SubprocessRenderer, template: str
) -> None:
    with pytest.raises(TemplateFault, match=r"template\.j2: rendering took longer than 0\.5 s"):
        await hasty.render(source(template), VARIABLES)

    assert hasty.killed_total == 1
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            try:
                assert await hasty.render(source("fine"), VARIABLES) == "fine"
            except TemplateFault:
                continue  # A busy machine may take half a second for it.
            break


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10 ** 10 }}",
        "{{ ('a' * 10 ** 8 ~ 'b' * 10 ** 8)|length }}",
        "{% set n = namespace(t='abcdefgh') %}{% for i in range(40) %}{% set n.t = n.t ~ n.t %}{% endfor %}",
        "{{ [0] * 10 ** 9 }}",
        "{% macro again(n) %}{{ again(n + 1) }}{% endmacro %}{{ again(0) }}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    ],
)
async def test_a_template_that_needs_too_much_memory_or_recursion_is_an_error(
    renderer: SubprocessRenderer, template: str
) -> None:
    with pytest.raises(TemplateFault, match=r"^/etc/bigfleet/template\.j2"):
        await renderer.render(source(template), VARIABLES)

    assert await renderer.render(source("fine"), VARIABLES) == "fine"


async def test_a_worker_that_died_while_idle_is_replaced(renderer: SubprocessRenderer) -> None:
    await renderer.render(source("fine"), VARIABLES)
    (worker,) = renderer._idle
    os.kill(worker._process.pid, signal.SIGKILL)
    await worker._process.wait()

    assert await renderer.render(source("fine again"), VARIABLES) == "fine again"


async def test_a_template_that_hangs_for_one_machine_does_not_hold_up_the_others(renderer: SubprocessRenderer) -> None:
    hanging = asyncio.create_task(renderer.render(source("{{ 9 ** (9 ** 9) }}"), VARIABLES))

    texts = await asyncio.gather(*(renderer.render(source("fine"), VARIABLES) for _ in range(20)))

    assert texts == ["fine"] * 20
    assert not hanging.done()
    hanging.cancel()
    await asyncio.wait({hanging})


async def test_a_worker_is_used_again(renderer: SubprocessRenderer) -> None:
    await renderer.render(source("one"), VARIABLES)
    (first,) = renderer._idle
    await renderer.render(source("two"), VARIABLES)

    assert renderer._idle == [first]


async def test_a_cancelled_rendering_leaves_no_process_and_no_late_answer(renderer: SubprocessRenderer) -> None:
    await renderer.render(source("warm"), VARIABLES)
    (worker,) = renderer._idle
    task = asyncio.create_task(renderer.render(source("{{ 9 ** (9 ** 9) }}"), VARIABLES))
    while renderer._idle:  # noqa: ASYNC110 - one turn of the loop, no wait
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert worker.has_ended
    assert await renderer.render(source("the next"), VARIABLES) == "the next"


async def test_a_worker_inherits_no_variable_but_what_python_needs(
    renderer: SubprocessRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BIGFLEET_TEST_PASSWORD", "hunter2")
    await renderer.render(source("fine"), VARIABLES)
    (worker,) = renderer._idle

    with open(f"/proc/{worker._process.pid}/environ", "rb") as file:  # noqa: ASYNC230 - a file of the kernel
        assert b"hunter2" not in file.read()
    with open(f"/proc/{worker._process.pid}/limits") as file:  # noqa: ASYNC230 - a file of the kernel
        limits = file.read()
    assert "Max address space         268435456" in limits
