"""What the admin API's bodies and queries are made of: whatever passes here, every part behind it can carry."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from cluster.control.store import MAX_PAGE, MAX_VERSION


def _is_text(value: str) -> str:
    """JSON can write halves of characters, which nothing can encode."""
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise PydanticCustomError("text", "should be Unicode text")
    return value


Text = Annotated[str, AfterValidator(_is_text)]
Version = Annotated[int, Field(ge=0, le=MAX_VERSION)]
Page = Annotated[int, Field(ge=1, le=MAX_PAGE)]
Before = Annotated[int | None, Field(ge=1, le=MAX_VERSION)]


class AdminBody(BaseModel):
    """Base of every body: no unknown fields, no coercion, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
