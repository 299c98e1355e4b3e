"""Classifies errors of AWS: no capacity, retry, final, absent, forbidden.

docs/spec/aws-provider.md §3. No other module knows error codes of AWS. An unlisted error is never retried.
"""

from enum import Enum
from typing import Final

from bigfleet.provider.backend import Stockout, Transient
from bigfleet.provider.backends.aws.api import CONNECTION, AwsError

#: What a Create without capacity asks the kit to wait before the machine is offered again.
STOCKOUT_RETRY_SECONDS: Final = 300.0
#: How long further Creates of that type, zone and capacity type fail without a call.
STOCKOUT_MEMORY_SECONDS: Final = 180.0
#: The same for a type that the zone does not have.
UNSUPPORTED_MEMORY_SECONDS: Final = 24 * 3600.0

_QUOTAS: Final = frozenset({"MaxSpotInstanceCountExceeded", "VcpuLimitExceeded", "InstanceLimitExceeded"})
_STOCKOUTS: Final = frozenset(
    {*_QUOTAS, "InsufficientInstanceCapacity", "ReservationCapacityExceeded", "SpotMaxPriceTooLow", "Unsupported"}
    | {"InsufficientFreeAddressesInSubnet"}
)
#: Who calls is not known: expired or revoked credentials, none, or a clock that is wrong. AWS's codes and botocore's.
_WITHOUT_CREDENTIALS: Final = frozenset(
    {
        "AuthFailure",
        "ExpiredToken",
        "ExpiredTokenException",
        "InvalidAccessKeyId",
        "InvalidClientTokenId",
        "RequestExpired",
        "RequestTimeTooSkewed",
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
        "CredentialRetrievalError",
        "MetadataRetrievalError",
        "NoCredentialsError",
        "PartialCredentialsError",
        "SSOTokenLoadError",
        "TokenRetrievalError",
        "UnauthorizedSSOTokenError",
    }
)
#: Of our own: the credentials are of another account than the machines.
OTHER_ACCOUNT: Final = "OtherAccount"
_TRANSIENT: Final = frozenset(
    {
        CONNECTION,
        OTHER_ACCOUNT,
        "RequestLimitExceeded",
        "RequestThrottled",
        "RequestThrottledException",
        "SlowDown",
        "ServiceUnavailable",
        "Unavailable",
        "InternalError",
        "InternalFailure",
        "RequestTimeout",
        # An instance of this token exists and was asked for otherwise: its tag shows it in a moment.
        "IdempotentParameterMismatch",
    }
)
#: EC2's reasons for an instance that ended while it was starting, for want of capacity.
_STOCKOUT_REASONS: Final = frozenset(
    {"Server.InsufficientInstanceCapacity", "Server.SpotInstanceTermination", "Server.SpotInstanceShutdown"}
)
#: EC2 does not know the instance, or never gave such an id.
_UNKNOWN_INSTANCE: Final = frozenset({"InvalidInstanceID.NotFound", "InvalidInstanceID.Malformed"})
_NOT_FOUND_SUFFIX: Final = ".NotFound"
_ABSENT_OBJECT: Final = frozenset({"NoSuchKey", "404"})
#: EC2's answer to a dry run that it would carry out.
_WOULD_SUCCEED: Final = "DryRunOperation"
_FORBIDDEN_STATUS: Final = 403


class Meaning(Enum):
    """What follows from an error."""

    STOCKOUT = "stockout"
    TRANSIENT = "transient"
    FINAL = "final"


class AwsRefused(Exception):
    """A final error, as it is shown."""


def meaning_of(error: AwsError) -> Meaning:
    """Return the class of an error."""
    code = error.code
    if code in _STOCKOUTS or code.startswith("InsufficientCapacity"):
        return Meaning.STOCKOUT
    if code in _TRANSIENT or code in _WITHOUT_CREDENTIALS or code.startswith("Throttling") or error.status >= 500:
        return Meaning.TRANSIENT
    return Meaning.FINAL


def memory_seconds(code: str) -> float:
    """Return how long a stockout of this code is remembered."""
    return UNSUPPORTED_MEMORY_SECONDS if code == "Unsupported" else STOCKOUT_MEMORY_SECONDS


def text_of(error: AwsError) -> str:
    """Return what is shown of an error: a quota is named as one."""
    return f"quota reached: {error}" if error.code in _QUOTAS else str(error)


def is_stockout_reason(reason: str) -> bool:
    """Return whether an instance with this state reason ended for want of capacity."""
    return reason in _STOCKOUT_REASONS


def is_unknown_instance(error: AwsError) -> bool:
    """Return whether EC2 does not know the instance of the call."""
    return error.code in _UNKNOWN_INSTANCE


def is_not_found(error: AwsError) -> bool:
    """Return whether EC2 does not know what the call names, or does not show it yet."""
    return error.code.endswith(_NOT_FOUND_SUFFIX)


def is_absent_object(error: AwsError) -> bool:
    """Return whether S3 says that the object is not there."""
    return error.code in _ABSENT_OBJECT


def is_forbidden(error: AwsError) -> bool:
    """Return whether a right is missing, as far as the HTTP status says."""
    return error.status == _FORBIDDEN_STATUS


def is_without_credentials(error: AwsError) -> bool:
    """Return whether AWS does not know who calls; the next call may have valid credentials again."""
    return error.code in _WITHOUT_CREDENTIALS


def is_without_answer(error: AwsError) -> bool:
    """Return whether no answer came, so that the next call would wait for as long."""
    return error.code == CONNECTION


def is_permitted_dry_run(error: AwsError) -> bool:
    """Return whether a dry run got past the permissions."""
    return error.code == _WOULD_SUCCEED or is_unknown_instance(error)


def raised(error: AwsError, *, may_lack_capacity: bool = False) -> Exception:
    """Return the exception that the kit gets for an error; only a launch may lack capacity."""
    meaning = meaning_of(error)
    if meaning is Meaning.STOCKOUT and may_lack_capacity:
        return Stockout(text_of(error), max(STOCKOUT_RETRY_SECONDS, memory_seconds(error.code)))
    return Transient(str(error)) if meaning is Meaning.TRANSIENT else AwsRefused(text_of(error))
