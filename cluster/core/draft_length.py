"""How many guesses to ask for: K per request, 0 = off.

A cycle with K guesses takes arrival(K) + step(rows with K) and emits E(K) = 1 + a + … + a^K tokens, where a is the
chance that a guess is accepted given that those before it were. K maximises E(K) / cycle(K); K = 0 emits one token
per plain step. Everything but E is measured. Once the pool has tried what speculation gains over plain decoding (see
tactics.py), that measured gain takes the place of the predicted one, and a request differs by its acceptance only.

A drafter that knows the chance q of its guesses, that those before it and a guess are all right, needs no K: another
guess is accepted with the chance q * a, and costs c seconds, in which the request gets c * rate tokens otherwise. So it
goes on while q >= c * rate / a, at most to the length that would pay best if every guess were accepted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from cluster.core.cost_model import Average, DraftCost, StepCost
from cluster.core.tactics import Tactic, TacticChoice
from cluster.messages.request import MAX_DRAFT_TOKENS, DraftLengthMode

_PRIOR_ACCEPTANCE = 0.6  # before anything is measured: hopeful, so that speculation gets measured at all
_PRIOR_TRIALS = 10.0
_REQUEST_TRIALS = 15.0  # how many guesses a request must show before its own rate outweighs the pool's
_POOL_DECAY = 0.995  # per verification
_REQUEST_DECAY = 0.95


@dataclass(frozen=True, slots=True)
class DraftLengthConfig:
    """Who decides the draft length, and how reluctantly it changes. Its bound is each request's own."""

    mode: DraftLengthMode = DraftLengthMode.ADAPTIVE
    hysteresis: float = 0.1  # a new length must promise this much more tokens per second
    probe_interval: int = 64  # tokens between two tries while off; doubles with each vain try
    max_probe_interval: int = 512
    max_arrival_s: float = math.inf  # a block that takes longer than that is not waited for
    tactics: tuple[Tactic, ...] = (Tactic.OVERLAP,)


class DraftAsk(NamedTuple):
    """What the target wants of a drafter next, see Commit."""

    draft_len: int  # 0: nothing
    longest_len: int
    min_confidence: float


NOTHING = DraftAsk(0, 0, 0.0)


@dataclass(slots=True)
class AcceptanceCount:
    """Owns decaying counts of accepted guesses and of rejections (at most one per verification)."""

    decay: float
    accepted: float = 0.0
    rejected: float = 0.0

    def observe(self, num_accepted: int, rejected: bool) -> None:
        self.accepted = self.accepted * self.decay + num_accepted
        self.rejected = self.rejected * self.decay + rejected

    def rate(self, prior: float, prior_trials: float) -> float:
        """Mean of the Beta posterior. Unlike accepted/drafted, accepted/(accepted + rejected) does not depend on K."""
        return (self.accepted + prior * prior_trials) / (self.accepted + self.rejected + prior_trials)


@dataclass(slots=True)
class DraftLengthState:
    """One request's part of the decision; owned by its sequence, changed only by the controller."""

    max_draft_tokens: int  # the request's own limit, changed by SetDraftLimit
    longest_len: int = 0  # guesses asked for last, at most
    settled_len: int | None = None  # the length chosen last, probes aside
    probe_interval: int = 0
    probe_at: int = 0  # probe when so few tokens remain; remaining tokens only ever go down
    acceptance: AcceptanceCount = field(default_factory=lambda: AcceptanceCount(_REQUEST_DECAY))
    transit_s: Average = field(default_factory=Average)  # of a block's arrival, what its drafter did not take


class DraftLengthController:
    """Owns what a pool has measured about its drafts and steps, and turns it into a draft length per request."""

    def __init__(self, config: DraftLengthConfig) -> None:
        self.config = config
        self.tactics = TacticChoice(config.tactics)
        self._steps = StepCost()
        self._drafts = DraftCost()
        self._transit_s = Average()
        self._acceptance = AcceptanceCount(_POOL_DECAY)
        self._foreseen = 0.0  # guesses that should have been accepted at the pool's rate, decaying as they do
        self._step_s_by_len: dict[tuple[int, int], list[float] | None] = {}  # until the next measurement

    # --- measurements ---

    def observe_step(self, num_rows: int, seconds: float) -> None:
        self._steps.observe(num_rows, seconds)
        self._step_s_by_len.clear()

    def observe_arrival(
        self, state: DraftLengthState, num_draft_tokens: int, draft_time_s: float, seconds: float
    ) -> None:
        """A block of `num_draft_tokens` ≥ 1 came `seconds` after the commit that asked for it."""
        self._drafts.observe(num_draft_tokens, draft_time_s)
        for transit_s in (self._transit_s, state.transit_s):
            transit_s.observe(max(0.0, seconds - draft_time_s))

    def observe_acceptance(self, state: DraftLengthState, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        rejected = num_accepted_tokens < num_draft_tokens
        self._foreseen = self._foreseen * _POOL_DECAY + _expected(self._pool_acceptance_rate, num_draft_tokens)[-1] - 1
        self._acceptance.observe(num_accepted_tokens, rejected)
        state.acceptance.observe(num_accepted_tokens, rejected)

    # --- predictions ---

    def acceptance_rate(self, state: DraftLengthState) -> float:
        return state.acceptance.rate(self._pool_acceptance_rate, _REQUEST_TRIALS)

    @property
    def _pool_acceptance_rate(self) -> float:
        return self._acceptance.rate(_PRIOR_ACCEPTANCE, _PRIOR_TRIALS)

    def expected_tokens(self, state: DraftLengthState, num_draft_tokens: int) -> float:
        """E(K): tokens emitted per verification, the target's own token included."""
        return _expected(self.acceptance_rate(state), num_draft_tokens)[-1]

    def expected_of_pool(self, num_draft_tokens: int) -> float:
        """E(K) of a request like all others, by as much above or below the formula as verifications have been.

        Blocks that end where their drafter is unsure are right more often than others of their lengths.
        """
        bias = (self._acceptance.accepted + _PRIOR_TRIALS) / (self._foreseen + _PRIOR_TRIALS)
        return 1 + bias * (_expected(self._pool_acceptance_rate, num_draft_tokens)[-1] - 1)

    def arrival_s(self, state: DraftLengthState, num_draft_tokens: int) -> float | None:
        """Seconds from a commit to its block; None before the first block."""
        transit_s = state.transit_s if state.transit_s.count else self._transit_s
        return transit_s.value + self._drafts.predict(num_draft_tokens) if transit_s.count else None

    def step_s(self, num_rows: int) -> float | None:
        return self._steps.predict(num_rows)

    # --- the decision ---

    def set_limit(self, state: DraftLengthState, max_draft_tokens: int) -> None:
        """A request may ask for so many guesses from now on; of those it has asked for, no more are verified either."""
        state.max_draft_tokens = max_draft_tokens
        state.longest_len = min(state.longest_len, max_draft_tokens)

    def next_ask(
        self, state: DraftLengthState, remaining_tokens: int, num_sequences: int, shows_chances: bool = False
    ) -> DraftAsk:
        """What to ask for when `remaining_tokens` may still be emitted and `num_sequences` share the steps.

        At most remaining_tokens - 1 guesses: the target always emits one token of its own. shows_chances: how likely a
        guess is to its drafter says how likely it is to be accepted.
        """
        limit = min(MAX_DRAFT_TOKENS, state.max_draft_tokens, remaining_tokens - 1)
        ask = NOTHING
        if limit > 0 and self.config.mode is DraftLengthMode.FIXED:
            ask = DraftAsk(limit, limit, 0.0)
        elif limit > 0:
            ask = self._adapt(state, limit, remaining_tokens, num_sequences, shows_chances)
        state.longest_len = ask.longest_len
        return ask

    def _adapt(
        self, state: DraftLengthState, limit: int, remaining_tokens: int, num_sequences: int, shows_chances: bool
    ) -> DraftAsk:
        trials = self.tactics.trials(num_sequences)
        if trials.tactic is Tactic.PLAIN:
            return NOTHING
        cycles = self._cycles(state, limit, num_sequences)
        if cycles is None:
            return DraftAsk(limit, limit, 0.0)  # nothing is measured yet: ask, and learn
        rates = self._tokens_per_second(state, cycles, trials.gain())
        draft_len = self._best(state, rates, trials.is_trial, remaining_tokens)
        if draft_len == 0:
            return NOTHING
        if not shows_chances or limit == 1:
            return DraftAsk(draft_len, draft_len, 0.0)
        end = min(draft_len + 1, limit)
        guess_s = (cycles[end] - cycles[1]) / (end - 1)
        worth = guess_s * max(rates) / self.acceptance_rate(state)
        if worth <= 0:  # there is no threshold to stop at
            return DraftAsk(draft_len, draft_len, 0.0)
        return DraftAsk(draft_len, self._longest(state, draft_len, cycles), min(worth, 1.0))

    def _longest(self, state: DraftLengthState, draft_len: int, cycles: list[float]) -> int:
        """The length of at least `draft_len` that pays best for guesses that are all right, and comes in time."""
        arrivals = self._arrivals(state, len(cycles) - 1) or []
        in_time = (k for k, arrival in enumerate(arrivals) if k > draft_len and arrival <= self.config.max_arrival_s)
        return max((draft_len, *in_time), key=lambda k: (1 + k) / cycles[k])

    def _best(self, state: DraftLengthState, rates: list[float], is_trial: bool, remaining_tokens: int) -> int:
        """The draft length of the highest of `rates`, by K, if it is so much better than that of before."""
        limit = len(rates) - 1
        hopeful = max(range(1, limit + 1), key=rates.__getitem__)
        if is_trial:
            return hopeful
        best = hopeful if rates[hopeful] > rates[0] else 0
        if state.settled_len is not None:
            settled = min(state.settled_len, limit)
            if rates[best] <= (1 + self.config.hysteresis) * rates[settled]:
                best = settled
        if best == 0:
            return self._probe(state, hopeful, remaining_tokens)
        state.settled_len = best
        return best

    def _probe(self, state: DraftLengthState, draft_len: int, remaining_tokens: int) -> int:
        """While off: `draft_len` once per interval, else 0. Each vain probe doubles the interval."""
        if state.settled_len != 0:
            state.settled_len = 0
            state.probe_interval = self.config.probe_interval
            state.probe_at = remaining_tokens - state.probe_interval
        if remaining_tokens > state.probe_at:
            return 0
        state.probe_interval = min(2 * state.probe_interval, self.config.max_probe_interval)
        state.probe_at = remaining_tokens - state.probe_interval
        return draft_len

    def _cycles(self, state: DraftLengthState, limit: int, num_sequences: int) -> list[float] | None:
        """Seconds of a cycle for each K in 0 … limit; None while a part of it has not been measured."""
        step_s, arrivals = self._step_s(num_sequences, limit), self._arrivals(state, limit)
        if step_s is None or arrivals is None:
            return None
        return [arrival + seconds for arrival, seconds in zip(arrivals, step_s, strict=True)]

    def _arrivals(self, state: DraftLengthState, limit: int) -> list[float] | None:
        """Predicted arrivals for each K in 0 … limit, on a straight line but for K = 0, where nothing is asked for."""
        first, second = self.arrival_s(state, 1), self.arrival_s(state, 2)
        if first is None or second is None:
            return None
        return [0.0, *(first + index * (second - first) for index in range(limit))]

    def _tokens_per_second(self, state: DraftLengthState, cycles: list[float], gain: float | None) -> list[float]:
        """For each K in 0 … limit.

        `gain`: what speculation has been seen to gain for requests of the pool's acceptance; None: as predicted.
        """
        plain, *others = cycles
        plain_rate = 1.0 / plain if gain is None else max(_rates(self._pool_acceptance_rate, others)) / gain
        return [plain_rate, *_rates(self.acceptance_rate(state), others)]

    def _step_s(self, num_sequences: int, limit: int) -> list[float] | None:
        """Predicted step time by draft length, every sequence drafting as much; computed once per measurement."""
        key = (num_sequences, limit)
        if key not in self._step_s_by_len:
            self._step_s_by_len[key] = self._predict_steps(num_sequences, limit)
        return self._step_s_by_len[key]

    def _predict_steps(self, num_sequences: int, limit: int) -> list[float] | None:
        predicted = [self._steps.predict(num_sequences * (1 + draft_len)) for draft_len in range(limit + 1)]
        known = [max(seconds, 1e-9) for seconds in predicted if seconds is not None]
        return known if len(known) == len(predicted) else None


def _expected(acceptance: float, limit: int) -> list[float]:
    """E(K) for K = 0 … limit."""
    return list(accumulate(acceptance**position for position in range(limit + 1)))


def _rates(acceptance: float, cycles: list[float]) -> list[float]:
    """E(K) / cycle for K = 1 … len(cycles)."""
    return [
        expected / seconds for expected, seconds in zip(_expected(acceptance, len(cycles))[1:], cycles, strict=True)
    ]
