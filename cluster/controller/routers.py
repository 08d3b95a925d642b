"""Which routers are connected, and what they run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from cluster.control.store import Kind
from cluster.transport.control_backend import Acknowledgement, RouterState

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Connected:
    """One router's answers, by kind: the version in force there, and why it refused a later one."""

    versions: dict[Kind, int] = field(default_factory=dict)
    errors: dict[Kind, str] = field(default_factory=dict)

    def state(self, router_id: str) -> RouterState:
        policy, access = self.versions.get(Kind.POLICY, 0), self.versions.get(Kind.ACCESS, 0)
        return RouterState(router_id, policy, access, "; ".join(self.errors.values()))


class Routers:
    """Owns the state of every connected router; a router that connects again takes its own place."""

    def __init__(self) -> None:
        self._routers: dict[str, _Connected] = {}

    def states(self) -> tuple[RouterState, ...]:
        """Every connected router, by id."""
        return tuple(router.state(router_id) for router_id, router in sorted(self._routers.items()))

    def has_any(self) -> bool:
        """Whether any router is connected."""
        return bool(self._routers)

    @contextmanager
    def connected(self, router_id: str) -> Iterator[None]:
        """The router is connected inside the block."""
        mine = self._routers[router_id] = _Connected()
        try:
            yield
        finally:
            if self._routers.get(router_id) is mine:
                del self._routers[router_id]

    def acknowledge(self, router_id: str, item: Acknowledgement) -> None:
        """Note what a router answered. Unknown routers are ignored."""
        router = self._routers.get(router_id)
        if router is None:
            return
        if item.error:
            router.errors[item.kind] = item.error
            logger.error("router %s refused %s version %d: %s", router_id, item.kind, item.version, item.error)
        else:
            router.errors.pop(item.kind, None)
            router.versions[item.kind] = item.version
