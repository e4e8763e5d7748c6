"""An integer enum that prints as ``Class.NAME`` on every supported Python."""

from __future__ import annotations

from enum import IntEnum


class NamedIntEnum(IntEnum):
    """IntEnum whose ``str()`` and plain ``format()`` give ``Class.NAME`` (spec api-types §3).

    Python 3.11 changed both to the bare number; a number says nothing in an error text. A format spec
    (``f"{code:#x}"``) still formats the number.
    """

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"

    def __format__(self, format_spec: str) -> str:
        return format(int(self), format_spec) if format_spec else str(self)
