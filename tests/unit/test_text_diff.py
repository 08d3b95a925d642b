"""Diffs as histories show them."""

from __future__ import annotations

import pytest

from cluster.control.text_diff import MAX_DIFF_CHARS, unified_diff

pytestmark = pytest.mark.unit


def numbered(count: int, suffix: str = "") -> str:
    return "".join(f"line {number}{suffix}\n" for number in range(count))


def test_equal_texts_have_no_diff() -> None:
    assert unified_diff("a\n", "a\n", "1", "2") == ""


def test_a_change_is_shown_with_its_surroundings() -> None:
    diff = unified_diff(numbered(9), numbered(9).replace("line 4", "other"), "1", "2")
    assert diff.splitlines()[:3] == ["--- 1", "+++ 2", "@@ -2,7 +2,7 @@"]
    assert " line 3\n-line 4\n+other\n line 5" in diff


def test_a_difference_of_line_endings_is_said_in_words() -> None:
    assert "only line endings differ" in unified_diff("a\n", "a\r\n", "1", "2")


def test_a_small_change_of_a_long_text_is_shown() -> None:
    assert "+added" in unified_diff(numbered(20_000), numbered(20_000) + "added\n", "1", "2")


def test_texts_that_differ_everywhere_are_only_counted() -> None:
    diff = unified_diff(numbered(20_000), numbered(20_001, suffix="x"), "1", "2")
    assert diff == "--- 1\n+++ 2\n@@ 20000 lines became 20001 lines @@"


def test_a_long_diff_is_cut_between_lines_and_says_so() -> None:
    *lines, last = unified_diff("", numbered(4000), "1", "2").splitlines()
    assert last == "@@ the rest is not shown @@"
    assert lines[-1] in {f"+line {number}" for number in range(4000)}
    assert sum(len(line) + 1 for line in lines) <= MAX_DIFF_CHARS
