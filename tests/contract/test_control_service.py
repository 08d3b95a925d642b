"""The control service through its real gRPC port: documents, their history, watching, and who may do what."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import ClassVar

import pytest

from cluster.control.document import parse_document
from cluster.control.rollout import RolloutCommand
from cluster.control.store import Change, Kind, Restore
from cluster.control.switch import SpeculationSwitch
from cluster.messages.answer import ErrorKind, RequestError
from cluster.transport.control_client import ControlClient, RouterEnd
from tests.control_server import ACCESS_TEXT, TOKEN, ControlServer, Follower, control_server, policy

pytestmark = pytest.mark.contract


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[ControlServer]:
    async with control_server(tmp_path / "control.db") as server:
        yield server


@pytest.fixture
async def client(server: ControlServer) -> AsyncIterator[ControlClient]:
    client = ControlClient(server.address, TOKEN)
    yield client
    await client.close()


def change(salt: str) -> Change:
    return Change(policy(salt), "ann", "because")


ACCESS = Change(ACCESS_TEXT, "ann", "")
BAD = Change(policy("s") + "rules: [{id: r, action: allow, percent: 101}]\n", "ann", "")


async def test_a_document_is_applied_read_listed_and_rolled_back(client: ControlClient) -> None:
    first = await client.apply(Kind.POLICY, change("one"))
    second = await client.apply(Kind.POLICY, change("two"), expected_version=1)
    third = await client.roll_back(Kind.POLICY, Restore(1, "bob", "undo"))

    assert [first.version, second.version, third.version] == [1, 2, 3]
    assert (await client.get(Kind.POLICY)).text == policy("one")
    assert (await client.get(Kind.POLICY, 2)).text == policy("two")
    newest, middle, oldest = await client.history(Kind.POLICY, 10)
    assert (newest.restores, newest.author, newest.reason) == (1, "bob", "undo")
    assert "-salt: one" in middle.diff
    assert "+salt: two" in middle.diff
    assert oldest.version == 1
    assert [item.version for item in await client.history(Kind.POLICY, 10, before=3)] == [2, 1]


async def test_what_was_done_is_told_newest_first(client: ControlClient) -> None:
    for salt in ("one", "two"):
        await client.apply(Kind.POLICY, change(salt))
    newest, oldest = await client.audit(10)
    assert (newest.actor, newest.action, newest.outcome, newest.detail) == (
        "ann",
        "policy.apply",
        "version 2",
        "because",
    )
    assert await client.audit(10, before=newest.sequence) == (oldest,)


async def test_kinds_count_their_own_versions(client: ControlClient) -> None:
    await client.apply(Kind.POLICY, change("one"))
    assert (await client.apply(Kind.ACCESS, ACCESS)).version == 1


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda client: client.get(Kind.POLICY, 7), ErrorKind.NOT_FOUND),
        (lambda client: client.apply(Kind.POLICY, BAD), ErrorKind.INVALID),
        (lambda client: client.apply(Kind.POLICY, Change("", "ann", "")), ErrorKind.INVALID),
        (lambda client: client.apply(Kind.POLICY, Change(policy("s"), "", "")), ErrorKind.INVALID),
        (lambda client: client.apply(Kind.POLICY, change("text"), expected_version=4), ErrorKind.CONFLICT),
        (lambda client: client.roll_back(Kind.POLICY, Restore(9, "ann", "")), ErrorKind.NOT_FOUND),
        (lambda client: client.history(Kind.POLICY, 100_000), ErrorKind.INVALID),
        (lambda client: client.audit(100_000), ErrorKind.INVALID),
    ],
)
async def test_what_cannot_be_done_is_refused_by_kind(client: ControlClient, call, kind: ErrorKind) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(RequestError) as failure:
        await call(client)
    assert failure.value.kind is kind
    assert (await client.status()).policy_version == 0


async def test_a_refused_document_names_the_field_and_leaves_the_last_one_in_force(client: ControlClient) -> None:
    await client.apply(Kind.POLICY, change("good"))
    with pytest.raises(RequestError, match=r"rules\[0\]\.percent.*at most 100"):
        await client.apply(Kind.POLICY, BAD)
    assert (await client.get(Kind.POLICY)).text == policy("good")


@pytest.mark.parametrize("name", ["field", "字"])
async def test_a_document_with_more_flaws_than_an_answer_holds_is_refused_like_any_other(
    client: ControlClient, name: str
) -> None:
    text = policy("s") + "".join(f"{name}{number}: 1\n" for number in range(2000))
    with pytest.raises(RequestError, match=r"0: unknown field.* \(the rest is left out\)") as failure:
        await client.apply(Kind.POLICY, Change(text, "ann", ""))
    assert failure.value.kind is ErrorKind.INVALID


async def test_a_document_without_room_for_the_kill_switch_is_refused_and_the_switch_fits_into_any_other(
    client: ControlClient,
) -> None:
    def crowded(num_rules: int) -> str:
        rule = {"action": "deny", "match": {"tenants": [f"{number:02}" for number in range(38)]}}
        rules = [rule | {"id": f"r{number}"} for number in range(num_rules)]
        return parse_document({"schema": "paceline.policy/v1", "rules": rules}).canonical_json()

    with pytest.raises(RequestError, match="rules: 985 rules leave no room for switches"):
        await client.apply(Kind.POLICY, Change(crowded(985), "ann", ""))
    await client.apply(Kind.POLICY, Change(crowded(984), "ann", ""))
    for tenant in ("a", "b"):  # as YAML, it would not be one any more
        off = await client.switch_speculation(SpeculationSwitch(False, model="m", tenant=tenant), "ann", "")
    assert len(parse_document(off.text).rules) == 986
    await client.apply(Kind.POLICY, change("other"))
    assert (await client.roll_back(Kind.POLICY, Restore(3, "ann", ""))).text == off.text


async def test_writers_on_top_of_whatever_stands_all_get_through(client: ControlClient) -> None:
    snapshots = await asyncio.gather(*(client.apply(Kind.POLICY, change(f"text {n}")) for n in range(4)))
    assert sorted(snapshot.version for snapshot in snapshots) == [1, 2, 3, 4]


async def test_a_watch_gives_what_is_in_force_and_what_comes(client: ControlClient) -> None:
    await client.apply(Kind.POLICY, change("one"))
    async with aclosing(client.watch(Kind.POLICY)) as watch:
        assert (await anext(watch)).text == policy("one")
        await client.apply(Kind.POLICY, change("two"))
        assert (await anext(watch)).text == policy("two")


@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN + "x"])
async def test_without_the_token_nothing_is_told_or_changed(server: ControlServer, token: str | None) -> None:
    stranger = ControlClient(server.address, token)
    for call in (
        stranger.apply(Kind.POLICY, change("mine")),
        stranger.get(Kind.POLICY),
        stranger.history(Kind.POLICY, 5),
        stranger.roll_back(Kind.POLICY, Restore(1, "me", "")),
        stranger.status(),
        stranger.audit(5),
        stranger.rollouts.start("", "me", ""),
        stranger.rollouts.get("id"),
        stranger.rollouts.list(5),
        stranger.rollouts.command("id", RolloutCommand.PROMOTE, "me", ""),
        anext(stranger.watch(Kind.POLICY)),
        stranger.follow(RouterEnd("spy", lambda _: pytest.fail("a document"), lambda: None)),
    ):
        with pytest.raises(RequestError) as failure:
            await call
        assert failure.value.kind is ErrorKind.UNAUTHENTICATED
    await stranger.close()


async def test_without_a_configured_token_routers_may_follow_and_nobody_may_administer(tmp_path: Path) -> None:
    async with control_server(tmp_path / "control.db", token=None) as server:
        await server.service.apply(Kind.POLICY, change("one"))
        client = ControlClient(server.address, "anything")
        for call in (client.get(Kind.POLICY), anext(client.watch(Kind.ACCESS))):
            with pytest.raises(RequestError) as failure:
                await call
            assert failure.value.kind is ErrorKind.FORBIDDEN
        await client.close()
        router = Follower(server)
        router.link.start()
        await router.arrives("one")
        await router.link.stop()


async def test_a_switch_changes_the_policy_that_stands_and_nothing_else(client: ControlClient) -> None:
    first = await client.switch_speculation(SpeculationSwitch(False, tenant="acme"), "ann", "slow")
    assert (first.version, parse_document(first.text).kill.tenants) == (1, ("acme",))
    await client.apply(Kind.POLICY, change("mine"))
    await client.switch_speculation(SpeculationSwitch(False), "ann", "all of it")
    await client.switch_speculation(SpeculationSwitch(True), "ann", "again")
    switched_on = await client.switch_speculation(SpeculationSwitch(True, model="m", percent=12.5), "ann", "a share")
    document = parse_document(switched_on.text)
    assert (document.salt, document.kill.all, document.rules[0].percent) == ("mine", False, 12.5)


async def test_switches_at_the_same_time_all_hold(client: ControlClient) -> None:
    tenants = [f"tenant-{number}" for number in range(4)]
    await asyncio.gather(
        *(client.switch_speculation(SpeculationSwitch(False, tenant=tenant), "ann", "") for tenant in tenants)
    )
    killed = parse_document((await client.get(Kind.POLICY)).text).kill.tenants
    assert killed is not None
    assert sorted(killed) == tenants


async def test_a_switch_that_cannot_work_says_why(client: ControlClient) -> None:
    await client.switch_speculation(SpeculationSwitch(False), "ann", "")
    with pytest.raises(RequestError, match=r"kill\.all") as failure:
        await client.switch_speculation(SpeculationSwitch(True, tenant="acme"), "ann", "")
    assert failure.value.kind is ErrorKind.INVALID


# --- routers ---------------------------------------------------------------------------------------------------------


async def state_of(server: ControlServer, condition) -> None:  # type: ignore[no-untyped-def]
    """Wait until the routers' states fulfil a condition."""
    async with asyncio.timeout(30):
        while not condition((await server.service.status()).routers):  # noqa: ASYNC110 - reports come by the network
            await asyncio.sleep(0)


async def test_a_router_runs_what_is_in_force_and_says_so(server: ControlServer, client: ControlClient) -> None:
    await client.apply(Kind.POLICY, change("one"))
    router = Follower(server)
    router.link.start()
    await router.arrives("one")
    await client.apply(Kind.ACCESS, ACCESS)
    await client.apply(Kind.POLICY, change("two"))
    await router.arrives("two")
    await router.arrives("")
    await state_of(server, lambda routers: [(r.policy_version, r.access_version) for r in routers] == [(2, 1)])
    await router.link.stop()
    await state_of(server, lambda routers: not routers)


async def test_a_router_that_cannot_read_a_document_keeps_the_last_one_and_says_why(
    server: ControlServer, client: ControlClient
) -> None:
    router = Follower(server)
    router.link.start()
    await client.apply(Kind.POLICY, change("one"))
    await router.arrives("one")
    await client.apply(Kind.POLICY, change("unknown"))
    await state_of(server, lambda routers: routers and "schema: newer" in routers[0].error)
    assert (await server.service.status()).routers[0].policy_version == 1
    await client.apply(Kind.POLICY, change("three"))
    await router.arrives("three")
    await state_of(server, lambda routers: routers and routers[0].error == "" and routers[0].policy_version == 3)
    await router.link.stop()


async def test_a_router_keeps_looking_for_the_service_whatever_happens_while_it_looks(server: ControlServer) -> None:
    class Troubled(Follower):
        troubles: ClassVar[list[Exception]] = [RuntimeError("no such actor"), OSError("no route")]

        async def _discover(self) -> str | None:
            if self.troubles:
                raise self.troubles.pop()
            return self.address

    router = Troubled(server)
    router.link.start()
    await server.service.apply(Kind.POLICY, change("one"))
    await router.arrives("one")
    await router.link.stop()


async def test_a_router_outlives_the_service_and_follows_its_successor(tmp_path: Path) -> None:
    router = Follower()
    router.link.start()
    with pytest.raises(RequestError) as failure:
        router.link.backend()
    assert failure.value.kind is ErrorKind.UNAVAILABLE
    async with control_server(tmp_path / "control.db") as first:
        await first.service.apply(Kind.POLICY, change("one"))
        router.address = first.address
        await router.arrives("one")
    assert router.texts == [policy("one")]
    async with control_server(tmp_path / "control.db") as second:
        router.address = second.address
        await second.service.apply(Kind.POLICY, change("two"))
        await router.arrives("two")
        assert (await router.link.backend().get(Kind.POLICY)).version == 2
    assert router.texts == [policy("one"), policy("two")]  # what is in force already is not put in force again
    await router.link.stop()
