"""`paceline chat`."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.text import Text

from cluster.cli.client import DEFAULT_URL, ApiKeyOption, UrlOption
from cluster.cli.common import console, die


def chat(
    url: UrlOption = DEFAULT_URL,
    api_key: ApiKeyOption = None,
    model: Annotated[str | None, typer.Option(help="Default: the first model served.")] = None,
    max_tokens: int = 512,
    temperature: float = 0.7,
) -> None:
    """Talk to a running Paceline. Ctrl-D ends."""
    from openai import OpenAI, OpenAIError

    client = OpenAI(base_url=f"{url}/v1", api_key=api_key or "none", max_retries=0)
    messages: list[Any] = []
    try:
        model = model or client.models.list().data[0].id
        while (line := _ask()) is not None:
            messages.append({"role": "user", "content": line})
            stream = client.chat.completions.create(
                model=model, messages=messages, max_tokens=max_tokens, temperature=temperature, stream=True
            )
            messages.append({"role": "assistant", "content": _show(stream)})
    except OpenAIError as error:
        die(f"{url}: {error}")


def _show(stream: Any) -> str:
    """Print an answer as it comes; gives all of it."""
    reply = ""
    for chunk in stream:
        text = (chunk.choices[0].delta.content or "") if chunk.choices else ""
        reply += text
        console.print(text, end="")
    console.print()
    return reply


def _ask() -> str | None:
    try:
        return console.input(Text("you> ", "bold"))
    except (EOFError, KeyboardInterrupt):
        return None
