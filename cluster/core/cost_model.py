"""What steps and drafts cost, measured online. Seconds everywhere."""

from __future__ import annotations

from bisect import bisect_left

_SMOOTHING = 0.1  # weight of a new measurement
_OUTLIER = 4.0  # an average so much above a measurement came from an outlier (a cold start) and is dropped
_HICCUP = 3.0  # a block that takes longer than so many like it counts as these
_JITTER_S = 1e-3  # no time is so short that a stumble is told from it by ratio alone
_MAX_S = 60.0  # nobody waits so long for a block, and sums of what a peer claims stay finite
_SETTLED = 5.0  # blocks after which the line is to be trusted
_LINE_DECAY = 0.98  # per block
_ORIGIN_WEIGHT = 0.1  # of a block


class Average:
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
        self._buckets: dict[int, tuple[float, Average]] = {}  # bucket -> (average rows, average seconds)
        self._points: list[tuple[float, float]] = []  # the same, sorted by rows

    def observe(self, num_rows: int, seconds: float) -> None:
        bucket = num_rows.bit_length()
        rows, average = self._buckets.get(bucket) or (float(num_rows), Average())
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


class DraftCost:
    """Owns how long a drafter takes for a block by its guesses: a fixed part, to read what was committed, and a slope.

    A straight line by least squares over the latest blocks, with a faint first point that no guesses take no time: as
    long as all blocks are of one length, that is all there is to tell the two parts apart.
    """

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._weight = self._guesses = self._seconds = self._squares = self._products = 0.0  # decaying sums

    def observe(self, num_guesses: int, seconds: float) -> None:
        seconds = min(seconds, _MAX_S)
        if 0 < self._weight <= _SETTLED:
            if seconds * _OUTLIER < min(self.predict(num_guesses), self._seconds / self._weight):
                self._forget()  # the first started cold
        elif self._weight:  # one that stumbles would tilt the line for long
            seconds = min(seconds, _HICCUP * max(self.predict(num_guesses), self._seconds / self._weight, _JITTER_S))
        self._weight = _LINE_DECAY * self._weight + 1
        self._guesses = _LINE_DECAY * self._guesses + num_guesses
        self._seconds = _LINE_DECAY * self._seconds + seconds
        self._squares = _LINE_DECAY * self._squares + num_guesses * num_guesses
        self._products = _LINE_DECAY * self._products + num_guesses * seconds

    def predict(self, num_guesses: int) -> float:
        """0 before the first block."""
        if not self._weight:
            return 0.0
        weight = self._weight + _ORIGIN_WEIGHT
        slope = (weight * self._products - self._guesses * self._seconds) / (
            weight * self._squares - self._guesses * self._guesses
        )
        slope = min(max(slope, 0.0), self._seconds / self._guesses)  # neither part is negative
        return (self._seconds - slope * self._guesses) / weight + slope * num_guesses
