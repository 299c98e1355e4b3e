"""Writes bills of materials in CycloneDX: name, version, hashes and licence of each package; equal input, equal bytes.

`tools.supply_chain` writes that of the lock file, and `tools.image` that of the image, into the image.
"""

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_ROOT: Final = Path(__file__).resolve().parents[1]
#: Version of CycloneDX.
SPECIFICATION: Final = "1.6"
#: Identifies the project within the file.
_PROJECT: Final = "bigfleet"
_LICENCE_ROW: Final = re.compile(r"^\| (\S+) \| (.+) \|$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Component:
    """A package."""

    name: str
    version: str
    #: Package URL, which is what scanners look it up by.
    purl: str
    #: SHA-256 of the file that is installed, or of each of those that may be.
    hashes: tuple[str, ...]
    #: SPDX expression; "" if it is not known.
    licence: str = ""


def python_component(name: str, version: str, hashes: tuple[str, ...], licences: Mapping[str, str]) -> Component:
    """Return a package of Python."""
    return Component(name, version, f"pkg:pypi/{name}@{version}", hashes, licences.get(name, ""))


def known_licences(page: Path = _ROOT / "docs" / "licences.md") -> dict[str, str]:
    """Return the licences of docs/licences.md, which a test compares with the installed packages."""
    return dict(_LICENCE_ROW.findall(page.read_text(encoding="utf-8")))


def bill_of_materials(components: Iterable[Component]) -> bytes:
    """Return the bill of materials of the project with these packages, sorted."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    listed = sorted(components, key=lambda each: each.purl)
    described = {
        "type": "application",
        "bom-ref": _PROJECT,
        "name": project["name"],
        "version": project["version"],
        "description": project["description"],
        "licenses": [_licence(project["license"])],
    }
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": SPECIFICATION,
        "version": 1,
        "metadata": {
            "component": described,
            "properties": [{"name": "cdx:reproducible", "value": "true"}],
        },
        "components": [_component(each) for each in listed],
        "dependencies": [{"ref": _PROJECT, "dependsOn": [each.purl for each in listed]}],
    }
    return f"{json.dumps(document, indent=1)}\n".encode()


def _component(component: Component) -> dict[str, Any]:
    found: dict[str, Any] = {
        "type": "library",
        "bom-ref": component.purl,
        "name": component.name,
        "version": component.version,
        "purl": component.purl,
    }
    hashes = [{"alg": "SHA-256", "content": digest} for digest in component.hashes]
    if len(hashes) == 1:
        found["hashes"] = hashes
    else:
        place = f"https://pypi.org/project/{component.name}/{component.version}/"
        found["externalReferences"] = [{"type": "distribution", "url": place, "hashes": hashes}]
    if component.licence:
        found["licenses"] = [_licence(component.licence)]
    return found


def _licence(expression: str) -> dict[str, Any]:
    """Return a licence by its identifier, or an expression of several."""
    if " " in expression:
        return {"expression": expression}
    return {"license": {"id": expression}}
