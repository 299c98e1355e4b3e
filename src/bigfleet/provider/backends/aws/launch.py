"""Builds the parameters of RunInstances for a machine, and the tags that tie an instance to it.

docs/spec/aws-provider.md §2. The parameters follow from the operation and the offering only: EC2 refuses a ClientToken
that comes with others. It makes no call to AWS.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from bigfleet.model.states import CapacityType
from bigfleet.provider.backend import MachineView

TAG_MACHINE: Final = "bigfleet:machine"
TAG_OPERATION: Final = "bigfleet:operation"
TAG_PROVIDER: Final = "bigfleet:provider"
#: The state file whose provider launched an instance.
TAG_OWNER: Final = "bigfleet:owner"
#: The cluster that an instance was configured for; removed last by a Drain.
TAG_CLUSTER: Final = "bigfleet:cluster"
#: The cluster whose traces an instance still has after a Drain that did not reset it.
TAG_FORMER_CLUSTER: Final = "bigfleet:former-cluster"
#: What the agent on the instance is to do: docs/spec/aws-provider.md §4.
TAG_CONFIGURE: Final = "bigfleet:configure"
TAG_DRAIN: Final = "bigfleet:drain"
NAME: Final = "Name"

#: AWS's limits; we refuse before a call, because EC2 counts in bytes before base64.
TAG_VALUE_CHARACTERS_MAX: Final = 256
USER_DATA_BYTES_MAX: Final = 16_384


class LaunchFault(Exception):
    """Parameters that EC2 would refuse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSettings:
    """How the instances of one offering are launched; "" leaves a setting to the launch template or to EC2."""

    ami: str = ""
    #: `lt-…` or a name.
    launch_template: str = ""
    #: A number, `$Default` or `$Latest`.
    launch_template_version: str = "$Default"
    subnet: str = ""
    #: Id of the reservation that the instances are launched into.
    capacity_reservation: str = ""


def run_request(
    machine: MachineView,
    *,
    operation_id: str,
    provider: str,
    settings: LaunchSettings,
    node_role: str,
    user_data: str,
    owner: str = "",
) -> dict[str, Any]:
    """Return the parameters of RunInstances. Raises LaunchFault for what EC2 does not take."""
    check_user_data(user_data)
    tags = {
        TAG_MACHINE: machine.id,
        TAG_OPERATION: operation_id,
        TAG_PROVIDER: provider,
        NAME: machine.id,
    }
    if owner:
        tags[TAG_OWNER] = owner
    check_tags(tags)
    listed = [{"Key": key, "Value": value} for key, value in tags.items()]
    request: dict[str, Any] = {
        "MinCount": 1,
        "MaxCount": 1,
        "ClientToken": operation_id,
        "InstanceType": machine.instance_type,
        "TagSpecifications": [
            {"ResourceType": resource, "Tags": listed} for resource in ("instance", "volume", "network-interface")
        ],
        "MetadataOptions": {"HttpTokens": "required", "HttpEndpoint": "enabled", "InstanceMetadataTags": "enabled"},
        "InstanceInitiatedShutdownBehavior": "terminate",
        "UserData": user_data,
    }
    if settings.ami:
        request["ImageId"] = settings.ami
    if settings.launch_template:
        key = "LaunchTemplateId" if settings.launch_template.startswith("lt-") else "LaunchTemplateName"
        request["LaunchTemplate"] = {key: settings.launch_template, "Version": settings.launch_template_version}
    if settings.subnet:
        request["SubnetId"] = settings.subnet
    else:
        request["Placement"] = {"AvailabilityZone": machine.zone}
    if node_role:
        key = "Arn" if node_role.startswith("arn:") else "Name"
        request["IamInstanceProfile"] = {key: node_role}
    if settings.capacity_reservation:
        request["CapacityReservationSpecification"] = {
            "CapacityReservationTarget": {"CapacityReservationId": settings.capacity_reservation}
        }
    if machine.capacity_type is CapacityType.SPOT:
        options = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
        request["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": options}
    return request


def check_user_data(user_data: str) -> None:
    """Raise LaunchFault for more user data than EC2 takes."""
    size = len(user_data.encode())
    if size > USER_DATA_BYTES_MAX:
        raise LaunchFault(f"user data has {size:,} bytes, EC2 takes at most {USER_DATA_BYTES_MAX:,}")


def check_tags(tags: Mapping[str, str]) -> None:
    """Raise LaunchFault naming the tag whose value EC2 does not take."""
    for key, value in tags.items():
        if len(value) > TAG_VALUE_CHARACTERS_MAX:
            text = f"has {len(value)} characters, EC2 takes at most {TAG_VALUE_CHARACTERS_MAX}"
            raise LaunchFault(f"tag {key} {text}")
