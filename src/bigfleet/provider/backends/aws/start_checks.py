"""Checks at the start that AWS allows the calls that the provider will make.

docs/spec/aws-provider.md §1. If AWS does not answer, the provider starts anyway: with a loaded state it can serve
without AWS.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final, Protocol

import structlog

from bigfleet.model.ids import MachineId
from bigfleet.model.states import MachineState
from bigfleet.provider.backend import MachineView
from bigfleet.provider.backends.aws.api import AwsError
from bigfleet.provider.backends.aws.errors import (
    Meaning,
    is_absent_object,
    is_forbidden,
    is_without_credentials,
    meaning_of,
)
from bigfleet.provider.backends.aws.launch import run_request
from bigfleet.provider.backends.aws.offerings import AwsOffering

_log = structlog.get_logger("bigfleet.provider.backends.aws.start_checks")

#: docs.aws.amazon.com/AWSEC2/latest/UserGuide/work-with-tags-in-IMDS.html
_XEN_FAULT: Final = (
    "is not built on the Nitro System: tags that come later do not reach its metadata service, so that no agent gets "
    "an order; take another type"
)
_LISTING_ADVICE: Final = (
    "grant s3:ListBucket: without it S3 answers 403 in place of 404 for a result that is not there yet, and every "
    "Configure and Drain fails"
)


class StartCalls(Protocol):
    """The calls that are made before the provider serves. Each raises AwsError."""

    def identity(self) -> str:
        """Return the ARN of who calls."""
        ...

    def dry_run_launch(self, request: Mapping[str, Any]) -> None:
        """Return when this launch would be allowed."""
        ...

    def dry_run_terminate(self) -> None:
        """Return when the end of an instance would be allowed."""
        ...

    def find_xen_types(self, instance_types: Iterable[str]) -> set[str]:
        """Return those of the types whose hypervisor is Xen."""
        ...

    def find_bucket(self, bucket: str) -> None:
        """Return when there is this bucket, and it may be listed."""
        ...

    def find_object(self, bucket: str, key: str) -> None:
        """Return when there is this object."""
        ...


def check_start(
    calls: StartCalls,
    offerings: Iterable[AwsOffering],
    *,
    provider: str,
    node_role: str,
    user_data: str,
    bucket: str,
    prefix: str,
) -> list[str]:
    """Return one line for each refusal; none when everything is allowed. Raises LaunchFault for a wrong parameter."""
    refusals: list[str] = []
    try:
        _log.info("aws.identity_found", arn=calls.identity())
    except AwsError as error:
        if _is_unanswered(error):
            return []
        # Without an identity every other call would say the same.
        return [f"aws: {error.action} refused: {error.code}: {error.message}"]
    offerings = tuple(offerings)
    _check_types(calls, refusals, offerings)
    launches: dict[str, tuple[AwsOffering, dict[str, Any]]] = {}
    for each in offerings:
        request = _request(each, provider=provider, node_role=node_role, user_data=user_data)
        launches.setdefault(
            repr(sorted((key, value) for key, value in request.items() if key in _DISTINCT)), (each, request)
        )
    for offering, request in launches.values():
        try:
            calls.dry_run_launch(request)
        except AwsError as error:
            place = offering.settings.subnet or offering.zone
            _add(refusals, error, f" for {offering.instance_type} in {place}")
    try:
        calls.dry_run_terminate()
    except AwsError as error:
        _add(refusals, error, "")
    _check_bucket(calls, refusals, bucket, prefix)
    return refusals


def _check_types(calls: StartCalls, refusals: list[str], offerings: Iterable[AwsOffering]) -> None:
    try:
        xen = calls.find_xen_types({each.instance_type for each in offerings})
    except AwsError as error:
        # A type that there is not is refused by the dry run of its launch.
        _log.warning("aws.instance_types_unchecked", error=str(error))
        return
    refusals += [f"aws: {each} {_XEN_FAULT}" for each in sorted(xen)]


def _check_bucket(calls: StartCalls, refusals: list[str], bucket: str, prefix: str) -> None:
    try:
        calls.find_bucket(bucket)
        return
    except AwsError as error:
        if not is_forbidden(error):
            _add(refusals, error, f" for bucket {bucket}")
            return
    # The right may be restricted to the prefix: what counts is the answer for a result that is not there.
    try:
        calls.find_object(bucket, f"{prefix}/start-check" if prefix else "start-check")
    except AwsError as error:
        if is_forbidden(error):
            _log.warning("aws.bucket_not_listed", bucket=bucket, prefix=prefix, advice=_LISTING_ADVICE)
        elif not is_absent_object(error):
            _add(refusals, error, f" for bucket {bucket}")


#: Launches that differ in none of these are checked once.
_DISTINCT = frozenset(
    {
        "InstanceType",
        "ImageId",
        "LaunchTemplate",
        "SubnetId",
        "Placement",
        "CapacityReservationSpecification",
        "InstanceMarketOptions",
    }
)


def _request(offering: AwsOffering, *, provider: str, node_role: str, user_data: str) -> dict[str, Any]:
    slot = offering.offering.slot(0)
    machine = MachineView(
        id=MachineId(slot.id),
        state=MachineState.SPECULATIVE,
        instance_type=slot.instance_type,
        zone=slot.zone,
        capacity_type=slot.capacity_type,
    )
    request = run_request(
        machine,
        operation_id="start-check",
        provider=provider,
        settings=offering.settings,
        node_role=node_role,
        user_data=user_data,
    )
    del request["ClientToken"]
    return request


def _add(refusals: list[str], error: AwsError, about: str) -> None:
    if not _is_unanswered(error):
        refusals.append(f"aws: {error.action} refused{about}: {error.code}: {error.message}")


def _is_unanswered(error: AwsError) -> bool:
    """Return whether AWS gave no answer that counts; it is logged."""
    # While it serves, credentials may come back; a start without any is a mistake to mend.
    if meaning_of(error) is Meaning.TRANSIENT and not is_without_credentials(error):
        _log.warning("aws.start_check_unanswered", action=error.action, error=str(error))
        return True
    return False
