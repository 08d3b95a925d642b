"""What steps and drafts cost, measured online. Seconds everywhere."""

from __future__ import annotations

from bisect import bisect_left

_SMOOTHING = 0.1  # weight of a new measurement
_OUTLIER = 4.0  # an average so much above a measurement came from an outlier (a cold start) and is dropped


class _Average:
    """A running average that forgets a cold start at once: times are inflated by accident, never deflated."""

    __slots__ = ("count", "value")

    def __init__(self) -> None:
        self.value = 0.0  # means nothing while count is 0
        self.count = 0

    def observe(self, value: float) -> None:
        if value * _OUTLIER < self.value:
            self.count = 0
        self.count += 1
        self.value += max(_SMOOTHING, 1 / self.count) * (value - self.value)


class StepCost:
    """Owns the average duration of a step by its number of rows, in power-of-two buckets."""

    def __init__(self) -> None:
        self._buckets: dict[int, tuple[float, _Average]] = {}  # bucket -> (average rows, average seconds)
        self._points: list[tuple[float, float]] = []  # the same, sorted by rows

    def observe(self, num_rows: int, seconds: float) -> None:
        bucket = num_rows.bit_length()
        rows, average = self._buckets.get(bucket) or (float(num_rows), _Average())
        average.observe(seconds)
        self._buckets[bucket] = rows + _SMOOTHING * (num_rows - rows), average
        self._points = sorted((rows, average.value) for rows, average in self._buckets.values())

    def predict(self, num_rows: int) -> float | None:
        """Interpolated between measured sizes, extrapolated past them; None before the first measurement."""
        if not self._points:
            return None
        index = bisect_left(self._points, (num_rows, 0.0))
        if index == 0:
            return self._below_first(num_rows)
        left = self._points[index - 1]
        if index < len(self._points):
            return _on_line(left, self._points[index], num_rows)
        return left[1] + self._slope(len(self._points) - 2) * (num_rows - left[0])

    def _below_first(self, num_rows: int) -> float:
        rows, seconds = self._points[0]
        on_line = seconds - self._slope(0) * (rows - num_rows)
        return max(on_line, seconds * num_rows / rows)  # fixed cost cannot be negative

    def _slope(self, index: int) -> float:
        """Seconds per row between two neighbouring points; 0 while there is only one, never negative."""
        if len(self._points) < 2:
            return 0.0
        (rows, seconds), (next_rows, next_seconds) = self._points[index : index + 2]
        return max(0.0, (next_seconds - seconds) / max(next_rows - rows, 1.0))


def _on_line(left: tuple[float, float], right: tuple[float, float], num_rows: int) -> float:
    share = (num_rows - left[0]) / max(right[0] - left[0], 1e-9)
    return left[1] + share * (right[1] - left[1])


class ArrivalCost:
    """Owns how long a draft block takes from the commit that asked for it: a fixed part and a part per guess."""

    def __init__(self) -> None:
        self._overhead_s = _Average()
        self._per_guess_s = _Average()

    def observe(self, num_draft_tokens: int, draft_time_s: float, seconds: float) -> None:
        """`draft_time_s` of the `seconds` were spent on guessing `num_draft_tokens` ≥ 1 tokens."""
        self._overhead_s.observe(max(0.0, seconds - draft_time_s))
        self._per_guess_s.observe(draft_time_s / num_draft_tokens)

    def predict(self, num_draft_tokens: int) -> float | None:
        """None before the first block."""
        if not self._overhead_s.count:
            return None
        return self._overhead_s.value + num_draft_tokens * self._per_guess_s.value
