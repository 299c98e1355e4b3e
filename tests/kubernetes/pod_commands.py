"""Makes of the pod of a workload a command that runs on this machine: its arguments, and the files that it mounts."""

import base64
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

#: Runs kubectl and returns what it printed; fails when kubectl does.
Kubectl = Callable[..., Awaitable[str]]


class PodCommand(NamedTuple):
    """What a pod runs."""

    #: Command and arguments, with the values of its variables and the places of its files on this machine.
    words: list[str]
    service_account: str

    def with_flags(self, values: Mapping[str, str]) -> list[str]:
        """Return the words with other values for flags that are there. Raises AssertionError for one that is not."""
        flags = {word.partition("=")[0] for word in self.words}
        assert flags >= values.keys(), f"{sorted(values.keys() - flags)} are not among {self.words}"
        names = [word.partition("=")[0] for word in self.words]
        return [
            f"{name}={values[name]}" if name in values else word for name, word in zip(names, self.words, strict=True)
        ]


async def pod_command(kubectl: Kubectl, namespace: str, workload: str, folder: Path) -> PodCommand:
    """Return the command of a workload, such as `deployment/bigfleet-operator`, with its files below a folder.

    Secrets and ConfigMaps are written as they are now. Volumes of other kinds are folders that stay as they are.
    """
    pod = yaml.safe_load(await kubectl("-n", namespace, "get", workload, "-o", "yaml"))["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    variables = {}
    for variable in container.get("env", ()):
        if "valueFrom" in variable:
            source = variable["valueFrom"]["configMapKeyRef"]
            content = await _content(kubectl, namespace, "configmap", source["name"])
            variables[f"$({variable['name']})"] = content[source["key"]].decode()
    volumes = {each["name"]: each for each in pod.get("volumes", ())}
    places = {}
    for mount in container["volumeMounts"]:
        path = mount["mountPath"]
        places[path] = folder / "mounted" / path.lstrip("/")
        # A volume that a claim makes is not among those of the pod.
        await _mount(kubectl, namespace, volumes.get(mount["name"], {}), places[path])
    words = [_resolved(word, variables, places) for word in container.get("args", ())]
    return PodCommand([*container["command"], *words], pod.get("serviceAccountName", "default"))


async def _mount(kubectl: Kubectl, namespace: str, volume: Mapping[str, Any], place: Path) -> None:
    content: dict[str, bytes] = {}
    if "secret" in volume:
        content = await _content(kubectl, namespace, "secret", volume["secret"]["secretName"])
    elif "configMap" in volume:
        content = await _content(kubectl, namespace, "configmap", volume["configMap"]["name"])
    _write(place, content)


def _write(place: Path, content: Mapping[str, bytes]) -> None:
    place.mkdir(parents=True, exist_ok=True)
    for key, value in content.items():
        (place / key).write_bytes(value)


async def _content(kubectl: Kubectl, namespace: str, kind: str, name: str) -> dict[str, bytes]:
    found = yaml.safe_load(await kubectl("-n", namespace, "get", kind, name, "-o", "yaml")).get("data", {})
    return {key: base64.b64decode(value) if kind == "secret" else value.encode() for key, value in found.items()}


def _resolved(word: str, variables: Mapping[str, str], places: Mapping[str, Path]) -> str:
    for name, value in variables.items():
        word = word.replace(name, value)
    flag, equals, value = word.partition("=")
    for path, place in places.items():
        if value == path or value.startswith(f"{path}/"):
            return f"{flag}{equals}{place}{value.removeprefix(path)}"
    return word
