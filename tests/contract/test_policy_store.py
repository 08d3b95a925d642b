"""What every store promises, whichever database keeps it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.control import store
from cluster.control.control_store import ControlStore
from cluster.control.open_store import open_store as open_url
from cluster.control.redis_store import RedisBackend
from cluster.control.sqlite_store import SQLiteBackend
from cluster.control.store import (
    AuditEntry,
    Change,
    ConflictError,
    InvalidWriteError,
    Kind,
    MissingError,
    Restore,
    Retention,
    RolloutRecord,
    StoreBackend,
    StoreError,
    StoreFullError,
)
from tests.redis_server import running_redis

pytestmark = pytest.mark.contract

POLICY = Kind.POLICY
OpenStore = Callable[..., Awaitable[ControlStore]]


def change(text: str, author: str = "ann", reason: str = "because") -> Change:
    return Change(text, author, reason)


def entry(actor: str = "ann", at: float = 1.0, detail: str = "") -> AuditEntry:
    return AuditEntry(actor, "policy.put", "policy", "ok", at, detail)


def rollout(rollout_id: str, revision: int = 1, finished: bool = False, state: str = "{}") -> RolloutRecord:
    return RolloutRecord(rollout_id, revision, state, finished, float(revision))


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with running_redis() as server:
        yield server.url


@pytest.fixture(params=["sqlite", "redis"])
def open_backend(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Awaitable[StoreBackend]]:
    """Opens the same database again and again, each time as another process would."""
    if request.param == "sqlite":
        return lambda: SQLiteBackend.open(tmp_path / "control.sqlite")
    url = request.getfixturevalue("redis_url")
    return lambda: RedisBackend.open(url, namespace=tmp_path.name)


@pytest.fixture
async def open_store(open_backend: Callable[[], Awaitable[StoreBackend]]) -> AsyncIterator[OpenStore]:
    opened: list[ControlStore] = []

    async def open_one(retention: Retention | None = None, poll_interval_s: float = 0.05) -> ControlStore:
        opened.append(ControlStore(await open_backend(), retention, poll_interval_s))
        return opened[-1]

    yield open_one
    for one in opened:
        await one.close()


# --- versions --------------------------------------------------------------------------------------------------------


async def test_a_new_store_is_empty(open_store: OpenStore) -> None:
    new = await open_store()
    assert await new.current(POLICY) is None
    assert new.last_known(POLICY) is None
    assert await new.history(POLICY) == ()
    assert await new.rollouts() == await new.unfinished_rollouts() == await new.audit() == ()
    with pytest.raises(MissingError, match="policy has no version 1"):
        await new.get(POLICY, 1)


async def test_versions_count_up_and_keep_who_when_and_why(open_store: OpenStore) -> None:
    one = await open_store()
    first = await one.put(POLICY, change("a: 1\n"), 0, now=10.5)
    second = await one.put(POLICY, Change("a: 2\n", "bob", "faster\nnow"), 1, now=11.0)
    assert (first.version, second.version) == (1, 2)
    assert await one.current(POLICY) == second == await one.get(POLICY, 2)
    assert await one.get(POLICY, 1) == first
    newest, oldest = await one.history(POLICY)
    assert (newest, oldest) == (second.info, first.info)
    assert (newest.author, newest.reason, newest.written_at) == ("bob", "faster\nnow", 11.0)
    assert newest.digest == store.text_digest("a: 2\n")
    assert newest.diff == "--- version 1\n+++ version 2\n@@ -1 +1 @@\n-a: 1\n+a: 2"
    assert oldest.diff.endswith("+a: 1")


async def test_kinds_count_apart(open_store: OpenStore) -> None:
    one = await open_store()
    await one.put(POLICY, change("policy"), 0, 1.0)
    access = await one.put(Kind.ACCESS, change("access"), 0, 1.0)
    assert access.version == 1
    assert (await one.get(POLICY, 1)).text == "policy"


async def test_a_write_from_an_old_version_is_refused_with_the_current_one(open_store: OpenStore) -> None:
    one, other = await open_store(), await open_store()
    await one.put(POLICY, change("a"), 0, 1.0)
    await one.put(POLICY, change("b"), 1, 2.0)
    for expected in (0, 1, 3):
        with pytest.raises(ConflictError, match=f"policy is at 2, not at {expected}") as refused:
            await other.put(POLICY, change("c"), expected, 3.0)
        assert refused.value.current == 2
    assert (await other.history(POLICY))[0].version == 2


async def test_no_write_is_lost_among_many_writers(open_store: OpenStore) -> None:
    """Each of them reads, changes and writes until nobody came between."""
    writers = [await open_store() for _ in range(4)]

    async def add(writer: ControlStore, line: str) -> None:
        while True:
            current = await writer.current(POLICY)
            text, version = (current.text, current.version) if current else ("", 0)
            try:
                await writer.put(POLICY, change(f"{text}{line}\n"), version, 1.0)
                return
            except ConflictError:
                continue

    lines = [f"{writer}.{number}" for writer in range(4) for number in range(5)]
    await asyncio.gather(*(add(writers[int(line[0])], line) for line in lines))
    current = await writers[0].current(POLICY)
    assert current is not None
    assert current.version == 20
    assert sorted(current.text.split()) == lines


async def test_a_rollback_is_a_new_version_with_the_old_text(open_store: OpenStore) -> None:
    one = await open_store()
    await one.put(POLICY, change("good\n"), 0, 1.0)
    await one.put(POLICY, change("bad\n"), 1, 2.0)
    restored = await one.rollback(POLICY, Restore(1, "bob", "slower"), 2, 3.0)
    assert (restored.version, restored.text) == (3, "good\n")
    assert (restored.info.restores, restored.info.author, restored.info.reason) == (1, "bob", "slower")
    assert "-bad\n+good" in restored.info.diff
    assert await one.current(POLICY) == restored
    assert (await one.history(POLICY))[0] == restored.info
    with pytest.raises(ConflictError):
        await one.rollback(POLICY, Restore(1, "bob", "again"), 2, 4.0)
    with pytest.raises(MissingError):
        await one.rollback(POLICY, Restore(9, "bob", "what"), 3, 4.0)


async def test_history_has_pages(open_store: OpenStore) -> None:
    one = await open_store()
    for version in range(5):
        await one.put(POLICY, change(f"v{version + 1}"), version, 1.0)
    assert [info.version for info in await one.history(POLICY, 2)] == [5, 4]
    assert [info.version for info in await one.history(POLICY, 2, before=4)] == [3, 2]
    assert [info.version for info in await one.history(POLICY, 2, before=2)] == [1]
    assert [info.version for info in await one.history(POLICY, 2, before=100)] == [5, 4]
    assert await one.history(POLICY, 2, before=1) == ()


async def test_old_versions_are_forgotten_and_their_numbers_are_not_used_again(open_store: OpenStore) -> None:
    one = await open_store(Retention(versions=2))
    for version in range(4):
        await one.put(POLICY, change(f"v{version + 1}"), version, 1.0)
    assert [info.version for info in await one.history(POLICY)] == [4, 3]
    with pytest.raises(MissingError):
        await one.get(POLICY, 2)
    assert (await one.put(POLICY, change("v5"), 4, 1.0)).version == 5


async def test_any_text_comes_back_as_it_went_in(open_store: OpenStore) -> None:
    one = await open_store()
    for version, text in enumerate(["ü \U0001f680 \x00 \r\n'\"{}", "x" * store.MAX_TEXT_BYTES]):
        await one.put(POLICY, change(text), version, 1.0)
        assert (await one.get(POLICY, version + 1)).text == text


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (Change("", "ann", ""), "text"),
        (Change("é" * (store.MAX_TEXT_BYTES // 2) + "x", "ann", ""), "text"),
        (Change("\ud800", "ann", ""), "text"),
        (Change("a", "", ""), "author"),
        (Change("a", "x" * 129, ""), "author"),
        (Change("a", "ann\n", ""), "author"),
        (Change("a", "ann", "x" * 1025), "reason"),
        (Change("a", "ann", "\x00"), "reason"),
    ],
)
async def test_a_bad_field_is_named_and_nothing_is_written(open_store: OpenStore, bad: Change, field: str) -> None:
    one = await open_store()
    with pytest.raises(InvalidWriteError, match=f"^{field}: "):
        await one.put(POLICY, bad, 0, 1.0)
    assert await one.current(POLICY) is None


async def test_questions_out_of_range_are_refused(open_store: OpenStore) -> None:
    one = await open_store()
    questions = {
        "limit": [one.history(POLICY, 0), one.history(POLICY, 101), one.audit(0), one.rollouts(10**30)],
        "before": [one.history(POLICY, 1, 0), one.audit(1, 10**30)],
        "version": [one.get(POLICY, 0), one.get(POLICY, 10**30)],
        "revision": [one.put_rollout(rollout("r", 0)), one.put_rollout(rollout("r", 10**30))],
        "rollout_id": [one.put_rollout(rollout(""))],
        "state": [one.put_rollout(rollout("r", state="x" * (store.MAX_TEXT_BYTES + 1)))],
        "actor": [one.append_audit(entry(actor=""))],
        "detail": [one.append_audit(entry(detail="x" * 4097))],
    }
    for field, coroutines in questions.items():
        for coroutine in coroutines:
            with pytest.raises(InvalidWriteError, match=f"^{field}: must (be|have) "):
                await coroutine


# --- watching --------------------------------------------------------------------------------------------------------


async def test_a_watch_wakes_at_once_for_a_write_of_the_same_process(open_store: OpenStore) -> None:
    one = await open_store(poll_interval_s=3600.0)
    watches = [asyncio.create_task(one.watch(POLICY, 0, 60.0)) for _ in range(3)]
    await one.put(Kind.ACCESS, change("other"), 0, 1.0)
    written = await one.put(POLICY, change("a"), 0, 1.0)
    assert await asyncio.gather(*watches) == [written] * 3


async def test_a_watch_sees_another_process_write(open_store: OpenStore) -> None:
    one, other = await open_store(), await open_store()
    watch = asyncio.create_task(one.watch(POLICY, 0, 60.0))
    written = await other.put(POLICY, change("a"), 0, 1.0)
    assert await watch == written == one.last_known(POLICY)


async def test_a_watch_with_another_version_returns_at_once_and_else_ends_in_time(open_store: OpenStore) -> None:
    one = await open_store(poll_interval_s=3600.0)
    assert await one.watch(POLICY, 0, 0.01) is None
    written = await one.put(POLICY, change("a"), 0, 1.0)
    assert await one.watch(POLICY, 0, 60.0) == written
    assert await one.watch(POLICY, 7, 60.0) == written, "a store restored from a backup is behind its watchers"
    assert await one.watch(POLICY, 1, 0.01) is None


# --- rollouts --------------------------------------------------------------------------------------------------------


async def test_a_rollout_is_written_revision_by_revision(open_store: OpenStore) -> None:
    one, other = await open_store(), await open_store()
    await one.put_rollout(rollout("r", 1))
    await one.put_rollout(rollout("r", 2, state='{"percent": 5}'))
    assert await other.rollout("r") == rollout("r", 2, state='{"percent": 5}')
    for revision in (1, 2, 4):
        with pytest.raises(ConflictError, match="rollout r is at 2") as refused:
            await other.put_rollout(rollout("r", revision, state="other"))
        assert refused.value.current == 2
    with pytest.raises(ConflictError) as refused:
        await other.put_rollout(rollout("unknown", 2))
    assert refused.value.current == 0
    with pytest.raises(MissingError):
        await other.rollout("unknown")


async def test_rollouts_are_listed_by_start(open_store: OpenStore) -> None:
    one = await open_store()
    for name in "abc":
        await one.put_rollout(rollout(name))
    await one.put_rollout(rollout("b", 2, finished=True))
    assert [record.rollout_id for record in await one.rollouts()] == ["c", "b", "a"]
    assert [record.rollout_id for record in await one.rollouts(2)] == ["c", "b"]
    assert [record.rollout_id for record in await one.unfinished_rollouts()] == ["a", "c"]


async def test_a_new_rollout_takes_the_place_of_the_oldest_finished_one(open_store: OpenStore) -> None:
    one = await open_store(Retention(rollouts=3))
    for name in "abc":
        await one.put_rollout(rollout(name))
    with pytest.raises(StoreFullError, match="3 rollouts are unfinished"):
        await one.put_rollout(rollout("d"))
    await one.put_rollout(rollout("c", 2, finished=True))
    await one.put_rollout(rollout("b", 2, finished=True))
    await one.put_rollout(rollout("d"))
    assert [record.rollout_id for record in await one.rollouts()] == ["d", "c", "a"]
    assert [record.rollout_id for record in await one.unfinished_rollouts()] == ["a", "d"]


# --- audit -----------------------------------------------------------------------------------------------------------


async def test_the_audit_log_is_in_order_and_has_pages(open_store: OpenStore) -> None:
    one = await open_store()
    written = [await one.append_audit(entry(at=float(number), detail=f"n={number}\nü")) for number in range(5)]
    assert [one.sequence for one in written] == [1, 2, 3, 4, 5]
    assert await one.audit(2) == (written[4], written[3])
    assert await one.audit(2, before=4) == (written[2], written[1])
    assert await one.audit(2, before=1) == ()


async def test_the_audit_log_keeps_the_newest_entries(open_store: OpenStore) -> None:
    one = await open_store(retention=Retention(audit_entries=2))
    for number in range(4):
        await one.append_audit(entry(at=float(number)))
    assert [one.sequence for one in await one.audit()] == [4, 3]


# --- answers that were lost ------------------------------------------------------------------------------------------


async def test_a_write_repeated_because_its_answer_was_lost_is_done_once(
    open_store: OpenStore, open_backend: Callable[[], Awaitable[StoreBackend]]
) -> None:
    one = await open_store()
    backend = await open_backend()
    first = await one.put(POLICY, change("a"), 0, 1.0)
    second = await one.put(POLICY, change("b"), 1, 2.0)
    await backend.append(second, keep=10)
    with pytest.raises(ConflictError):
        await backend.append(first, keep=10)
    with pytest.raises(ConflictError):
        await backend.append(replace(second, text="c"), keep=10)
    await backend.put_rollout(rollout("r"), keep=10)
    await backend.put_rollout(rollout("r"), keep=10)
    assert await backend.append_audit(entry(), keep=10) == await backend.append_audit(entry(), keep=10) == 1
    assert await backend.append_audit(entry(at=2.0), keep=10) == 2
    assert await one.current(POLICY) == second
    assert len(await one.history(POLICY)) == 2
    await backend.close()


# --- URLs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("database", ["sqlite", "redis"])
async def test_a_url_names_the_store(database: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path}/a%20b.sqlite" if database == "sqlite" else request.getfixturevalue("redis_url")
    one = await open_url(url, Retention(versions=1))
    for version in range(2):
        await one.put(POLICY, change(f"v{version + 1}"), version, 1.0)
    await one.close()
    again = await open_url(url)
    assert [info.version for info in await again.history(POLICY)] == [2]
    await again.close()


@pytest.mark.parametrize("url", ["", "sqlite:relative", "postgres://ann:secret@host"])
async def test_a_url_of_another_kind_is_refused(url: str) -> None:
    with pytest.raises(StoreError, match="the store's URL must be sqlite:///, redis://, rediss:// or unix://"):
        await open_url(url)
