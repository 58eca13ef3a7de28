"""What every section of a recipe has in common: frozen, documented, unknown keys refused with the nearest known one."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

Item = TypeVar("Item")


def _one_is_a_list(value: object) -> object:
    return (value,) if isinstance(value, str) else value


Several = Annotated[tuple[Item, ...], BeforeValidator(_one_is_a_list)]
"""A list of texts; a single text is a list of one: ``--set run.plugins=mine.py``."""


class Section(BaseModel):
    """One section of the recipe. The docstring under each field becomes its description in the JSON schema."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        validate_default=True,
        protected_namespaces=(),
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """``parallel.tp=true`` is a mistake; Python would take it for 1."""
        assert info.field_name is not None
        annotation = cls.model_fields[info.field_name].annotation
        items = value if isinstance(value, list | tuple) else (value,)
        if any(isinstance(item, bool) for item in items) and not _takes_truth(annotation):
            raise PydanticCustomError("truth_value", "true and false are no values of this field")
        return value


def _takes_truth(annotation: Any) -> bool:
    return annotation is bool or any(_takes_truth(part) for part in get_args(annotation))
