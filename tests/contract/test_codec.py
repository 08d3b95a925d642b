"""The pool protocols' bytes: what round-trips, what never changes, and what each malformed frame costs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.messages.answer import FinishReason, TokenLogprobs
from cluster.messages.request import MAX_DRAFT_TOKENS, Grammar, GrammarKind, SamplingParams
from cluster.messages.rounds import (
    Abort,
    Close,
    Commit,
    Committed,
    DraftBlock,
    Open,
    PoolLoad,
    Refusal,
    RefusalReason,
    SetDraftLimit,
    StepTimings,
    Submit,
)
from cluster.transport import limits
from cluster.transport.codec import CodecError, Frame
from cluster.transport.draft_stream import DRAFT_PROTOCOL
from cluster.transport.target_stream import TARGET_PROTOCOL
from protos.paceline.v1 import common_pb2, draft_pb2, target_pb2

pytestmark = pytest.mark.contract

# --- every message, as hypothesis draws it ---------------------------------------------------------------------------

counts = st.integers(0, limits.MAX_COUNT)
draft_lens = st.integers(0, MAX_DRAFT_TOKENS)
seconds = st.floats(0, 1e9, allow_nan=False)
chances = st.floats(0, 1)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=limits.MAX_REQUEST_ID_CHARS)
labels = st.text(st.characters(exclude_categories=["Cs"]), max_size=32)
logprob_values = st.floats(-(2.0**100), 0, width=32)


def token_ids(at_most: int, at_least: int = 0) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(counts, min_size=at_least, max_size=at_most).map(tuple)


samplings = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, limits.MAX_COUNT),
    seed=st.integers(0, 2**64 - 1),
    temperature=st.floats(0, 100),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.none() | st.integers(1, limits.MAX_COUNT),
    min_p=st.floats(0, 1),
    stop=st.lists(labels, max_size=4).map(tuple),
    stop_token_ids=token_ids(4),
    ignore_eos=st.booleans(),
    num_logprobs=st.none() | st.integers(0, limits.MAX_TOP_LOGPROBS),
    presence_penalty=st.floats(-limits.MAX_PENALTY, limits.MAX_PENALTY),
    frequency_penalty=st.floats(-limits.MAX_PENALTY, limits.MAX_PENALTY),
    repetition_penalty=st.just(1.0) | st.floats(1e-3, limits.MAX_PENALTY),
    logit_bias=st.dictionaries(counts, st.floats(-100, 100), max_size=4).map(lambda bias: tuple(bias.items())),
    min_tokens=counts,
    grammar=st.none() | st.builds(Grammar, st.sampled_from(GrammarKind), st.text(max_size=50)),
)
submits = st.builds(
    Submit,
    request_id=names,
    prompt_token_ids=token_ids(20, at_least=1),
    sampling=samplings,
    max_draft_tokens=draft_lens,
    output_token_ids=token_ids(8),
    priority=st.integers(-(2**31), 2**31 - 1),
    deadline_s=st.none() | st.floats(-1e9, 1e9),
    tenant=labels,
)
blocks = st.builds(
    DraftBlock,
    request_id=names,
    committed_len=counts,
    token_ids=token_ids(MAX_DRAFT_TOKENS),
    epoch=counts,
    draft_time_s=seconds,
)
opens = st.builds(
    Open,
    request_id=names,
    epoch=counts,
    token_ids=token_ids(20, at_least=1),
    sampling=samplings,
    draft_len=draft_lens,
    tenant=labels,
    num_prompt_tokens=st.integers(0, 1),
)
committeds = st.builds(
    Committed,
    request_id=names,
    epoch=counts,
    base_len=counts,
    token_ids=token_ids(40),
    draft_len=draft_lens,
    min_confidence=chances,
    longest_draft_len=draft_lens,
)
refusals = st.builds(Refusal, request_id=names, reason=st.sampled_from(RefusalReason), message=labels, epoch=counts)
entries = st.builds(
    TokenLogprobs,
    token_id=counts,
    logprob=logprob_values,
    top=st.lists(st.tuples(counts, logprob_values), max_size=3).map(tuple),
)


@st.composite
def commits(draw: st.DrawFn) -> Commit:
    tokens = draw(token_ids(limits.MAX_COMMIT_TOKENS))
    num_draft = draw(draft_lens)
    with_logprobs = bool(tokens) and draw(st.booleans())
    base_len = draw(counts)
    return Commit(
        request_id=draw(names),
        base_len=base_len,
        token_ids=tokens,
        next_draft_len=draw(draft_lens),
        longest_draft_len=draw(draft_lens),
        min_confidence=draw(chances),
        num_draft_tokens=num_draft,
        num_accepted_tokens=draw(st.integers(0, num_draft)),
        finish_reason=draw(st.none() | st.sampled_from(FinishReason)),
        logprobs=tuple(draw(entries) for _ in tokens) if with_logprobs else None,
        timings=draw(st.builds(StepTimings, seconds, seconds, seconds, seconds, seconds)),
        num_cached_tokens=draw(st.integers(0, base_len)),
    )


@st.composite
def loads(draw: st.DrawFn) -> PoolLoad:
    total = draw(counts)
    in_pool = st.integers(0, total)
    return PoolLoad(draw(counts), draw(counts), draw(in_pool), total, draw(in_pool), draw(st.booleans()))


draft_limits = st.builds(SetDraftLimit, request_id=names, max_draft_tokens=draft_lens)
target_commands = submits | blocks | draft_limits | st.builds(Abort, names)
target_events = commits() | refusals | loads()
draft_commands = opens | committeds | st.builds(Close, names)
draft_events = blocks | refusals | loads()

DIRECTIONS: dict[str, tuple[st.SearchStrategy[Any], Callable[[Any], bytes], Callable[[bytes], Frame[Any]]]] = {
    "target commands": (target_commands, TARGET_PROTOCOL.encode_command, TARGET_PROTOCOL.decode_commands),
    "target events": (target_events, TARGET_PROTOCOL.encode_event, TARGET_PROTOCOL.decode_events),
    "draft commands": (draft_commands, DRAFT_PROTOCOL.encode_command, DRAFT_PROTOCOL.decode_commands),
    "draft events": (draft_events, DRAFT_PROTOCOL.encode_event, DRAFT_PROTOCOL.decode_events),
}
each_direction = pytest.mark.parametrize("direction", DIRECTIONS)


# --- what round-trips ------------------------------------------------------------------------------------------------


@each_direction
@given(data=st.data())
def test_a_frame_of_any_messages_decodes_to_the_same_messages_in_order(direction: str, data: st.DataObject) -> None:
    messages, encode, decode = DIRECTIONS[direction]
    sent = data.draw(st.lists(messages, max_size=5))
    assert decode(b"".join(encode(message) for message in sent)) == Frame(tuple(sent))


@each_direction
@given(data=st.data())
def test_any_bytes_are_a_frame_or_a_codec_error(direction: str, data: st.DataObject) -> None:
    messages, encode, decode = DIRECTIONS[direction]
    frame = bytearray(encode(data.draw(messages)))
    frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    garbage = data.draw(st.binary(max_size=64) | st.just(bytes(frame)) | st.just(bytes(frame[:-1])))
    with suppress(CodecError):
        assert isinstance(decode(garbage), Frame)


def test_a_64_bit_seed_survives() -> None:
    submit = replace(SUBMIT, sampling=replace(SAMPLING, seed=2**64 - 1))
    frame = TARGET_PROTOCOL.decode_commands(TARGET_PROTOCOL.encode_command(submit))
    assert frame.messages == (submit,)


def test_a_long_refusal_is_cut_rather_than_refused_itself() -> None:
    refusal = Refusal("a", RefusalReason.INTERNAL, "x" * (limits.MAX_REFUSAL_CHARS + 1))
    (decoded,) = TARGET_PROTOCOL.decode_events(TARGET_PROTOCOL.encode_event(refusal)).messages
    assert decoded == replace(refusal, message="x" * limits.MAX_REFUSAL_CHARS)


# --- what never changes ----------------------------------------------------------------------------------------------

SAMPLING = SamplingParams(
    max_tokens=16,
    seed=7,
    temperature=0.5,
    top_p=0.75,
    top_k=40,
    min_p=0.25,
    stop=("END",),
    stop_token_ids=(2,),
    ignore_eos=True,
    num_logprobs=0,
)
ADJUSTING = replace(
    SAMPLING,
    presence_penalty=0.5,
    frequency_penalty=-0.25,
    repetition_penalty=1.5,
    logit_bias=((300, -100.0), (7, 2.0)),
    min_tokens=3,
)
SUBMIT = Submit("req-1", (1, 300, 49151), SAMPLING, 5, (9,), -1, 1.5, "acme")
BLOCK = DraftBlock("req-1", 4, (10, 11), 2, 0.5)
COMMIT = Commit(
    "req-1", 4, (10, 12), 3, 2, 1, FinishReason.STOP, (TokenLogprobs(10, -0.5, ((10, -0.5),)), TokenLogprobs(12, -1.0)),
    StepTimings(0.25, 0.5, 0.125, 0.75, 0.5),
)  # fmt: skip
REFUSAL = Refusal("req-1", RefusalReason.TOO_LONG, "no", 3)
LOAD = PoolLoad(1, 2, 3, 400, 5, draining=True)
OPEN = Open("req-1", 2, (1, 2, 3), SAMPLING, 4, "acme")
COMMITTED = Committed("req-1", 2, 4, (10, 12), 3)

GOLDEN: dict[str, tuple[Callable[[Any], bytes], Any, str]] = {
    "submit": (
        TARGET_PROTOCOL.encode_command,
        SUBMIT,
        "0a5f0a5d0a057265712d31120601ac02ffff021a2d0810100719000000000000e03f21000000000000e83f28283100000000"
        "0000d03f3a03454e444201024801500020052a010930ffffffffffffffffff0139000000000000f83f420461636d65",
    ),
    "submit with penalties": (
        TARGET_PROTOCOL.encode_command,
        replace(SUBMIT, sampling=ADJUSTING),
        "0a98010a95010a057265712d31120601ac02ffff021a650810100719000000000000e03f21000000000000e83f282831"
        "000000000000d03f3a03454e444201024801500059000000000000e03f61000000000000d0bf69000000000000f83f72"
        "0c08ac021100000000000059c0720b0807110000000000000040780320052a010930ffffffffffffffffff0139000000"
        "000000f83f420461636d65",
    ),
    "submit with a grammar": (
        TARGET_PROTOCOL.encode_command,
        replace(SUBMIT, sampling=replace(SAMPLING, grammar=Grammar(GrammarKind.REGEX, "a+"))),
        "0a680a660a057265712d31120601ac02ffff021a360810100719000000000000e03f21000000000000e83f2828310000"
        "00000000d03f3a03454e4442010248015000f2010608021202612b20052a010930ffffffffffffffffff013900000000"
        "0000f83f420461636d65",
    ),
    "propose": (TARGET_PROTOCOL.encode_command, BLOCK, "0a1a12180a057265712d3110041a020a0b200229000000000000e03f"),
    "set draft limit": (TARGET_PROTOCOL.encode_command, SetDraftLimit("req-1", 5), "0a0b22090a057265712d311005"),
    "abort": (TARGET_PROTOCOL.encode_command, Abort("req-1"), "0a091a070a057265712d31"),
    "commit": (
        TARGET_PROTOCOL.encode_event,
        COMMIT,
        "0a610a5f0a057265712d3110041a020a0c20032802300138014210080a15000000bf1a07080a15000000bf4207080c150000"
        "80bf4a2d09000000000000d03f11000000000000e03f19000000000000c03f21000000000000e83f29000000000000e03f",
    ),
    "target refusal": (TARGET_PROTOCOL.encode_event, REFUSAL, "0a11120f0a057265712d3110031a026e6f2003"),
    "target load": (TARGET_PROTOCOL.encode_event, LOAD, "0a0f1a0d08011002180320900328053001"),
    "open": (
        DRAFT_PROTOCOL.encode_command,
        OPEN,
        "0a470a450a057265712d3110021a03010203222d0810100719000000000000e03f21000000000000e83f2828310000000000"
        "00d03f3a03454e44420102480150002804320461636d65",
    ),
    "open in mid-output": (
        DRAFT_PROTOCOL.encode_command,
        replace(OPEN, num_prompt_tokens=2),
        "0a490a470a057265712d3110021a03010203222d0810100719000000000000e03f21000000000000e83f282831000000"
        "000000d03f3a03454e44420102480150002804320461636d653802",
    ),
    "committed": (DRAFT_PROTOCOL.encode_command, COMMITTED, "0a1312110a057265712d311002180422020a0c2803"),
    "close": (DRAFT_PROTOCOL.encode_command, Close("req-1"), "0a091a070a057265712d31"),
    "draft block": (DRAFT_PROTOCOL.encode_event, BLOCK, "0a1a0a180a057265712d3110041a020a0b200229000000000000e03f"),
    "draft refusal": (DRAFT_PROTOCOL.encode_event, REFUSAL, "0a11120f0a057265712d3110031a026e6f2003"),
    "draft load": (DRAFT_PROTOCOL.encode_event, LOAD, "0a0f1a0d08011002180320900328053001"),
}


@pytest.mark.parametrize("kind", GOLDEN)
def test_the_bytes_of_a_message_stay_what_deployed_replicas_expect(kind: str) -> None:
    encode, message, expected = GOLDEN[kind]
    assert encode(message).hex() == expected


def test_generated_code_is_up_to_date() -> None:
    done = subprocess.run([sys.executable, "-m", "protos.generate", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# --- what a malformed message costs ----------------------------------------------------------------------------------

TOO_MANY_GUESSES = tuple(range(MAX_DRAFT_TOKENS + 1))
UNSENDABLE: dict[str, tuple[Callable[[Any], bytes], Any, str]] = {
    "empty request id": (TARGET_PROTOCOL.encode_command, Abort(""), "request_id"),
    "long request id": (DRAFT_PROTOCOL.encode_command, Close("x" * 129), "request_id"),
    "surrogate in request id": (TARGET_PROTOCOL.encode_command, Abort("\ud800"), "cannot carry"),
    "empty prompt": (TARGET_PROTOCOL.encode_command, replace(SUBMIT, prompt_token_ids=()), "prompt_token_ids"),
    "negative token id": (TARGET_PROTOCOL.encode_command, replace(SUBMIT, prompt_token_ids=(-1,)), "prompt_token_ids"),
    "token id of 2**31": (TARGET_PROTOCOL.encode_command, replace(SUBMIT, output_token_ids=(2**31,)), "output_token"),
    "sequence too long": (TARGET_PROTOCOL.encode_command, replace(SUBMIT, prompt_token_ids=(1,) * 2**20), "prompt"),
    "long tenant": (TARGET_PROTOCOL.encode_command, replace(SUBMIT, tenant="x" * 257), "tenant"),
    "priority of 2**31": (TARGET_PROTOCOL.encode_command, replace(SUBMIT, priority=2**31), "cannot carry"),
    "endless deadline": (TARGET_PROTOCOL.encode_command, replace(SUBMIT, deadline_s=float("inf")), "deadline_s"),
    "window over the limit": (TARGET_PROTOCOL.encode_command, replace(SUBMIT, max_draft_tokens=33), "max_draft_tokens"),
    "draft limit over the limit": (TARGET_PROTOCOL.encode_command, SetDraftLimit("req-1", 33), "max_draft_tokens"),
    "too many guesses": (TARGET_PROTOCOL.encode_command, replace(BLOCK, token_ids=TOO_MANY_GUESSES), "token_ids"),
    "negative length": (DRAFT_PROTOCOL.encode_event, replace(BLOCK, committed_len=-1), "committed_len"),
    "draft time is not a number": (
        DRAFT_PROTOCOL.encode_event,
        replace(BLOCK, draft_time_s=float("nan")),
        "draft_t",
    ),
    "commit of more than a window": (TARGET_PROTOCOL.encode_event, replace(COMMIT, token_ids=(1,) * 34), "token_ids"),
    "more accepted than drafted": (TARGET_PROTOCOL.encode_event, replace(COMMIT, num_accepted_tokens=3), "accepted"),
    "logprobs for other tokens": (TARGET_PROTOCOL.encode_event, replace(COMMIT, token_ids=(10,)), "logprobs"),
    "negative time": (TARGET_PROTOCOL.encode_event, replace(COMMIT, timings=StepTimings(held_s=-1.0)), "held_s"),
    "more free blocks than there are": (
        TARGET_PROTOCOL.encode_event,
        replace(LOAD, num_free_blocks=401),
        "free",
    ),
    "chance above 1": (TARGET_PROTOCOL.encode_event, replace(COMMIT, min_confidence=1.5), "min_confidence"),
    "chance below 0": (DRAFT_PROTOCOL.encode_command, replace(COMMITTED, min_confidence=-1.0), "min_confidence"),
    "chance that is no number": (
        DRAFT_PROTOCOL.encode_command,
        replace(COMMITTED, min_confidence=float("nan")),
        "min_confidence",
    ),
    "block over the limit": (DRAFT_PROTOCOL.encode_command, replace(COMMITTED, longest_draft_len=33), "longest"),
    "prompt longer than all": (DRAFT_PROTOCOL.encode_command, replace(OPEN, num_prompt_tokens=4), "num_prompt_tokens"),
    "session on nothing": (DRAFT_PROTOCOL.encode_command, replace(OPEN, token_ids=()), "token_ids"),
    "negative epoch": (DRAFT_PROTOCOL.encode_command, replace(COMMITTED, epoch=-1), "epoch"),
    "a draft's command to a target": (TARGET_PROTOCOL.encode_command, OPEN, "cannot carry"),
}
BAD_SAMPLING: dict[str, dict[str, Any]] = {
    "max_tokens": {"max_tokens": 0},
    "seed": {"seed": 2**64},
    "temperature": {"temperature": float("nan")},
    "top_p": {"top_p": 0.0},
    "top_k": {"top_k": 0},
    "min_p": {"min_p": 1.5},
    "stop": {"stop": ("x",) * 65},
    "stop_token_ids": {"stop_token_ids": (-1,)},
    "num_logprobs": {"num_logprobs": 129},
    "presence_penalty": {"presence_penalty": float("nan")},
    "frequency_penalty": {"frequency_penalty": float("-inf")},
    "repetition_penalty": {"repetition_penalty": 0.0},
    "logit_bias": {"logit_bias": ((1, float("inf")),)},
    "logit_bias: has": {"logit_bias": ((1, 1.0), (1, 2.0))},
    "logit_bias: token": {"logit_bias": ((-1, 1.0),)},
    "min_tokens": {"min_tokens": -1},
    "grammar": {"grammar": Grammar(GrammarKind.REGEX, "a" * 65_537)},
}


@pytest.mark.parametrize("case", UNSENDABLE)
def test_a_message_that_breaks_a_limit_fails_at_its_sender_by_name(case: str) -> None:
    encode, message, field = UNSENDABLE[case]
    with pytest.raises(CodecError, match=field):
        encode(message)


@pytest.mark.parametrize("field", BAD_SAMPLING)
def test_sampling_parameters_out_of_range_never_reach_an_engine(field: str) -> None:
    submit = replace(SUBMIT, sampling=replace(SAMPLING, **BAD_SAMPLING[field]))
    with pytest.raises(CodecError, match=f"sampling.{field}"):
        TARGET_PROTOCOL.encode_command(submit)


FAULTY_COMMANDS = {
    "submit without a prompt": target_pb2.TargetCommand(submit=target_pb2.Submit(request_id="bad")),
    "token id over 2**31": target_pb2.TargetCommand(
        submit=target_pb2.Submit(request_id="bad", prompt_token_ids=[2**32 - 1], sampling={"max_tokens": 1, "top_p": 1})
    ),
    "too many guesses": target_pb2.TargetCommand(propose={"request_id": "bad", "token_ids": TOO_MANY_GUESSES}),
    "limit for too many guesses": target_pb2.TargetCommand(
        set_draft_limit={"request_id": "bad", "max_draft_tokens": 33}
    ),
}


@pytest.mark.parametrize("case", FAULTY_COMMANDS)
def test_a_faulty_command_costs_its_own_request_and_no_other(case: str) -> None:
    sound = TARGET_PROTOCOL.encode_command(SUBMIT)
    faulty = target_pb2.TargetCommands(commands=[FAULTY_COMMANDS[case]]).SerializeToString()
    frame = TARGET_PROTOCOL.decode_commands(sound + faulty + sound)
    assert frame.messages == (SUBMIT, SUBMIT)
    (fault,) = frame.faults
    assert (fault.request_id, fault.is_hint) == ("bad", "guesses" in case)


FAULTY_EVENTS = {
    "too many guesses": draft_pb2.DraftEvent(block={"request_id": "bad", "token_ids": TOO_MANY_GUESSES, "epoch": 3}),
    "refusal without a reason": draft_pb2.DraftEvent(refusal={"request_id": "bad", "epoch": 3}),
    "negative draft time": draft_pb2.DraftEvent(block={"request_id": "bad", "draft_time_s": -1, "epoch": 3}),
}


@pytest.mark.parametrize("case", FAULTY_EVENTS)
def test_a_faulty_event_names_its_request_and_epoch(case: str) -> None:
    sound = DRAFT_PROTOCOL.encode_event(BLOCK)
    faulty = draft_pb2.DraftEvents(events=[FAULTY_EVENTS[case]]).SerializeToString()
    frame = DRAFT_PROTOCOL.decode_events(sound + faulty + sound)
    assert frame.messages == (BLOCK, BLOCK)
    (fault,) = frame.faults
    assert (fault.request_id, fault.epoch) == ("bad", 3)


def test_an_unknown_finish_reason_is_a_fault() -> None:
    event = target_pb2.TargetEvent(commit={"request_id": "bad", "token_ids": [1], "finish_reason": 99})
    frame = TARGET_PROTOCOL.decode_events(target_pb2.TargetEvents(events=[event]).SerializeToString())
    assert [fault.request_id for fault in frame.faults] == ["bad"]


@pytest.mark.parametrize("request_id", ["", "x" * 129])
def test_a_faulty_message_that_names_no_request_costs_the_stream(request_id: str) -> None:
    frame = target_pb2.TargetCommands(commands=[{"submit": {"request_id": request_id}}]).SerializeToString()
    with pytest.raises(CodecError, match="request_id"):
        TARGET_PROTOCOL.decode_commands(frame)


def test_an_impossible_load_costs_the_stream() -> None:
    load = common_pb2.PoolLoad(num_free_blocks=2, num_total_blocks=1)
    frame = target_pb2.TargetEvents(events=[target_pb2.TargetEvent(load=load)]).SerializeToString()
    with pytest.raises(CodecError, match="num_free_blocks"):
        TARGET_PROTOCOL.decode_events(frame)


@each_direction
def test_bytes_that_do_not_parse_cost_the_stream(direction: str) -> None:
    with pytest.raises(CodecError, match="does not parse"):
        DIRECTIONS[direction][2](b"\xff\xff\xff")


@each_direction
def test_an_oversized_frame_costs_the_stream_and_is_not_parsed(direction: str) -> None:
    with pytest.raises(CodecError, match="frame: must have at most"):
        DIRECTIONS[direction][2](bytes(limits.MAX_FRAME_BYTES + 1))


@each_direction
def test_a_kind_of_message_from_a_newer_version_is_skipped_and_counted(direction: str) -> None:
    field_1_holding_field_15 = bytes([0x0A, 0x02, 0x78, 0x01])
    assert DIRECTIONS[direction][2](field_1_holding_field_15) == Frame((), (), num_unknown=1)
