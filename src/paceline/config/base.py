"""What every section of a recipe has in common: frozen, documented, unknown keys refused with the nearest known one."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


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
