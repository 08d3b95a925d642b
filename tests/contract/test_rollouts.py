"""Rollouts on a control service: steps, faults of the store and the process, and other people's edits.

Time stands still unless a test moves it, and nothing ticks but by a test's own call.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.control.cohort import Cohort
from cluster.control.control_store import ControlStore
from cluster.control.document import parse_document
from cluster.control.finished_request import FinishedRequest, FollowedPolicy, Outcome, RequestTimes
from cluster.control.rollout import Phase, RolloutCommand
from cluster.control.rollout_entry import RolloutView
from cluster.control.sqlite_store import SQLiteBackend
from cluster.control.store import Kind, RolloutRecord, Snapshot, UnavailableError
from cluster.controller.board import Board
from cluster.controller.policy_desk import PolicyDesk
from cluster.controller.rollouts import Rollouts
from cluster.messages.answer import ErrorKind, RequestError

pytestmark = pytest.mark.contract

DEFAULT = parse_document({"schema": "paceline.policy/v1"})
POLICY = """
schema: paceline.policy/v1
rules:
- {id: other, action: allow, match: {tenants: [acme]}, percent: 30}
- {id: fast, action: allow, percent: 0, variant: wide, effect: {max_draft_tokens: 8}}
"""
SPEC = """
schema: paceline.rollout/v1
target: {rule: fast}
steps:
- set_percent: 10
- analyse: {window_s: 100, looks: 2}
- set_percent: 50
- pause: {seconds: 60}
- set_percent: 100
conditions:
- {metric: ttft, at_most: 1.5, min_samples: 40}
- {metric: error_rate, at_most: 0.2, min_samples: 40}
"""


class Killed(BaseException):
    """The process is gone: nothing after this happens."""


class Store(ControlStore):
    """A store that a test can take away, or that kills whoever writes at a moment."""

    is_away = False
    before_write: Callable[[str], None] = staticmethod(lambda what: None)  # may raise
    after_write: Callable[[str], None] = staticmethod(lambda what: None)

    async def put_rollout(self, record: RolloutRecord) -> None:
        self._check("rollout")
        await super().put_rollout(record)
        self.after_write("rollout")

    async def put(self, *arguments: Any) -> Snapshot:
        self._check("policy")
        snapshot = await super().put(*arguments)
        self.after_write("policy")
        return snapshot

    def _check(self, what: str) -> None:
        if self.is_away:
            raise UnavailableError("the database does not answer")
        self.before_write(what)


class Control:
    """One control service's rollouts, over a file that outlives it."""

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self.store = store
        self.board = Board()
        self.has_routers = True
        self.desk = PolicyDesk(store, self.board, DEFAULT, clock)
        self.rollouts = Rollouts(store, self.desk, lambda: self.has_routers, clock)


class World:
    """What does not end with a process: the database, and time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stores: list[Store] = []
        self.now = 1000.0

    async def control(self) -> Control:
        """A new process, which has seen what is in force."""
        self._stores.append(Store(await SQLiteBackend.open(self._path)))
        control = Control(self._stores[-1], lambda: self.now)
        if (snapshot := await control.store.current(Kind.POLICY)) is not None:
            control.board.publish(snapshot)
        return control

    async def apply(self, control: Control, text: str, author: str = "ann") -> Snapshot:
        return await control.desk.edit("apply", lambda document: parse_document(text), author, "")

    async def percent(self) -> float:
        """What the database says of the rule, whoever is alive."""
        store = ControlStore(await SQLiteBackend.open(self._path))
        snapshot = await store.current(Kind.POLICY)
        await store.close()
        assert snapshot is not None
        return next(rule.percent for rule in parse_document(snapshot.text).rules if rule.id == "fast")

    async def close(self) -> None:
        for store in self._stores:
            await store.close()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path / "control.db")
    yield made
    await made.close()


@pytest.fixture
async def control(world: World) -> Control:
    control = await world.control()
    await world.apply(control, POLICY)
    return control


def requests(world: World, since_version: int, ttft_s: float = 1.0, count: int = 60) -> list[FinishedRequest]:
    """As many of either cohort; the canary's first token takes `ttft_s`, the control's a second."""
    return [
        FinishedRequest(
            f"{cohort}-{world.now}-{number}",
            world.now,
            "m",
            "t",
            "w",
            Outcome.STOP,
            policy=FollowedPolicy(since_version, since_version, variant, "fast"),
            times=RequestTimes(ttft_s=seconds),
        )
        for cohort, variant, seconds in ((Cohort.CANARY, "wide", ttft_s), (Cohort.CONTROL, "control", 1.0))
        for number in range(count)
    ]


async def started(control: Control, spec: str = SPEC) -> str:
    return (await control.rollouts.start(spec, "ann", "faster")).rollout_id


async def look(world: World, control: Control, seconds: float = 50.0, **measured: Any) -> None:
    """Requests finish in the middle of some seconds, after which a look is due."""
    world.now += seconds / 2
    version = 0 if (snapshot := control.board.latest(Kind.POLICY)) is None else snapshot.version
    control.rollouts.take(requests(world, version, **measured))
    world.now += seconds / 2
    await control.rollouts.tick()


async def view(control: Control, rollout_id: str) -> RolloutView:
    return await control.rollouts.get(rollout_id)


# --- its course ------------------------------------------------------------------------------------------------------


async def test_a_good_canary_goes_all_the_way(world: World, control: Control) -> None:
    rollout_id = await started(control)
    assert await world.percent() == 10.0, "the first percentage is in force at once"
    await look(world, control)
    assert (await view(control, rollout_id)).step_index == 1, "a pass counts at the last look only"
    await look(world, control)
    assert await world.percent() == 50.0
    world.now += 60.0
    await control.rollouts.tick()
    ended = await view(control, rollout_id)
    assert (ended.phase, ended.percent, await world.percent()) == (Phase.SUCCESSFUL, 100.0, 100.0)
    assert [event.percent for event in ended.events] == [0.0, 10.0, 50.0, 50.0, 100.0, 100.0]
    assert ended.events[2].reason == "50 %: every metric is within its limit"
    policy = parse_document((await control.store.current(Kind.POLICY)).text)  # type: ignore[union-attr]
    assert policy.rules[0].percent == 30.0, "nothing else in the policy has changed"
    authors = {info.author for info in await control.store.history(Kind.POLICY)}
    assert authors == {"ann", f"rollout/{rollout_id}"}


async def test_a_bad_canary_is_at_0_percent_after_one_look_and_stays_there(world: World, control: Control) -> None:
    rollout_id = await started(control)
    await look(world, control, ttft_s=3.0)
    failed = await view(control, rollout_id)
    assert (failed.phase, failed.is_pending, await world.percent()) == (Phase.FAILED, False, 0.0)
    assert "ttft P50: ratio 3" in failed.why
    for _ in range(3):
        await look(world, control)
    assert await world.percent() == 0.0
    with pytest.raises(RequestError, match="failed cannot be resumed"):
        await control.rollouts.command(rollout_id, RolloutCommand.RESUME, "ann", "")
    entries = [(entry.actor, entry.action) for entry in await control.store.audit()]
    itself = f"rollout/{rollout_id}"
    assert entries == [
        (itself, "policy.percent"),
        (itself, "rollout.failed"),
        (itself, "policy.percent"),
        ("ann", "rollout.start"),
        ("ann", "policy.apply"),
    ]


async def test_too_few_requests_hold_it_until_somebody_resumes(world: World, control: Control) -> None:
    rollout_id = await started(control)
    for _ in range(4):
        await look(world, control, count=10)
    held = await view(control, rollout_id)
    assert (held.phase, held.step_index, await world.percent()) == (Phase.INCONCLUSIVE, 1, 10.0)
    assert "20 canary and 20 control samples, 40 needed" in held.why
    await control.rollouts.command(rollout_id, RolloutCommand.RESUME, "bob", "more traffic now")
    await look(world, control)
    await look(world, control)
    assert await world.percent() == 50.0


async def test_requests_that_began_under_an_earlier_percentage_say_nothing(world: World, control: Control) -> None:
    rollout_id = await started(control)
    world.now += 25.0
    control.rollouts.take(requests(world, since_version=1, ttft_s=9.0))
    world.now += 25.0
    await control.rollouts.tick()
    looked = await view(control, rollout_id)
    assert (looked.phase, looked.num_canary) == (Phase.RUNNING, 0)


async def test_without_any_router_an_analysis_waits(world: World, control: Control) -> None:
    rollout_id = await started(control)
    control.has_routers = False
    await look(world, control, seconds=500.0)
    assert (await view(control, rollout_id)).phase is Phase.RUNNING
    control.has_routers = True
    await control.rollouts.tick()
    assert await world.percent() == 50.0


async def test_a_match_gets_a_rule_of_its_own(world: World, control: Control) -> None:
    target = SPEC.replace("{rule: fast}", "{match: {tenants: [globex]}}")
    rollout_id = await started(control, target)
    document = parse_document((await control.store.current(Kind.POLICY)).text)  # type: ignore[union-attr]
    rule = document.rules[0]
    assert (rule.id, rule.percent, rule.control, rule.match.tenants) == (
        f"rollout-{rollout_id}", 10.0, "plain", ("globex",),
    )  # fmt: skip
    await control.rollouts.command(rollout_id, RolloutCommand.ABORT, "ann", "")
    document = parse_document((await control.store.current(Kind.POLICY)).text)  # type: ignore[union-attr]
    assert document.rules[0].percent == 0.0


@pytest.mark.parametrize(
    ("num_rules", "match", "word"),
    [(984, "{tenants: [globex]}", "rules: 985 rules leave no room for switches"), (0, "{tenants: [a b]}", "'a b'")],
)
async def test_a_rollout_makes_no_rule_that_nobody_could_apply(
    world: World, control: Control, num_rules: int, match: str, word: str
) -> None:
    if num_rules:
        rules = [f"- {{id: r{number}, action: deny}}" for number in range(num_rules)]
        await world.apply(control, "schema: paceline.policy/v1\nrules:\n" + "\n".join(rules))
    with pytest.raises(RequestError, match=word) as failure:
        await started(control, SPEC.replace("{rule: fast}", f"{{match: {match}}}"))
    assert failure.value.kind is ErrorKind.INVALID
    assert await control.rollouts.list(10) == ()


async def test_a_rule_for_which_the_policy_has_no_room_is_refused_before_anything_is_kept(
    world: World, control: Control
) -> None:
    rules = [f"- {{id: r{number}, action: deny, match: {{tenants: [t]}}}}" for number in range(1000)]
    await world.apply(control, "schema: paceline.policy/v1\nrules:\n" + "\n".join(rules))
    with pytest.raises(RequestError, match="rules") as failure:
        await started(control, SPEC.replace("{rule: fast}", "{match: {tenants: [globex]}}"))
    assert failure.value.kind is ErrorKind.INVALID
    assert await control.rollouts.list(10) == ()


# --- by hand ---------------------------------------------------------------------------------------------------------


async def test_a_pause_by_hand_holds_the_step_and_resuming_begins_it_again(world: World, control: Control) -> None:
    rollout_id = await started(control)
    await look(world, control)
    paused = await control.rollouts.command(rollout_id, RolloutCommand.PAUSE, "bob", "lunch")
    assert (paused.phase, paused.why) == (Phase.PAUSED, "paused by bob: lunch")
    await look(world, control, seconds=500.0, ttft_s=9.0)
    resumed = await control.rollouts.command(rollout_id, RolloutCommand.RESUME, "bob", "")
    assert (resumed.phase, resumed.step_index, resumed.since, resumed.num_canary) == (Phase.RUNNING, 1, world.now, 0)
    await look(world, control)
    assert await world.percent() == 10.0
    await look(world, control)
    assert await world.percent() == 50.0
    by_hand = [entry.action for entry in await control.store.audit() if entry.action.startswith("rollout.")]
    assert by_hand[-3:] == ["rollout.resume", "rollout.pause", "rollout.start"]


@pytest.mark.parametrize(
    ("command", "phase", "percent"),
    [(RolloutCommand.ABORT, Phase.ABORTED, 0.0), (RolloutCommand.PROMOTE, Phase.SUCCESSFUL, 100.0)],
)
async def test_abort_and_promote_are_in_force_when_they_are_answered(
    world: World, control: Control, command: RolloutCommand, phase: Phase, percent: float
) -> None:
    rollout_id = await started(control)
    ended = await control.rollouts.command(rollout_id, command, "bob", "")
    assert (ended.phase, ended.is_pending, await world.percent()) == (phase, False, percent)
    assert await control.store.unfinished_rollouts() == ()


async def test_one_rollout_of_a_rule_at_a_time(world: World, control: Control) -> None:
    first = await started(control)
    with pytest.raises(RequestError, match=f"rollout {first} of rule fast is not finished") as failure:
        await started(control)
    assert failure.value.kind is ErrorKind.CONFLICT
    await control.rollouts.command(first, RolloutCommand.ABORT, "ann", "")
    await started(control)


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (SPEC.replace("set_percent: 10", "set_percent: 101"), "steps[0].set_percent"),
        (SPEC.replace("rule: fast", "rule: slow"), "target.rule"),
        (SPEC + "#" * 70_000, "text"),
        ("", "document"),
    ],
)
async def test_a_rollout_that_cannot_be_is_refused_by_field(control: Control, spec: str, field: str) -> None:
    with pytest.raises(RequestError) as failure:
        await started(control, spec)
    assert failure.value.kind is ErrorKind.INVALID
    assert field in failure.value.message
    assert await control.rollouts.list(10) == ()


# --- somebody else's edits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        ("percent: 10.0\n", "percent: 20.0\n", "rule fast is at 20 %, not at 10 %"),
        ("max_draft_tokens: 8", "max_draft_tokens: 9", "rule fast says something else than before"),
        ("id: fast", "id: renamed", "rule fast is gone"),
    ],
)
async def test_an_edit_of_the_rule_by_hand_ends_the_rollout_and_stays(
    world: World, control: Control, before: str, after: str, why: str
) -> None:
    rollout_id = await started(control)
    text = (await control.store.current(Kind.POLICY)).text  # type: ignore[union-attr]
    assert before in text
    edited = text.replace(before, after)
    await world.apply(control, edited, "bob")
    await look(world, control)
    ended = await view(control, rollout_id)
    assert (ended.phase, ended.is_pending) == (Phase.ABORTED, False)
    assert f"{why} (policy version 3, by bob)" in ended.why
    assert parse_document((await control.store.current(Kind.POLICY)).text) == parse_document(edited)  # type: ignore[union-attr]


async def test_an_edit_of_another_rule_disturbs_nobody(world: World, control: Control) -> None:
    rollout_id = await started(control)
    await look(world, control)
    text = (await control.store.current(Kind.POLICY)).text  # type: ignore[union-attr]
    await world.apply(control, text.replace("percent: 30.0", "percent: 31.0"))
    await look(world, control)
    assert await world.percent() == 50.0
    assert (await view(control, rollout_id)).phase is Phase.PAUSED


async def test_another_salt_means_other_cohorts_which_are_measured_afresh(world: World, control: Control) -> None:
    rollout_id = await started(control)
    await look(world, control, ttft_s=1.3)
    text = (await control.store.current(Kind.POLICY)).text  # type: ignore[union-attr]
    await world.apply(control, text + "salt: another\n")
    await control.rollouts.tick()
    again = await view(control, rollout_id)
    assert (again.step_index, again.since, again.num_canary) == (1, world.now, 0)


async def test_a_rollout_that_fails_takes_even_an_edited_rule_to_0_percent(world: World, control: Control) -> None:
    await started(control)
    text = (await control.store.current(Kind.POLICY)).text  # type: ignore[union-attr]

    def edit_first(what: str) -> None:
        control.store.before_write = lambda what: None
        raise UnavailableError("away for a moment")

    world.now += 25.0
    control.rollouts.take(requests(world, 2, ttft_s=9.0))
    world.now += 25.0
    control.store.after_write = lambda what: setattr(control.store, "before_write", edit_first)
    await control.rollouts.tick()  # the verdict is kept, then the store is away
    control.store.after_write = lambda what: None
    assert await world.percent() == 10.0
    await world.apply(control, text.replace("percent: 10.0\n", "percent: 20.0\n"), "bob")
    await control.rollouts.tick()
    assert await world.percent() == 0.0


# --- faults ----------------------------------------------------------------------------------------------------------


def killed_after(number: int, what: str) -> Callable[[str], None]:
    """Kills at the n-th write of a kind."""
    left = [number]

    def write(written: str) -> None:
        left[0] -= written == what
        if left[0] == 0 and written == what:
            raise Killed

    return write


@pytest.mark.parametrize("what", ["rollout", "policy"])
@pytest.mark.parametrize("when", ["before_write", "after_write"])
@pytest.mark.parametrize("number", range(1, 12))
async def test_a_killed_control_is_succeeded_at_the_same_step(
    world: World, control: Control, what: str, when: str, number: int
) -> None:
    """Wherever it is killed, the rollout comes to the same end, each percentage having been set once."""
    rollout_id = await started(control)
    setattr(control.store, when, killed_after(number, what))
    for _ in range(12):
        before = (await control.store.rollout(rollout_id)).revision
        try:
            await look(world, control)
        except Killed:
            stored = await control.store.rollout(rollout_id)
            control = await world.control()
            told = (await control.rollouts.list(1))[0]
            assert before <= stored.revision == told.revision
            await control.rollouts.tick()
    ended = (await control.rollouts.list(1))[0]
    assert (ended.phase, await world.percent()) == (Phase.SUCCESSFUL, 100.0)
    history = await control.store.history(Kind.POLICY)
    assert len(history) == 4, "10, 50 and 100 %, and the first one: nothing was done twice"


async def test_a_successor_goes_on_from_the_same_step_and_measures_it_afresh(world: World, control: Control) -> None:
    rollout_id = await started(control)
    await look(world, control)
    successor = await world.control()
    await successor.rollouts.tick()
    resumed = await view(successor, rollout_id)
    assert (resumed.step_index, resumed.phase, resumed.percent) == (1, Phase.RUNNING, 10.0)
    assert (resumed.since, resumed.num_canary) == (world.now, 0)
    await look(world, successor, seconds=100.0, count=10)
    assert (await view(successor, rollout_id)).phase is Phase.INCONCLUSIVE, "what the dead one saw does not count"


async def test_of_two_controls_one_goes_on_and_the_other_follows(world: World, control: Control) -> None:
    rollout_id = await started(control)
    other = await world.control()
    await other.rollouts.tick()
    for _ in range(12):
        await look(world, control)
        if (snapshot := await other.store.current(Kind.POLICY)) is not None:
            other.board.publish(snapshot)
        await look(world, other, seconds=0.0)
        if (snapshot := await other.store.current(Kind.POLICY)) is not None:
            control.board.publish(snapshot)
    ended = (await control.rollouts.list(1))[0]
    assert (ended.rollout_id, ended.phase, await world.percent()) == (rollout_id, Phase.SUCCESSFUL, 100.0)
    assert await view(control, rollout_id) == await view(other, rollout_id) == ended


async def test_while_the_store_is_away_a_rollout_waits_and_then_goes_on(
    world: World, control: Control, caplog: pytest.LogCaptureFixture
) -> None:
    rollout_id = await started(control)
    await look(world, control)
    control.store.is_away = True
    await look(world, control)
    await control.rollouts.tick()
    assert (await world.percent(), caplog.text.count("the database does not answer\n")) == (10.0, 1)
    control.store.is_away = False
    await control.rollouts.tick()
    assert await world.percent() == 50.0
    assert (await view(control, rollout_id)).phase is Phase.PAUSED
