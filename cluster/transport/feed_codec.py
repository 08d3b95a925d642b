"""Finished requests ↔ their form on the wire. Times travel as ages, since the clocks of two machines may differ."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from cluster.control.finished_request import FinishedRequest, FollowedPolicy, Outcome, RequestGuesses, RequestTimes
from cluster.messages.request import MAX_DRAFT_TOKENS, Drafter
from cluster.transport.limits import MAX_COUNT, MAX_LABEL_CHARS, CodecError, check_request_id
from protos.paceline.v1 import control_pb2 as pb

MAX_TEMPERATURE = 100.0


def records_to_wire(records: Iterable[FinishedRequest], now: float) -> list[pb.FinishedRequest]:
    """`now` is on the clock of the records' finished_at."""
    return [_to_wire(record, now) for record in records]


def record_from_wire(message: pb.FinishedRequest, now: float) -> FinishedRequest:
    """finished_at comes out on the clock of `now`. Raises CodecError, naming the field."""
    check_request_id(message.request_id)
    for field, text in (("model", message.model), ("tenant", message.tenant), ("workload", message.workload)):
        _check_text(field, text)
    _check_number("age_s", message.age_s)
    _check_number("temperature", message.temperature, MAX_TEMPERATURE)
    return FinishedRequest(
        message.request_id,
        now - message.age_s,
        message.model,
        message.tenant,
        message.workload,
        _outcome(message.outcome),
        message.temperature,
        message.prompt_tokens,
        message.output_tokens,
        _policy_from_wire(message.policy) if message.HasField("policy") else None,
        _times_from_wire(message.times),
        _guesses_from_wire(message.guesses),
    )


def _to_wire(record: FinishedRequest, now: float) -> pb.FinishedRequest:
    times, guesses = record.times, record.guesses
    return pb.FinishedRequest(
        request_id=record.request_id,
        age_s=max(0.0, now - record.finished_at),
        model=record.model,
        tenant=record.tenant,
        workload=record.workload,
        outcome=record.outcome.value,
        temperature=record.temperature,
        prompt_tokens=record.prompt_tokens,
        output_tokens=record.output_tokens,
        policy=None if record.policy is None else _policy_to_wire(record.policy),
        times=pb.RequestTimes(
            ttft_s=times.ttft_s, tpot_s=times.tpot_s, itl_p95_s=times.itl_p95_s, itl_p99_s=times.itl_p99_s
        ),
        guesses=pb.RequestGuesses(
            drafter=guesses.drafter.value,
            draft_version=guesses.draft_version,
            fell_back=guesses.fell_back,
            acceptance_length=guesses.acceptance_length,
            verified_per_position=guesses.verified_per_position,
            accepted_per_position=guesses.accepted_per_position,
        ),
    )


def _policy_to_wire(policy: FollowedPolicy) -> pb.FollowedPolicy:
    return pb.FollowedPolicy(
        version=policy.version,
        since_version=policy.since_version,
        variant=policy.variant,
        rule=policy.rule,
        is_mixed=policy.is_mixed,
    )


def _policy_from_wire(message: pb.FollowedPolicy) -> FollowedPolicy:
    _check_text("policy.variant", message.variant)
    _check_text("policy.rule", message.rule)
    rule = message.rule if message.HasField("rule") else None
    return FollowedPolicy(message.version, message.since_version, message.variant, rule, message.is_mixed)


def _times_from_wire(message: pb.RequestTimes) -> RequestTimes:
    return RequestTimes(
        _optional("times.ttft_s", message.ttft_s, message.HasField("ttft_s")),
        _optional("times.tpot_s", message.tpot_s, message.HasField("tpot_s")),
        _optional("times.itl_p95_s", message.itl_p95_s, message.HasField("itl_p95_s")),
        _optional("times.itl_p99_s", message.itl_p99_s, message.HasField("itl_p99_s")),
    )


def _guesses_from_wire(message: pb.RequestGuesses) -> RequestGuesses:
    _check_text("guesses.draft_version", message.draft_version)
    verified, accepted = message.verified_per_position, message.accepted_per_position
    _check_positions(verified, accepted)
    return RequestGuesses(
        _drafter(message.drafter),
        message.draft_version if message.HasField("draft_version") else None,
        message.fell_back,
        _optional("guesses.acceptance_length", message.acceptance_length, message.HasField("acceptance_length")),
        tuple(verified),
        tuple(accepted),
    )


# --- checks ----------------------------------------------------------------------------------------------------------


def _outcome(value: str) -> Outcome:
    try:
        return Outcome(value)
    except ValueError as error:
        raise CodecError(f"outcome: must be one of {', '.join(Outcome)}") from error


def _drafter(value: str) -> Drafter:
    try:
        return Drafter(value)
    except ValueError as error:
        raise CodecError(f"guesses.drafter: must be one of {', '.join(Drafter)}") from error


def _check_positions(verified: Sequence[int], accepted: Sequence[int]) -> None:
    if not len(verified) == len(accepted) <= MAX_DRAFT_TOKENS:
        raise CodecError(f"guesses: must have at most {MAX_DRAFT_TOKENS} positions, as many verified as accepted")
    if any(taken > count for count, taken in zip(verified, accepted, strict=True)):
        raise CodecError("guesses.accepted_per_position: more than were verified")


def _optional(field: str, value: float, is_given: bool) -> float | None:
    if not is_given:
        return None
    _check_number(field, value)
    return value


def _check_number(field: str, value: float, at_most: float = MAX_COUNT) -> None:
    if not (math.isfinite(value) and 0 <= value <= at_most):
        raise CodecError(f"{field}: must lie in 0..{at_most:g}, got {value}")


def _check_text(field: str, text: str) -> None:
    if len(text) > MAX_LABEL_CHARS:
        raise CodecError(f"{field}: must have at most {MAX_LABEL_CHARS} characters, got {len(text)}")
