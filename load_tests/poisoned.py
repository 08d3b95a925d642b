"""A cluster with one good way to guess and one bad: n-grams, and a poisoned draft whose tokens are random and slow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from load_tests.random_draft import Shape, save_random_draft

MODEL = "smollm2-135m"

# Each of these is a rule of the policy, and the only tenant that it matches. Nobody asks as the last one.
NGRAM, POISONED, QUIET = "ngram", "poisoned", "quiet"

# A text that goes on as it began, which n-grams guess well.
PROMPT = "user: yes\nbot: no\n" * 6

# Four guesses of this network take 30 ms and more on two cores.
SLOW = Shape(hidden=256, intermediate=1024, num_layers=40)

# The canary is who gets the guesses; the control decodes plainly.
POLICY = f"""
schema: paceline.policy/v1
rules:
- id: {NGRAM}
  match: {{tenants: [{NGRAM}]}}
  action: allow
  percent: 0
  control: plain
  effect: {{drafter: ngram}}
- id: {POISONED}
  match: {{tenants: [{POISONED}]}}
  action: allow
  percent: 0
  control: plain
  effect: {{drafter: model}}
- id: {QUIET}
  match: {{tenants: [{QUIET}]}}
  action: allow
  percent: 0
  control: plain
"""


def poisoned_config(folder: Path) -> dict[str, Any]:
    """The demo's target with a poisoned draft. Targets wait for guesses, so that a bad draft is felt in full."""
    draft = save_random_draft(folder, MODEL, shape=SLOW)
    pool = {"kv_blocks": 600, "max_model_len": 2048, "max_num_seqs": 8, "max_queued": 64}
    model = {
        "name": MODEL,
        "target": {"path": MODEL, **pool},
        "draft": {"path": str(draft), "version": "d-bad", **pool},
    }
    speculation = {"max_draft_tokens": 4, "draft_length": "fixed", "hold": "deadline", "max_hold_ms": 500}
    return {"models": [model], "speculation": speculation}


def rollout_of(rule: str, window_s: float, looks: int, min_samples: int, percents: tuple[float, ...] = (50,)) -> str:
    """The rule's percentage is raised with an analysis after each step, and then to 100."""
    measured = "\n".join(
        f"- set_percent: {percent:g}\n- analyse: {{window_s: {window_s:g}, looks: {looks}}}" for percent in percents
    )
    return f"""
schema: paceline.rollout/v1
target: {{rule: {rule}}}
steps:
{measured}
- set_percent: 100
conditions:
- {{metric: tpot, at_most: 1.3, min_samples: {min_samples}}}
- {{metric: acceptance_length, at_least: 1.3, compare: canary, min_samples: {min_samples}}}
- {{metric: error_rate, at_most: 0.5, min_samples: {min_samples}}}
"""
