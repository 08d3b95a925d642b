"""What penalties, logit_bias and min_tokens must know of one sequence, kept up to date token by token."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from cluster.core.step import SamplingHistory
from cluster.messages.request import SamplingParams

_INT32, _FLOAT64 = "i", "d"


class LogitHistory:
    """Owns the tokens whose logits one sequence's parameters change, and how often each is in its output.

    Only what is committed is kept. Guesses are laid on top of it in each snapshot, so nothing has to be taken back.
    """

    __slots__ = ("_bias", "_counts", "_num_output_tokens", "_params", "_slots", "_stop_slots", "_token_ids")

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Iterable[int],
        output_token_ids: Sequence[int],
        stop_token_ids: Iterable[int],
    ) -> None:
        bias = dict(params.logit_bias)
        stops = tuple(stop_token_ids) if params.min_tokens else ()
        self._params = params
        self._slots = {token_id: slot for slot, token_id in enumerate(dict.fromkeys((*bias, *stops)))}
        self._token_ids = array(_INT32, self._slots)
        self._counts = array(_INT32, [SamplingHistory.NOT_SEEN] * len(self._slots))
        self._bias = array(_FLOAT64, bias.values()).tobytes()
        self._stop_slots = tuple(self._slots[token_id] for token_id in stops)
        self._num_output_tokens = 0
        if params.repetition_penalty != 1:
            for token_id in prompt_token_ids:
                self._counts[self._slot(token_id)] = 0
        self.append(output_token_ids)

    def append(self, token_ids: Sequence[int]) -> None:
        """Take in committed output."""
        self._num_output_tokens += len(token_ids)
        if self._params.has_penalties:
            for token_id in token_ids:
                slot = self._slot(token_id)
                self._counts[slot] = max(0, self._counts[slot]) + 1

    @property
    def is_needed(self) -> bool:
        """Whether the logits of what comes next need any change."""
        params = self._params
        return params.has_penalties or bool(self._bias) or self._num_output_tokens < params.min_tokens

    def snapshot(self, ahead: Sequence[int] = ()) -> SamplingHistory | None:
        """The state after what is committed, with the tokens ahead of it; None when the logits need no change."""
        if not self.is_needed:
            return None
        is_short = self._num_output_tokens < self._params.min_tokens
        counted = ahead if self._params.has_penalties else ()
        new = list(dict.fromkeys(token_id for token_id in counted if token_id not in self._slots))
        new_slots = {token_id: slot for slot, token_id in enumerate(new, start=len(self._slots))}
        return SamplingHistory(
            token_ids=self._token_ids.tobytes() + array(_INT32, new).tobytes(),
            counts=self._counts.tobytes() + array(_INT32, [SamplingHistory.NOT_SEEN] * len(new)).tobytes(),
            bias=self._bias,
            stop_slots=self._stop_slots if is_short else (),
            num_output_tokens=self._num_output_tokens,
            num_ahead=len(ahead),
            ahead_slots=tuple(new_slots[i] if i in new_slots else self._slots[i] for i in counted),
        )

    def _slot(self, token_id: int) -> int:
        """The token's slot, a new one if need be."""
        slot = self._slots.setdefault(token_id, len(self._token_ids))
        if slot == len(self._token_ids):
            self._token_ids.append(token_id)
            self._counts.append(SamplingHistory.NOT_SEEN)
        return slot


def logit_history(
    params: SamplingParams,
    prompt_token_ids: Iterable[int],
    output_token_ids: Sequence[int],
    stop_token_ids: Iterable[int],
) -> LogitHistory | None:
    """A sequence's history; None for parameters that leave logits as they are, which is most."""
    if not params.adjusts_logits:
        return None
    return LogitHistory(params, prompt_token_ids, output_token_ids, stop_token_ids)
