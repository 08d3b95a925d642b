"""A registry on a port of its own, for scrapers that ask each process by itself."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server

logger = logging.getLogger(__name__)


@contextmanager
def serve_metrics(registry: CollectorRegistry, host: str, port: int = 0) -> Iterator[str]:
    """Expose `registry` on this port of `host` while the context is open; gives host:port.

    On a free port if the port is 0 or somebody else's: metrics must not keep a replica from serving.
    """
    server, thread = _start(registry, host, port)
    try:
        yield f"{host}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _start(registry: CollectorRegistry, host: str, port: int) -> tuple[WSGIServer, Thread]:
    try:
        return start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        if port == 0:
            raise
        logger.warning("port %d is not free for metrics, taking another one: %s", port, error)
        return start_http_server(0, addr=host, registry=registry)
