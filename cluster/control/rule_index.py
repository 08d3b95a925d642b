"""Which rules match a request: sets of rules as the bits of integers, so that a hundred rules cost a few look-ups.

Bit i stands for rule i. For each kind of name, every name that some rule lists has the set of rules that accept it;
for each kind of number, every stretch between two ends of ranges has. What matches is the intersection over all kinds.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.control.document import Match, TemperatureRange, TokenRange

_NAMES_OF: tuple[Callable[[Match], tuple[str, ...] | None], ...] = (
    lambda match: match.tenants,
    lambda match: match.models,
    lambda match: match.workloads,
    lambda match: match.key_labels,
    lambda match: match.draft_versions,
)


class Traits(Protocol):
    """What a `match` section looks at in a request."""

    @property
    def tenant(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def workload(self) -> str: ...
    @property
    def key_label(self) -> str | None: ...
    @property
    def draft_version(self) -> str | None: ...
    @property
    def temperature(self) -> float: ...
    @property
    def prompt_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True)
class _Names:
    """One kind of name."""

    accepting: dict[str, int]  # name → rules that accept it, those included that ask for none
    unasked: int  # rules that ask for none

    @classmethod
    def of(cls, lists: Sequence[tuple[str, ...] | None]) -> _Names:
        unasked = _bits(i for i, names in enumerate(lists) if names is None)
        accepting: dict[str, int] = {}
        for i, names in enumerate(lists):
            for name in names or ():
                accepting[name] = accepting.get(name, unasked) | 1 << i
        return cls(accepting, unasked)

    def rules(self, name: str | None) -> int:
        return self.unasked if name is None else self.accepting.get(name, self.unasked)


@dataclass(frozen=True, slots=True)
class _Ranges:
    """One kind of number, cut at every end of a range: below the first, at it, between it and the second, and so on."""

    edges: tuple[float, ...]  # k of them, sorted
    accepting: tuple[int, ...]  # 2k + 1: even between edges, odd at one

    @classmethod
    def of(cls, ranges: Sequence[TemperatureRange | TokenRange | None]) -> _Ranges:
        ends = [(None, None) if limits is None else (limits.min, limits.max) for limits in ranges]
        edges = sorted({end for pair in ends for end in pair if end is not None})
        at = {edge: 2 * i + 1 for i, edge in enumerate(edges)}
        starting, ending = [0] * (2 * len(edges) + 1), [0] * (2 * len(edges) + 1)
        for i, (low, high) in enumerate(ends):
            starting[0 if low is None else at[low]] |= 1 << i
            ending[2 * len(edges) if high is None else at[high]] |= 1 << i
        return cls(tuple(edges), tuple(_sweep(starting, ending)))

    def rules(self, value: float) -> int:
        return self.accepting[bisect_left(self.edges, value) + bisect_right(self.edges, value)]


def _sweep(starting: Sequence[int], ending: Sequence[int]) -> Iterator[int]:
    inside = 0
    for starts, ends in zip(starting, ending, strict=True):
        inside |= starts
        yield inside
        inside &= ~ends


@dataclass(frozen=True, slots=True)
class RuleIndex:
    """The `match` sections of a document's rules, ready for use."""

    names: tuple[_Names, ...]
    temperatures: _Ranges
    prompt_tokens: _Ranges

    @classmethod
    def of(cls, matches: Sequence[Match]) -> RuleIndex:
        """Build it once per document."""
        names = tuple(_Names.of([names_of(match) for match in matches]) for names_of in _NAMES_OF)
        temperatures = _Ranges.of([match.temperature for match in matches])
        return cls(names, temperatures, _Ranges.of([match.prompt_tokens for match in matches]))

    def matching(self, traits: Traits) -> int:
        """The rules that match, as bits."""
        tenant, model, workload, key_label, draft_version = self.names
        found = tenant.rules(traits.tenant) & model.rules(traits.model) & workload.rules(traits.workload)
        found &= key_label.rules(traits.key_label) & draft_version.rules(traits.draft_version)
        return found & self.temperatures.rules(traits.temperature) & self.prompt_tokens.rules(traits.prompt_tokens)


def in_order(rules: int) -> Iterator[int]:
    """The numbers of the bits that are set, lowest first."""
    while rules:
        lowest = rules & -rules
        yield lowest.bit_length() - 1
        rules ^= lowest


def _bits(numbers: Iterator[int]) -> int:
    return sum(1 << i for i in numbers)
