"""Measures a roll-up while requests come and go, in all and for each namespace (docs/spec/operator.md §3).

A shard ends the session of an operator whose roll-up is too large, and with it the demand of all tenants. The sizes are
running sums. They estimate bytes on the wire: the true size is at most one and a half times the estimate. This module
does not choose which request is left out.
"""

from collections import Counter
from typing import Final

from bigfleet.model.ids import text_bytes
from bigfleet.model.shapes import SHAPES_MAX
from bigfleet.operator.requests import MappedRequest

#: The shard takes no more (docs/spec/wire.md §2).
ROWS_MAX: Final = 20_000
#: A shard takes frames of 32 MiB.
BYTES_MAX: Final = 20 * 1024 * 1024
#: Of both, what the requests of one namespace may take, so that there is room for those of the others.
NAMESPACE_PERCENT_MAX: Final = 75

#: Numbers and lengths around the texts of a row, around an amount and its name, and around a shape.
_ROW_BYTES: Final = 32
_AMOUNT_BYTES: Final = 24
_SHAPE_BYTES: Final = 16
#: A row names each of its resources in its sum and in its min unit. Each kind of requests is a shape, and if its pods
#: wait, a waiting shape.
_SUMS: Final = 2
_SHAPES: Final = 2

RowId = tuple[str, str]
#: Resource names and amounts of a request, the group that excludes itself, and its limit.
RequestKind = tuple[tuple[tuple[str, int], ...], str, int]


class _Shapes:
    """The distinct requests of a row, or of one namespace in it, and about how many bytes they take."""

    __slots__ = ("_kinds", "_kinds_bytes", "_names", "_names_bytes")

    def __init__(self) -> None:
        self._kinds: Counter[RequestKind] = Counter()
        self._kinds_bytes = 0
        #: By how many kinds each resource is named.
        self._names: Counter[str] = Counter()
        self._names_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._kinds)

    @property
    def size_bytes(self) -> int:
        """Bytes on the wire: beyond 64 kinds they are merged, and a merged one may name all resources."""
        shapes_bytes = min(self._kinds_bytes, SHAPES_MAX * (_SHAPE_BYTES + self._names_bytes))
        return _SUMS * self._names_bytes + _SHAPES * shapes_bytes

    def add(self, kind: RequestKind) -> None:
        self._kinds[kind] += 1
        if self._kinds[kind] > 1:
            return
        self._kinds_bytes += _SHAPE_BYTES
        for name, _milli in kind[0]:
            name_bytes = _AMOUNT_BYTES + text_bytes(name)
            self._kinds_bytes += name_bytes
            self._names[name] += 1
            if self._names[name] == 1:
                self._names_bytes += name_bytes

    def remove(self, kind: RequestKind) -> None:
        self._kinds[kind] -= 1
        if self._kinds[kind]:
            return
        del self._kinds[kind]
        self._kinds_bytes -= _SHAPE_BYTES
        for name, _milli in kind[0]:
            name_bytes = _AMOUNT_BYTES + text_bytes(name)
            self._kinds_bytes -= name_bytes
            self._names[name] -= 1
            if not self._names[name]:
                del self._names[name]
                self._names_bytes -= name_bytes


class _Row:
    """One row, and what each namespace has in it."""

    __slots__ = ("own_bytes", "parts", "shapes")

    def __init__(self, own_bytes: int) -> None:
        #: Of its requirements and its group.
        self.own_bytes = own_bytes
        self.shapes = _Shapes()
        self.parts: dict[str, _Shapes] = {}


class _Total:
    """Rows and bytes."""

    __slots__ = ("rows", "size_bytes")

    def __init__(self) -> None:
        self.rows = 0
        self.size_bytes = 0

    def change(self, rows: int, size_bytes: int) -> None:
        self.rows += rows
        self.size_bytes += size_bytes


class RollUpSize:
    """Rows and bytes of a roll-up. A row counts for each namespace that has requests in it, with these requests."""

    def __init__(self) -> None:
        self._rows: dict[RowId, _Row] = {}
        self._all = _Total()
        #: All and only the namespaces with requests.
        self._namespaces: dict[str, _Total] = {}

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return self._all.rows

    @property
    def size_bytes(self) -> int:
        """About how many bytes they have."""
        return self._all.size_bytes

    def add(self, row_id: RowId, namespace: str, request: MappedRequest, kind: RequestKind) -> None:
        """Count a request."""
        row = self._rows.get(row_id)
        if row is None:
            own_bytes = _ROW_BYTES + text_bytes(request.profile.fingerprint) + text_bytes(request.group)
            row = self._rows[row_id] = _Row(own_bytes)
            self._all.change(1, own_bytes)
        total = self._namespaces.get(namespace)
        if total is None:
            total = self._namespaces[namespace] = _Total()
        part = row.parts.get(namespace)
        if part is None:
            part = row.parts[namespace] = _Shapes()
            total.change(1, row.own_bytes)
        for each, shapes in ((self._all, row.shapes), (total, part)):
            before = shapes.size_bytes
            shapes.add(kind)
            each.change(0, shapes.size_bytes - before)

    def remove(self, row_id: RowId, namespace: str, kind: RequestKind) -> None:
        """Count a request no longer."""
        row, total = self._rows[row_id], self._namespaces[namespace]
        part = row.parts[namespace]
        for each, shapes in ((self._all, row.shapes), (total, part)):
            before = shapes.size_bytes
            shapes.remove(kind)
            each.change(0, shapes.size_bytes - before)
        if not part:
            del row.parts[namespace]
            total.change(-1, -row.own_bytes)
            if not total.rows:
                del self._namespaces[namespace]
        if not row.shapes:
            del self._rows[row_id]
            self._all.change(-1, -row.own_bytes)

    def fault(self, namespace: str) -> str:
        """Return which bound is exceeded by all requests, or by those of a namespace; "" for none."""
        own = self._namespaces.get(namespace, _Total())
        for total, whose, percent in (
            (self._all, "the cluster", 100),
            (own, f"namespace {namespace}", NAMESPACE_PERCENT_MAX),
        ):
            rows_max, bytes_max = ROWS_MAX * percent // 100, BYTES_MAX * percent // 100
            if total.rows > rows_max:
                return f"{whose} would have {total.rows:,} needs, at most {rows_max:,} are reported"
            if total.size_bytes > bytes_max:
                return f"the needs of {whose} would have {total.size_bytes:,} bytes, at most {bytes_max:,} are reported"
        return ""
