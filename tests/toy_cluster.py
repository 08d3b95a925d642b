"""A router in front of toy pools in one process: real engines, schedulers and sessions, loopback streams, no model."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from cluster.config import ClusterConfig, ModelConfig, PoolConfig, RouterConfig, SpeculationConfig
from cluster.control.policy import SpeculationPolicy
from cluster.core.draft_watch import Patience
from cluster.messages.answer import TokenDelta
from cluster.messages.request import GenerateRequest
from cluster.messages.rounds import Submit
from cluster.router.observer import (
    BlockVerified,
    FellBack,
    HintDropped,
    PolicyApplied,
    ProposalForwarded,
    RequestFinished,
    RequestResumed,
    RequestStarted,
    RoundFinished,
    TokensDelivered,
)
from cluster.router.replica_set import Pool as PoolName
from cluster.router.replica_set import ReplicaInfo
from cluster.router.router import Connectors, Router
from cluster.router.served_model import RouterLimits
from cluster.router.target_link import FailoverLimits
from cluster.transport.draft_stream import DRAFT_PROTOCOL
from cluster.transport.hub import PoolHub
from cluster.transport.loopback import NO_FAULTS, Faults, LoopbackStream
from cluster.transport.target_stream import TARGET_PROTOCOL
from tests.engines import Pool, draft_pool, plain_output, target_pool
from tests.fakes import byte_tokenizer, sampling

MODEL = "toy"
HOLD_S = 0.02  # a hung draft costs this much per token, as in production; a live one answers within a few turns
FOREVER_S = 60.0
_RETRIES = {"wait_s": 20.0, "max_moves": 50, "first_retry_s": 0.001, "last_retry_s": 0.01}
STEADY = RouterLimits(discover_every_s=0.01, deadline_grace_s=0.05, failover=FailoverLimits(**_RETRIES))
IMPATIENT = RouterLimits(  # for tests with pools that hang; on a busy machine it takes slow ones for hung
    discover_every_s=0.01,
    ready_wait_s=0.2,
    patience=Patience(max_missed_rounds=32, max_silence_s=0.05, max_open_s=0.1),
    failover=FailoverLimits(first_commit_s=0.2, commit_s=0.2, **_RETRIES),
)


class RecordingObserver:
    """Keeps every event."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        for name in (
            "request_started", "tokens_delivered", "request_finished", "round_finished", "fell_back", "hint_dropped",
            "request_resumed", "proposal_forwarded", "block_verified", "policy_applied",
        ):  # fmt: skip
            setattr(self, name, self.events.append)

    request_started: Callable[[RequestStarted], None]
    tokens_delivered: Callable[[TokensDelivered], None]
    request_finished: Callable[[RequestFinished], None]
    round_finished: Callable[[RoundFinished], None]
    fell_back: Callable[[FellBack], None]
    hint_dropped: Callable[[HintDropped], None]
    request_resumed: Callable[[RequestResumed], None]
    proposal_forwarded: Callable[[ProposalForwarded], None]
    block_verified: Callable[[BlockVerified], None]
    policy_applied: Callable[[PolicyApplied], None]

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


@dataclass
class Host:
    """One pool replica: its engine, the hub in front of it, and the streams that lead there."""

    info: ReplicaInfo
    pool: Pool
    hub: PoolHub[Any, Any]
    faults: Sequence[Faults] = ()  # of the first, second, … stream; later ones have none
    streams: list[LoopbackStream[Any, Any]] = field(default_factory=list)
    is_hung: bool = False

    def connect(self) -> LoopbackStream[Any, Any]:
        number = len(self.streams)
        self.streams.append(LoopbackStream(self.hub, self.faults[number] if number < len(self.faults) else NO_FAULTS))
        return self.streams[-1]

    async def cut(self) -> None:
        """Break every stream; the replica stays."""
        for stream in self.streams:
            await stream.close()


class ToyCluster:
    """Owns the replicas, steps their engines from the event loop, and knows the only right output of a request."""

    def __init__(self, router_config: RouterConfig, speculation: SpeculationConfig, limits: RouterLimits) -> None:
        self.hosts: dict[str, Host] = {}
        self.observer = RecordingObserver()
        self._numbers = itertools.count(1)
        config = ClusterConfig(
            models=(
                ModelConfig(
                    name=MODEL,
                    target=PoolConfig(path="toy", max_num_seqs=8, max_queued=100, max_model_len=128),
                    draft=PoolConfig(path="toy-draft"),
                ),
            ),
            router=router_config,
            speculation=speculation,
        )
        connect = lambda info: self.hosts[info.replica_id].connect()  # noqa: E731
        self.router = Router(
            config,
            {MODEL: byte_tokenizer()},
            self._discover,
            self.observer,
            connectors=Connectors(connect, connect),
            limits=limits,
        )

    async def _discover(self) -> list[ReplicaInfo]:
        return [host.info for host in self.hosts.values()]

    def add_target(self, *faults: Faults, **options: Any) -> Host:
        return self._add(PoolName.TARGET, target_pool(**{"max_hold_s": HOLD_S, **options}), TARGET_PROTOCOL, faults)

    def add_draft(self, *faults: Faults, version: str | None = None, **options: Any) -> Host:
        return self._add(PoolName.DRAFT, draft_pool(**options), DRAFT_PROTOCOL, faults, version)

    def _add(
        self, name: PoolName, pool: Pool, protocol: Any, faults: Sequence[Faults], version: str | None = None
    ) -> Host:
        replica_id = f"{name}-{next(self._numbers)}"
        hub = PoolHub[Any, Any](protocol)
        pool.engine.on_events = hub.publish
        hub.bind(pool.engine)
        max_len = pool.engine.max_model_len if name is PoolName.TARGET else None
        info = ReplicaInfo(replica_id, replica_id, MODEL, name, max_model_len=max_len, version=version)
        self.hosts[replica_id] = Host(info, pool, hub, faults)
        return self.hosts[replica_id]

    async def kill(self, host: Host) -> None:
        """The replica is gone: no streams, no discovery, no steps."""
        del self.hosts[host.info.replica_id]
        await host.cut()

    async def until(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110 - each turn lets the engines step
                await asyncio.sleep(0)

    def use(self, policy: SpeculationPolicy) -> None:
        """Put a policy in force."""
        self.router.policy.apply(policy.document, policy.version)

    def is_free(self) -> bool:
        """Whether every living replica holds nothing."""
        return all(host.pool.is_free() for host in self.hosts.values())

    async def run_engines(self) -> None:
        while True:
            for host in list(self.hosts.values()):
                if not host.is_hung:
                    host.pool.engine.step()
            await asyncio.sleep(0)


@asynccontextmanager
async def toy_cluster(
    num_targets: int = 0,
    num_drafts: int = 0,
    *,
    router: RouterConfig | None = None,
    speculation: SpeculationConfig | None = None,
    limits: RouterLimits = STEADY,
    prepare: Callable[[ToyCluster], None] = lambda _: None,
) -> AsyncIterator[ToyCluster]:
    """A started cluster; `prepare` may add hosts of its own."""
    cluster = ToyCluster(router or RouterConfig(), speculation or SpeculationConfig(max_draft_tokens=4), limits)
    prepare(cluster)
    for _ in range(num_targets):
        cluster.add_target()
    for _ in range(num_drafts):
        cluster.add_draft()
    engines = asyncio.create_task(cluster.run_engines())
    await cluster.router.start()
    try:
        yield cluster
    finally:
        await cluster.router.stop()
        engines.cancel()
        await asyncio.wait([engines])


def request(request_id: str = "r", prompt: Sequence[int] = (3, 1, 4), max_tokens: int = 30, **fields: Any) -> Any:
    params = {key: fields.pop(key) for key in ("seed", "temperature", "stop", "stop_token_ids") if key in fields}
    ignore_eos = fields.pop("ignore_eos", True)
    return GenerateRequest(
        request_id, MODEL, tuple(prompt), sampling(max_tokens, ignore_eos=ignore_eos, **params), **fields
    )


def right_output(item: GenerateRequest) -> tuple[int, ...]:
    return plain_output(Submit(item.request_id, item.prompt_token_ids, item.sampling))


async def collect(router: Router, item: GenerateRequest) -> list[TokenDelta]:
    return [delta async for delta in router.generate(item)]


def tokens_of(deltas: Sequence[TokenDelta]) -> tuple[int, ...]:
    return tuple(token_id for delta in deltas for token_id in delta.token_ids)
