"""What a chain of passes must give, in terms of steps without one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from cluster.core.step import SampledTokens, ScheduledSequence, SchedulerOutput, StepOutput
from cluster.runtime.work import ShouldStop, never


def run_chain(
    run: Callable[[SchedulerOutput], StepOutput], step: SchedulerOutput, should_stop: ShouldStop = never
) -> StepOutput:
    """What a step's chain must give, by a step for each pass."""
    one = SchedulerOutput(step.scheduled)
    total = output = run(one)
    for _ in range(step.num_chained):
        if output.failed or output.stuck or _is_unlikely(step, total) or should_stop():
            break
        one = SchedulerOutput(tuple(_following(item, output) for item in one.scheduled if item.num_samples))
        output = run(one)
        more = output.samples
        samples = {key: _joined(found, more[key]) if key in more else found for key, found in total.samples.items()}
        total = replace(total, samples=samples)
    return total


def _joined(first: SampledTokens, more: SampledTokens) -> SampledTokens:
    logprobs = None if first.logprobs is None or more.logprobs is None else first.logprobs + more.logprobs
    return SampledTokens(first.token_ids + more.token_ids, logprobs)


def _is_unlikely(step: SchedulerOutput, output: StepOutput) -> bool:
    return any(
        sum(token.logprob for token in output.samples[item.request_id].logprobs or ()) < item.min_logprob
        for item in step.scheduled
        if item.num_samples
    )


def _following(item: ScheduledSequence, output: StepOutput) -> ScheduledSequence:
    (token_id,) = output.samples[item.request_id].token_ids
    return replace(item, token_ids=(token_id,), start=item.start + len(item.token_ids))
