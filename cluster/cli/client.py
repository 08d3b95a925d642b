"""How commands ask a running Paceline: one call, its answer, or the end of the command with the server's words."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import httpx
import typer

from cluster.cli.common import die


def _base_url(url: str) -> str:
    """Without what a browser adds at the end."""
    return url.rstrip("/")


UrlOption = Annotated[str, typer.Option("--url", callback=_base_url, help="Base URL of a running Paceline.")]
DEFAULT_URL = "http://127.0.0.1:8000"
ApiKeyOption = Annotated[
    str | None, typer.Option("--api-key", envvar="PACELINE_API_KEY", help="Where requests need one.")
]


def ask(
    method: str,
    url: str,
    secret: str | None = None,
    timeout_s: float = 10.0,
    tolerated: Collection[int] = (),
    **options: Any,
) -> Any:
    """What one call answers; ends the command with the server's message if it fails.

    `secret` is a key or a token; `options` are httpx's. None says that it failed with one of the
    `tolerated` statuses.
    """
    with calling(url):
        response = httpx.request(method, url, headers=bearer(secret), timeout=timeout_s, **options)
    if response.status_code in tolerated:
        return None
    check(response)
    return answer_of(response)


@contextmanager
def calling(url: str) -> Iterator[None]:
    """Ends the command if a call inside finds no Paceline."""
    try:
        yield
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        die(f"no Paceline answers at {url}: {error}")
    except UnicodeEncodeError as error:  # a shell may pass bytes that are no text
        die(f"{error.object[error.start : error.end]!a} is not Unicode text")


def bearer(secret: str | None) -> dict[str, str]:
    """The headers that carry a key or a token. Ends the command for one that none can carry."""
    if secret is None:
        return {}
    if not (secret.isascii() and secret.isprintable()):
        die("a key or token has printable ASCII characters only")
    return {"authorization": f"Bearer {secret}"}


def check(response: httpx.Response) -> None:
    """End the command with what the server says if a call has failed. The body has been read."""
    if not response.is_error:
        return
    try:
        die(str(response.json()["error"]["message"]))
    except (ValueError, KeyError, TypeError):
        die(f"{response.request.url}: {response.status_code}")


def answer_of(response: httpx.Response) -> Any:
    """What a good answer says."""
    try:
        return response.json()
    except ValueError:
        die(f"{response.request.url} does not speak as Paceline does")
