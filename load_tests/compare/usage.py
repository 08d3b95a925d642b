"""What a turn cost the machine: memory, processor time of the engine, and what others took from the same cores."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from load_tests.compare import process_tree


@dataclass(frozen=True, slots=True)
class Usage:
    """Of one engine while it did one load."""

    peak_rss_mib: float  # since the first turn; pages that processes share count once for each
    pss_mib: float  # at the end; a page that n processes share counts 1/n for each
    engine_cores: float  # cores that its processes kept busy, on average
    others_share: (
        float  # of the cores' time: taken by programs that are neither engine nor client, or by the hypervisor
    )


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Processor times so far, in seconds."""

    wall: float
    engine: float
    client: float
    busy: float  # of the cores, whoever used them

    @classmethod
    def read(cls, root: int, cores: tuple[int, ...]) -> CpuTimes:
        """`root` is the engine's first process."""
        busy = busy_s(Path("/proc/stat").read_text(), cores)
        return cls(time.perf_counter(), process_tree.cpu_s(root), time.process_time(), busy)

    def engine_cores_since(self, before: CpuTimes) -> float:
        return (self.engine - before.engine) / (self.wall - before.wall)

    def others_share_since(self, before: CpuTimes, num_cores: int) -> float:
        ours = self.engine - before.engine + self.client - before.client
        others = self.busy - before.busy - ours
        return max(0.0, others) / ((self.wall - before.wall) * num_cores)  # below 0: ticks are coarse


def busy_s(stat: str, cores: tuple[int, ...]) -> float:
    """Seconds in which `cores` were not idle, given the text of /proc/stat; stolen time counts as busy."""
    lines = (line.split() for line in stat.splitlines())
    times = {line[0]: list(map(int, line[1:9])) for line in lines if line[0].startswith("cpu")}
    chosen = [times[f"cpu{core}"] for core in cores]
    return sum(sum(fields) - fields[3] - fields[4] for fields in chosen) / os.sysconf("SC_CLK_TCK")  # idle, iowait
