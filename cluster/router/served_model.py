"""One served model, as the router holds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.core.draft_watch import Patience
from cluster.core.speculation import SpeculationLimits
from cluster.messages.rounds import Commit
from cluster.router.admission import Admission
from cluster.router.draft_link import DraftReplicas
from cluster.router.observer import RouterObserver
from cluster.router.policy_source import PolicySource
from cluster.router.replica_set import ReplicaStatus
from cluster.router.target_link import FailoverLimits, TargetReplicas
from cluster.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class RouterLimits:
    """How patient a router is, with drafts and with targets; in seconds unless named otherwise.

    ready_wait_s: how long requests queue while no target replica is connected, so that a broken stream costs no errors.
    deadline_grace_s: how much longer than the target the router waits before it enforces a deadline itself.
    """

    discover_every_s: float = 0.5
    ready_wait_s: float = 5.0
    deadline_grace_s: float = 0.25
    patience: Patience = field(default_factory=Patience)
    failover: FailoverLimits = field(default_factory=FailoverLimits)


@dataclass(slots=True)
class Totals:
    """What a model's requests have produced since the router started."""

    num_steps: int = 0
    num_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def add(self, commit: Commit) -> None:
        """Count one commit."""
        self.num_steps += bool(commit.token_ids)
        self.num_tokens += len(commit.token_ids)
        self.num_draft_tokens += commit.num_draft_tokens
        self.num_accepted_tokens += commit.num_accepted_tokens

    @property
    def acceptance_length(self) -> float:
        """Tokens per target step, bonus included; 0 before the first."""
        return self.num_tokens / self.num_steps if self.num_steps else 0.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model's name, tokenizer and pools, and the requests in front of them."""

    name: str
    tokenizer: Tokenizer
    configured_max_len: int
    targets: TargetReplicas
    drafts: DraftReplicas | None
    admission: Admission
    draft_version: str | None = None  # as configured: what policies go by while no draft replica says its own
    totals: Totals = field(default_factory=Totals)

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence that every target replica takes; as configured until one has said so."""
        published = self.targets.max_model_len
        return self.configured_max_len if published is None else published

    def status(self) -> ModelStatus:
        """A snapshot of its requests."""
        totals, admission = self.totals, self.admission
        return ModelStatus(
            self.name,
            admission.num_running,
            admission.num_queued,
            totals.num_steps,
            totals.num_tokens,
            totals.num_draft_tokens,
            totals.num_accepted_tokens,
            totals.acceptance_length,
        )


@dataclass(frozen=True, slots=True)
class FlowContext:
    """What every request of a router shares."""

    policy: PolicySource
    observer: RouterObserver
    clock: Callable[[], float]
    limits: RouterLimits
    speculation: SpeculationLimits


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One model's requests: in flight on the target pool, queued for it, and what they have produced so far."""

    model: str
    num_requests: int
    num_queued: int
    num_steps: int
    num_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    acceptance_length: float


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """The router's view of the whole system."""

    is_ready: bool
    policy_version: int
    models: tuple[ModelStatus, ...]
    replicas: tuple[ReplicaStatus, ...]
