"""A router's link to the control service: what is in force there goes into force here, and nothing waits for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from cluster.control.store import Kind, Snapshot
from cluster.messages.answer import ErrorKind, RequestError
from cluster.router.request_feed import RequestFeed
from cluster.transport.control_backend import Acknowledgement, ControlBackend
from cluster.transport.control_client import ControlClient, RouterEnd

logger = logging.getLogger(__name__)

FIRST_RETRY_S = 0.1
LAST_RETRY_S = 2.0

Apply = Callable[[Snapshot], None]


class ControlLink:
    """Owns the stream to the control service, wherever that is now.

    While it is down, the last documents stay in force. `appliers` put a document of their kind in force and raise
    ValueError for one that cannot be; the one before stays then, and the service is told why.
    """

    def __init__(
        self,
        router_id: str,
        discover: Callable[[], Awaitable[str | None]],
        appliers: Mapping[Kind, Apply],
        token: str | None = None,
        feed: RequestFeed | None = None,
    ) -> None:
        """`discover` gives the service's address; None: it is not there. `feed` is what it is told of requests."""
        self._router_id = router_id
        self._discover = discover
        self._appliers = appliers
        self._token = token
        self._feed = feed
        self._client: ControlClient | None = None
        self._applied: dict[Kind, tuple[int, str]] = {}  # version and digest
        self._task: asyncio.Task[None] | None = None
        self._is_lost = False

    def start(self) -> None:
        """Follow the service from now on."""
        self._task = asyncio.create_task(self._run(), name="control-link")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def backend(self) -> ControlBackend:
        """The service, for administration. Raises RequestError(UNAVAILABLE) while it is away."""
        if self._client is None:
            message = "the control service is not reachable; routers go on with what they have"
            raise RequestError(ErrorKind.UNAVAILABLE, message, retry_after_s=1.0)
        return self._client

    async def _run(self) -> None:
        wait_s = FIRST_RETRY_S
        while True:
            was_connected = False
            try:
                address = await self._discover()
                was_connected = address is not None and await self._follow(address)
            except Exception:
                if not self._is_lost:
                    logger.exception("cannot follow the control service, going on with what is in force")
                self._is_lost = True
            wait_s = FIRST_RETRY_S if was_connected else min(LAST_RETRY_S, wait_s * 2)
            await asyncio.sleep(wait_s)

    async def _follow(self, address: str) -> bool:
        """Stay connected as long as it lasts; whether it was at all."""
        client = ControlClient(address, self._token)
        try:
            await client.follow(self._end(client))
            self._note_lost("it ended the stream")
        except RequestError as error:
            self._note_lost(error.message)
        finally:
            was_connected, self._client = self._client is not None, None
            await client.close()
        return was_connected

    def _end(self, client: ControlClient) -> RouterEnd:
        next_batch = None if self._feed is None else self._feed.next_batch
        return RouterEnd(self._router_id, self._put_in_force, lambda: self._connected(client), next_batch)

    def _connected(self, client: ControlClient) -> None:
        self._client, self._is_lost = client, False

    def _put_in_force(self, snapshot: Snapshot) -> Acknowledgement:
        info = snapshot.info
        if self._applied.get(info.kind) == (info.version, info.digest):
            return Acknowledgement(info.kind, info.version)
        try:
            self._appliers[info.kind](snapshot)
        except ValueError as error:
            logger.error("%s version %d is refused; the one before stays: %s", info.kind, info.version, error)
            return Acknowledgement(info.kind, info.version, str(error)[:1000])
        self._applied[info.kind] = (info.version, info.digest)
        logger.info("%s version %d is in force", info.kind, info.version)
        return Acknowledgement(info.kind, info.version)

    def _note_lost(self, cause: str) -> None:
        if not self._is_lost:
            logger.warning("lost the control service, going on with what is in force: %s", cause)
        self._is_lost = True
