"""Chooses the replica a request goes to. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from zlib import crc32

from cluster.messages.rounds import PoolLoad


@dataclass(frozen=True, slots=True)
class Candidate:
    """A connected replica, as the router sees it now.

    num_in_flight counts this router's own requests there; `load` is the replica's last report, which lags but covers
    every router.
    """

    key: str
    num_in_flight: int = 0
    load: PoolLoad | None = None


def filter_ready(candidates: Iterable[Candidate], excluded: Collection[str] = ()) -> list[Candidate]:
    """Those that take new requests and have not failed this one already."""
    return [
        candidate
        for candidate in candidates
        if candidate.key not in excluded and not (candidate.load is not None and candidate.load.draining)
    ]


def score_load(candidate: Candidate) -> tuple[int, float]:
    """Requests there, then the share of KV in use: lower is better."""
    load = candidate.load
    if load is None:
        return candidate.num_in_flight, 0.0
    used = 1.0 - load.num_free_blocks / load.num_total_blocks if load.num_total_blocks else 0.0
    return max(candidate.num_in_flight, load.num_running + load.num_waiting), used


def pick(candidates: Iterable[Candidate], request_id: str, excluded: Collection[str] = ()) -> str | None:
    """The least loaded ready replica's key; equals are spread by the request's id. None: there is none."""

    def rank(candidate: Candidate) -> tuple[int, float, int]:
        return *score_load(candidate), crc32(f"{request_id}/{candidate.key}".encode())

    ready = filter_ready(candidates, excluded)
    return min(ready, key=rank).key if ready else None
