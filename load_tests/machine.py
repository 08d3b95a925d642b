"""What a measurement was made on."""

from __future__ import annotations

import os
import platform


def machine_facts() -> str:
    """Processor, cores and how busy they are, in one line."""
    load = ", ".join(f"{average:.1f}" for average in os.getloadavg())
    return f"{_processor()}, {os.cpu_count()} cores, load {load} (1, 5, 15 min), Python {platform.python_version()}"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
            return next(names, platform.machine())
    except OSError:
        return platform.machine()
