"""A trace as pictures: a Chrome trace of every round (opens in ui.perfetto.dev), and the median round as SVG."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from load_tests.round_trace import Round, Span

_LANES = ("target", "router", "draft", "wire")
_COLOURS = {"target": "#3b6ea5", "draft": "#5a9e6f", "router": "#d98e04", "wire": "#9a9a9a"}
_WIDTH, _LEFT, _TOP, _LANE, _LINE = 1000, 70, 34, 34, 15


def chrome_trace(rounds: tuple[Round, ...]) -> dict[str, Any]:
    """Complete events in microseconds; a thread for each process of a round and for the wire."""
    names = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": {"name": lane}}
        for tid, lane in enumerate(_LANES)
    ]
    return {"displayTimeUnit": "ms", "traceEvents": [*names, *(event for item in rounds for event in _events(item))]}


def _events(item: Round) -> Iterator[dict[str, Any]]:
    for span in item.spans:
        yield {
            "ph": "X",
            "name": span.name,
            "pid": 0,
            "tid": _LANES.index(lane_of(span)),
            "ts": span.begin_ns / 1e3,
            "dur": span.duration_ns / 1e3,
            "args": {"request": item.request_id, "committed": item.length},
        }


def lane_of(span: Span) -> str:
    """Who has the round meanwhile."""
    return span.name.partition(":")[0]


def svg(item: Round) -> str:
    """One round over time, a lane for each process; forward passes are filled, the rest is lighter. Below, a legend."""
    per_ns = (_WIDTH - _LEFT - 10) / item.duration_ns
    height = _TOP + len(_LANES) * _LANE + 20 + _LINE * len(item.by_name())
    share = f"{100 * item.outside_forwards:.0f} % outside the models"
    title = f"One round, {item.duration_ns / 1e6:.2f} ms, {share} (pale)"
    parts = [_text(_LEFT, 18, title)]
    for row, lane in enumerate(_LANES):
        parts.append(_text(4, _TOP + row * _LANE + 20, lane))
    for span in item.spans:
        x = _LEFT + (span.begin_ns - item.spans[0].begin_ns) * per_ns
        parts.append(_box(span, x, max(0.5, span.duration_ns * per_ns)))
    for row, (name, ns) in enumerate(item.by_name().items()):
        parts.append(_text(_LEFT, _TOP + len(_LANES) * _LANE + 20 + _LINE * row, f"{ns / 1e6:7.3f} ms  {name}"))
    frame = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="monospace"'
    return f'{frame} font-size="12"><rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'


def _box(span: Span, x: float, width: float) -> str:
    lane = lane_of(span)
    y = _TOP + _LANES.index(lane) * _LANE
    tip = escape(f"{span.name}: {span.duration_ns / 1e6:.3f} ms")
    fill = f'fill="{_COLOURS[lane]}" fill-opacity="{1 if span.is_forward else 0.45}"'
    return f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_LANE - 6}" {fill}><title>{tip}</title></rect>'


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x}" y="{y}" xml:space="preserve">{escape(text)}</text>'
