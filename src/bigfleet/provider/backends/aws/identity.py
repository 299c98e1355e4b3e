"""Checks that a state file is used with the account and region whose instances it has, and gives it an owner id.

docs/spec/aws-provider.md §1, §8. In another account or region every host would look lost. The owner id distinguishes
the instances of this file from those of another provider with the same name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from bigfleet.provider.records.refusal import StartRefused

ACCOUNT: Final = "aws.account"
REGION: Final = "aws.region"
OWNER: Final = "aws.owner"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The account, the region and the owner id with which a provider is started."""

    #: Of the credentials, "" while AWS did not say it.
    account: str = ""
    region: str = ""
    #: Owner id that a person named, "" for none.
    owner: str = ""
    #: What a state file without an owner id gets then.
    new_owner: str = ""


def checked_identity(stored: Mapping[str, str], place: Place) -> dict[str, str]:
    """Return what the state is to store; an account that is not known now is left as it is stored.

    Raises StartRefused for a state of another account, region or owner.
    """
    known = {key: value for key, value in ((ACCOUNT, place.account), (REGION, place.region)) if value}
    if any(stored.get(key, value) != value for key, value in known.items()):
        former, now = _place(stored), _place({**stored, **known})
        raise StartRefused(
            f"--state: the machines of this file are in {former}, and the provider was started for {now}; start it "
            "with the credentials and the --region of the file, or name another file"
        )
    former_owner = stored.get(OWNER, "")
    if place.owner and former_owner not in ("", place.owner):
        raise StartRefused(
            f"--owner: the instances of this state file have the owner {former_owner}, not {place.owner}; leave "
            "--owner out, or name a new file with --state"
        )
    taken = former_owner or place.owner or place.new_owner
    return {**stored, **known, **({OWNER: taken} if taken else {})}


def _place(identity: Mapping[str, str]) -> str:
    account = identity.get(ACCOUNT, "")
    return f"account {account or 'unknown'}, region {identity.get(REGION, '') or 'unknown'}"
