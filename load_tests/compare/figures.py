"""From traces to the figures of a round, and from rounds to medians with their spread."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from load_tests.compare.client import Trace
from load_tests.compare.usage import Usage


@dataclass(frozen=True, slots=True)
class Figures:
    """What one engine did in one round. Times in milliseconds, memory in MiB; None where nothing is to be measured."""

    tok_s: float  # output tokens of all streams, from the first request to the last token
    ttft_ms: float  # median over requests, as are the next two
    tpot_ms: float | None
    decode_tok_s: float | None  # 1 / TPOT: of one stream, prompts not counted
    itl_p50_ms: float | None
    itl_p95_ms: float | None
    itl_p99_ms: float | None
    peak_rss_mib: float  # the last four: see Usage
    pss_mib: float
    engine_cores: float
    others_share: float

    @classmethod
    def of(cls, traces: Sequence[Trace], usage: Usage) -> Figures:
        seconds = max(trace.arrivals[-1] for trace in traces) - min(trace.sent for trace in traces)
        tpots = [trace.tpot_s for trace in traces if trace.tpot_s is not None]
        gaps = sorted(gap for trace in traces for gap in trace.gaps_s)
        return cls(
            tok_s=sum(trace.num_tokens for trace in traces) / seconds,
            ttft_ms=1e3 * statistics.median(trace.ttft_s for trace in traces),
            tpot_ms=1e3 * statistics.median(tpots) if tpots else None,
            decode_tok_s=1 / statistics.median(tpots) if tpots else None,
            itl_p50_ms=_percentile_ms(gaps, 0.5),
            itl_p95_ms=_percentile_ms(gaps, 0.95),
            itl_p99_ms=_percentile_ms(gaps, 0.99),
            **asdict(usage),
        )


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over rounds."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(min(values), statistics.median(values), max(values))

    def __str__(self) -> str:
        low, median, high = map(figure_text, (self.low, self.median, self.high))
        return f"{median} [{low}, {high}]"


def figure_text(value: float) -> str:
    """Three digits or so."""
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def spread_of(rounds: Sequence[Figures], figure: str) -> Spread | None:
    """Of the named figure; None if a round lacks it."""
    values = [getattr(figures, figure) for figures in rounds]
    return None if not values or None in values else Spread.of(values)


def ratios(rounds: Sequence[Figures], base: Sequence[Figures], figure: str) -> Spread | None:
    """Of the named figure in the same rounds of two engines; None if a round of either lacks it."""
    pairs = [(getattr(one, figure), getattr(other, figure)) for one, other in zip(rounds, base, strict=True)]
    if not pairs or any(None in pair for pair in pairs):
        return None
    return Spread.of([one / other for one, other in pairs])


def _percentile_ms(ordered_s: Sequence[float], share: float) -> float | None:
    """Nearest rank: the smallest value that at least `share` of the values do not exceed."""
    if not ordered_s:
        return None
    rank = max(0, -(-len(ordered_s) * round(share * 100) // 100) - 1)
    return 1e3 * ordered_s[rank]


def agreement(text: str, other: str) -> float:
    """The share of `text` before it first differs from `other`; 1 if both are empty."""
    if text == other:
        return 1.0
    common = next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))
    return common / max(len(text), len(other))
