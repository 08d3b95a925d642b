"""The Redis store under what happens to servers, and to secrets."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import AsyncIterator, Iterator

import pytest
from redis.asyncio import Redis

from cluster.control.control_store import ControlStore
from cluster.control.redis_store import SCHEMA_VERSION, RedisBackend
from cluster.control.store import Change, ConflictError, Kind, RolloutRecord, Snapshot, StoreError, UnavailableError
from tests.redis_server import RedisServer, running_redis

pytestmark = pytest.mark.integration

POLICY = Kind.POLICY


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with running_redis() as one:
        yield one


@pytest.fixture
async def store(server: RedisServer) -> AsyncIterator[ControlStore]:
    one = ControlStore(await RedisBackend.open(server.url), poll_interval_s=0.02)
    yield one
    await one.close()


async def put(store: ControlStore, expected_version: int) -> Snapshot:
    return await store.put(POLICY, Change(f"v{expected_version + 1}", "ann", ""), expected_version, 1.0)


async def put_until_unavailable(store: ControlStore) -> int:
    """Write versions until the server is gone; returns the last one that was answered."""
    version = 0
    while True:
        try:
            version = (await put(store, version)).version
        except UnavailableError:
            return version


async def test_kill_9_and_restart_in_the_middle_of_writes_loses_no_version(
    server: RedisServer, store: ControlStore
) -> None:
    other = ControlStore(await RedisBackend.open(server.url), poll_interval_s=0.02)
    writing = asyncio.create_task(put_until_unavailable(store))
    assert await other.watch(POLICY, 0, 60.0) is not None
    while (await other.watch(POLICY, 0, 60.0)).version < 50:  # type: ignore[union-attr]
        pass
    server.kill()
    answered = await writing
    server.start()
    current = await store.current(POLICY)
    assert current is not None
    assert current.version in (answered, answered + 1), "at most the write whose answer was lost is there as well"
    for version in range(1, current.version + 1):
        assert (await store.get(POLICY, version)).text == f"v{version}"
    assert await put(store, current.version) == await other.watch(POLICY, current.version, 60.0)
    await other.close()


async def test_while_the_server_is_away_the_last_known_version_stays_and_writes_fail_clearly(
    server: RedisServer, store: ControlStore, caplog: pytest.LogCaptureFixture
) -> None:
    written = await put(store, 0)
    server.kill()
    with caplog.at_level(logging.INFO, "cluster.control.control_store"):
        with pytest.raises(UnavailableError, match=r"^Redis at /.*socket: "):
            await put(store, 1)
        with pytest.raises(UnavailableError):
            await store.current(POLICY)
        assert store.last_known(POLICY) == written
        watch = asyncio.create_task(store.watch(POLICY, 1, 60.0))
        timeout_s = 0.5
        while store.away is None:
            assert await store.watch(POLICY, 1, timeout_s) is None
            timeout_s *= 2
        server.start()
        second = await put(store, 1)
        assert await watch == second == store.last_known(POLICY)
        await store.watch(POLICY, 0, 60.0)
    assert store.away is None
    messages = [record.getMessage() for record in caplog.records]
    assert [message.partition(";")[0] for message in messages] == [
        "the control store is away", "the control store is back",
    ]  # fmt: skip


async def test_two_processes_that_write_the_same_revision_get_one_success(server: RedisServer) -> None:
    stores = [ControlStore(await RedisBackend.open(server.url)) for _ in range(5)]
    records = [RolloutRecord("r", 1, f"from {number}", False, 1.0) for number in range(5)]
    writes = [store.put_rollout(record) for store, record in zip(stores, records, strict=True)]
    outcomes = await asyncio.gather(*writes, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes if outcome] == [ConflictError] * 4
    assert await stores[0].rollout("r") == records[outcomes.index(None)]
    for store in stores:
        await store.close()


async def test_namespaces_do_not_mix_and_all_keys_share_a_hash_tag(server: RedisServer, store: ControlStore) -> None:
    other = ControlStore(await RedisBackend.open(server.url, namespace="staging"))
    await put(store, 0)
    assert await other.current(POLICY) is None
    await put(other, 0)
    async with Redis(unix_socket_path=str(server.socket), decode_responses=True) as client:
        assert {key.partition(":")[0] for key in await client.keys()} == {"{paceline}", "{staging}"}
    await other.close()


async def test_a_namespace_of_a_newer_version_is_refused_and_left_alone(server: RedisServer) -> None:
    async with Redis(unix_socket_path=str(server.socket), decode_responses=True) as client:
        await client.set("{paceline}:schema", SCHEMA_VERSION + 1)
        with pytest.raises(StoreError, match=f"has schema {SCHEMA_VERSION + 1}, .* reads up to {SCHEMA_VERSION}"):
            await RedisBackend.open(server.url)
        assert await client.get("{paceline}:schema") == str(SCHEMA_VERSION + 1)


async def test_users_and_passwords_work_and_appear_nowhere(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with Redis(unix_socket_path=str(server.socket)) as client:
        await client.execute_command("ACL", "SETUSER", "ann", "on", ">se/cret", "~{paceline}:*", "+@all", "-@dangerous")
        await client.execute_command("ACL", "SETUSER", "default", "off")
    with caplog.at_level(logging.DEBUG):
        store = ControlStore(await RedisBackend.open(f"unix://ann:se%2Fcret@{server.socket}"))
        await put(store, 0)
        await store.close()
        told = []
        for url in (f"unix://ann:wrongcret@{server.socket}", server.url):
            with pytest.raises(UnavailableError) as refused:
                await RedisBackend.open(url)
            told.append("".join(traceback.format_exception(refused.value)))
    assert "cret" not in caplog.text + "".join(told) + repr(store)


@pytest.mark.parametrize("url", ["http://ann:secret@host", "redis://ann:sec/ret@host", "redis://:secret@/0", "secret"])
async def test_a_url_that_leads_nowhere_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(StoreError, match="must be sqlite:///, redis://, rediss:// or unix://") as refused:
        await RedisBackend.open(url)
    told = "".join(traceback.format_exception(refused.value))
    assert "sec" not in told.replace("test_redis_store", "")


async def test_an_option_that_is_not_understood_is_refused() -> None:
    with pytest.raises(StoreError, match="host:6379 has an option that is not understood"):
        await RedisBackend.open("redis://:secret@host/0?socket_timeout=soon")
