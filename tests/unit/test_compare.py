"""The comparison's pure parts: when requests are sent, what figures mean, what a report says."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer import BadParameter

from load_tests.compare.__main__ import named
from load_tests.compare.client import Trace
from load_tests.compare.figures import Figures, Spread, agreement, ratios, spread_of
from load_tests.compare.measure import Results, measured
from load_tests.compare.peers.base import AbsentError, Arm, Conditions, Drafting, PeerName, Say, ServerCommand, Weights
from load_tests.compare.peers.paceline import Paceline, cluster_config
from load_tests.compare.peers.vllm import Vllm
from load_tests.compare.process_tree import descendants
from load_tests.compare.report import Report, as_json, markdown, rich_tables
from load_tests.compare.scenario import SCENARIOS, Load, Scenario
from load_tests.compare.usage import CpuTimes, Usage, busy_s
from load_tests.compare.workload import Ask, Closed, Poisson, run_workload

pytestmark = pytest.mark.unit

OURS, THEIRS = Arm(PeerName.PACELINE), Arm(PeerName.LLAMA_CPP)
USAGE = Usage(peak_rss_mib=9.0, pss_mib=8.0, engine_cores=1.5, others_share=0.25)
LOAD = Load(Closed(1), requests=2, max_tokens=3)
SCENARIO = Scenario("A title", (OURS, THEIRS), (LOAD,), max_model_len=64)
CONDITIONS = Conditions(Path("/m"), Path("/d"), Path("/nowhere"), (0, 1), 2, 64, 1, 4)


def figures(tok_s: float, ttft_ms: float = 10.0) -> Figures:
    return Figures(tok_s, ttft_ms, 5.0, 200.0, 5.0, 6.0, 7.0, 512.0, 256.0, 1.5, 0.0)


# --- figures ---------------------------------------------------------------------------------------------------------


def test_a_rounds_figures_count_all_streams_output_and_each_streams_own_times() -> None:
    first = Trace(sent=0.0, arrivals=(0.1, 0.2, 0.3), num_tokens=3, text="")
    second = Trace(sent=0.0, arrivals=(0.3, 0.5), num_tokens=3, text="")  # two tokens came together
    found = Figures.of([first, second], USAGE)
    assert found.tok_s == pytest.approx(6 / 0.5)
    assert found.ttft_ms == pytest.approx(200)
    assert found.tpot_ms == pytest.approx(100)
    assert found.decode_tok_s == pytest.approx(10)
    assert found.itl_p50_ms == pytest.approx(100)
    assert found.itl_p99_ms == pytest.approx(200)
    assert (found.peak_rss_mib, found.pss_mib, found.engine_cores, found.others_share) == (9.0, 8.0, 1.5, 0.25)


def test_percentiles_of_gaps_are_the_smallest_that_enough_of_them_do_not_exceed() -> None:
    arrivals, now = [0.0], 0.0
    for gap in range(100, 0, -1):
        now += gap / 1000
        arrivals.append(now)
    found = Figures.of([Trace(0.0, tuple(arrivals), 101, "")], USAGE)
    assert found.itl_p50_ms == pytest.approx(50)
    assert found.itl_p95_ms == pytest.approx(95)
    assert found.itl_p99_ms == pytest.approx(99)


def test_a_single_token_has_a_time_to_first_token_and_no_time_per_token() -> None:
    found = Figures.of([Trace(0.0, (0.25,), 1, "")], USAGE)
    assert found.ttft_ms == pytest.approx(250)
    assert (found.tpot_ms, found.decode_tok_s, found.itl_p50_ms) == (None, None, None)
    assert spread_of([found], "tpot_ms") is None


def test_a_ratio_is_taken_in_each_round_before_the_median() -> None:
    ours, theirs = [figures(10), figures(40), figures(30)], [figures(10), figures(20), figures(10)]
    assert ratios(ours, theirs, "tok_s") == Spread(1.0, 2.0, 3.0)
    assert ratios(ours, [replace(one, tpot_ms=None) for one in theirs], "tpot_ms") is None


def test_texts_agree_up_to_where_they_first_differ() -> None:
    assert agreement("abcd", "abxd") == 0.5
    assert agreement("ab", "abcd") == 0.5
    assert agreement("", "") == 1
    assert agreement("", "a") == 0


def test_what_others_take_is_the_cores_busy_time_less_the_engines_and_the_clients() -> None:
    before = CpuTimes(wall=10.0, engine=5.0, client=1.0, busy=20.0)
    after = CpuTimes(wall=14.0, engine=11.0, client=1.5, busy=27.5)
    assert after.engine_cores_since(before) == pytest.approx(1.5)
    assert after.others_share_since(before, num_cores=2) == pytest.approx(1 / 8)
    assert replace(after, busy=26.4).others_share_since(before, num_cores=2) == 0


def test_a_core_is_busy_unless_it_is_idle_or_waits_for_a_disk() -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    stat = f"cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 {ticks} 0 0 70 80 0 0 {ticks} 0 0\ncpu1 0 {ticks} 0 0 0 0 0 0 0 0\nintr 1"
    assert busy_s(stat, (0,)) == pytest.approx(2)
    assert busy_s(stat, (0, 1)) == pytest.approx(3)


# --- workload --------------------------------------------------------------------------------------------------------


def test_poisson_arrivals_are_the_same_for_everybody_and_come_at_the_rate_asked_for() -> None:
    offsets = Poisson(rate=4.0, seed=1).offsets_s(2001)
    assert offsets == Poisson(rate=4.0, seed=1).offsets_s(2001)
    assert offsets != Poisson(rate=4.0, seed=2).offsets_s(2001)
    assert offsets[0] == 0
    assert list(offsets) == sorted(offsets)
    assert offsets[-1] / 2000 == pytest.approx(1 / 4, rel=0.1)


@pytest.mark.parametrize("arrivals", [Closed(1), Closed(3), Poisson(rate=1e6)])
async def test_every_ask_is_sent_once_and_answered_in_its_place(arrivals: Closed | Poisson) -> None:
    asks = [Ask((number,), 1) for number in range(7)]
    running, most = 0, 0

    async def send(ask: Ask) -> Trace:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(10 - ask.prompt_token_ids[0]):  # later ones end sooner
            await asyncio.sleep(0)
        running -= 1
        return Trace(0.0, (0.0,), 1, str(ask.prompt_token_ids[0]))

    traces = await run_workload(asks, arrivals, send)
    assert [trace.text for trace in traces] == ["0", "1", "2", "3", "4", "5", "6"]
    if isinstance(arrivals, Closed):
        assert most == arrivals.streams


async def test_a_failed_request_is_what_the_workload_raises() -> None:
    async def send(ask: Ask) -> Trace:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await run_workload([Ask((1,), 1)] * 4, Closed(2), send)


def test_rounds_go_through_the_held_out_prompts_one_after_the_other() -> None:
    scenario, heldout = SCENARIOS["speculation"], tuple((number,) for number in range(48))
    (load,) = scenario.loads
    asked = [ask.prompt_token_ids for number in range(scenario.rounds) for ask in load.asks(number, heldout)]
    assert sorted(asked) == list(heldout)


def test_every_preset_measures_five_rounds_or_more_of_prompts_that_fit() -> None:
    for scenario in SCENARIOS.values():
        assert scenario.rounds >= 5
        for load in scenario.loads:
            assert (load.prompt_tokens or 128) + load.max_tokens <= scenario.max_model_len


def test_long_prompts_share_no_beginning_between_rounds() -> None:
    load = Load(Closed(1), requests=2, max_tokens=1, prompt_tokens=512)
    asks = [ask for number in (-1, 0, 1) for ask in load.asks(number, ())]
    assert {len(ask.prompt_token_ids) for ask in asks} == {512}
    assert len({ask.prompt_token_ids[:1] for ask in asks}) == len(asks)


# --- engines ---------------------------------------------------------------------------------------------------------


def test_paceline_has_a_draft_pool_only_where_a_model_guesses_and_never_a_prefix_cache() -> None:
    plain = cluster_config(OURS, CONDITIONS, 8000).models[0]
    assert plain.draft is None
    assert plain.target.num_threads == CONDITIONS.threads
    drafted = cluster_config(replace(OURS, drafting=Drafting.MODEL), CONDITIONS, 8000).models[0]
    assert drafted.draft is not None
    assert not drafted.target.prefix_cache
    assert cluster_config(replace(OURS, weights=Weights.INT8), CONDITIONS, 8000).models[0].target.quantization == "int8"


def test_paceline_asks_for_speculation_in_the_request_so_that_plain_and_ngram_share_a_server() -> None:
    peer, ngram = Paceline(), replace(OURS, drafting=Drafting.NGRAM)
    assert peer.server_of(ngram) == OURS
    assert peer.body(OURS, Ask((1,), 2))["speculation"] == {"enabled": False}
    assert peer.body(ngram, Ask((1,), 2))["speculation"] == {"enabled": True, "drafter": "ngram"}


def test_what_an_engine_cannot_do_is_absent_with_the_reason() -> None:
    with pytest.raises(AbsentError, match="bf16 only"):
        Vllm().command(Arm(PeerName.VLLM, weights=Weights.INT8), CONDITIONS, 1)


def test_a_tree_is_the_root_and_everything_that_came_from_it_parents_first() -> None:
    assert descendants(2, [(1, 0), (2, 1), (3, 1), (4, 2), (5, 4), (6, 2)]) == [2, 4, 6, 5]


# --- absence and report ----------------------------------------------------------------------------------------------


class Missing:
    """An engine that cannot be installed, or cannot start."""

    def __init__(self, *, installs: bool) -> None:
        self._installs = installs

    def prepare(self, conditions: Conditions, say: Say) -> None:
        if not self._installs:
            raise AbsentError("cannot be installed: no wheel")

    def server_of(self, arm: Arm) -> Arm:
        return arm

    def command(self, arm: Arm, conditions: Conditions, port: int) -> ServerCommand:
        raise AbsentError("needs another processor")

    def body(self, arm: Arm, ask: Ask) -> dict[str, object]:
        raise AssertionError


def test_an_engine_that_cannot_be_had_is_reported_as_absent_and_the_others_go_on() -> None:
    peers = {PeerName.PACELINE: Missing(installs=False), PeerName.LLAMA_CPP: Missing(installs=True)}
    with measured(SCENARIO, CONDITIONS, peers, ((1,),), lambda line: None) as results:
        pass
    assert results.absent == {OURS: "cannot be installed: no wheel", THEIRS: "needs another processor"}
    assert results.rounds == {}
    page = markdown(Report(SCENARIO, results, "a machine", "conditions"))
    assert "| llama.cpp bf16 | needs another processor |" in page


def test_an_engine_that_fails_midway_leaves_no_figures_behind() -> None:
    results = Results(rounds={(OURS, LOAD): [figures(1)], (THEIRS, LOAD): [figures(1)]})
    results.drop(THEIRS, "a request failed")
    assert list(results.rounds) == [(OURS, LOAD)]
    assert results.absent == {THEIRS: "a request failed"}


def test_an_interrupted_comparison_keeps_the_rounds_that_everybody_present_has_finished() -> None:
    rounds = {(OURS, LOAD): [figures(1), figures(2)], (THEIRS, LOAD): [figures(3)]}
    results = Results(dict(rounds))
    results.keep_complete_rounds(SCENARIO)
    assert results.rounds == {(OURS, LOAD): [figures(1)], (THEIRS, LOAD): [figures(3)]}
    none_of_theirs = Results({(OURS, LOAD): [figures(1)]})
    none_of_theirs.keep_complete_rounds(SCENARIO)
    assert none_of_theirs.rounds == {}
    theirs_absent = Results({(OURS, LOAD): [figures(1)]}, absent={THEIRS: "no wheel"})
    theirs_absent.keep_complete_rounds(SCENARIO)
    assert theirs_absent.rounds == {(OURS, LOAD): [figures(1)]}


@pytest.fixture
def report() -> Report:
    rounds = {
        (OURS, LOAD): [figures(150, 20), figures(160, 20), figures(140, 20)],
        (THEIRS, LOAD): [figures(100, 10), figures(100, 10), figures(100, 10)],
    }
    texts = {(OURS, (1,)): "a", (OURS, (2,)): "b", (THEIRS, (1,)): "a", (THEIRS, (2,)): "c"}
    return Report(SCENARIO, Results(rounds, texts), "a machine", "conditions")


def test_the_report_gives_medians_with_their_spread_ratios_and_how_many_texts_agree(report: Report) -> None:
    page = markdown(report)
    ours, theirs, ratio = (line for line in page.splitlines() if line.startswith(("| paceline", "| llama.cpp")))
    assert "| paceline bf16 | 150 [140, 160] |" in ours
    assert "512 [512, 512] | 256 [256, 256] | 1.50 [1.50, 1.50] | 0.00 [0.00, 0.00] | 2/2, 100% |" in ours
    assert theirs.endswith("| 1/2, 50% |")
    assert ratio == "| paceline bf16 / llama.cpp bf16 | 1.50 [1.40, 1.60] | 1.00 [1.00, 1.00] | 2.00 [2.00, 2.00] |"
    assert "## Absent" not in page


def test_the_report_says_what_is_unusual_about_an_engine(report: Report) -> None:
    noted = replace(report, results=replace(report.results, notes={THEIRS: "with --no-repack"}))
    assert "| llama.cpp bf16 | with --no-repack |" in markdown(noted)
    assert "Notes" not in markdown(report)


@pytest.mark.parametrize(
    ("peers", "rows"),
    [
        ("paceline", ["paceline bf16", "paceline ngram bf16", "paceline draft bf16"]),
        ("vllm bf16, llama.cpp ngram bf16", ["vllm bf16", "llama.cpp ngram bf16"]),
    ],
)
def test_engines_are_chosen_by_name_or_by_row(peers: str, rows: list[str]) -> None:
    assert [str(arm) for arm in named(SCENARIOS["speculation"].arms, peers)] == rows


def test_an_unknown_engine_is_refused_with_those_there_are() -> None:
    with pytest.raises(BadParameter, match=r"'vlm'.*paceline, vllm"):
        named(SCENARIOS["speculation"].arms, "vlm")


def test_the_json_has_every_round(report: Report) -> None:
    found = json.loads(as_json(report))
    assert [round["tok_s"] for round in found["measured"][0]["rounds"]] == [150, 160, 140]
    assert found["absent"] == {}


def test_the_terminal_shows_the_same_tables(report: Report) -> None:
    console = Console(width=200, record=True)
    for table in rich_tables(report):
        console.print(table)
    assert "paceline bf16 / llama.cpp bf16" in console.export_text()
