"""What a policy document must have that people or rollouts put in force, beyond being one. Pure.

A document in the store may break these rules: switches that turn something off use the room that is kept for them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

from cluster.control.document import MAX_NAMES, MAX_RULES, Match, PolicyDocument
from cluster.control.document_text import MAX_DOCUMENT_BYTES
from cluster.control.flaws import WHOLE, DocumentError, Flaw

ROOM_BYTES: Final = 4096  # of a document, left free for switches: a kill switch must always fit
ROOM_ENTRIES: Final = 16  # likewise, of its rules and of each list of `kill`

_LABEL: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")  # what requests can have


def check_applicable(document: PolicyDocument) -> None:
    """Raises DocumentError for one that leaves no room for switches, or has a name that no request can have."""
    if flaws := [*_room_flaws(document), *_name_flaws(document)]:
        raise DocumentError(flaws)


def check_room(document: PolicyDocument) -> None:
    """Raises DocumentError for a document that a switch, or a rollout that fails, might not fit into."""
    if flaws := list(_room_flaws(document)):
        raise DocumentError(flaws)


def label_flaws(path: str, names: Iterable[str]) -> list[Flaw]:
    """What is wrong with names of tenants, workloads or key labels: a switch or rule for such a one does nothing."""
    limit = "1 to 64 letters, digits, dots, dashes or underscores"
    return [Flaw(path, f"no request can have {name!a}", limit) for name in names if _LABEL.fullmatch(name) is None]


def _room_flaws(document: PolicyDocument) -> Iterator[Flaw]:
    kill = document.kill
    lists = {"models": kill.models, "tenants": kill.tenants, "draft_versions": kill.draft_versions}
    used = [
        (WHOLE, len(document.canonical_json().encode()), MAX_DOCUMENT_BYTES - ROOM_BYTES, "bytes in canonical form"),
        ("rules", len(document.rules), MAX_RULES - ROOM_ENTRIES, "rules"),
        *((f"kill.{name}", len(names or ()), MAX_NAMES - ROOM_ENTRIES, "names") for name, names in lists.items()),
    ]
    for path, number, limit, unit in used:
        if number > limit:
            yield Flaw(path, f"{number} {unit} leave no room for switches", f"at most {limit}")


def _name_flaws(document: PolicyDocument) -> Iterator[Flaw]:
    yield from label_flaws("kill.tenants", document.kill.tenants or ())
    for index, rule in enumerate(document.rules):
        yield from _match_flaws(f"rules[{index}].match", rule.match)


def _match_flaws(path: str, match: Match) -> Iterator[Flaw]:
    labels = {"tenants": match.tenants, "workloads": match.workloads, "key_labels": match.key_labels}
    for name, values in labels.items():
        yield from label_flaws(f"{path}.{name}", values or ())
