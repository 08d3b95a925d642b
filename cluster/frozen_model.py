"""What every part of the configuration is made of."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """Never mutated; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")
