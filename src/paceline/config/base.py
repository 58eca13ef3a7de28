"""What every section of a recipe has in common: frozen, documented, unknown keys refused with the nearest known one."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict

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
