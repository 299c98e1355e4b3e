"""One after another: what `--sequential` places is what asking again and again would, with each answer carried out."""

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bigfleet.partition.answer import AllocationOptions, answer
from tests.engine.proof import in_proportion
from tests.partition.messages import Dice, Object, dice, instance, messages, plain


def wanted(die: Dice, number: int) -> dict[str, Any]:
    """Return an instance that runs, plain or mirrored."""
    body: dict[str, Any] = plain(instance(die, is_wanted=True))
    body.pop("forthcoming", None)
    is_mirrored = body["disk_template"] == "drbd"
    return {
        **body,
        "name": f"new{number}",
        "admin_state": "up",
        "disk_template": "drbd" if is_mirrored else "plain",
        "required_nodes": 2 if is_mirrored else 1,
    }


def carried_out(message: dict[str, Any], body: dict[str, Any], hosts: list[str]) -> None:
    """Change the message as if Ganeti had created the instance."""
    message["instances"][body["name"]] = {**body, "nodes": hosts}
    message["nodes"][hosts[0]]["free_memory"] -= body["memory"]
    for host in hosts:
        node = message["nodes"][host]
        node["free_disk"] -= body["disk_space_total"]
        node["free_spindles"] -= sum(disk["spindles"] or 0 for disk in body["disks"])


def asked_again(message: dict[str, Any], several: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """Ask for one instance after another and return where each went; those that failed are left out."""
    placed = []
    for body in several:
        request = {"type": "allocate", **body}
        said = answer(json.dumps({**message, "request": request}).encode()).line
        assert said is not None
        reply = json.loads(said)
        if reply["success"]:
            placed.append((body["name"], reply["result"]))
            carried_out(message, body, reply["result"])
    return placed


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=in_proportion(150))
@given(messages(), st.lists(dice(), min_size=1, max_size=6))
def test_each_instance_goes_where_it_would_go_if_asked_for_by_itself(message: Object, several: list[Dice]) -> None:
    base = plain(message)
    base["instances"] = {}
    for node in base["nodes"].values():
        node["ndparams"] = {"exclusive_storage": True}
        # What the records say and what the host shows agree, as they do when nothing else goes on.
        node["free_memory"] = node["total_memory"] = int(node["total_memory"])
        node["reserved_memory"] = 0
    base["enabled_hypervisors"] = ["xen-pvm"]
    bodies = [wanted(die, number) for number, die in enumerate(several)]
    request = {"type": "multi-allocate", "instances": bodies}
    said = answer(json.dumps({**base, "request": request}).encode(), AllocationOptions(is_sequential=True)).line
    assert said is not None
    reply = json.loads(said)
    placed = [(name, hosts) for name, hosts in reply["result"][0]]

    assert reply["success"]
    assert placed == asked_again(base, bodies)
    assert len(placed) + len(reply["result"][1]) == len(bodies)
