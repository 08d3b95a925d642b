"""How many guesses to ask for: K per request, 0 = off."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.messages import DraftLengthMode


@dataclass(frozen=True, slots=True)
class DraftLengthConfig:
    """Limits of the draft length."""

    max_draft_tokens: int
    mode: DraftLengthMode = DraftLengthMode.ADAPTIVE


class DraftLengthController:
    """Owns what a pool has measured about its drafts and steps, and turns it into a draft length per request."""

    def __init__(self, config: DraftLengthConfig) -> None:
        raise NotImplementedError
