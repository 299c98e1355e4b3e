"""Checks that a state file is used with the account and region whose instances it has.

docs/spec/aws-provider.md §1. In another account or region every host would look lost.
"""

from collections.abc import Mapping
from typing import Final

from bigfleet.provider.records.refusal import StartRefused

ACCOUNT: Final = "aws.account"
REGION: Final = "aws.region"


def checked_identity(stored: Mapping[str, str], *, account: str, region: str) -> dict[str, str]:
    """Return what the state is to store; an account that is not known now, "", is left as it is stored.

    Raises StartRefused for a state of another account or region.
    """
    known = {key: value for key, value in ((ACCOUNT, account), (REGION, region)) if value}
    if any(stored.get(key, value) != value for key, value in known.items()):
        former, now = _place(stored), _place({**stored, **known})
        raise StartRefused(
            f"--state: the machines of this file are in {former}, and the provider was started for {now}; start it "
            "with the credentials and the --region of the file, or name another file"
        )
    return {**stored, **known}


def _place(identity: Mapping[str, str]) -> str:
    account = identity.get(ACCOUNT, "")
    return f"account {account or 'unknown'}, region {identity.get(REGION, '') or 'unknown'}"
