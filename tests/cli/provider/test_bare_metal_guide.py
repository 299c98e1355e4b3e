"""docs/bare-metal.md is true: its commands are run in order, with stubs in place of ipmitool and kubectl."""

import re
from pathlib import Path

import pytest

from tests.cli.provider.bmc_stubs import write_stubs
from tests.guides import Terminal, blocks, turns
from tests.patience import wait_until

PAGE = Path(__file__).parents[3] / "docs" / "bare-metal.md"


@pytest.mark.slow
def test_the_commands_of_the_page_do_what_it_says(tmp_path: Path) -> None:
    terminal, run = Terminal(tmp_path, write_stubs(tmp_path)), iter(blocks(PAGE, ("sh", "console")))
    (terminal.folder / "team-a.kubeconfig").write_text("")
    for language, content in run:
        if content.startswith("bigfleet provider exec"):
            break
        if language == "sh":
            terminal.run(content)
            continue
        for command, printed in turns(content):
            assert terminal.run(command) == printed
    # No host is on, and no cloud-init data is left, before the provider starts.
    assert list((tmp_path / "power").iterdir()) == []
    assert list(terminal.folder.rglob("user-data")) == []
    commands = [content for _language, content in run]
    assert [each.split()[1] for each in commands] == ["provider", "shard", "get"]
    status, shard, machines = commands
    with terminal.serving(content, "--addr"):
        assert re.search(r"SPECULATIVE\W+3\b", terminal.run(status), re.IGNORECASE)
        with terminal.serving(shard, "--listen"):
            names = ("r640-01", "r640-02", "r740-01")
            wait_until(lambda: all(name in terminal.run(machines) for name in names), "the shard lists no hosts")
