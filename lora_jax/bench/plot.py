"""`--plot`: one figure of a result, by matplotlib, which is an optional extra."""

from __future__ import annotations

import importlib
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..errors import ConfigError
from . import report

FORMATS = (".png", ".svg", ".pdf")
MANY = 8  # groups of bars; more leave no room for numbers
LONG = 32  # characters of a model's name


@dataclass(frozen=True)
class Panel:
    """One set of axes. series: legend name -> values.

    kind "bars": one bar for each of `labels` and series, errors (legend name -> (below, above) each) drawn as whiskers.
    kind "lines": values against `labels`, numbers, or against 1, 2, ... without labels.
    unit: of the values, in brackets behind `value`. reference: a dashed line, (its name, value). row: of the figure, from 0.
    scale: both ends of the axis of values, for panels to be compared; None: what the values need.
    """

    title: str
    value: str
    unit: str
    series: Mapping[str, Sequence[float]]
    labels: Sequence[Any] = ()
    label_name: str = ""
    kind: Literal["bars", "lines"] = "bars"
    errors: Mapping[str, tuple[Sequence[float], Sequence[float]]] = field(default_factory=dict)
    reference: tuple[str, float] | None = None
    row: int = 0
    scale: tuple[float, float] | None = None


def check(path: str) -> None:
    """Raises ConfigError: no matplotlib, or a kind of file that it is not asked for."""
    if Path(path).suffix.lower() not in FORMATS:
        raise ConfigError(f"{path} is no name of a figure: it must end in one of {', '.join(FORMATS)}")
    try:
        importlib.import_module("matplotlib.figure")
    except ModuleNotFoundError as e:
        raise ConfigError(
            f"figures need the package {e.name}: install the extra 'bench', in a checkout pip install -e '.[bench]'"
        ) from None


def save(path: str, panels: Sequence[Panel], result: Mapping[str, Any]) -> None:
    """Draws the panels, those of one row side by side, under the benchmark's name, with machine, versions, date and command
    at the foot."""
    from matplotlib.figure import Figure  # no pyplot: no window, no global state

    rows = [[panel for panel in panels if panel.row == row] for row in sorted({panel.row for panel in panels})]
    across = max(map(len, rows))
    figure = Figure(figsize=(6.4 * across, 5.2 * len(rows)), layout="constrained")
    figure.suptitle("\n".join(textwrap.wrap(heading(result), 60 * across, break_on_hyphens=False)))
    figure.supxlabel("\n".join(foot(result, 100 * across)), fontsize=7, color="0.35")
    for y, row in enumerate(rows):
        for x, panel in enumerate(row):
            _draw(panel, figure.add_subplot(len(rows), across, y * across + x + 1))
    figure.savefig(path, dpi=150)


def heading(result: Mapping[str, Any]) -> str:
    """Benchmark, model and what was asked of it."""
    asked = {"batch_size": "batch", "input_len": "prompt", "output_len": "output"}
    sizes = [f"{name} {result[key]}" for key, name in asked.items() if key in result]
    model = Path(str(result.get("model", ""))).name
    if len(model) > LONG:  # the command at the foot has all of it
        model = f"{model[: LONG // 2]}…{model[1 - LONG // 2 :]}"
    what = ", ".join(filter(None, [model, *sizes]))
    return f"lora-jax bench {result['benchmark']}" + (f": {what}" if what else "")


def foot(result: Mapping[str, Any], width: int) -> list[str]:
    """Lines of at most `width` characters."""
    text = [report.one_line(dict(result)), *([result["command"]] if result["command"] else [])]
    return [line for part in text for line in textwrap.wrap(part, width, break_on_hyphens=False)]


def _draw(panel: Panel, axes: Any) -> None:
    axes.set_title(panel.title, fontsize=10)
    axes.set_ylabel(f"{panel.value} [{panel.unit}]")
    axes.set_xlabel(panel.label_name)
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
    if panel.kind == "lines" and not len(panel.labels):
        axes.xaxis.get_major_locator().set_params(integer=True)
    width = 0.8 / max(1, len(panel.series))
    for i, (name, values) in enumerate(panel.series.items()):
        if panel.kind == "lines":
            axes.plot(panel.labels if len(panel.labels) else range(1, len(values) + 1), values, marker=".", label=name)
            continue
        at = [x + (i - (len(panel.series) - 1) / 2) * width for x in range(len(values))]
        axes.bar(at, values, width * 0.9, label=name, yerr=panel.errors.get(name), capsize=3, alpha=0.7)
        for x, value in zip(at, values, strict=True) if len(panel.labels) <= MANY else ():
            text = _label(value, panel.unit)
            axes.annotate(text, (x, 0), (0, 3), textcoords="offset points", ha="center", fontsize=8)
    if panel.kind == "bars":
        labels = [str(label) for label in panel.labels]
        crowded = sum(map(len, labels)) > 80
        axes.set_xticks(range(len(labels)), labels, rotation=90 if crowded else 0, fontsize=7 if crowded else None)
    if panel.reference is not None:
        axes.axhline(panel.reference[1], linestyle="--", color="0.4", label=panel.reference[0])
    if len(panel.series) > 1 or panel.reference is not None:
        axes.legend(fontsize=8)
    if panel.scale is not None:
        axes.set_ylim(*panel.scale)
    elif min((min(values, default=0) for values in panel.series.values()), default=0) >= 0:
        axes.set_ylim(bottom=0)


def _label(value: float, unit: str) -> str:
    """A percentage to a hundredth, without the sign of what rounds to nothing; else three digits, or all before the point: an
    exponent would run into the next bar's."""
    if unit == "%":
        return f"{round(value, 2) + 0.0:.2f} %"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
