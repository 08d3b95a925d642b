"""A client of the OpenAI streaming API that spends next to nothing per token on cores that it shares with the server.

It notes when bytes come and reads what they say after the request has ended.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class RequestFailedError(Exception):
    """A request was refused, broke off, or gave another number of tokens than asked for; the message says which."""


@dataclass(frozen=True, slots=True)
class Trace:
    """One request as its client saw it; times by one monotonic clock, in seconds.

    `arrivals` has one entry per part of the output, which may hold several tokens; the first part is one token.
    """

    sent: float
    arrivals: tuple[float, ...]
    num_tokens: int
    text: str

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0] - self.sent

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None if everything came at once."""
        seconds = self.arrivals[-1] - self.arrivals[0]
        return seconds / (self.num_tokens - 1) if seconds > 0 else None

    @property
    def gaps_s(self) -> list[float]:
        return [now - before for before, now in zip(self.arrivals, self.arrivals[1:], strict=False)]


async def stream_completion(port: int, body: Mapping[str, object], num_tokens: int) -> Trace:
    """Run one streamed completion against this machine's `port`. Raises RequestFailedError."""
    payload = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
    )
    sent = time.perf_counter()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(head.encode() + payload)
            pieces = await _read_pieces(reader)
        finally:
            writer.close()
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        raise RequestFailedError(f"the answer broke off: {error or type(error).__name__}") from error
    return _trace(sent, pieces, num_tokens)


async def _read_pieces(reader: asyncio.StreamReader) -> list[tuple[float, bytes]]:
    """The body's pieces and when each came. Raises RequestFailedError for a status other than 200."""
    status = await reader.readline()
    chunked = False
    while (line := await reader.readline()).strip():
        chunked |= line.lower().startswith(b"transfer-encoding:") and b"chunked" in line.lower()
    pieces = await (_read_chunks(reader) if chunked else _read_to_end(reader))
    if status.split()[1:2] != [b"200"]:
        text = b"".join(piece for _, piece in pieces).decode("utf-8", "replace")
        raise RequestFailedError(f"{status.decode('latin-1').strip()}: {text[:500]}")
    return pieces


async def _read_chunks(reader: asyncio.StreamReader) -> list[tuple[float, bytes]]:
    pieces = []
    while size := int((await reader.readline()).split(b";")[0], 16):
        piece = await reader.readexactly(size + 2)
        pieces.append((time.perf_counter(), piece[:-2]))
    return pieces


async def _read_to_end(reader: asyncio.StreamReader) -> list[tuple[float, bytes]]:
    pieces = []
    while piece := await reader.read(2**16):
        pieces.append((time.perf_counter(), piece))
    return pieces


def _events(pieces: list[tuple[float, bytes]]) -> list[tuple[float, dict[str, Any]]]:
    """The server-sent events and when the last byte of each came."""
    events, pending = [], b""
    for when, piece in pieces:
        *lines, pending = (pending + piece).split(b"\n")
        events += [(when, json.loads(line[5:])) for line in lines if line.startswith(b"data:") and b"{" in line]
    return events


def _trace(sent: float, pieces: list[tuple[float, bytes]], num_tokens: int) -> Trace:
    arrivals, texts, produced = [], [], None
    for when, event in _events(pieces):
        if "error" in event:
            raise RequestFailedError(str(event["error"]))
        produced = (event.get("usage") or {}).get("completion_tokens", produced)
        for choice in event["choices"]:
            texts.append(choice["text"])
            if choice["text"] or choice.get("finish_reason") is None:
                arrivals.append(when)
    if produced != num_tokens or not arrivals:
        raise RequestFailedError(f"the answer has {produced} tokens, {num_tokens} were asked for")
    return Trace(sent, tuple(arrivals), num_tokens, "".join(texts))
