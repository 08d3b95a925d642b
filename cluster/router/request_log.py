"""One line of JSON for each request that has ended, without anything of its text, its user or its session."""

from __future__ import annotations

import json
import logging
from typing import Final

from cluster.router.observer import RequestFinished

REQUEST_LOGGER: Final = "paceline.requests"  # at level INFO; silent until somebody sets it so

logger = logging.getLogger(REQUEST_LOGGER)


def log_finished(event: RequestFinished) -> None:
    """Say how a request ended, and which part of the policy it followed."""
    if logger.isEnabledFor(logging.INFO):
        logger.info(json.dumps(_fields(event)))


def _fields(event: RequestFinished) -> dict[str, object]:
    stats, policy = event.stats, event.stats.policy
    decided = (
        {}
        if policy is None
        else {
            "policy_version": policy.version,
            "rule": policy.rule,
            "variant": policy.variant,
            "reason": policy.reason,
        }
    )
    return {
        "request_id": event.request_id,
        "model": event.labels.model,
        "tenant": event.labels.tenant,
        "workload": event.labels.workload,
        "outcome": event.outcome.value,
        "ttft_s": event.ttft_s,
        "tpot_s": event.tpot_s,
        "e2e_s": event.e2e_s,
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.completion_tokens,
        "acceptance_length": stats.acceptance_length,
        "drafter": event.drafter.value,
        **decided,
    }
