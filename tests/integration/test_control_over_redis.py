"""The control service over a real Redis that is killed: no version is lost, and routers notice nothing."""

from __future__ import annotations

import pytest

from cluster.control.store import Change, Kind
from cluster.messages.answer import ErrorKind, RequestError
from tests.control_server import Follower, control_server, policy
from tests.redis_server import running_redis

pytestmark = pytest.mark.integration


async def test_redis_is_killed_and_comes_back_and_routers_notice_nothing() -> None:
    with running_redis() as redis:
        async with control_server(redis.url) as server:
            service, router = server.service, Follower(server)
            router.link.start()
            await service.apply(Kind.POLICY, Change(policy("one"), "ann", "first"))
            await router.arrives("one")

            redis.kill()
            with pytest.raises(RequestError) as failure:
                await service.apply(Kind.POLICY, Change(policy("lost"), "ann", "while it is away"))
            assert failure.value.kind is ErrorKind.UNAVAILABLE
            status = await service.status()
            assert status.store_error
            assert [(state.policy_version, state.error) for state in status.routers] == [(1, "")]
            newcomer = Follower(server)
            newcomer.link.start()
            await newcomer.arrives("one")  # from memory

            redis.start()
            await service.apply(Kind.POLICY, Change(policy("two"), "ann", "second"))
            await router.arrives("two")
            await newcomer.arrives("two")
            assert router.texts == [policy("one"), policy("two")]
            history = await service.history(Kind.POLICY, 10)
            assert [(info.version, info.reason) for info in history] == [(2, "second"), (1, "first")]
            await router.link.stop()
            await newcomer.link.stop()


async def test_a_control_service_that_starts_before_redis_works_once_redis_does() -> None:
    with running_redis() as redis:
        redis.kill()
        async with control_server(redis.url) as server:
            router = Follower(server)
            router.link.start()
            assert (await server.service.status()).store_error
            with pytest.raises(RequestError) as failure:
                await server.service.apply(Kind.POLICY, Change(policy("lost"), "ann", ""))
            assert failure.value.kind is ErrorKind.UNAVAILABLE
            redis.start()
            await server.service.apply(Kind.POLICY, Change(policy("one"), "ann", ""))
            await router.arrives("one")
            await router.link.stop()


async def test_a_new_control_service_finds_what_the_one_before_wrote() -> None:
    with running_redis() as redis:
        async with control_server(redis.url) as server:
            await server.service.apply(Kind.POLICY, Change(policy("one"), "ann", ""))
        redis.kill()
        redis.start()
        async with control_server(redis.url) as server:
            router = Follower(server)
            router.link.start()
            await router.arrives("one")
            await router.link.stop()
