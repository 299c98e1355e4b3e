"""Lists rows of demand in order, and says how they came from the list before.

A demand table knows which rows it put in or took out; an engine that works on rows by identity would otherwise have to
look at each of tens of thousands to find the few that are others (docs/adr/0111). To other callers they are an ordinary
tuple. This module must not leave out a place at which two listings differ.
"""

from collections.abc import Iterable, Sequence

from bigfleet.engine.shapes.columns.listed import ListedColumns
from bigfleet.model.need import Need


class ListedRows(tuple[Need, ...]):
    """Rows in list order (docs/spec/model.md §8), and the places at which they differ from the listing before.

    Invariant: without the rows at `gone` the former listing has, in the same order, the very objects that this one has
    without those at `come`. Without a former listing both are empty and mean nothing.
    """

    #: Distinguishes this listing from every other one; a listing itself is not stored for that.
    moment: object
    #: Moment of the former listing, None where nothing is known of it.
    since: object | None
    #: Places in the former listing, ascending.
    gone: Sequence[int]
    #: Places in this one, ascending.
    come: Sequence[int]
    #: The rows in columns, None where no one has read them.
    columns: ListedColumns | None
    #: Whether a row says of which pods it consists; None where no one has looked.
    says_pods: bool | None

    def __new__(cls, rows: Iterable[Need] = ()) -> "ListedRows":
        """Make a listing of which nothing is known but its rows."""
        listed = super().__new__(cls, rows)
        listed.moment, listed.since, listed.gone, listed.come = object(), None, (), ()
        listed.columns, listed.says_pods = None, None
        return listed

    def followed_by(self, rows: Iterable[Need], *, gone: Sequence[int], come: Sequence[int]) -> "ListedRows":
        """Return the next listing, which differs from this one at the places given and nowhere else."""
        listed = ListedRows(rows)
        assert len(self) - len(gone) == len(listed) - len(come), "the places do not add up"
        listed.since, listed.gone, listed.come = self.moment, gone, come
        return listed
