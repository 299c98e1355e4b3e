"""Compares provider ids of machines with those of Nodes, whose spellings may differ (docs/spec/operator.md §7.1).

A Node's provider id may be the machine's, or end in `/` and the last path part of the machine's.
"""


def comparable_part(provider_id: str) -> str:
    """Return the last path part of a machine's provider id, "" where it identifies nothing.

    A number at the end of a path counts instances of a scale set: other sets have the same number.
    """
    _path, slash, part = provider_id.rpartition("/")
    return "" if slash and part.isdigit() else part


def last_part(provider_id: str) -> str:
    """Return the last path part of a Node's provider id; the whole id when it has no path."""
    return provider_id.rpartition("/")[2]
