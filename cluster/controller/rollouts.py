"""Carries rollouts out: measures, decides, moves percentages, and keeps each step before and after it is taken.

Whatever ends this process, its successor goes on from the stored state: an action that is pending is done again, which
changes nothing if it was done, and a window whose requests were counted in memory is measured afresh.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from cluster.control import rollout, rollout_entry
from cluster.control.applicable import check_applicable
from cluster.control.control_store import ControlStore
from cluster.control.document import DocumentError, RuleAction, parse_document
from cluster.control.finished_request import FinishedRequest
from cluster.control.rollout import RolloutCommand, RolloutState
from cluster.control.rollout_entry import MAX_SPEC_BYTES, RolloutEntry, RolloutView, moved, view_of
from cluster.control.rollout_rule import AppliedRule, RuleEditedError, applied_rule, edit_of, find_rule, with_percent
from cluster.control.rollout_spec import RolloutSpec, parse_rollout
from cluster.control.store import ConflictError, RolloutRecord, check_name, check_remark
from cluster.controller.audit_log import AuditLog
from cluster.controller.errors import errors_of
from cluster.controller.policy_desk import PolicyDesk
from cluster.controller.rollout_run import RolloutRun
from cluster.messages.answer import ErrorKind, RequestError

logger = logging.getLogger(__name__)

TICK_S = 0.25


class Rollouts:
    """Owns the unfinished rollouts of the store: a RolloutBackend. One event loop's; one thing at a time.

    `has_routers`: whether any router reports now. `clock` is seconds since 1970.
    """

    def __init__(
        self, store: ControlStore, policy: PolicyDesk, has_routers: Callable[[], bool], clock: Callable[[], float]
    ) -> None:
        self._store = store
        self._policy = policy
        self._has_routers = has_routers
        self._clock = clock
        self._audit = AuditLog(store, clock)
        self._runs: dict[str, RolloutRun] | None = None  # None: not read from the store yet
        self._lock = asyncio.Lock()
        self._troubles: dict[str, str] = {}  # by rollout, to be told once

    # --- by itself ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Go on with every rollout, for ever. While the store is away, all of them wait."""
        while True:
            await self.tick()
            await asyncio.sleep(TICK_S)

    async def tick(self) -> None:
        """Go on with every rollout as far as time and measurements allow. What cannot be done now is tried again."""
        async with self._lock:
            with self._noting_trouble("all of them"):
                await self._known()
            for rollout_id, run in list((self._runs or {}).items()):
                with self._noting_trouble(rollout_id):
                    await self._go_on(run)

    def take(self, records: Sequence[FinishedRequest]) -> None:
        """Finished requests of a router; finished_at is on this service's clock."""
        for run in (self._runs or {}).values():
            run.take(records)

    # --- RolloutBackend ----------------------------------------------------------------------------------------------

    async def start(self, text: str, author: str, reason: str) -> RolloutView:
        return await errors_of(self._start(text, author, reason))

    async def get(self, rollout_id: str) -> RolloutView:
        run = (self._runs or {}).get(rollout_id)
        if run is not None:
            return run.view(self._clock())
        return _view(await errors_of(self._store.rollout(rollout_id)))

    async def list(self, limit: int) -> tuple[RolloutView, ...]:
        return tuple(map(_view, await errors_of(self._store.rollouts(limit))))

    async def command(self, rollout_id: str, command: RolloutCommand, author: str, reason: str) -> RolloutView:
        return await errors_of(self._command(rollout_id, command, author, reason))

    # --- commands ----------------------------------------------------------------------------------------------------

    async def _start(self, spec_text: str, author: str, reason: str) -> RolloutView:
        check_name("author", author)
        check_remark("reason", reason)
        spec = _parse(spec_text)
        async with self._lock:
            runs, now, rollout_id = await self._known(), self._clock(), secrets.token_hex(4)
            rule = spec.target.rule or f"rollout-{rollout_id}"
            others = [other for other, run in runs.items() if run.entry.rule == rule]
            if others:
                raise RequestError(ErrorKind.CONFLICT, f"rollout {others[0]} of rule {rule} is not finished")
            applied = await self._target(spec, rule)
            entry = RolloutEntry(rollout_id, rule, spec_text, author, reason, now, rollout.start(now), applied)
            run = RolloutRun(entry, 0)
            await self._keep(run, moved(entry, entry.state, now))
            runs[rollout_id] = run
            await self._note(author, "start", entry, reason)
            await self._go_on(run)
            return run.view(self._clock())

    async def _target(self, spec: RolloutSpec, rule_id: str) -> AppliedRule | None:
        """The rule as it stands; None if it is to be made, for which there is room.

        Raises RequestError unless it is there and has a percentage, DocumentError for one that cannot be made.
        """
        snapshot = await self._policy.standing()
        document = None if snapshot is None else parse_document(snapshot.text)
        if spec.target.match is not None:
            made = with_percent(document or self._policy.default_policy, spec, rule_id, None, 0.0)
            if made is not None:
                check_applicable(made)
            return None
        rule = None if document is None else find_rule(document, rule_id)
        if snapshot is None or document is None or rule is None or rule.action is RuleAction.DENY:
            message = f"target.rule: the policy in force has no allow rule {rule_id!r}"
            raise RequestError(ErrorKind.INVALID, message, "target.rule")
        applied = applied_rule(document, snapshot.version, rule_id)
        assert applied is not None
        return applied

    async def _command(self, rollout_id: str, command: RolloutCommand, author: str, reason: str) -> RolloutView:
        check_name("author", author)
        check_remark("reason", reason)
        async with self._lock:
            run = (await self._known()).get(rollout_id) or _run(await self._store.rollout(rollout_id))
            now = self._clock()
            try:
                by = f"{author}: {reason}" if reason else author
                state = rollout.obey(run.spec, run.state, command, now, by)
            except rollout.RolloutCommandError as error:
                raise RequestError(ErrorKind.CONFLICT, str(error)) from error
            await self._keep(run, moved(run.entry, state, now))
            await self._note(author, command, run.entry, reason)
            await self._go_on(run)
            return run.view(self._clock())

    # --- steps -------------------------------------------------------------------------------------------------------

    async def _go_on(self, run: RolloutRun) -> None:
        """One measurement at most; then every step that needs none."""
        now = self._clock()
        try:
            await self._heed_edits(run, now)
            measurement = run.measurement(now) if self._has_routers() else None
            await self._move(run, rollout.advance(run.spec, run.state, measurement, now), now)
            while run.state.pending is not None:
                await self._carry_out(run)
                await self._move(run, rollout.advance(run.spec, run.state, None, self._clock()), self._clock())
        except ConflictError:  # another control service, or an earlier write of ours whose answer was lost
            record = await self._store.rollout(run.entry.rollout_id)
            run.stored(rollout_entry.from_json(record.state), record.revision)
        if run.entry.is_over:
            (self._runs or {}).pop(run.entry.rollout_id, None)

    async def _heed_edits(self, run: RolloutRun, now: float) -> None:
        """Step aside for somebody else's edit of the rule; measure afresh if it changed what is compared."""
        applied, snapshot = run.entry.applied, self._policy.in_force()
        if applied is None or run.state.pending is not None or snapshot is None or run.is_checked(snapshot):
            return
        document = parse_document(snapshot.text)
        if edit := edit_of(document, run.entry.rule, applied):
            await self._step_aside(run, edit, now)
            return
        stands = applied_rule(document, snapshot.version, run.entry.rule)
        if stands is not None and stands.surroundings != applied.surroundings:
            state = rollout.measure_afresh(run.spec, run.state, now)
            await self._keep(run, replace(moved(run.entry, state, now), applied=stands))
        run.checked_version = snapshot.version

    async def _step_aside(self, run: RolloutRun, edit: str, now: float) -> None:
        snapshot = self._policy.in_force()
        version = "" if snapshot is None else f" (policy version {snapshot.version}, by {snapshot.info.author})"
        why = f"{edit}{version}: what was set by hand stays"
        await self._move(run, rollout.step_aside(run.state, now, why), now)

    async def _carry_out(self, run: RolloutRun) -> None:
        """Bring the pending percentage into force, and note that it is."""
        entry, pending = run.entry, run.state.pending
        assert pending is not None
        author = f"rollout/{entry.rollout_id}"
        try:
            snapshot = await self._policy.edit("percent", run.edited, author, run.state.reason[:1000])
        except RuleEditedError as error:
            await self._step_aside(run, str(error), self._clock())
            return
        now = self._clock()
        applied = applied_rule(parse_document(snapshot.text), snapshot.version, entry.rule)
        state = rollout.confirm(run.state, pending.revision, now)
        await self._keep(run, replace(moved(entry, state, now), applied=applied))

    async def _move(self, run: RolloutRun, state: RolloutState, now: float) -> None:
        """Keep a state that the rollout came to by itself."""
        before = run.state
        if state == before:
            return
        await self._keep(run, moved(run.entry, state, now))
        if state.phase is not before.phase:
            logger.info("rollout %s is %s: %s", run.entry.rollout_id, state.phase, state.reason)
            await self._note(f"rollout/{run.entry.rollout_id}", state.phase, run.entry, state.reason)

    # --- the store ---------------------------------------------------------------------------------------------------

    async def _known(self) -> dict[str, RolloutRun]:
        """Every unfinished rollout. The first time they come from the store, and what they were measuring is lost."""
        if self._runs is None:
            runs = [run for record in await self._store.unfinished_rollouts() if (run := _readable(record))]
            for run in runs:
                now = self._clock()
                await self._move(run, rollout.measure_afresh(run.spec, run.state, now), now)
            self._runs = {run.entry.rollout_id: run for run in runs}
        return self._runs

    async def _keep(self, run: RolloutRun, entry: RolloutEntry) -> None:
        """Raises ConflictError if the store has another state by now."""
        text, revision = rollout_entry.to_json(entry), run.revision + 1
        await self._store.put_rollout(RolloutRecord(entry.rollout_id, revision, text, entry.is_over, self._clock()))
        run.stored(entry, revision)

    async def _note(self, actor: str, action: str, entry: RolloutEntry, detail: str) -> None:
        await self._audit.note(actor, f"rollout.{action}", entry.rollout_id, entry.state.phase, detail)

    @contextmanager
    def _noting_trouble(self, whose: str) -> Iterator[None]:
        """One rollout's trouble is not the others', and what is stored stays consistent, so the next tick may retry."""
        try:
            yield
            self._troubles.pop(whose, None)
        except Exception as error:
            if self._troubles.get(whose) != str(error):
                logger.warning("a rollout waits: %s", whose, exc_info=error)
            self._troubles[whose] = str(error)


def _parse(spec_text: str) -> RolloutSpec:
    if len(spec_text.encode(errors="replace")) > MAX_SPEC_BYTES:
        raise RequestError(ErrorKind.INVALID, f"text: must have at most {MAX_SPEC_BYTES} bytes", "text")
    try:
        return parse_rollout(spec_text)
    except DocumentError as error:
        raise RequestError(ErrorKind.INVALID, str(error), "text") from error


def _run(record: RolloutRecord) -> RolloutRun:
    return RolloutRun(rollout_entry.from_json(record.state), record.revision)


def _readable(record: RolloutRecord) -> RolloutRun | None:
    """A rollout of a later version of the program is left alone."""
    try:
        return _run(record)
    except ValueError:
        logger.exception("rollout %s cannot be read; its percentage stays as it is", record.rollout_id)
        return None


def _view(record: RolloutRecord) -> RolloutView:
    return view_of(rollout_entry.from_json(record.state), record.revision, None, None)
