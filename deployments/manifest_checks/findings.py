"""What a check says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from deployments.manifest_checks.manifests import Manifests


class ToolAbsent(RuntimeError):
    """What a check needs is not on this machine; the message is its name."""


@dataclass(frozen=True, slots=True)
class Check:
    """One named check. `problems` gives a sentence for each flaw, and raises ToolAbsent."""

    name: str
    about: str
    problems: Callable[[Manifests], Iterable[str]]


@dataclass(frozen=True, slots=True)
class Result:
    """What one check found. `absent` is what it needs and does not have; it has found nothing then."""

    check: Check
    problems: tuple[str, ...] = ()
    absent: str | None = None
