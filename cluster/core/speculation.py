"""The router's half of a draft round: what to do with each commit and each block, as a list of actions.

    target ── Commit ──▶ SpeculationSession ── Committed ──▶ draft
    target ◀── Propose ── SpeculationSession ◀── DraftBlock ── draft

Nothing here can fail a request: whatever a draft does, commits go to the client, and the target learns when no guess
will come.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from cluster.core.commit_log import CommitLog
from cluster.core.draft_watch import DraftWatch, Patience
from cluster.core.ngram import NgramIndex
from cluster.messages.request import Drafter, SamplingParams
from cluster.messages.rounds import Commit, Committed, DraftBlock, Open

# Tokens that a draft may lag behind while none of its guesses are wanted: what it can read in a moment.
_MAX_UNTOLD = 32


class FallbackCause(StrEnum):
    """Why a request stopped using a drafter."""

    LOST = "draft_lost"  # the stream to it ended
    REFUSED = "draft_refused"
    SLOW = "draft_slow"  # silent or late for too long
    WITHDRAWN = "withdrawn"  # policy or availability changed while it was in use
    UNAVAILABLE = "draft_unavailable"  # wanted, but no replica is ready


class DropCause(StrEnum):
    """Why a frame was dropped."""

    OLD_BLOCK = "old_block"  # guesses for tokens that came out differently, or twice the same
    OLD_EPOCH = "old_epoch"  # of a session that is closed
    EARLY_BLOCK = "early_block"  # guesses after tokens that nobody committed yet
    REPEATED_COMMIT = "repeated_commit"


@dataclass(frozen=True, slots=True)
class Propose:
    """Send this to the target."""

    block: DraftBlock


@dataclass(frozen=True, slots=True)
class ToDraft:
    """Send this to the open draft session."""

    command: Committed


@dataclass(frozen=True, slots=True)
class OpenDraft:
    """Pick a draft replica and open a session there."""

    command: Open


@dataclass(frozen=True, slots=True)
class CloseDraft:
    """Close the draft session; `gives_up`: its replica is not to be asked again for this request."""

    gives_up: bool = False


@dataclass(frozen=True, slots=True)
class Emit:
    """Give these tokens to the client. `drafter`: whose guesses the commit has verified, NONE if it has none."""

    commit: Commit
    drafter: Drafter = Drafter.NONE


@dataclass(frozen=True, slots=True)
class Fallback:
    """Count a lost drafter."""

    cause: FallbackCause


@dataclass(frozen=True, slots=True)
class RoundDone:
    """Count an answered round."""

    drafter: Drafter
    round_trip_s: float
    draft_time_s: float
    num_draft_tokens: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """Count a dropped frame."""

    cause: DropCause


Action = Propose | ToDraft | OpenDraft | CloseDraft | Emit | Fallback | RoundDone | Dropped


@dataclass(frozen=True, slots=True)
class SpeculationLimits:
    """The bounds of every session of a router."""

    patience: Patience = field(default_factory=Patience)
    ngram_min_match: int = 2
    ngram_max_match: int = 5


class SpeculationSession:
    """Owns one request's committed tokens and the state of the guesses for them.

    Actions are to be carried out in order: what the pools wait for comes first, what the client sees after it.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: tuple[int, ...],
        sampling: SamplingParams,
        tenant: str = "default",
        limits: SpeculationLimits | None = None,
    ) -> None:
        self._request_id = request_id
        self._sampling = sampling
        self._tenant = tenant
        self._limits = limits or SpeculationLimits()
        self._log = CommitLog(prompt_token_ids)
        self._drafter = Drafter.NONE
        self._max_draft_tokens = 0
        self._epoch = 0
        self._watch = DraftWatch(self._limits.patience)
        self._ngram: NgramIndex | None = None
        self._told_len = 0  # committed tokens that the open draft session knows of
        self._proposers: list[tuple[int, Drafter]] = []  # who proposes, from which committed length on

    @property
    def drafter(self) -> Drafter:
        """What guesses now: MODEL, NGRAM or NONE."""
        return self._drafter

    @property
    def epoch(self) -> int:
        """Number of the latest draft session; the first is 1."""
        return self._epoch

    @property
    def output_token_ids(self) -> tuple[int, ...]:
        """Everything committed after the prompt."""
        return self._log.output_token_ids

    @property
    def committed_len(self) -> int:
        """Prompt + output committed."""
        return self._log.committed_len

    def on_decision(self, drafter: Drafter, max_draft_tokens: int) -> list[Action]:
        """Use this drafter from now on; NONE stops speculation on the spot."""
        self._max_draft_tokens = max_draft_tokens
        if drafter is self._drafter:
            return []
        return [*self._leave(drafter), *self._enter(drafter)]

    def on_commit(self, commit: Commit, now: float) -> list[Action]:
        """Tokens from the target, in any order, any number of times."""
        if self._log.is_early(commit):
            self._log.take(commit)
            return []
        taken = self._log.take(commit)
        if not taken:
            return [Dropped(DropCause.REPEATED_COMMIT)]
        *overtaken, latest = taken
        actions: list[Action] = []
        for commit in overtaken:  # the target has gone on from these: it wants no guesses after them any more
            actions += self._forward(replace(commit, next_draft_len=0, longest_draft_len=0), now)
        return [*actions, *self._forward(latest, now), *map(self._emit, taken)]

    def on_block(self, block: DraftBlock, now: float) -> list[Action]:
        """Guesses from the draft session: proposed if they still apply."""
        if block.epoch != self._epoch or self._drafter is not Drafter.MODEL:
            return [Dropped(DropCause.OLD_EPOCH)]
        self._watch.hear()
        if block.committed_len > self.committed_len:
            return [Dropped(DropCause.EARLY_BLOCK)]
        if block.committed_len == self._watch.asked_len:
            return self._finish_round(block, now)
        if not self._is_of_use(block):
            return [Dropped(DropCause.OLD_BLOCK)]
        self._watch.help_late()
        return [self._propose(self._cut(block), Drafter.MODEL)]

    def on_draft_lost(self, cause: FallbackCause) -> list[Action]:
        """The draft session is gone; the request goes on without until the next decision."""
        if self._drafter is not Drafter.MODEL:
            return []
        self._drafter = Drafter.NONE
        return [*self._stop_waiting(), CloseDraft(cause is FallbackCause.SLOW), Fallback(cause)]

    def finish(self) -> list[Action]:
        """The request is over, for whatever reason: free the draft's side."""
        was_open = self._drafter is Drafter.MODEL
        self._drafter = Drafter.NONE
        self._ngram = None
        return [CloseDraft()] if was_open else []

    # --- proposals ---------------------------------------------------------------------------------------------------

    def _propose(self, block: DraftBlock, drafter: Drafter) -> Propose:
        """Remember whose guesses they are: by the time they are verified, another drafter may have taken over."""
        if block.token_ids and (not self._proposers or self._proposers[-1][1] is not drafter):
            self._proposers.append((block.committed_len, drafter))
        return Propose(block)

    def _emit(self, commit: Commit) -> Emit:
        if commit.num_draft_tokens == 0:
            return Emit(commit)
        earlier = (drafter for first_len, drafter in reversed(self._proposers) if first_len <= commit.base_len)
        return Emit(commit, next(earlier, Drafter.NONE))

    # --- a commit ----------------------------------------------------------------------------------------------------

    def _forward(self, commit: Commit, now: float) -> list[Action]:
        if commit.finish_reason is not None:
            return self.finish()
        num_wanted = min(commit.next_draft_len, self._max_draft_tokens)
        if self._drafter is Drafter.MODEL:
            return self._ask_draft(commit, num_wanted, now)
        if self._ngram is not None:
            self._ngram.extend(commit.token_ids)
        return self._guess(num_wanted) if commit.next_draft_len else []

    def _ask_draft(self, commit: Commit, num_wanted: int, now: float) -> list[Action]:
        """Tell the draft of everything since it was told last: when guesses are wanted, and now and then while not."""
        self._watch.pass_by()
        if num_wanted:
            self._watch.ask(self.committed_len, now)
        else:
            self._watch.rest()
        if self._watch.has_lost_patience(now):
            return self.on_draft_lost(FallbackCause.SLOW)
        if not num_wanted and self.committed_len - self._told_len < _MAX_UNTOLD:
            return []
        base_len, self._told_len = self._told_len, self.committed_len
        tokens = tuple(self._log.token_ids[base_len:])
        longest = min(commit.longest_draft_len, self._max_draft_tokens)
        confidence = commit.min_confidence
        return [ToDraft(Committed(self._request_id, self._epoch, base_len, tokens, num_wanted, confidence, longest))]

    def _guess(self, num_wanted: int) -> list[Action]:
        """An n-gram proposal, or word that none will come."""
        guesses = self._ngram.guess(num_wanted) if self._ngram is not None else ()
        proposal = self._propose(self._block(guesses), Drafter.NGRAM)
        return [proposal, RoundDone(Drafter.NGRAM, 0.0, 0.0, len(guesses))] if guesses else [proposal]

    def _block(self, token_ids: tuple[int, ...]) -> DraftBlock:
        return DraftBlock(self._request_id, self.committed_len, token_ids, self._epoch)

    # --- a block -----------------------------------------------------------------------------------------------------

    def _finish_round(self, block: DraftBlock, now: float) -> list[Action]:
        round_trip_s = now - self._watch.asked_at
        self._watch.answer()
        block = self._cut(block)
        done = RoundDone(Drafter.MODEL, round_trip_s, block.draft_time_s, len(block.token_ids))
        return [self._propose(block, Drafter.MODEL), done]

    def _is_of_use(self, block: DraftBlock) -> bool:
        """Whether a late block guessed right what was committed since, and more, and more is awaited.

        It goes to the target as it is, with its own stamp: that tells how long it took, and how good it was.
        """
        num_committed = self.committed_len - block.committed_len
        if self._watch.asked_len is None or not 0 < num_committed < len(block.token_ids):
            return False
        return list(block.token_ids[:num_committed]) == self._log.token_ids[block.committed_len :]

    def _cut(self, block: DraftBlock) -> DraftBlock:
        """At most as many guesses beyond what is committed as the decision allows."""
        num_committed = self.committed_len - block.committed_len
        return replace(block, token_ids=block.token_ids[: num_committed + self._max_draft_tokens])

    # --- changing drafters -------------------------------------------------------------------------------------------

    def _enter(self, drafter: Drafter) -> list[Action]:
        self._drafter = drafter
        if drafter is Drafter.NGRAM:
            limits = self._limits
            self._ngram = NgramIndex(self._log.token_ids, limits.ngram_min_match, limits.ngram_max_match)
            return []
        if drafter is not Drafter.MODEL:
            return []
        self._epoch += 1
        self._watch = DraftWatch(self._limits.patience)
        tokens = tuple(self._log.token_ids)
        self._told_len = len(tokens)
        num_prompt = self._log.prompt_len
        return [OpenDraft(Open(self._request_id, self._epoch, tokens, self._sampling, 0, self._tenant, num_prompt))]

    def _leave(self, successor: Drafter) -> list[Action]:
        left, self._drafter = self._drafter, Drafter.NONE
        self._ngram = None
        match left, successor:
            case Drafter.MODEL, _:
                return [*self._stop_waiting(), CloseDraft(), Fallback(FallbackCause.WITHDRAWN)]
            case Drafter.NGRAM, Drafter.NONE:
                return [Fallback(FallbackCause.WITHDRAWN)]
            case _:
                return []

    def _stop_waiting(self) -> list[Action]:
        """Tell a target that may be holding the sequence that no guess will come."""
        if self._watch.asked_len is None:
            return []
        self._watch.answer()
        return [Propose(self._block(()))]
