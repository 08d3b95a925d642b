"""Opens the store that a URL names."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from cluster.control.control_store import ControlStore
from cluster.control.redis_store import RedisBackend
from cluster.control.sqlite_store import SQLiteBackend
from cluster.control.store import Retention


async def open_store(url: str, retention: Retention | None = None) -> ControlStore:
    """sqlite:///absolute/path, or redis://, rediss:// or unix:// as RedisBackend.open takes them.

    Raises StoreError for a URL or a store that cannot be used. A server that does not answer yet may do so later.
    """
    if url.startswith("sqlite:///"):
        return ControlStore(await SQLiteBackend.open(Path(unquote(urlsplit(url).path))), retention)
    return ControlStore(await RedisBackend.open(url), retention)
