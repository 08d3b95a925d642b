"""One request's drafting state. Pure: nothing here knows of a model, a clock or a thread.

    tokens    | committed: prompt + output      | guesses                 |
    0                              committed_len                 num_tokens
    KV valid  | .......................... num_computed_tokens <= num_tokens - 1

The last token never has KV: it is the row that the next guess is sampled from. That holds for a last guess too, so
after a full acceptance the session ingests its own last guess before it drafts on.

A block ends early where its guesses are probably not all right: by the draft's own probabilities, their chance is
below what the commit asked for. What follows such guesses is hardly ever accepted, and costs the draft and the target a
row each. The target asks only where such chances mean something.
"""

from __future__ import annotations

import math
from dataclasses import replace
from enum import Enum

from cluster.core.draft_guide import draft_guide
from cluster.core.grammar import Grammars
from cluster.core.logit_history import logit_history
from cluster.core.prefix_cache import TokenChain
from cluster.core.step import SampledTokens, SamplingHistory
from cluster.messages.request import MAX_DRAFT_TOKENS, SamplingParams
from cluster.messages.rounds import Committed, DraftBlock, Open


class CommitOutcome(Enum):
    """What a `Committed` message meant to a session."""

    APPLIED = "applied"
    STALE = "stale"  # of an earlier epoch, or for a length already passed: a duplicate or a late one
    GAP = "gap"  # something before it was lost, so the session can no longer follow


class DraftSession:
    """Owns what is committed for one request, what is guessed after it, and how much of both has valid KV."""

    __slots__ = (
        "_guide", "_history", "_is_stuck", "_least_logprob", "_logprobs", "_num_prompt_tokens",
        "_scored", "_stop_token_ids", "_unscored", "chain", "epoch", "guesses", "last_used", "max_len",
        "num_computed_tokens", "num_owed", "request_id", "token_ids",
    )  # fmt: skip

    def __init__(
        self,
        message: Open,
        max_len: int,
        eos_token_ids: frozenset[int],
        now: float,
        grammars: Grammars | None = None,
    ) -> None:
        """Begin at `message.token_ids` (at least one). `max_len` bounds committed and guessed tokens together."""
        sampling = message.sampling
        self.request_id = message.request_id
        self.epoch = message.epoch
        self._unscored, self._scored = (replace(sampling, num_logprobs=number) for number in (None, 0))
        self._least_logprob = -math.inf  # of a block's guesses together, or it ends
        self.token_ids = list(message.token_ids)
        self.chain = TokenChain(message.tenant, self.token_ids)
        self.guesses: list[int] = []
        self.num_computed_tokens = 0
        self.max_len = max_len
        self.num_owed = self._limit(message.draft_len)  # guesses to ship for this committed_len; None: none asked for
        self.last_used = now
        eos = frozenset[int]() if sampling.ignore_eos else eos_token_ids
        self._stop_token_ids = eos | frozenset(sampling.stop_token_ids)
        prompt, output = message.token_ids[: message.num_prompt_tokens], message.token_ids[message.num_prompt_tokens :]
        self._history = logit_history(sampling, prompt, output, self._stop_token_ids)
        self._guide = draft_guide(grammars, sampling.grammar, eos_token_ids)
        self._num_prompt_tokens = message.num_prompt_tokens
        self._is_stuck = False  # nothing can be guessed after these guesses
        self._logprobs: list[float] = []  # of each guess

    @property
    def committed_len(self) -> int:
        return len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + len(self.guesses)

    @property
    def is_due(self) -> bool:
        """Whether a block is owed and nothing more can or need be guessed for it."""
        return self.num_owed is not None and (len(self.guesses) >= self.num_owed or self._has_ended)

    @property
    def wants_guess(self) -> bool:
        return self.num_owed is not None and not self.is_due

    @property
    def sampling(self) -> SamplingParams:
        """How the next guess is made: with its log-probability where a block's end depends on it."""
        return self._unscored if self._least_logprob == -math.inf else self._scored

    @property
    def min_logprob(self) -> float:
        """What the next guesses together may not fall below; above 0 when the guesses so far have fallen below it."""
        return self._least_logprob - sum(self._logprobs)

    @property
    def num_free_guesses(self) -> int:
        """Guesses still owed that depend on nothing but the tokens before them: no history, no grammar."""
        if self.num_owed is None or self._guide is not None or (self._history is not None and self._history.is_needed):
            return 0
        return self.num_owed - len(self.guesses)

    @property
    def num_pending_tokens(self) -> int:
        """Rows to run before the session is up to date; the last token's row only if a guess is wanted from it."""
        return self.num_tokens - self.num_computed_tokens - (0 if self.wants_guess else 1)

    def pending_rows(self, limit: int) -> tuple[int, ...]:
        """The next tokens without KV, at most `limit`, from position num_computed_tokens on."""
        start = self.num_computed_tokens
        stop = start + min(limit, self.num_pending_tokens)
        split = self.committed_len
        return tuple(self.token_ids[start:stop] + self.guesses[max(0, start - split) : max(0, stop - split)])

    def history(self) -> SamplingHistory | None:
        """What the next guess depends on beside its logits: what is committed, and every guess after it."""
        return None if self._history is None else self._history.snapshot(self.guesses)

    def token_mask(self) -> bytes | None:
        """What the request's grammar allows the next guess to be; None: anything."""
        if self._guide is None:
            return None
        return self._guide.next_mask(self.token_ids[self._num_prompt_tokens :], self.guesses)

    def commit(self, message: Committed, now: float) -> CommitOutcome:
        """Follow the target: keep guesses and KV up to the first difference, forget the rest."""
        outcome = self._judge(message)
        if outcome is CommitOutcome.APPLIED:
            self._append(message.token_ids)
            longest = message.longest_draft_len if message.draft_len and message.min_confidence else 0
            self.num_owed = self._limit(max(message.draft_len, longest))
            self._least_logprob = math.log(message.min_confidence) if message.min_confidence else -math.inf
            self.last_used = now
        return outcome

    def advance(self, num_rows: int) -> None:
        """Record that the next `num_rows` pending tokens now have KV."""
        self.num_computed_tokens += num_rows

    def skip_to(self, num_tokens: int) -> None:
        """KV for the first `num_tokens` committed tokens was cached."""
        self.num_computed_tokens = num_tokens

    def add_guess(self, token_id: int, logprob: float = 0.0) -> None:
        """Append a guess sampled from the last token's row."""
        self.guesses.append(token_id)
        self._logprobs.append(logprob)
        self._is_stuck = self._guide is not None and self._guide.ends_with(self.guesses)

    def add_guesses(self, sampled: SampledTokens) -> None:
        """Append a guess sampled from the last token's row, and those that followed in a chain, up to a block's end."""
        logprobs = [0.0] * len(sampled.token_ids) if sampled.logprobs is None else [t.logprob for t in sampled.logprobs]
        for index, guess in enumerate(zip(sampled.token_ids, logprobs, strict=True)):
            if index:
                if self._has_ended:
                    return
                self.advance(1)  # the guess before was a row of the chain
            self.add_guess(*guess)

    def get_stuck(self) -> None:
        """Record that the model has no token for the next guess, until more is committed."""
        self._is_stuck = True

    def take_block(self, now: float) -> DraftBlock:
        """The block owed for this committed_len; nothing is owed afterwards. Guesses beyond it are kept."""
        token_ids = tuple(self.guesses[: self.num_owed])
        self.num_owed = None
        return DraftBlock(self.request_id, self.committed_len, token_ids, self.epoch, now - self.last_used)

    def _limit(self, draft_len: int) -> int | None:
        return min(draft_len, MAX_DRAFT_TOKENS, max(0, self.max_len - self.committed_len)) if draft_len > 0 else None

    @property
    def _has_ended(self) -> bool:
        is_over = bool(self.guesses) and self.guesses[-1] in self._stop_token_ids
        return self._is_stuck or is_over or self.min_logprob > 0

    def _judge(self, message: Committed) -> CommitOutcome:
        if message.epoch < self.epoch or message.base_len < self.committed_len:
            return CommitOutcome.STALE
        if message.epoch > self.epoch or message.base_len > self.committed_len:
            return CommitOutcome.GAP
        return CommitOutcome.APPLIED

    def _append(self, token_ids: tuple[int, ...]) -> None:
        num_right = _common_prefix_len(self.guesses, token_ids)
        is_confirmed = num_right == len(token_ids)  # the guesses after it were conditioned on the same prefix
        kept_len = self.num_tokens if is_confirmed else self.committed_len + num_right
        self.num_computed_tokens = min(self.num_computed_tokens, kept_len)
        self.guesses = self.guesses[num_right:] if is_confirmed else []
        self._logprobs = self._logprobs[num_right:] if is_confirmed else []
        self.token_ids.extend(token_ids)
        if self._history is not None:
            self._history.append(token_ids)
        if self._guide is not None:
            self._guide.append(token_ids)
            self._is_stuck = self._guide.ends_with(self.guesses)


def _common_prefix_len(left: list[int], right: tuple[int, ...]) -> int:
    length = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        length += 1
    return length
