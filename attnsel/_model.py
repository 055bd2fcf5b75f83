"""The base of everything people write: frozen, strict about unknown fields, hashed once."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError

from attnsel.errors import InvalidInput

M = TypeVar("M", bound="FrozenModel")


class FrozenModel(BaseModel):
    """A pydantic model that works as a dictionary key at the cost of an attribute look-up.

    Equality and hash run over the declared fields, and nothing else can influence them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=False)

    _key: tuple[Any, ...] = PrivateAttr(default=())
    _hash: int = PrivateAttr(default=0)

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise InvalidInput.from_pydantic(error) from None

    def model_post_init(self, context: Any, /) -> None:
        values = self.__dict__
        self._key = tuple([values[name] for name in type(self).model_fields])
        self._hash = hash(self._key)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(other) is not type(self):
            return NotImplemented
        assert isinstance(other, FrozenModel)
        return self._hash == other._hash and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    def replace(self: M, **changes: Any) -> M:
        """A copy with some fields changed, validated like any other (``model_copy`` would not)."""
        given = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self)(**{**given, **changes})
