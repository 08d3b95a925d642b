"""The part of the configuration that runs on without a restart when it changes. Needs no Ray.

Serve restarts every replica of an application whose builder's arguments change. So in a Serve config file these fields
are no arguments but the `user_config` of the deployments that follow them, which Serve hands to running replicas.
"""

from __future__ import annotations

from typing import Any, Final

from cluster.config import ClusterConfig

LiveConfig = dict[str, dict[str, Any]]  # section -> field -> value, as in the file

LIVE_FIELDS: Final = {"speculation": ("enabled", "max_draft_tokens", "drafter"), "router": ("replicas",)}


def live_part(config: ClusterConfig) -> LiveConfig:
    """The live fields with their values."""
    written = config.model_dump(mode="json")
    return {section: {name: written[section][name] for name in names} for section, names in LIVE_FIELDS.items()}


def with_live_part(config: ClusterConfig, live: LiveConfig) -> ClusterConfig:
    """`config` with these live fields instead of its own. Raises ValidationError."""
    written = config.model_dump()
    return ClusterConfig.model_validate(
        written | {section: written[section] | dict(values) for section, values in live.items()}
    )
