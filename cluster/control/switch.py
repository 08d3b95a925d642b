"""`paceline speculation on|off`: the changes that one switch makes to a policy document. Pure.

Off for everything, a model, a tenant or a draft version goes into `kill`; off for a combination becomes a deny rule.
On takes back what off has done; if the document would still leave it off, or a percentage is wanted, an allow rule
goes in front. Rules that switches have made are named after what they switch, so that a later switch finds them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import yaml

from cluster.control.applicable import check_room, label_flaws
from cluster.control.document import DocumentError, Flaw, PolicyDocument, parse_document
from cluster.control.document_text import MAX_DOCUMENT_BYTES

RULE_PREFIX: Final = "switch-"
_DIMENSIONS: Final = ("models", "tenants", "draft_versions")


@dataclass(frozen=True, slots=True)
class SpeculationSwitch:
    """Speculation on or off for those that all of the given names hold for; none given: for everyone.

    percent: on for this share of them, and off for the rest; only with `enabled`.
    """

    enabled: bool
    model: str | None = None
    tenant: str | None = None
    draft_version: str | None = None
    percent: float | None = None

    @property
    def names(self) -> dict[str, str]:
        """What is given, by the name of its list in the document."""
        given = zip(_DIMENSIONS, (self.model, self.tenant, self.draft_version), strict=True)
        return {dimension: name for dimension, name in given if name is not None}

    @property
    def only_takes_back(self) -> bool:
        """Whether it undoes what another switch has done, and asks for nothing new."""
        return self.enabled and self.percent is None

    @property
    def rule_id(self) -> str:
        """The id of the rule that such a switch makes; short and legal whatever the names are."""
        names = "\0".join(f"{dimension}\0{name}" for dimension, name in self.names.items())
        return RULE_PREFIX + hashlib.sha256(names.encode()).hexdigest()[:16]


def switched(document: PolicyDocument, switch: SpeculationSwitch) -> PolicyDocument:
    """The document after the switch. Raises DocumentError for a switch that makes no sense, or a document too full."""
    if switch.percent is not None and not switch.enabled:
        raise DocumentError([Flaw("percent", "goes with on, not with off")])
    if switch.tenant is not None and not switch.only_takes_back and (flaws := label_flaws("tenant", [switch.tenant])):
        raise DocumentError(flaws)
    values: dict[str, Any] = document.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    rules = [rule for rule in values.pop("rules", []) if rule["id"] != switch.rule_id]
    kill: dict[str, Any] = values.pop("kill", {})
    made = _turn_on(document, switch, kill) if switch.enabled else _turn_off(switch, kill)
    values |= {"kill": kill} if kill else {}
    changed = parse_document(values | {"rules": ([made] if made else []) + rules})
    if switch.enabled and len(changed.rules) > len(document.rules):
        check_room(changed)
    return changed


def as_text(document: PolicyDocument) -> str:
    """As an operator would write it; where that is too long, in canonical form."""
    text = as_yaml(document)
    return text if len(text.encode()) <= MAX_DOCUMENT_BYTES else document.canonical_json()


def as_yaml(document: PolicyDocument) -> str:
    """The document as an operator would write it: no defaults, in the order of the schema."""
    values = document.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return yaml.safe_dump({"schema": values.pop("schema"), **values}, sort_keys=False, allow_unicode=True)


def _turn_off(switch: SpeculationSwitch, kill: dict[str, Any]) -> Mapping[str, object] | None:
    names = switch.names
    if not names:
        kill["all"] = True
        return None
    if len(names) > 1:
        return {"id": switch.rule_id, "match": _match(switch), "action": "deny"}
    ((dimension, name),) = names.items()
    kill[dimension] = [*(known for known in kill.get(dimension, []) if known != name), name]
    return None


def _turn_on(document: PolicyDocument, switch: SpeculationSwitch, kill: dict[str, Any]) -> Mapping[str, object] | None:
    """Nobody else is turned on: a wider kill that stands makes this an error, since the switch would do nothing."""
    names = switch.names
    if not names:
        kill.pop("all", None)
    for dimension, name in names.items():
        left = [known for known in kill.get(dimension, []) if known != name]
        if len(names) == 1 and left:
            kill[dimension] = left
        elif len(names) == 1:
            kill.pop(dimension, None)
    _refuse_if_killed(names, kill)
    if switch.percent is None and document.default.enabled:
        return None
    share = {} if switch.percent is None else {"percent": switch.percent, "control": "plain"}
    return {"id": switch.rule_id, "match": _match(switch), "action": "allow", **share}


def _refuse_if_killed(names: Mapping[str, str], kill: Mapping[str, Any]) -> None:
    if kill.get("all"):
        raise DocumentError([Flaw("kill.all", "speculation is off for everything; turn that on first")])
    for dimension, name in names.items():
        if name in kill.get(dimension, []):
            raise DocumentError(
                [Flaw(f"kill.{dimension}", f"speculation is off for all of {name!r}; turn that on first")]
            )


def _match(switch: SpeculationSwitch) -> dict[str, list[str]]:
    return {dimension: [name] for dimension, name in switch.names.items()}
