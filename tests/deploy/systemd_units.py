"""Reads the units of deploy/systemd as systemd does."""

import os
import re
import shlex
from collections.abc import Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
#: Those of the checkout, or of a release's sources that were unpacked (`make release-check`).
UNITS = Path(os.environ.get("BIGFLEET_UNITS") or ROOT / "deploy" / "systemd")
PROGRAM = "/opt/bigfleet/bin/bigfleet"
#: Each service as an administrator starts it, and the example of its environment.
SERVICES = {
    "bigfleet-shard@shard-0.service": "shard-shard-0.env",
    "bigfleet-provider@simulated.service": "provider-simulated.env",
    "bigfleet-provider@rack.service": "provider-rack.env",
    "bigfleet-provider@kvm.service": "provider-kvm.env",
    "bigfleet-coordinator.service": "coordinator.env",
}


def file_of(service: str) -> Path:
    """Return the file of a service; instances share the file of their template."""
    return UNITS / re.sub(r"@[^.]+", "@", service)


def drop_ins_of(service: str) -> list[Path]:
    """Return the examples of drop-ins for a service."""
    return sorted((UNITS / "examples" / f"{service}.d").glob("*.conf"))


@cache
def settings(service: str) -> Mapping[str, list[str]]:
    """Return the values of each setting in the order of the files, drop-ins last, lines that continue joined."""
    found: dict[str, list[str]] = {}
    lines = [line for file in (file_of(service), *drop_ins_of(service)) for line in file.read_text().splitlines()]
    text = "\n".join(line for line in lines if not line.startswith("#"))
    for line in text.replace("\\\n", " ").splitlines():
        name, equals, value = line.partition("=")
        if equals:
            found.setdefault(name, []).append(value.strip())
    return found


def one(service: str, name: str) -> str:
    (value,) = settings(service)[name]
    return value


def environment_of(service: str) -> dict[str, str]:
    """Return the variables of the example file, as systemd reads it."""
    lines = (UNITS / "examples" / SERVICES[service]).read_text().splitlines()
    pairs = (line.partition("=") for line in lines if line and not line.startswith("#"))
    return {name: " ".join(shlex.split(value)) for name, _equals, value in pairs}


def command_line(service: str, places: Mapping[str, str], environment: Mapping[str, str]) -> list[str]:
    """Return the words that systemd would start: `${X}` is a word or part of one, `$X` as many words as it holds."""
    words = []
    for word in one(service, "ExecStart").split():
        if word.startswith("$") and not word.startswith("${"):
            words += environment.get(word[1:], "").split()
            continue
        for name, place in places.items():
            word = word.replace(name, place)
        words.append(re.sub(r"\$\{(\w+)\}", lambda found: environment.get(found[1], ""), word))
    return words


def instance_of(service: str) -> str:
    return service.removesuffix(".service").partition("@")[2]
