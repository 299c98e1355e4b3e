"""Ends what a run launched: instances by their tag, then volumes and network interfaces that stayed behind.

It must never touch what has another tag. A launch that was under way when the provider was killed shows up later, so it
looks until nothing has shown up for a while.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeVar

from bigfleet.model.clock import Clock
from bigfleet.provider.backends.aws.api import IDS_MAX, AwsError
from bigfleet.provider.backends.aws.boto import AwsSession, call_once
from bigfleet.provider.backends.aws.errors import Meaning, meaning_of
from bigfleet.provider.backends.aws.launch import TAG_PROVIDER

T = TypeVar("T")

POLL_SECONDS: Final = 5.0
#: What EC2 still bills, or lets come back.
_LIVE: Final = ("pending", "running", "stopping", "stopped")
_ENDING: Final = "shutting-down"
#: Of volumes and network interfaces: what belongs to no instance any more.
_UNUSED: Final = {"Name": "status", "Values": ["available"]}


class Leftovers:
    """What has a provider's tag that begins with a prefix, in one region."""

    def __init__(self, session: AwsSession, clock: Clock, *, prefix: str, say: Callable[[str], None]) -> None:
        """`prefix` begins the name of each provider of the run."""
        if not prefix:
            raise ValueError("an empty prefix would match every provider")
        self._client = session.client("ec2")
        self._clock = clock
        self._prefix = prefix
        self._say = say
        #: Instances of the last look.
        self._shown: list[str] = []

    def live(self, besides: str = "") -> list[str]:
        """Return the instances that cost money, without those of provider `besides`. Raises AwsError."""
        return [each["InstanceId"] for each in self._instances(_LIVE) if _provider_of(each) != besides]

    def terminate(self, ids: list[str]) -> None:
        """End these instances. Raises AwsError."""
        for start in range(0, len(ids), IDS_MAX):
            self._terminate(ids[start : start + IDS_MAX])

    def _terminate(self, ids: list[str]) -> None:
        try:
            self._call("TerminateInstances", lambda client: client.terminate_instances(InstanceIds=ids))
        except AwsError as error:
            if len(ids) == 1 or meaning_of(error) is Meaning.TRANSIENT:
                raise
            self._terminate_one_by_one(ids)

    def _terminate_one_by_one(self, ids: list[str]) -> None:
        """End all but those that EC2 refuses, such as protected ones. Raises the last refusal."""
        refusal: AwsError | None = None
        for each in ids:
            try:
                self._terminate([each])
            except AwsError as error:
                refusal = error
        if refusal is not None:
            raise refusal

    def end_all(self, *, seconds_max: float, quiet_seconds: float, poll_seconds: float = POLL_SECONDS) -> list[str]:
        """End everything, and return what is still there after `seconds_max`.

        It is done once nothing has shown up for `quiet_seconds`. Errors are reported and tried again.
        """
        until = self._clock.monotonic_seconds() + seconds_max
        quiet_since = self._clock.monotonic_seconds()
        left: list[str] = []
        while True:
            try:
                left = self._end_what_shows()
            except AwsError as error:
                self._say(f"{error}; tried again" if meaning_of(error) is Meaning.TRANSIENT else f"{error}")
                left = self._shown or ["what could not be looked at"]
            now = self._clock.monotonic_seconds()
            if left:
                quiet_since = now
            elif now - quiet_since >= quiet_seconds:
                return []
            if now >= until:
                return left
            # Signals do not end it: they are ignored during a clean-up.
            threading.Event().wait(poll_seconds)

    def _end_what_shows(self) -> list[str]:
        """Ask for the end of all that shows, and return it."""
        live = self._shown = self.live()
        if live:
            self._say(f"ending {len(live)} instances: {', '.join(live)}")
            self.terminate(live)
            return live
        ending = [each["InstanceId"] for each in self._instances((_ENDING,))]
        if ending:
            # A volume is deleted with its instance, unless a launch template says otherwise.
            return ending
        return [*self._delete_volumes(), *self._delete_interfaces()]

    def _delete_volumes(self) -> list[str]:
        found = self._listed("DescribeVolumes", "describe_volumes", "Volumes", "VolumeId")
        for each in found:
            self._delete_volume(each)
        return found

    def _delete_volume(self, volume_id: str) -> None:
        self._say(f"deleting volume {volume_id}")
        self._call("DeleteVolume", lambda client: client.delete_volume(VolumeId=volume_id))

    def _delete_interfaces(self) -> list[str]:
        found = self._listed(
            "DescribeNetworkInterfaces", "describe_network_interfaces", "NetworkInterfaces", "NetworkInterfaceId"
        )
        for each in found:
            self._delete_interface(each)
        return found

    def _delete_interface(self, interface_id: str) -> None:
        self._say(f"deleting network interface {interface_id}")
        self._call(
            "DeleteNetworkInterface", lambda client: client.delete_network_interface(NetworkInterfaceId=interface_id)
        )

    def _listed(self, action: str, operation: str, key: str, name: str) -> list[str]:
        def read(client: Any) -> list[str]:
            pages = client.get_paginator(operation).paginate(Filters=[self._filter, _UNUSED])
            return [
                each[name]
                for page in pages
                for each in page[key]
                if _tags(each.get("Tags", each.get("TagSet", []))).get(TAG_PROVIDER, "").startswith(self._prefix)
            ]

        return self._call(action, read)

    def _instances(self, states: tuple[str, ...]) -> list[Mapping[str, Any]]:
        filters = [self._filter, {"Name": "instance-state-name", "Values": list(states)}]

        def read(client: Any) -> list[Mapping[str, Any]]:
            pages = client.get_paginator("describe_instances").paginate(Filters=filters)
            return [each for each in _in_pages(pages) if _provider_of(each).startswith(self._prefix)]

        return self._call("DescribeInstances", read)

    @property
    def _filter(self) -> Mapping[str, Any]:
        return {"Name": f"tag:{TAG_PROVIDER}", "Values": [f"{self._prefix}*"]}

    def _call(self, action: str, method: Callable[[Any], T]) -> T:
        return call_once(self._client, f"ec2:{action}", method)


def _in_pages(pages: Any) -> Iterator[Mapping[str, Any]]:
    for page in pages:
        for reservation in page["Reservations"]:
            yield from reservation["Instances"]


def _provider_of(instance: Mapping[str, Any]) -> str:
    return _tags(instance.get("Tags", [])).get(TAG_PROVIDER, "")


def _tags(listed: list[Mapping[str, str]]) -> dict[str, str]:
    return {each["Key"]: each["Value"] for each in listed}
