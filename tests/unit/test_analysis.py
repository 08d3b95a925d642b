"""The decision about a canary: what passes, what fails, what stays open, and how often it is wrong."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from cluster.control.analysis import Assessment, Bound, Compare, Metric, MetricSpec, Verdict, assess
from cluster.control.cohort import Cohort, Measurement, RequestRecord

pytestmark = pytest.mark.unit

Draw = Callable[[random.Random], float]


def ttfts(values: Sequence[float], cohort: Cohort) -> tuple[RequestRecord, ...]:
    return tuple(RequestRecord(str(number), cohort, 0.0, ttft_s=value) for number, value in enumerate(values))


def measured(canary: Sequence[float], control: Sequence[float]) -> Measurement:
    return Measurement(0.0, 60.0, ttfts(canary, Cohort.CANARY), ttfts(control, Cohort.CONTROL))


def failures(canary: tuple[int, int], control: tuple[int, int]) -> Measurement:
    """(failed, all) per cohort."""

    def records(counts: tuple[int, int], cohort: Cohort) -> tuple[RequestRecord, ...]:
        return tuple(RequestRecord(str(n), cohort, 0.0, failed=n < counts[0]) for n in range(counts[1]))

    return Measurement(0.0, 60.0, records(canary, Cohort.CANARY), records(control, Cohort.CONTROL))


def spread(scale: float, count: int = 400) -> list[float]:
    """Values around `scale`, from 0.8 to 1.2 of it."""
    return [scale * (0.8 + 0.4 * number / (count - 1)) for number in range(count)]


TTFT = MetricSpec(Metric.TTFT, limit=1.1)


def verdict(spec: MetricSpec, measurement: Measurement) -> Verdict:
    return assess([spec], measurement).verdict


# --- verdicts --------------------------------------------------------------------------------------------------------


def test_a_ratio_is_within_beyond_or_too_near_its_limit() -> None:
    assert verdict(TTFT, measured(spread(1.0), spread(1.0))) is Verdict.PASS
    assert verdict(TTFT, measured(spread(1.3), spread(1.0))) is Verdict.FAIL
    assert verdict(TTFT, measured(spread(1.1), spread(1.0))) is Verdict.INCONCLUSIVE


def test_a_limit_may_be_a_lower_one() -> None:
    spec = MetricSpec(Metric.TTFT, limit=0.9, bound=Bound.AT_LEAST)
    assert verdict(spec, measured(spread(1.0), spread(1.0))) is Verdict.PASS
    assert verdict(spec, measured(spread(0.7), spread(1.0))) is Verdict.FAIL
    assert verdict(spec, measured(spread(0.9), spread(1.0))) is Verdict.INCONCLUSIVE


def test_a_limit_may_be_about_the_difference_or_the_canary_alone() -> None:
    by_difference = MetricSpec(Metric.TTFT, limit=0.1, compare=Compare.DIFFERENCE)
    assert verdict(by_difference, measured(spread(1.0), spread(1.0))) is Verdict.PASS
    assert verdict(by_difference, measured(spread(1.3), spread(1.0))) is Verdict.FAIL
    alone = MetricSpec(Metric.TTFT, limit=1.1, compare=Compare.CANARY)
    assert verdict(alone, measured(spread(1.0), [])) is Verdict.PASS
    assert verdict(alone, measured(spread(1.3), [])) is Verdict.FAIL


def test_a_tail_is_compared_where_it_is() -> None:
    canary = spread(1.0, 380) + [9.0] * 120
    assert verdict(TTFT, measured(canary, spread(1.0, 500))) is not Verdict.FAIL
    p95 = MetricSpec(Metric.TTFT, limit=1.1, quantile=0.95)
    assert verdict(p95, measured(canary, spread(1.0, 500))) is Verdict.FAIL


def test_too_few_samples_decide_nothing_however_bad_they_look() -> None:
    for canary, control in ((99, 400), (400, 99), (0, 0)):
        found = assess([TTFT], measured([5.0] * canary, [1.0] * control))
        assert found.verdict is Verdict.INCONCLUSIVE
        assert found.reason == f"ttft: {canary} canary and {control} control samples, 100 needed"


def test_requests_without_a_value_are_no_samples_but_count_for_rates() -> None:
    records = tuple(RequestRecord(str(n), Cohort.CANARY, 0.0, failed=True) for n in range(200))
    control = ttfts(spread(1.0), Cohort.CONTROL)
    found = assess([TTFT, MetricSpec(Metric.ERROR_RATE, 0.01, compare=Compare.DIFFERENCE)],
                   Measurement(0.0, 60.0, records, control))  # fmt: skip
    assert [result.verdict for result in found.results] == [Verdict.INCONCLUSIVE, Verdict.FAIL]
    assert [result.num_canary for result in found.results] == [0, 200]


def test_rates_compare_shares_of_requests() -> None:
    spec = MetricSpec(Metric.ERROR_RATE, limit=0.02, compare=Compare.DIFFERENCE)
    assert verdict(spec, failures((0, 400), (0, 400))) is Verdict.PASS
    assert verdict(spec, failures((40, 400), (2, 400))) is Verdict.FAIL
    assert verdict(spec, failures((8, 400), (0, 400))) is Verdict.INCONCLUSIVE
    by_ratio = MetricSpec(Metric.ERROR_RATE, limit=2.0)
    assert verdict(by_ratio, failures((100, 400), (10, 400))) is Verdict.FAIL
    assert verdict(by_ratio, failures((0, 400), (0, 400))) is Verdict.INCONCLUSIVE, "a ratio of nothing says nothing"


@pytest.mark.parametrize(
    ("metric", "field"),
    [
        (Metric.TTFT, "ttft_s"),
        (Metric.TPOT, "tpot_s"),
        (Metric.ITL_P95, "itl_p95_s"),
        (Metric.ITL_P99, "itl_p99_s"),
        (Metric.ACCEPTANCE_LENGTH, "acceptance_length"),
        (Metric.ERROR_RATE, "failed"),
        (Metric.FALLBACK_RATE, "fell_back"),
    ],
)
def test_each_metric_reads_its_own_field(metric: Metric, field: str) -> None:
    def records(value: float, cohort: Cohort) -> tuple[RequestRecord, ...]:
        return tuple(RequestRecord(str(n), cohort, 0.0, **{field: value}) for n in range(200))  # type: ignore[arg-type]

    spec = MetricSpec(metric, limit=0.5, compare=Compare.DIFFERENCE)
    worse = Measurement(0.0, 60.0, records(True, Cohort.CANARY), records(False, Cohort.CONTROL))
    assert verdict(spec, worse) is Verdict.FAIL
    assert verdict(MetricSpec(metric, 0.5, compare=Compare.CANARY), worse) is Verdict.FAIL


def test_one_failed_condition_fails_all_and_every_condition_has_to_pass() -> None:
    passes, fails = TTFT, MetricSpec(Metric.TTFT, limit=0.5)
    unknown = MetricSpec(Metric.TPOT, limit=1.1)
    same = measured(spread(1.0), spread(1.0))

    def outcome(*specs: MetricSpec) -> Assessment:
        return assess(specs, same)

    assert outcome(passes, fails, unknown).verdict is Verdict.FAIL
    assert outcome(passes, unknown).verdict is Verdict.INCONCLUSIVE
    assert outcome(passes, passes).verdict is Verdict.PASS
    assert outcome(passes, fails).reason.startswith("ttft P50: ratio 1 [0.9")
    assert outcome(passes, fails).reason.endswith("] is not at most 0.5")
    assert outcome(passes).results[0].estimate == 1.0


def test_more_looks_and_conditions_make_a_fail_harder_and_a_pass_no_easier() -> None:
    worse = measured(spread(1.14), spread(1.0))
    assert assess([TTFT], worse).verdict is Verdict.FAIL
    assert assess([TTFT], worse, num_looks=1000).verdict is Verdict.INCONCLUSIVE
    assert assess([TTFT] * 1000, worse).verdict is Verdict.INCONCLUSIVE
    same = measured(spread(1.0), spread(1.0))
    assert assess([TTFT], same, num_looks=1000).verdict is Verdict.PASS


# --- how often it is wrong -------------------------------------------------------------------------------------------


def lognormal(rng: random.Random) -> float:
    return rng.lognormvariate(0.0, 0.5)


def heavy_tail(rng: random.Random) -> float:
    return rng.paretovariate(1.5)


def two_humps(rng: random.Random) -> float:
    return rng.lognormvariate(0.0, 0.2) if rng.random() < 0.9 else rng.lognormvariate(2.0, 0.3)


def outcomes(spec: MetricSpec, draw: Draw, scale: float, sizes: tuple[int, int], trials: int) -> Counter[Verdict]:
    rng = random.Random(20260)
    found: Counter[Verdict] = Counter()
    for _ in range(trials):
        canary = [scale * draw(rng) for _ in range(sizes[0])]
        found[verdict(spec, measured(canary, [draw(rng) for _ in range(sizes[1])]))] += 1
    return found


@pytest.mark.parametrize("draw", [lognormal, heavy_tail, two_humps])
@pytest.mark.parametrize(("quantile", "sizes"), [(0.5, (100, 100)), (0.5, (50, 450)), (0.95, (150, 300))])
def test_at_the_limit_it_fails_and_passes_as_seldom_as_stated(
    draw: Draw, quantile: float, sizes: tuple[int, int]
) -> None:
    """Stated: 5 % each. 200 trials may show up to 19 of either (three standard deviations above 10)."""
    spec = MetricSpec(Metric.TTFT, limit=1.2, quantile=quantile, min_samples=50)
    found = outcomes(spec, draw, 1.2, sizes, trials=200)
    assert found[Verdict.FAIL] <= 19
    assert found[Verdict.PASS] <= 19


@pytest.mark.parametrize(
    ("quantile", "scale", "sizes", "expected", "power"),
    [
        (0.5, 1.0, (400, 400), Verdict.PASS, 0.9),
        (0.5, 1.0, (200, 1800), Verdict.PASS, 0.9),
        (0.5, 1.6, (100, 900), Verdict.FAIL, 0.95),
        (0.5, 1.6, (400, 400), Verdict.FAIL, 0.99),
        (0.95, 1.6, (400, 400), Verdict.FAIL, 0.9),
    ],
)
def test_with_the_stated_number_of_samples_it_decides(
    quantile: float, scale: float, sizes: tuple[int, int], expected: Verdict, power: float
) -> None:
    """docs/rollouts.md has this table: log-normal latencies, sigma 0.5, limit 1.2."""
    spec = MetricSpec(Metric.TTFT, limit=1.2, quantile=quantile)
    assert outcomes(spec, lognormal, scale, sizes, trials=60)[expected] >= 60 * power
