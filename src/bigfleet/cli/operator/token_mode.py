"""Names the ways in which a machine's join token is made (docs/spec/operator.md §6)."""

from enum import Enum


class TokenMode(Enum):
    """The values of `--bootstrap-token`."""

    #: Templates bring what they need.
    NONE = "none"
    #: A bootstrap token, stored as a Secret.
    BOOTSTRAP = "secret"
    #: A token of a service account.
    SERVICE_ACCOUNT = "tokenrequest"
