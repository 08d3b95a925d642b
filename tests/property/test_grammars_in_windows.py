"""A grammar holds at every position of a verification window, and no guess changes what comes out."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.messages.answer import FinishReason
from cluster.messages.request import Drafter, DraftLengthMode, GenerateRequest, HoldMode, SpeculationOverride
from cluster.messages.rounds import Commit, DraftBlock, Refusal, Submit
from cluster.runtime.sampler import Sampler
from cluster.runtime.sampler_cpu import CpuSampler
from cluster.runtime.sampler_torch import TorchSampler
from tests.engines import Pool, TinyRouter, draft_pool, target_pool
from tests.fakes import sampling
from tests.grammars import PIECES, InstantGrammars, regex, text_of
from tests.logit_engines import EOS_ID, LogitRunner, LogitToy, run_with_guesses, truth_with
from tests.toy_cluster import MODEL, collect, tokens_of, toy_cluster

pytestmark = pytest.mark.property

DRAFT_LEN = 4
VOCAB = len(PIECES)
GRAMMARS = InstantGrammars()
LEGAL = regex("([0-9]+,)*[0-9]+")
ILLEGAL = PIECES.index(b"x")
SAMPLERS = [CpuSampler(), TorchSampler()]


def toy(**fields: Any) -> LogitToy:
    return LogitToy(VOCAB, **fields)


def target(model: LogitToy, sampler: Sampler | None = None, grammars: Any = GRAMMARS, **options: Any) -> Pool:
    return target_pool(runner=LogitRunner(model, sampler), grammars=grammars, **options)


def submit(request_id: str = "r", grammar: str = LEGAL.source, **fields: Any) -> Submit:
    fields = {"max_tokens": 24, "seed": 3, "temperature": 0.0, **fields}
    return Submit(request_id, (10, 5, 10), sampling(grammar=regex(grammar), **fields), DRAFT_LEN)


def right_output(model: LogitToy, request: Submit) -> tuple[int, ...]:
    grammar = request.sampling.grammar
    return model.output(request, None if grammar is None else GRAMMARS.matcher(grammar))


# --- what is proposed, offset by offset ------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: type(sampler).__name__)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("offset", range(DRAFT_LEN))
def test_eight_sequences_emit_no_illegal_token_wherever_in_their_windows_one_is_drafted(
    offset: int, temperature: float, sampler: Sampler
) -> None:
    """The model wants the illegal token everywhere, so every row of every window depends on its own mask."""
    model = toy(favourite=ILLEGAL, pull=30.0)
    requests = [submit(f"r{i}", temperature=temperature, seed=i) for i in range(8)]
    right = {request.request_id: right_output(model, request) for request in requests}
    pool = target(model, sampler, max_num_batched_tokens=64)
    pool.engine.handle(requests)
    seen = 0
    while len(finished(pool)) < len(requests):
        pool.engine.step()
        commits, seen = pool.of(Commit)[seen:], len(pool.of(Commit))
        for commit in (commit for commit in commits if commit.next_draft_len):
            guess = truth_with(right[commit.request_id], ILLEGAL, offset)
            answer(pool, commit, guess(pool.output(commit.request_id), commit.next_draft_len))
    for request in requests:
        assert pool.output(request.request_id) == right[request.request_id]
        assert re.fullmatch(r"[0-9,]+", text_of(right[request.request_id]))
    assert sum(commit.num_accepted_tokens for commit in pool.of(Commit)) >= 8 * offset
    assert pool.is_free()


def finished(pool: Pool) -> list[Commit]:
    return [commit for commit in pool.of(Commit) if commit.finish_reason is not None]


def answer(pool: Pool, commit: Commit, guesses: Any) -> None:
    committed_len = commit.base_len + len(commit.token_ids)
    pool.engine.handle([DraftBlock(commit.request_id, committed_len, tuple(guesses))])


def test_an_illegal_guess_and_what_follows_it_are_not_verified() -> None:
    model = toy()
    request = submit()
    right = right_output(model, request)
    commits = run_with_guesses(pool := target(model), request, truth_with(right, ILLEGAL, 2))
    assert pool.output("r") == right
    assert max(commit.num_draft_tokens for commit in commits) == 2


@pytest.mark.parametrize("offset", range(DRAFT_LEN))
def test_a_bias_cannot_lift_an_illegal_token(offset: int) -> None:
    model = toy()
    request = submit(logit_bias=((ILLEGAL, 100.0),))
    right = right_output(model, request)
    run_with_guesses(pool := target(model), request, truth_with(right, ILLEGAL, offset))
    assert pool.output("r") == right
    assert ILLEGAL not in right


# --- the end ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guesses", [(), (1, 2, 3), (1, 2, 3, EOS_ID), (1, 2, 3, 4), (1, 2), (EOS_ID,)], ids=str)
def test_an_output_ends_as_soon_as_nothing_can_follow(guesses: tuple[int, ...]) -> None:
    """a, b, c are tokens 1, 2, 3. After the last of them not even the end is asked for."""
    request = submit(grammar="abc", logit_bias=tuple((token_id, 50.0) for token_id in (1, 2, 3)))
    pool = target(toy())
    commits = run_with_guesses(pool, request, lambda output, count: guesses[len(output) :][:count])
    assert text_of(pool.output("r")) == "abc"
    assert commits[-1].finish_reason is FinishReason.STOP
    assert pool.engine.faults.total == 0


def test_an_end_of_sequence_ends_an_output_only_where_the_grammar_does() -> None:
    request = submit(grammar="(ab)+c?", logit_bias=((EOS_ID, 90.0),))
    pool = target(toy())
    commits = run_with_guesses(pool, request, lambda _, count: (EOS_ID,) * count)
    assert re.fullmatch("(ab)+c?", text_of(pool.output("r")))
    assert pool.output("r")[-1] == EOS_ID
    assert commits[-1].finish_reason is FinishReason.STOP


def test_min_tokens_gives_way_where_the_grammar_allows_only_the_end() -> None:
    request = submit(grammar="(ab){1,3}", min_tokens=20)
    pool = target(toy())
    commits = run_with_guesses(pool, request, lambda _, count: ())
    assert text_of(pool.output("r")) == "ababab"  # not one of the shorter ones
    assert commits[-1].finish_reason is FinishReason.STOP
    assert pool.engine.faults.total == 0


def test_an_output_that_is_complete_at_max_tokens_has_stopped() -> None:
    for max_tokens, reason in ((1, FinishReason.LENGTH), (2, FinishReason.STOP), (3, FinishReason.STOP)):
        request = submit(grammar="xc", max_tokens=max_tokens)
        commits = run_with_guesses(target(toy()), request, lambda _, count: ())
        assert commits[-1].finish_reason is reason


# --- any grammar, any guesses ----------------------------------------------------------------------------------------

ATOMS = st.sampled_from(["a", "b", "[abc]", "xy", "[0-9]", "1", ",", "\\.", "(aa|a)", "[^a]", "\\{", '"'])
REGEXES = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}"])).map(lambda pair: f"({pair[0]}){pair[1]}"),
    ),
    max_leaves=6,
).filter(lambda source: GRAMMARS.is_usable(regex(source)))


@settings(max_examples=60, deadline=None)
@given(
    sources=st.lists(REGEXES, min_size=1, max_size=4),
    temperature=st.sampled_from([0.0, 1.0]),
    noise=st.sampled_from([0.0, 1.0, 20.0]),
    draft_knows=st.booleans(),
    sampler=st.sampled_from(SAMPLERS),
    num_blocks=st.sampled_from([22, 200]),
    delay=st.integers(0, 3),
)
def test_any_grammar_and_any_draft_leave_the_output_as_it_is(
    sources: list[str],
    temperature: float,
    noise: float,
    draft_knows: bool,
    sampler: Sampler,
    num_blocks: int,
    delay: int,
) -> None:
    """Preemption included, and grammars that are compiled while others run."""
    model = toy()
    pool = target(model, sampler, InstantGrammars(delay=delay), num_blocks=num_blocks)
    drafts = draft_pool(
        num_blocks=num_blocks,
        runner=LogitRunner(toy(noise=noise), sampler),
        grammars=InstantGrammars(delay=delay) if draft_knows else None,
    )
    router = TinyRouter(pool, drafts)
    requests = [submit(f"r{i}", source, temperature=temperature, seed=i) for i, source in enumerate(sources)]
    for request in requests:
        router.submit(request)
    router.run(lambda: None)
    router.close()
    for request in requests:
        right = right_output(model, request)
        assert pool.output(request.request_id) == right
        last = next(commit for commit in finished(pool) if commit.request_id == request.request_id)
        is_whole = re.fullmatch(request.sampling.grammar.source, text_of(right), re.DOTALL) is not None
        assert last.finish_reason is FinishReason.LENGTH or is_whole
    assert pool.engine.faults.total == 0
    assert pool.is_free()
    assert drafts.is_free()


@settings(max_examples=40, deadline=None)
@given(source=REGEXES, seed=st.integers(0, 2**32), temperature=st.sampled_from([0.0, 1.0]))
def test_random_guesses_leave_the_output_as_it_is(source: str, seed: int, temperature: float) -> None:
    model, chance = toy(), random.Random(seed)
    request = submit(grammar=source, temperature=temperature)
    right = right_output(model, request)

    def guess(output: tuple[int, ...], count: int) -> list[int]:
        ahead = [*right[len(output) :], *(EOS_ID for _ in range(count))][:count]
        return [token_id if chance.random() < 0.7 else chance.randrange(VOCAB) for token_id in ahead]

    run_with_guesses(pool := target(model), request, guess)
    assert pool.output("r") == right


def test_a_draft_that_is_the_target_and_knows_the_grammar_is_accepted_in_full() -> None:
    model = toy(favourite=ILLEGAL, pull=30.0)
    router = TinyRouter(pool := target(model), draft_pool(runner=LogitRunner(model), grammars=GRAMMARS))
    router.submit(request := submit(temperature=1.0))
    router.run(lambda: None)
    assert pool.output("r") == right_output(model, request)
    unfinished = [commit for commit in pool.of(Commit) if commit.finish_reason is None]
    assert all(commit.num_accepted_tokens == commit.num_draft_tokens for commit in unfinished)
    assert sum(commit.num_draft_tokens for commit in unfinished) > 10


class FewTokens:
    """A sampler of a draft that scores few tokens, as drafts with a small output vocabulary do."""

    IDS = torch.tensor([PIECES.index(piece) for piece in (b"1", b"2", b"x", b"a")])

    def sample(self, logits: torch.Tensor, batch: Any, _: object = None) -> Any:
        return CpuSampler().sample(logits[:, self.IDS].contiguous(), batch, self.IDS)


def test_a_draft_without_a_token_that_the_grammar_allows_says_so_and_goes_on() -> None:
    """Its last guess before a comma ends the block; no session is lost over it."""
    model = toy()
    drafts = draft_pool(runner=LogitRunner(toy(noise=1.0), FewTokens()), grammars=GRAMMARS)
    router = TinyRouter(pool := target(model), drafts)
    router.submit(request := submit(grammar="([12]{2},){12}", max_tokens=60))
    router.run(lambda: None)
    assert pool.output("r") == right_output(model, request)
    assert drafts.of(Refusal) == []
    assert any(not block.token_ids for block in drafts.of(DraftBlock))
    assert sum(commit.num_accepted_tokens for commit in pool.of(Commit)) > 0


def test_a_resumed_request_goes_on_where_its_grammar_was() -> None:
    model = toy()
    request = submit(temperature=1.0)
    right = right_output(model, request)
    for num_known in range(1, len(right)):
        resumed = Submit("r", request.prompt_token_ids, request.sampling, DRAFT_LEN, right[:num_known])
        run_with_guesses(pool := target(model), resumed, lambda output, count: ())
        assert right[:num_known] + pool.output("r") == right


# --- the whole way ---------------------------------------------------------------------------------------------------


async def test_every_drafter_gives_the_same_output() -> None:
    model = toy()
    grammars = InstantGrammars()
    async with toy_cluster(
        prepare=lambda cluster: (
            cluster.add_target(runner=LogitRunner(model), grammars=grammars),
            cluster.add_draft(runner=LogitRunner(toy(noise=1.0)), grammars=grammars),
        )
    ) as cluster:
        for index, source in enumerate(['(\\{"[abc]+":[0-9]+\\},)+', LEGAL.source, "(a|b)*c"]):
            item = submit(grammar=source, temperature=1.0)
            for drafter in (Drafter.NONE, Drafter.NGRAM, Drafter.MODEL):
                speculation = SpeculationOverride(drafter is not Drafter.NONE, DRAFT_LEN, drafter)
                request = GenerateRequest(
                    f"{index}-{drafter}", MODEL, item.prompt_token_ids, item.sampling, speculation=speculation
                )
                assert tokens_of(await collect(cluster.router, request)) == right_output(model, item)


# --- how many guesses are asked for ----------------------------------------------------------------------------------


def test_illegal_guesses_are_learnt_from_although_nothing_verifies_them() -> None:
    request = submit(grammar="[abc]{100}", max_tokens=100)
    now = [0.0]
    pool = target(toy(), mode=DraftLengthMode.ADAPTIVE, hold=HoldMode.BREAK_EVEN, clock=lambda: now[0])
    pool.runner.before_step = lambda _: now.__setitem__(0, now[0] + 0.01)

    def guess(_: tuple[int, ...], number: int) -> list[int]:
        now[0] += 0.003
        return [ILLEGAL] * number

    commits = run_with_guesses(pool, request, guess)
    assert pool.output("r") == right_output(toy(), request)
    assert sum(commit.num_draft_tokens for commit in commits) == 0
    assert sum(commit.next_draft_len > 0 for commit in commits[20:]) < 5
