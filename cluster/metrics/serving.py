"""A registry on a port of its own, for replicas that have no HTTP API."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, start_http_server


@contextmanager
def serve_metrics(registry: CollectorRegistry, host: str) -> Iterator[str]:
    """Expose `registry` on a free port of `host` while the context is open; gives host:port."""
    server, thread = start_http_server(0, addr=host, registry=registry)
    try:
        yield f"{host}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
