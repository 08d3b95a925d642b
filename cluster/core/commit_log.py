"""Puts the target's commits in order: each token is taken once, however often and in whatever order it arrives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cluster.messages.rounds import Commit

MAX_EARLY_COMMITS = 64  # commits kept while an earlier one is missing; a target never runs further ahead of its stream


class CommitLog:
    """Owns one request's tokens, prompt included, as far as the router has seen them committed.

        tokens   | prompt | output taken so far |   gap   | early commits ... |
        0                                   committed_len

    Output is a function of the request alone, so a repeated commit, or one of an earlier attempt on another replica,
    says nothing but what is already here or what comes next: overlaps are cut, never compared.
    """

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        self.token_ids: list[int] = list(prompt_token_ids)
        self.prompt_len = len(self.token_ids)
        self._early: dict[int, Commit] = {}

    @property
    def committed_len(self) -> int:
        return len(self.token_ids)

    @property
    def output_token_ids(self) -> tuple[int, ...]:
        return tuple(self.token_ids[self.prompt_len :])

    def is_early(self, commit: Commit) -> bool:
        return commit.base_len > self.committed_len

    def take(self, commit: Commit) -> list[Commit]:
        """The commits that can be taken now, in order, cut to what is new. Empty: repeated, or kept for later."""
        if self.is_early(commit):
            self._keep(commit)
            return []
        taken = self._take_next(commit)
        while taken and (waiting := self._pop_reachable()) is not None:
            taken += self._take_next(waiting)
        return taken

    def _take_next(self, commit: Commit) -> list[Commit]:
        num_known = self.committed_len - commit.base_len
        fresh = commit.token_ids[num_known:]
        ends_here = commit.finish_reason is not None and num_known == len(commit.token_ids)
        if not fresh and not ends_here:
            return []
        self.token_ids.extend(fresh)
        if num_known == 0:
            return [commit]
        logprobs = None if commit.logprobs is None else commit.logprobs[num_known:]
        return [replace(commit, base_len=commit.base_len + num_known, token_ids=fresh, logprobs=logprobs)]

    def _keep(self, commit: Commit) -> None:
        if len(self._early) < MAX_EARLY_COMMITS:
            self._early[commit.base_len] = commit

    def _pop_reachable(self) -> Commit | None:
        reachable = [base_len for base_len in self._early if base_len <= self.committed_len]
        return self._early.pop(min(reachable)) if reachable else None
