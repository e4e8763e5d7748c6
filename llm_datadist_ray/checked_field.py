"""A read/write attribute that is checked wherever it is assigned, constructor included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")
Check = Callable[[str, Any], object]


class CheckedField(Generic[T]):
    """Descriptor: ``check(name, value)`` runs before every assignment, and what it raises leaves the old value.

    The value lives in the instance's ``__dict__`` as ``_name``, so owners pickle and copy as usual.
    """

    def __init__(self, check: Check) -> None:
        self.check = check
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> CheckedField[T]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> T: ...

    def __get__(self, instance: object | None, owner: type) -> CheckedField[T] | T:
        return self if instance is None else self.load(instance)

    def __set__(self, instance: object, value: T) -> None:
        self.check(self.name, value)
        self.store(instance, value)

    def load(self, instance: object) -> Any:
        """The value without any check; AttributeError when it was never assigned."""
        return getattr(instance, f"_{self.name}")

    def store(self, instance: object, value: Any) -> None:
        """Assigns without any check."""
        setattr(instance, f"_{self.name}", value)
