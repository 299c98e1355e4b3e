"""What a template is given for a machine."""

from bigfleet.model.frames import BootstrapRequest, Taint
from bigfleet.model.profile import Operator, Requirement
from bigfleet.operator.bootstrap.variables import sample_variables, template_variables


def test_a_request_becomes_plain_values() -> None:
    request = BootstrapRequest(
        request_id="r",
        cluster_id="blue",
        requirements=(Requirement("zone", Operator.NOT_IN, ("b", "a")),),
        machine_id="aws/i-1",
        instance_type="m.large",
        zone="z",
        provider_id="aws://i-1",
        labels={"b": "2", "a": "1"},
        taints=(Taint("k", "v", "NoSchedule"),),
    )

    variables = template_variables("blue", request, token="a.b", expires_unix_seconds=1_767_225_600)

    label = "h-22d0c8c46a9d7cbc6073785870ed6b35592d3124"
    assert variables == {
        "cluster_id": "blue",
        "requirements": [{"key": "zone", "operator": "NotIn", "values": ["a", "b"]}],
        "machine_id": "aws/i-1",
        "machine_id_label": label,
        "labels": {"a": "1", "b": "2", "bigfleet.lucy.sh/machine-id": label},
        "taints": [{"key": "k", "value": "v", "effect": "NoSchedule"}],
        "instance_type": "m.large",
        "zone": "z",
        "provider_id": "aws://i-1",
        "token": "a.b",
        "expires_at": "2026-01-01T00:00:00Z",
    }


def test_what_an_older_shard_does_not_send_is_empty() -> None:
    variables = template_variables("blue", BootstrapRequest(request_id="r", cluster_id="blue"))

    assert variables["machine_id"] == variables["machine_id_label"] == variables["provider_id"] == ""
    assert variables["labels"] == {}
    assert variables["token"] == variables["expires_at"] == ""
    assert set(variables) == set(sample_variables("blue", with_token=False))
