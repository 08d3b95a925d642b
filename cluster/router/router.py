"""The router: takes requests in, runs each through the pools, and gives its output back as a stream."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass

from cluster.config import ClusterConfig, ModelConfig, PoolConfig
from cluster.control.access import ApiKey
from cluster.control.document import parse_document
from cluster.core.speculation import SpeculationLimits
from cluster.messages.answer import ErrorKind, RequestError, TokenDelta
from cluster.messages.request import GenerateRequest
from cluster.messages.rounds import DraftCommand, DraftEvent, TargetCommand, TargetEvent
from cluster.router.access import Access
from cluster.router.admission import Admission, PoolGuard
from cluster.router.delivery import Delivery
from cluster.router.observer import PolicyApplied, RequestFinished, RouterObserver
from cluster.router.policy_source import PolicySource, default_document, default_policy
from cluster.router.replica_set import Discover, Pool, ReplicaInfo, ReplicaSet
from cluster.router.request_flow import RequestFlow
from cluster.router.request_record import RequestRecord
from cluster.router.served_model import ClusterStatus, FlowContext, RouterLimits, ServedModel
from cluster.tokenizer import IncrementalDetokenizer, Tokenizer
from cluster.transport.draft_stream import GrpcDraftStream
from cluster.transport.stream import PoolStream
from cluster.transport.target_stream import GrpcTargetStream

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Connectors:
    """How the router reaches a discovered replica; tests connect in process."""

    target: Callable[[ReplicaInfo], PoolStream[TargetCommand, TargetEvent]]
    draft: Callable[[ReplicaInfo], PoolStream[DraftCommand, DraftEvent]]


GRPC_CONNECTORS = Connectors(
    target=lambda info: GrpcTargetStream(info.address), draft=lambda info: GrpcDraftStream(info.address)
)


class Router:
    """Owns the streams to every pool replica and the requests on them: an InferenceBackend. One event loop's.

    Policy and `access` may be replaced at any time, from the event loop: running requests follow the policy at once.
    """

    def __init__(
        self,
        config: ClusterConfig,
        tokenizers: Mapping[str, Tokenizer],
        discover: Discover,
        observer: RouterObserver,
        *,
        connectors: Connectors = GRPC_CONNECTORS,
        clock: Callable[[], float] = time.monotonic,
        limits: RouterLimits | None = None,
    ) -> None:
        """`tokenizers` by model name. Nothing is contacted before start()."""
        self._config = config
        self._discover = discover
        self._connectors = connectors
        self._limits = limits or RouterLimits()
        self.policy = PolicySource(default_policy(config))
        self.policy.on_change = self._follow_policy
        self.access = Access(config.router.replicas, clock, config.router.require_keys)
        self._context = FlowContext(
            self.policy, observer, clock, self._limits, _speculation_limits(config, self._limits)
        )
        self._models = {model.name: self._serve(model, tokenizers[model.name]) for model in config.models}
        self._flows: dict[str, RequestFlow] = {}
        self._replicas: tuple[ReplicaInfo, ...] = ()
        self._discovery: asyncio.Task[None] | None = None
        self._discovery_fails = False
        self.on_finished: Callable[[RequestFinished], None] = lambda event: None

    # --- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Look for replicas once, then keep looking."""
        await self.refresh()
        self._discovery = asyncio.create_task(self._keep_refreshing(), name="router-discovery")

    async def stop(self) -> None:
        """Fail what runs, close every stream. Pools free everything of this router."""
        if self._discovery is not None:
            self._discovery.cancel()
            await asyncio.wait([self._discovery])
        for flow in list(self._flows.values()):
            flow.fail(RequestError(ErrorKind.UNAVAILABLE, "the router is shutting down", retry_after_s=1.0))
        for replicas in self._replica_sets():
            await replicas.close()

    async def refresh(self) -> None:
        """Look for replicas once. A failing discovery leaves things as they are."""
        try:
            self._replicas = tuple(await self._discover())
            self._discovery_fails = False
        except Exception:
            if not self._discovery_fails:
                logger.exception("cannot discover replicas; going on with those that are known")
            self._discovery_fails = True
        for model in self._models.values():
            model.targets.update(self._known(model.name, Pool.TARGET))
            if model.drafts is not None:
                model.drafts.update(self._known(model.name, Pool.DRAFT))
        for replicas in self._replica_sets():
            for stream in replicas.idle_retired():
                await stream.close()

    def apply_policy(self, text: str, version: int) -> None:
        """Put a policy document in force; running requests follow it at once.

        Raises DocumentError with every flaw of a text that is no policy document: the last one stays in force then.
        """
        self.policy.apply(parse_document(text), version)

    # --- InferenceBackend --------------------------------------------------------------------------------------------

    def models(self) -> list[str]:
        """Names of the served models."""
        return list(self._models)

    def tokenizer(self, model: str) -> Tokenizer:
        """A model's tokenizer. Raises RequestError(NOT_FOUND)."""
        return self._model(model).tokenizer

    def max_model_len(self, model: str) -> int:
        """Most tokens, prompt and output together, of one sequence. Raises RequestError(NOT_FOUND)."""
        return self._model(model).max_model_len

    def key_holder(self, api_key: str | None) -> ApiKey | None:
        """Whose key it is; None while requests need none. Raises RequestError(UNAUTHENTICATED)."""
        return self.access.key_holder(api_key)

    def ready(self) -> bool:
        """Whether every model has a target replica that has reported for work."""
        return all(
            any(replica.load is not None for replica in model.targets.statuses()) and model.targets.has_ready()
            for model in self._models.values()
        )

    def check_together(self, requests: Sequence[GenerateRequest]) -> None:
        """Raises RequestError if the tenant's quota has no room for all of them; each is reported as refused then."""
        try:
            self.access.check_together(requests)
        except RequestError as error:
            for record in [self._record(request, self._model(request.model)) for request in requests]:
                record.fail(error)
                self.on_finished(record.finish(self._context.clock()))
            raise

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        """Output as it is committed; the last delta has a finish_reason. Closing the generator cancels the request.

        Raises RequestError when the request is not taken, or fails.
        """
        context, model = self._context, self._model(request.model)
        record = self._record(request, model)
        prompt_tokens = 0 if request.choice else len(request.prompt_token_ids)
        try:
            with self.access.admitted(request.tenant, prompt_tokens) as charge:
                await self._start(record, model)
                while record.outcome is None:
                    delta = await record.delivery.next_delta()
                    charge(len(delta.token_ids))
                    record.note(delta)
                    yield delta
        except RequestError as error:
            record.fail(error)
            raise
        finally:
            self.on_finished(record.finish(context.clock()))

    def reconfigure(self, config: ClusterConfig) -> None:
        """Follow another number of routers and other speculation defaults, from the event loop. The rest is ignored."""
        self.access.num_routers = config.router.replicas
        self.policy.apply_default(default_document(config))

    # --- reporting ---------------------------------------------------------------------------------------------------

    def replicas(self) -> tuple[ReplicaInfo, ...]:
        """Every pool replica as last discovered, connected or not."""
        return self._replicas

    def status(self) -> ClusterStatus:
        """A snapshot of requests, pools and acceptance."""
        return ClusterStatus(
            self.ready(),
            self.policy.current.version,
            tuple(model.status() for model in self._models.values()),
            tuple(status for replicas in self._replica_sets() for status in replicas.statuses()),
        )

    # --- inside ------------------------------------------------------------------------------------------------------

    def _follow_policy(self) -> None:
        flows = list(self._flows.values())
        for flow in flows:
            flow.on_policy_change()
        self._context.observer.policy_applied(PolicyApplied(self.policy.current.version, len(flows)))

    def _record(self, request: GenerateRequest, model: ServedModel) -> RequestRecord:
        sampling = request.sampling
        detokenizer = IncrementalDetokenizer(model.tokenizer, sampling.stop, min_tokens=sampling.min_tokens)
        delivery = Delivery(request, detokenizer, self._context.observer, self._context.clock)
        return RequestRecord(request, delivery, self._context.observer)

    async def _start(self, record: RequestRecord, model: ServedModel) -> None:
        """Wait for a slot, then submit. The slot is given back when the flow has left the pools."""
        request, context = record.request, self._context
        timeout_s = request.deadline_s if request.deadline_s is not None else self._config.router.request_timeout_s
        await self._wait_for_slot(model, request.tenant, timeout_s)
        admitted_at = context.clock()
        if request.request_id in self._flows:
            model.admission.release(request.tenant, 0.0)
            raise RequestError(ErrorKind.INVALID, "a request with this id is in flight already", "request_id")

        def on_closed() -> None:
            del self._flows[request.request_id]
            model.admission.release(request.tenant, context.clock() - admitted_at)

        flow = RequestFlow(request, model, context, record.delivery, on_closed)
        self._flows[request.request_id] = flow
        record.admit(flow, admitted_at)
        flow.start(record.delivery.marks.arrival + timeout_s)

    async def _wait_for_slot(self, model: ServedModel, tenant: str, timeout_s: float) -> None:
        is_up = model.targets.has_ready
        try:
            async with asyncio.timeout(timeout_s) as wait:
                with PoolGuard(wait, is_up, self._limits.ready_wait_s):
                    await model.admission.acquire(tenant)
        except TimeoutError as error:
            if is_up():
                raise RequestError(ErrorKind.DEADLINE, f"no slot became free within {timeout_s:g} s") from error
            message = f"no replica of {model.name!r} is ready"
            raise RequestError(ErrorKind.UNAVAILABLE, message, retry_after_s=1.0) from error

    def _model(self, name: str) -> ServedModel:
        model = self._models.get(name)
        if model is None:
            raise RequestError(ErrorKind.NOT_FOUND, f"The model `{name}` does not exist", "model")
        return model

    def _serve(self, model: ModelConfig, tokenizer: Tokenizer) -> ServedModel:
        clock, router = self._context.clock, self._config.router
        targets = ReplicaSet(self._connectors.target, clock)
        drafts = ReplicaSet(self._connectors.draft, clock) if model.draft is not None else None
        per_replica = slots_per_replica(model.target)
        admission = Admission(lambda: targets.num_ready * per_replica, router.max_queued_per_tenant, router.max_tenants)
        targets.on_change = admission.fill
        version = None if model.draft is None else model.draft.version_name
        return ServedModel(model.name, tokenizer, model.target.max_model_len, targets, drafts, admission, version)

    def _known(self, model: str, pool: Pool) -> list[ReplicaInfo]:
        return [info for info in self._replicas if info.model == model and info.pool == pool]

    def _replica_sets(self) -> list[ReplicaSet[TargetCommand, TargetEvent] | ReplicaSet[DraftCommand, DraftEvent]]:
        pools = [(model.targets, model.drafts) for model in self._models.values()]
        return [replicas for pair in pools for replicas in pair if replicas is not None]

    async def _keep_refreshing(self) -> None:
        while True:
            await asyncio.sleep(self._limits.discover_every_s)
            await self.refresh()


def slots_per_replica(target: PoolConfig) -> int:
    """Requests sent to one replica at a time: what it runs, and a few that wait there so that it never idles."""
    return target.max_num_seqs + min(target.max_queued, max(1, target.max_num_seqs // 8))


def _speculation_limits(config: ClusterConfig, limits: RouterLimits) -> SpeculationLimits:
    defaults = config.speculation
    max_match = max(defaults.ngram_min_match, defaults.ngram_max_match)
    return SpeculationLimits(limits.patience, defaults.ngram_min_match, max_match)
