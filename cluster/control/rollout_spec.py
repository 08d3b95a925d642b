"""The document that describes a rollout: whose percentage is raised, in which steps, and what must hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from cluster.control.analysis import RATES, Bound, Compare, Metric, MetricSpec
from cluster.control.cohort import DEFAULT_CAPACITY
from cluster.control.document import Label, Match, Percent
from cluster.control.strict_document import StrictModel, parse

SCHEMA: Final = "paceline.rollout/v1"
MAX_STEPS: Final = 100
MAX_CONDITIONS: Final = 20
MAX_LOOKS: Final = 20

Seconds = Annotated[float, Field(gt=0, le=7 * 86_400)]


class Target(StrictModel):
    """Whose percentage the rollout moves: an allow rule of the policy, or a rule to be made for a match."""

    rule: Label | None = None
    match: Match | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if (self.rule is None) == (self.match is None):
            raise PydanticCustomError("target", "should have either rule or match")
        return self


class Pause(StrictModel):
    """For so many seconds; without them, until somebody resumes."""

    seconds: Seconds | None = None


class Analyse(StrictModel):
    """Measure both cohorts for a window of time. A fail ends it at any of `looks` evenly spaced looks, a pass only at
    the last one."""

    window_s: Seconds
    looks: Annotated[int, Field(ge=1, le=MAX_LOOKS)] = 1


class Step(StrictModel):
    """Exactly one of them."""

    set_percent: Percent | None = None
    pause: Pause | None = None
    analyse: Analyse | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if sum(part is not None for part in (self.set_percent, self.pause, self.analyse)) != 1:
            raise PydanticCustomError("step", "should have exactly one of set_percent, pause, analyse")
        return self


class Condition(StrictModel):
    """What a metric has to be. Without `compare`: the ratio canary / control; for rates the difference."""

    metric: Metric
    at_most: Annotated[float, Field(ge=-1e6, le=1e6)] | None = None
    at_least: Annotated[float, Field(ge=-1e6, le=1e6)] | None = None
    compare: Compare | None = None
    quantile: Annotated[float, Field(ge=0.01, le=0.99)] = 0.5
    min_samples: Annotated[int, Field(ge=1, le=100_000)] = 100
    confidence: Annotated[float, Field(ge=0.5, le=0.9999)] = 0.95

    @model_validator(mode="after")
    def _has_one_limit(self) -> Self:
        if (self.at_most is None) == (self.at_least is None):
            raise PydanticCustomError("condition", "should have either at_most or at_least")
        return self

    def metric_spec(self) -> MetricSpec:
        default = Compare.DIFFERENCE if self.metric in RATES else Compare.RATIO
        bound, limit = (Bound.AT_LEAST, self.at_least) if self.at_most is None else (Bound.AT_MOST, self.at_most)
        return MetricSpec(
            self.metric, limit or 0.0, bound, self.compare or default, self.quantile, self.min_samples, self.confidence
        )


class RolloutSpec(StrictModel):
    """One rollout, checked whole: every analysis has something to check, and two cohorts to compare."""

    schema_: Literal["paceline.rollout/v1"] = Field(alias="schema")
    target: Target
    steps: Annotated[tuple[Step, ...], Field(min_length=1, max_length=MAX_STEPS)]
    conditions: Annotated[tuple[Condition, ...], Field(max_length=MAX_CONDITIONS)] = ()
    sample_capacity: Annotated[int, Field(ge=100, le=100_000)] = DEFAULT_CAPACITY

    def metric_specs(self) -> tuple[MetricSpec, ...]:
        return tuple(condition.metric_spec() for condition in self.conditions)

    @model_validator(mode="after")
    def _can_be_carried_out(self) -> Self:
        percent = 0.0
        for index, step in enumerate(self.steps):
            percent = percent if step.set_percent is None else step.set_percent
            if step.analyse is not None:
                self._check_analysis(f".steps[{index}].analyse", percent)
        for index, condition in enumerate(self.conditions):
            if condition.min_samples > self.sample_capacity:
                at, limit = f".conditions[{index}].min_samples", f"at most {self.sample_capacity}"
                raise PydanticCustomError("condition", "more than sample_capacity keeps", {"at": at, "limit": limit})
        return self

    def _check_analysis(self, at: str, percent: float) -> None:
        if not self.conditions:
            raise PydanticCustomError("analyse", "there are no conditions to check", {"at": at})
        if percent in (0.0, 100.0):
            message = f"there is only one cohort while the percentage is {percent:g}"
            raise PydanticCustomError("analyse", message, {"at": at})


def parse_rollout(source: str | Mapping[str, object]) -> RolloutSpec:
    """YAML, JSON or plain values. Raises DocumentError with the path to every field that is wrong."""
    return parse(RolloutSpec, source)
