"""The figures as bars, one picture per load; needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from load_tests.compare.figures import figure_text
from load_tests.compare.peers.base import PeerName
from load_tests.compare.report import FIGURES, Report
from load_tests.compare.scenario import Load

_PLOTTED = ("tok_s", "ttft_ms", "tpot_ms", "itl_p50_ms", "itl_p95_ms", "itl_p99_ms", "peak_rss_mib")
_COLOURS = {
    PeerName.PACELINE: "#c0392b",
    PeerName.VLLM: "#2c7fb8",
    PeerName.LLAMA_CPP: "#7f8c8d",
    PeerName.TRANSFORMERS: "#e0a030",
}


def write_plots(report: Report, folder: Path) -> list[Path]:
    """One PNG per load. Raises ImportError without matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    return [_write(report, load, folder) for load in report.scenario.loads if report.arms(load)]


def _write(report: Report, load: Load, folder: Path) -> Path:
    from matplotlib import pyplot

    arms = report.arms(load)
    figure, axes = pyplot.subplots(1, len(_PLOTTED), figsize=(3 * len(_PLOTTED), 1.2 + 0.4 * len(arms)), sharey=True)
    for axis, name in zip(axes, _PLOTTED, strict=True):
        _bars(axis, report, load, name)
    axes[0].set_yticks(range(len(arms)), [str(arm) for arm in arms])
    axes[0].invert_yaxis()
    figure.suptitle(f"{report.scenario.title}: {load}. Medians over rounds; lines from lowest to highest")
    figure.tight_layout()
    path = folder / f"{str(load).replace(' ', '-')}.png"
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _bars(axis: Any, report: Report, load: Load, name: str) -> None:
    for place, arm in enumerate(report.arms(load)):
        spread = report.spread(arm, load, name)
        if spread is None:
            continue
        reach = [[spread.median - spread.low], [spread.high - spread.median]]
        axis.barh(place, spread.median, xerr=reach, color=_COLOURS[arm.peer], error_kw={"elinewidth": 1})
        axis.annotate(f" {figure_text(spread.median)}", (spread.high, place), va="center", fontsize=8)
    axis.set_title(FIGURES[name], fontsize=10)
    axis.margins(x=0.25)
