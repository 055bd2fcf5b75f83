"""The base of everything people write: frozen, strict about unknown fields, hashed once."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, overload

from pydantic import BaseModel, ConfigDict, ValidationError

from attnsel.base.suggestions import suggestion, with_meant
from attnsel.errors import InvalidInput, short

M = TypeVar("M", bound="FrozenModel")
T = TypeVar("T")


class lazy(Generic[T]):
    """``functools.cached_property`` without the lock that it takes before Python 3.12: two threads that
    compute the same value of something frozen do no harm."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self.compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> lazy[T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        value = instance.__dict__[self.name] = self.compute(instance)
        return value


def invalid_input(error: ValidationError, known: Iterable[str] = ()) -> InvalidInput:
    """The first problem of a pydantic error in our words; the rest is counted, not dropped.

    ``known``: the fields there are, of which an unknown one may mean another.
    """
    problems = error.errors(include_url=False)
    first = problems[0]
    cause = first.get("ctx", {}).get("error")
    field = ".".join(str(part) for part in first["loc"])
    if isinstance(cause, InvalidInput):  # of a model inside this one, or of the whole
        return InvalidInput(f"{field}.{cause.field}", cause.value, cause.allowed) if field else cause
    field = field or "input"
    allowed = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    value = first["input"]
    if first["type"] == "missing" and len(first["loc"]) > 1:
        field, allowed = str(first["loc"][0]), "must hold more values"
    elif first["type"] == "missing":
        value, allowed = None, "must be given"
    if first["type"] == "extra_forbidden":
        meant = suggestion(str(first["loc"][0]), known) if len(first["loc"]) == 1 else ""
        allowed = "there is no such field" + (f": {meant}" if meant else "")
    if first["msg"].startswith("Input should be "):
        allowed = f"must be {allowed}"
    allowed = with_meant(field, value, allowed)
    invalid = InvalidInput(field, value, allowed)
    if len(problems) > 1:
        others = ", ".join(sorted({".".join(str(part) for part in p["loc"]) for p in problems[1:]}))
        invalid.args = (f"{invalid.args[0]} (also wrong: {short(others, str)})",)
    return invalid


class FrozenModel(BaseModel):
    """A pydantic model that works as a dictionary key at the cost of an attribute look-up.

    Equality and hash run over the declared fields, and nothing else can influence them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=False, ignored_types=(lazy,))

    if TYPE_CHECKING:
        # Kept in the instance's dictionary: pydantic's private attributes cost a microsecond to read.
        _key: ClassVar[tuple[Any, ...]]
        _hash: ClassVar[int]
    elif not hasattr(BaseModel, "__pydantic_fields__"):  # before pydantic 2.10
        __pydantic_fields__ = property(lambda self: self.model_fields)

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise invalid_input(error, type(self).model_fields) from None
        except TypeError:  # of a model in this one, which takes its values by name
            for name, value in data.items():
                if isinstance(value, Mapping) and not all(isinstance(key, str) for key in value):
                    raise InvalidInput(name, value, "must have texts for keys") from None
            raise

    def model_post_init(self, context: Any, /) -> None:
        values = self.__dict__
        key = tuple([values[name] for name in self.__pydantic_fields__])
        values["_key"] = key
        values["_hash"] = hash(key)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(other) is not type(self):
            return NotImplemented
        assert isinstance(other, FrozenModel)
        return self._hash == other._hash and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    def derive(self: M, **changes: Any) -> M:
        """``replace`` for values that are valid by construction: types are not checked again, but how the
        fields fit together is. Several times cheaper; for the engine's own use."""
        made = self._changed(changes)
        made.model_post_init(None)
        return made

    def _changed(self: M, changes: dict[str, Any]) -> M:
        """Its own fields with these changes, not initialised yet."""
        mine = self.__dict__
        return self._of_values(
            {**{name: mine[name] for name in self.__pydantic_fields__}, **changes}, changes
        )

    def _of_values(self: M, values: dict[str, Any], changes: dict[str, Any]) -> M:
        """One of the same kind with these values, not initialised yet; ``changes`` count as given."""
        made = type(self).__new__(type(self))
        object.__setattr__(made, "__dict__", values)
        object.__setattr__(made, "__pydantic_fields_set__", self.model_fields_set | changes.keys())
        object.__setattr__(made, "__pydantic_extra__", None)
        object.__setattr__(made, "__pydantic_private__", None)
        return made

    def __setstate__(self, state: dict[Any, Any]) -> None:
        super().__setstate__(state)
        FrozenModel.model_post_init(self, None)  # hashes of strings differ from process to process

    def model_copy(self: M, *, update: Any = None, deep: bool = False) -> M:
        """pydantic's would skip validation; this is ``replace``."""
        return self.replace(**(update or {}))

    def replace(self: M, **changes: Any) -> M:
        """A copy with some fields changed, validated like any other (``model_copy`` would not)."""
        given = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self)(**{**given, **changes})


# --------------------------------------------------------------------------------------------------------
# Plain values that come in as arguments. What is of another kind is named: never converted, never ignored.
#
# ``"no"`` is not True, and 2.5 rows are not 2: a value that Python would convert is a mistake in the caller's
# program. ``error`` is the class to raise, which has InvalidInput's arguments.


def flag(name: str, value: Any, error: type[InvalidInput] = InvalidInput) -> bool:
    """True or False, also NumPy's, or 0 or 1."""
    if value is True or value is False:
        return value
    kind = type(value)
    numpy_bool = kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_")
    if numpy_bool or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise error(name, value, "must be True or False")


def number(name: str, value: Any, error: type[InvalidInput] = InvalidInput) -> float:
    """A finite float from a real number, also NumPy's or a fraction."""
    try:
        result = float(value) if isinstance(value, Real) else None
    except Exception:  # too large, or a stranger's class
        result = None
    if result is None or not -float("inf") < result < float("inf"):
        raise error(name, value, "must be a finite number")
    return result


def whole(name: str, value: Any, error: type[InvalidInput] = InvalidInput) -> int:
    """An int, also NumPy's or an integer tensor of one element; no float, however round."""
    if isinstance(value, int):
        return int(value)
    try:
        return operator.index(value)
    except Exception:
        raise error(name, value, "must be an int") from None


def text(name: str, value: Any, error: type[InvalidInput] = InvalidInput) -> str:
    """A str, of a subclass what it holds."""
    if not isinstance(value, str):
        raise error(name, value, "must be a text")
    return str.__str__(value)
