"""Policies for tests: short ways to write one, and strategies that draw any."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from cluster.control.document import SCHEMA, parse_document
from cluster.control.policy import PolicyContext, SpeculationPolicy
from cluster.messages.request import Drafter, SpeculationOverride


def document_values(*rules: Mapping[str, object], **fields: object) -> dict[str, object]:
    """A document as plain values; rules without an id get one."""
    named = [{"id": f"rule-{i}"} | dict(rule) for i, rule in enumerate(rules)]
    return {"schema": SCHEMA, "rules": named} | fields


def policy(*rules: Mapping[str, object], version: int = 1, **fields: object) -> SpeculationPolicy:
    """A policy in force."""
    return SpeculationPolicy.of(parse_document(document_values(*rules, **fields)), version)


def default_settings(
    *, enabled: bool = True, max_draft_tokens: int = 5, drafter: Drafter = Drafter.AUTO
) -> dict[str, object]:
    """The `default` section."""
    return {"enabled": enabled, "max_draft_tokens": max_draft_tokens, "drafter": drafter.value}


def default_only(version: int = 1, **settings: Any) -> SpeculationPolicy:
    """A policy without rules."""
    return policy(version=version, default=default_settings(**settings))


# --- any document, any context: few names, so that things meet ------------------------------------------------------

_NAMES = st.sampled_from(["a", "b", "c"])
_TEMPERATURES = st.sampled_from([0.0, 0.3, 0.7, 1.0, 2.0])
_LENGTHS = st.sampled_from([0, 1, 10, 11, 4096])
_GUESSES = st.sampled_from([1, 4, 8, 32])


def _some(**strategies: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=strategies)


def _ranges(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    both = st.tuples(values, values).map(lambda pair: {"min": min(pair), "max": max(pair)})
    return st.one_of(values.map(lambda value: {"min": value}), values.map(lambda value: {"max": value}), both)


def _lists() -> st.SearchStrategy[list[str]]:
    return st.lists(_NAMES, min_size=1, max_size=2)


MATCHES = _some(
    models=_lists(),
    tenants=_lists(),
    workloads=_lists(),
    key_labels=_lists(),
    draft_versions=_lists(),
    temperature=_ranges(_TEMPERATURES),
    prompt_tokens=_ranges(_LENGTHS),
)
_EFFECTS = _some(drafter=st.sampled_from(["auto", "model", "ngram"]), max_draft_tokens=_GUESSES)
_PERCENTS = st.one_of(st.sampled_from([0, 0.01, 1, 50, 99.99, 100]), st.integers(0, 10_000).map(lambda n: n / 100))
_DENIES = st.fixed_dictionaries({"action": st.just("deny")}, optional={"match": MATCHES})
_ALLOWS = st.fixed_dictionaries(
    {"action": st.just("allow")},
    optional={
        "match": MATCHES,
        "percent": _PERCENTS,
        "variant": st.sampled_from(["canary", "wide", "narrow"]),
        "control": st.sampled_from(["default", "plain"]),
        "effect": _EFFECTS,
    },
)
_KILLS = _some(all=st.just(False), models=st.just(["c"]), tenants=st.just(["c"]), draft_versions=st.just(["c"]))
_DEFAULTS = _some(enabled=st.booleans(), drafter=st.sampled_from(["auto", "model", "ngram"]), max_draft_tokens=_GUESSES)


@st.composite
def documents(draw: st.DrawFn, rules: st.SearchStrategy[dict[str, Any]] | None = None) -> dict[str, object]:
    """Any valid document, as plain values."""
    chosen = draw(st.lists(st.one_of(_DENIES, _ALLOWS, _ALLOWS) if rules is None else rules, max_size=6))
    fields = draw(
        _some(
            salt=st.sampled_from(["v1", "2027-01"]),
            targeting_key=st.sampled_from(["user", "session", "tenant"]),
            kill=_KILLS,
            default=_DEFAULTS,
        )
    )
    return document_values(*chosen, **fields)


OVERRIDES = st.builds(
    SpeculationOverride,
    st.sampled_from([None, True, False]),
    st.none() | _GUESSES,
    st.none() | st.sampled_from(list(Drafter)),
)
CONTEXTS = st.builds(
    PolicyContext,
    model=_NAMES,
    tenant=_NAMES,
    workload=_NAMES,
    request_id=st.uuids().map(str),
    user=st.none() | st.text(max_size=4),
    session=st.none() | st.text(max_size=4),
    key_label=st.none() | _NAMES,
    temperature=_TEMPERATURES,
    prompt_tokens=_LENGTHS,
    draft_version=st.none() | _NAMES,
    override=st.one_of(st.just(SpeculationOverride()), OVERRIDES),
    available=st.sampled_from([frozenset({Drafter.NGRAM}), frozenset({Drafter.NGRAM, Drafter.MODEL})]),
)
