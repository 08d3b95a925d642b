"""What waits for the wire on one end of a stream."""

from __future__ import annotations

import asyncio
from collections import deque

_OVERHEAD_BYTES = 64  # the bytes object and its slot, so that many tiny messages count for what they hold


class OutboxFull(Exception):
    """The peer reads slower than this end writes, beyond what the outbox may hold."""


class Outbox:
    """Owns the encoded messages that one stream has not written yet: at most `limit_bytes` of them.

    `put` never blocks. One writer task awaits `take`, which joins everything that has gathered since the last frame:
    what is put in one turn of the event loop leaves as one frame, and so does what is put while a write is in flight.
    """

    def __init__(self, limit_bytes: int, frame_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._frame_bytes = frame_bytes
        self._parts: deque[bytes] = deque()
        self._num_bytes = 0
        self._finished = False
        self._wake = asyncio.Event()

    @property
    def num_bytes(self) -> int:
        """Bytes held, bookkeeping included."""
        return self._num_bytes

    def put(self, part: bytes) -> None:
        """Append one encoded message. Raises OutboxFull when it does not fit; what was there stays."""
        num_bytes = self._num_bytes + len(part) + _OVERHEAD_BYTES
        if num_bytes > self._limit_bytes:
            raise OutboxFull(f"more than {self._limit_bytes} bytes wait for the peer to read")
        self._parts.append(part)
        self._num_bytes = num_bytes
        self._wake.set()

    def finish(self) -> None:
        """Nothing more will be put: `take` returns what is left, then None."""
        self._finished = True
        self._wake.set()

    def clear(self) -> None:
        """Drop what is left, for a stream that is broken."""
        self._parts.clear()
        self._num_bytes = 0

    async def take(self) -> bytes | None:
        """The next frame: waits for a message, then joins up to about frame_bytes of them. None after `finish`."""
        while not self._parts:
            if self._finished:
                return None
            self._wake.clear()
            await self._wake.wait()
        return self._join()

    def _join(self) -> bytes:
        parts = [self._parts.popleft()]
        size = len(parts[0])
        while self._parts and size + len(self._parts[0]) <= self._frame_bytes:
            parts.append(self._parts.popleft())
            size += len(parts[-1])
        self._num_bytes -= size + len(parts) * _OVERHEAD_BYTES
        return b"".join(parts)
