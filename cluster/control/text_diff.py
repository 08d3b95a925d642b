"""The difference of two texts, as people read it, bounded in size and in time."""

from __future__ import annotations

import difflib
from itertools import takewhile

MAX_DIFF_CHARS = 32 * 1024
_MAX_CHANGED_LINES = 4000  # between the first and the last difference; the comparison's worst case is their square


def unified_diff(old: str, new: str, old_name: str, new_name: str) -> str:
    """A unified diff with three lines of context; empty if the texts are equal.

    Where too much differs to compare line by line it only counts, and a long diff is cut, saying so.
    """
    if old == new:
        return ""
    old_lines, new_lines = old.splitlines(), new.splitlines()
    equal = _equal_ends(old_lines, new_lines)
    if max(len(old_lines), len(new_lines)) - equal > _MAX_CHANGED_LINES:
        return f"--- {old_name}\n+++ {new_name}\n@@ {len(old_lines)} lines became {len(new_lines)} lines @@"
    diff = "\n".join(difflib.unified_diff(old_lines, new_lines, old_name, new_name, lineterm=""))
    return _cut(diff or f"--- {old_name}\n+++ {new_name}\n@@ only line endings differ @@")


def _equal_ends(old: list[str], new: list[str]) -> int:
    """How many lines are equal at the start and, after them, at the end."""
    head = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(old, new, strict=False)))
    tails = zip(reversed(old[head:]), reversed(new[head:]), strict=False)
    return head + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], tails))


def _cut(diff: str) -> str:
    if len(diff) <= MAX_DIFF_CHARS:
        return diff
    kept = diff[:MAX_DIFF_CHARS].rpartition("\n")[0]
    return f"{kept}\n@@ the rest is not shown @@"
