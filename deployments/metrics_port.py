"""Where a replica serves its metrics: on the port that the environment names, else on any free one."""

from __future__ import annotations

import os
from collections.abc import Mapping

METRICS_PORT_VARIABLE = "PACELINE_METRICS_PORT"  # a pod's, where one pod holds one replica


def metrics_port(environment: Mapping[str, str] = os.environ) -> int:
    """The port; 0: any. Raises ValueError for one that is none."""
    port = int(environment.get(METRICS_PORT_VARIABLE, "0"))
    if not 0 <= port <= 65535:
        raise ValueError(f"{METRICS_PORT_VARIABLE}: {port} is not a port")
    return port
