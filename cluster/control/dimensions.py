"""By what finished requests are told apart, and what each is called there: a bounded number of values. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from cluster.control.finished_request import FinishedRequest
from cluster.control.top_names import OTHER, TopNames

NONE: Final = "none"


class Dimension(StrEnum):
    """What requests can be broken down by."""

    MODEL = "model"
    TENANT = "tenant"
    WORKLOAD = "workload"
    VARIANT = "variant"
    DRAFTER = "drafter"
    DRAFT_VERSION = "draft_version"
    TEMPERATURE = "temperature"
    PROMPT_TOKENS = "prompt_tokens"
    OUTPUT_TOKENS = "output_tokens"


Key = Mapping[Dimension, str]

# Dimensions whose values others choose, and how many are told apart; the rest are `other`.
MAX_NAMES: Final[Mapping[Dimension, int]] = {
    Dimension.MODEL: 50,
    Dimension.TENANT: 50,
    Dimension.WORKLOAD: 20,
    Dimension.VARIANT: 20,
    Dimension.DRAFT_VERSION: 20,
}

# Largest value of each range, and what it is called.
TEMPERATURES: Final = ((0.0, "0"), (0.5, "0-0.5"), (1.0, "0.5-1"), (float("inf"), "1-2"))
PROMPT_LENGTHS: Final = ((128, "0-128"), (512, "129-512"), (2048, "513-2048"), (8192, "2049-8192"))
OUTPUT_LENGTHS: Final = ((0, "0"), (32, "1-32"), (128, "33-128"), (512, "129-512"), (2048, "513-2048"))


def temperature_range(temperature: float) -> str:
    """The range that holds it: its upper end does, its lower end does not."""
    return next(name for end, name in TEMPERATURES if temperature <= end)


def prompt_range(num_tokens: int) -> str:
    return next((name for end, name in PROMPT_LENGTHS if num_tokens <= end), "8193+")


def output_range(num_tokens: int) -> str:
    return next((name for end, name in OUTPUT_LENGTHS if num_tokens <= end), "2049+")


class Naming:
    """Owns which names are told apart; a name that was given stays."""

    def __init__(self) -> None:
        self._names = {dimension: TopNames(limit) for dimension, limit in MAX_NAMES.items()}

    def see(self, request: FinishedRequest) -> Key:
        """Count a request; its value in every dimension."""
        guesses, policy = request.guesses, request.policy
        chosen = {
            Dimension.MODEL: request.model,
            Dimension.TENANT: request.tenant,
            Dimension.WORKLOAD: request.workload,
            Dimension.VARIANT: None if policy is None else policy.variant,
            Dimension.DRAFT_VERSION: guesses.draft_version,
        }
        return {
            **{dimension: self._call(dimension, name) for dimension, name in chosen.items()},
            Dimension.DRAFTER: guesses.drafter.value,
            Dimension.TEMPERATURE: temperature_range(request.temperature),
            Dimension.PROMPT_TOKENS: prompt_range(request.prompt_tokens),
            Dimension.OUTPUT_TOKENS: output_range(request.output_tokens),
        }

    def _call(self, dimension: Dimension, name: str | None) -> str:
        return NONE if name is None else self._names[dimension].see(name)


def coarser(key: Key, kept: frozenset[Dimension]) -> Key:
    """The same with `other` in every dimension that is not kept."""
    return {dimension: value if dimension in kept else OTHER for dimension, value in key.items()}
