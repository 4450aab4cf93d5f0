"""Plots of results, SVG or PNG, by matplotlib: ``pip install '.[bench]'``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

Series = dict[str, Sequence[float | None]]  # by name, a value a label; None where there is none


def _axes(title: str, unit: str) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SystemExit("--plot needs matplotlib: pip install '.[bench]'") from error
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=10)
    axes.set_ylabel(unit)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def bars(path: Path, title: str, unit: str, labels: Sequence[str], series: Series) -> None:
    """Groups of bars: a group a label, a bar a series."""
    figure, axes = _axes(title, unit)
    width = 0.8 / max(len(series), 1)
    for place, (name, values) in enumerate(series.items()):
        at = [i + (place - (len(series) - 1) / 2) * width for i in range(len(labels))]
        heights = [value or 0.0 for value in values]
        drawn = axes.bar(at, heights, width, label=name)
        said = ["none" if value is None else f"{value:.3g}" for value in values]
        axes.bar_label(drawn, said, fontsize=7)
    axes.set_xticks(range(len(labels)), labels)
    axes.legend(fontsize=8, frameon=False)
    _save(figure, path)


def lines(
    path: Path,
    title: str,
    unit: str,
    axis: str,
    places: Sequence[float],
    series: Series,
    logarithmic: bool = False,
) -> None:
    """Lines with a mark at each place; a gap where there is no value."""
    figure, axes = _axes(title, unit)
    for name, values in series.items():
        heights = [float("nan") if value is None else value for value in values]
        axes.plot(places, heights, marker="o", markersize=4, label=name)
    axes.set_xlabel(axis)
    if logarithmic:
        axes.set_yscale("log")
        axes.set_xscale("log")
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.minorticks_off()
    axes.legend(fontsize=8, frameon=False)
    _save(figure, path)
