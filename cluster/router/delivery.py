"""One request's way to its client: text, stop strings, timing marks, and the queue its deltas wait in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from cluster.messages.answer import FinishReason, GenerationStats, PolicyStamp, RequestError, TokenDelta, TokenLogprobs
from cluster.messages.request import GenerateRequest
from cluster.messages.rounds import Commit
from cluster.router.observer import RequestLabels, RouterObserver, TokensDelivered
from cluster.router.request_meter import RequestMeter
from cluster.tokenizer import IncrementalDetokenizer


@dataclass(slots=True)
class Marks:
    """When things happened to one request, in seconds on the router's clock."""

    arrival: float
    first: float | None = None
    last: float | None = None

    @property
    def ttft_s(self) -> float | None:
        """Arrival → first token; None without any."""
        return None if self.first is None else self.first - self.arrival

    def tpot_s(self, num_tokens: int) -> float | None:
        """Mean time per token after the first; None below two tokens."""
        if self.first is None or self.last is None or num_tokens < 2:
            return None
        return (self.last - self.first) / (num_tokens - 1)

    def advance(self, now: float) -> tuple[float, bool]:
        """Mark a delta; the time since the one before (or since arrival), and whether it is the first."""
        is_first = self.first is None
        interval_s = now - (self.arrival if self.last is None else self.last)
        self.first = now if self.first is None else self.first
        self.last = now
        return interval_s, is_first


class Delivery:
    """Owns what a client has been given and is about to be given.

    Commits are only put down when they arrive; decoding them waits until the loop has carried every frame of this turn
    on to the pools. It does not wait for the client: a stop string ends the request however slowly the client reads.
    """

    def __init__(
        self,
        request: GenerateRequest,
        detokenizer: IncrementalDetokenizer,
        observer: RouterObserver,
        clock: Callable[[], float],
    ) -> None:
        """The request arrives now."""
        self._request = request
        self._detokenizer = detokenizer
        self._observer = observer
        self._clock = clock
        self._labels = RequestLabels(request.model, request.tenant, request.workload)
        self._undecoded: list[Commit] = []
        self._queue: asyncio.Queue[TokenDelta | RequestError] = asyncio.Queue()
        self._is_over = False
        self.marks = Marks(clock())
        self.meter = RequestMeter()
        self.stats = GenerationStats(prompt_tokens=len(request.prompt_token_ids), completion_tokens=0)
        self.on_stop: Callable[[], None] | None = None

    @property
    def is_over(self) -> bool:
        """Whether the last delta, or an error, has been queued."""
        return self._is_over

    async def next_delta(self) -> TokenDelta:
        """The next delta; the one with a finish_reason is the last. Raises the RequestError that ended the request."""
        item = await self._queue.get()
        if isinstance(item, RequestError):
            raise item
        return item

    def push(self, commit: Commit) -> None:
        """Take committed tokens; they are decoded in the loop's next turn."""
        if not self._undecoded:
            asyncio.get_running_loop().call_soon(self._decode)
        self._undecoded.append(commit)

    def end(self, finish_reason: FinishReason) -> None:
        """End now with what has been committed so far."""
        self._decode()
        if not self._is_over:
            self._put((), "", None, finish_reason, None)

    def fail(self, error: RequestError) -> None:
        """End with an error, after what has been committed so far."""
        self._decode()
        if not self._is_over:
            self._is_over = True
            self._queue.put_nowait(error)

    def count(self, *, num_resumes: int = 0, fallback: str | None = None) -> None:
        """Note in the request's statistics what happened to it."""
        fallbacks = self.stats.fallbacks if fallback is None else (*self.stats.fallbacks, fallback)
        self.stats = replace(self.stats, num_resumes=self.stats.num_resumes + num_resumes, fallbacks=fallbacks)

    def follow(self, policy: PolicyStamp) -> None:
        """Note the decision that holds from now on."""
        self.stats = replace(self.stats, policy=policy)
        self.meter.follow(policy)

    def _decode(self) -> None:
        commits, self._undecoded = self._undecoded, []
        for commit in commits:
            if not self._is_over:
                self._deliver(commit)

    def _deliver(self, commit: Commit) -> None:
        chunk = self._detokenizer.push(commit.token_ids)
        token_ids = commit.token_ids[: chunk.num_tokens_used]
        logprobs = None if commit.logprobs is None else commit.logprobs[: chunk.num_tokens_used]
        self._count_step(commit, len(token_ids))
        if chunk.stop_string is not None:
            self._put(token_ids, chunk.text, logprobs, FinishReason.STOP, chunk.stop_string)
            if commit.finish_reason is None and self.on_stop is not None:
                self.on_stop()
            return
        self._put(token_ids, chunk.text, logprobs, commit.finish_reason, self._stop_token(commit))

    def _put(
        self,
        token_ids: tuple[int, ...],
        text: str,
        logprobs: tuple[TokenLogprobs, ...] | None,
        finish_reason: FinishReason | None,
        stop_reason: str | int | None,
    ) -> None:
        if token_ids:
            interval_s, is_first = self.marks.advance(self._clock())
            event = TokensDelivered(self._request.request_id, self._labels, len(token_ids), interval_s, is_first)
            self._observer.tokens_delivered(event)
            if not is_first:
                self.meter.note_interval(interval_s)
        if finish_reason is None:
            delta = TokenDelta(self._request.request_id, token_ids, text, logprobs, policy=self.stats.policy)
        else:
            self._is_over = True
            tail = self._detokenizer.flush()
            if tail.stop_string is not None:  # completed by the replacement of an unfinished character at the very end
                finish_reason, stop_reason = FinishReason.STOP, tail.stop_string
            text += tail.text
            delta = TokenDelta(
                self._request.request_id,
                token_ids,
                text,
                logprobs,
                finish_reason,
                stop_reason,
                self.stats,
                self.stats.policy,
            )
        self._queue.put_nowait(delta)

    def _count_step(self, commit: Commit, num_tokens: int) -> None:
        self.meter.note_step(commit)
        stats = self.stats
        self.stats = replace(
            stats,
            completion_tokens=stats.completion_tokens + num_tokens,
            num_steps=stats.num_steps + bool(commit.token_ids),
            num_draft_tokens=stats.num_draft_tokens + commit.num_draft_tokens,
            num_accepted_tokens=stats.num_accepted_tokens + commit.num_accepted_tokens,
            num_cached_tokens=max(stats.num_cached_tokens, min(commit.num_cached_tokens, stats.prompt_tokens)),
        )

    def _stop_token(self, commit: Commit) -> int | None:
        if commit.finish_reason is not FinishReason.STOP or not commit.token_ids:
            return None
        last = commit.token_ids[-1]
        return last if last in self._request.sampling.stop_token_ids else None
