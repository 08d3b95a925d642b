"""A server's processes, read from /proc: their memory, and stopping, freezing and waking all of them."""

from __future__ import annotations

import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

_PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20


def descendants(root: int, parents: Iterable[tuple[int, int]]) -> list[int]:
    """`root` and everything that came from it, parents first, given (pid, parent's pid) of every process."""
    children: dict[int, list[int]] = defaultdict(list)
    for pid, parent in parents:
        children[parent].append(pid)
    found = [root]
    for pid in found:
        found += children[pid]
    return found


def tree(root: int) -> list[int]:
    """The process ids of `root` and of everything that came from it, parents first."""
    return descendants(root, _parents())


def rss_mib(root: int) -> float:
    """Resident memory, summed over the tree: pages that processes share count once for each of them."""
    return sum(_resident_pages(pid) for pid in tree(root)) * _PAGE_MIB


def pss_mib(root: int) -> float:
    """Resident memory of the tree in which a page that n processes share counts 1/n for each of them."""
    return sum(_pss_kib(pid) for pid in tree(root)) / 1024


def rss_mib_by_title(root: int) -> dict[str, float]:
    """Resident memory of each of the tree's processes, those of one title together."""
    sizes: dict[str, float] = defaultdict(float)
    for pid in tree(root):
        sizes[_title(pid)] += _resident_pages(pid) * _PAGE_MIB
    return sizes


def cpu_s(root: int) -> float:
    """Processor time that the tree has used, with that of children that have ended."""
    fields = filter(None, map(_stat, tree(root)))
    return sum(sum(map(int, stat[11:15])) for stat in fields) / _TICKS  # utime, stime, cutime, cstime


def freeze(root: int, patience_s: float = 5.0) -> None:
    """Stop every process of the tree, those started meanwhile included; returns when none of them runs any more."""
    frozen: set[int] = set()
    while fresh := [pid for pid in tree(root) if pid not in frozen]:
        _signal(fresh, signal.SIGSTOP)
        frozen.update(fresh)
    deadline = time.monotonic() + patience_s
    while not all(map(_stands, frozen)) and time.monotonic() < deadline:
        time.sleep(0.001)


def wake(root: int) -> None:
    """Let a frozen tree run again: children first, so that no parent finds them silent."""
    _signal(reversed(tree(root)), signal.SIGCONT)


def end(roots: Iterable[int], patience_s: float = 30.0) -> None:
    """Ask each root to end, and kill what is left of the trees afterwards. Parents still have to wait for the roots."""
    roots = tuple(roots)
    members = [pid for root in roots for pid in tree(root)]
    _signal(reversed(members), signal.SIGCONT)
    _signal(roots, signal.SIGTERM)
    deadline = time.monotonic() + patience_s
    while any(map(_runs, members)) and time.monotonic() < deadline:
        time.sleep(0.05)
    _signal(filter(_runs, members), signal.SIGKILL)


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _parents() -> list[tuple[int, int]]:
    pids = [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()]
    found = ((pid, _stat(pid)) for pid in pids)
    return [(pid, int(fields[1])) for pid, fields in found if fields]


def _runs(pid: int) -> bool:
    fields = _stat(pid)
    return bool(fields) and fields[0] not in "ZX"


def _stands(pid: int) -> bool:
    """Whether a process is stopped, or has ended: one that is told to stop first leaves what the kernel does for it."""
    fields = _stat(pid)
    return not fields or fields[0] in "TtZX"


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name: state, parent's pid, …; empty if the process has gone."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _title(pid: int) -> str:
    """What a process calls itself: a name that it has set, or its program and the first argument."""
    try:
        arguments = (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return " ".join(Path(argument).name for argument in arguments[:2]).strip()


def _resident_pages(pid: int) -> int:
    try:
        return int((_PROC / str(pid) / "statm").read_text().split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _pss_kib(pid: int) -> int:
    try:
        lines = (_PROC / str(pid) / "smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
