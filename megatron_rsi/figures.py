"""The pictures of a run: success by stage, time by stage, learning curves, seeds. Each function writes one PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display needed
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.ticker import MaxNLocator, PercentFormatter  # noqa: E402

from .log import PARTS  # noqa: E402
from .results import Results  # noqa: E402

INK, MUTED, GRID = "#1f2430", "#6b7280", "#e5e7eb"
PART_COLOURS = {
    "generate": "#2f6fb0", "sandbox": "#e08a2e", "train": "#3f9c74", "sync": "#b45a9c", "evaluate": "#8fb8dd",
    "other": "#c3c7cf",
}  # fmt: skip
LADDER_COLOURS = ("#1f7a6f", "#2fa294", "#5bbcae", "#86cfc4")
CURVES = (("reward", "reward"), ("solved", "strict success in training"), ("loss", "loss"), ("kl", "KL"),
          ("clip", "clipped share"), ("ev", "explained variance"), ("engine_gap_p99", "trainer/engine gap, p99"))  # fmt: skip


def suite_label(name: str) -> str:
    """``ladder_4`` -> ``4 sub-tasks``."""
    return f"{name.removeprefix('ladder_')} sub-tasks" if name.startswith("ladder_") else name


def suite_colours(names: Sequence[str]) -> dict[str, str]:
    """Core in blue, the ladder in fading greens, long in red, anything else in grey."""
    ladder = [name for name in names if name.startswith("ladder_")]
    colours = {name: LADDER_COLOURS[min(n, len(LADDER_COLOURS) - 1)] for n, name in enumerate(ladder)}
    return {name: colours.get(name, {"core": "#1d4e89", "long": "#c8553d"}.get(name, MUTED)) for name in names}


def _style(axes: Axes, title: str = "") -> None:
    axes.set_title(title, loc="left", fontsize=11, color=INK, pad=10)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, labelsize=9, length=0)


def _spread(heights: Sequence[float], gap: float) -> list[float]:
    """Moves labels apart, upwards from the lowest, until neighbours are ``gap`` from each other."""
    order = sorted(range(len(heights)), key=lambda n: heights[n])
    placed = list(heights)
    for lower, upper in zip(order, order[1:], strict=False):
        placed[upper] = max(placed[upper], placed[lower] + gap)
    return placed


def _save(figure: plt.Figure, path: Path) -> Path:
    figure.savefig(path, dpi=150, bbox_inches="tight", facecolor="white")
    plt.close(figure)
    return path


def success(results: Results, path: Path) -> Path:
    """Strict success of every suite by stage, with 95 % intervals. Lines follow the model that stands; a rolled-back
    candidate is a hollow marker off the line."""
    names, colours = results.suites, suite_colours(results.suites)
    figure, axes = plt.subplots(figsize=(8.0, 4.6))
    _style(axes, "Strict success on held-out tasks (bars: 95 % interval)")
    ends: dict[str, float] = {}
    for order, name in enumerate(names):
        shift = (order - (len(names) - 1) / 2) * 0.045  # so that intervals do not hide each other
        ends.update(_success_line(axes, results, name, colours[name], shift))
    axes.set_xticks(range(len(results.stages)), [s.name for s in results.stages])
    axes.set_xlim(-0.3, len(results.stages) - 0.7)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylim(bottom=-0.02)
    top = axes.get_ylim()[1]
    for (name, height), place in zip(ends.items(), _spread(list(ends.values()), 0.055 * top), strict=True):
        axes.annotate(
            f"{suite_label(name)}  {height:.0%}", (1.01, place), xycoords=("axes fraction", "data"), va="center",
            fontsize=9, color=colours[name], fontweight="bold" if name == "core" else "normal", annotation_clip=False,
        )  # fmt: skip
    if not all(stage.adopted for stage in results.stages):
        axes.plot([], [], "o", mfc="white", mec=MUTED, label="measured, then rolled back by the gate")
        axes.legend(frameon=False, fontsize=9, loc="upper left", labelcolor=MUTED)
    return _save(figure, path)


def _success_line(axes: Axes, results: Results, name: str, colour: str, shift: float) -> dict[str, float]:
    width = 2.6 if name == "core" else 1.6
    xs, ys = [], []
    for x, (own, standing) in enumerate(zip(results.stages, results.standing(), strict=True)):
        if name in standing.suites:
            xs.append(x + shift)
            ys.append(standing.suites[name].strict)
        measured = own.suites.get(name)
        if measured is None:
            continue
        error = [[measured.strict - measured.ci95[0]], [measured.ci95[1] - measured.strict]]
        axes.errorbar(
            [x + shift], [measured.strict], yerr=error, fmt="o", color=colour, ms=7 if name == "core" else 5,
            mfc=colour if own.adopted else "white", elinewidth=1.2, capsize=2.5,
        )  # fmt: skip
    axes.plot(xs, ys, color=colour, linewidth=width, solid_capstyle="round")
    return {name: ys[-1]} if ys else {}


def stage_times(seconds: Mapping[str, Mapping[str, float]], path: Path) -> Path:
    """Stacked bars: stage -> part -> seconds."""
    figure, axes = plt.subplots(figsize=(8.0, 0.9 + 0.46 * len(seconds)))
    _style(axes, "Where the time goes (seconds)")
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    stages = list(seconds)
    left = [0.0] * len(stages)
    for part in PARTS:
        widths = [max(0.0, seconds[stage].get(part, 0.0)) for stage in stages]
        if any(widths):
            axes.barh(stages, widths, left=left, color=PART_COLOURS[part], height=0.62, label=part, edgecolor="white")
            left = [a + b for a, b in zip(left, widths, strict=True)]
    for n, total in enumerate(left):
        axes.annotate(f" {total:.0f}", (total, n), va="center", fontsize=9, color=INK)
    axes.invert_yaxis()
    below = (0.5, -0.12 - 0.3 / len(stages))
    axes.legend(ncols=len(PARTS), frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=below)
    return _save(figure, path)


def learning_curves(records: Sequence[Mapping[str, object]], path: Path) -> Path | None:
    """Small panels of what the step records hold; None when they hold nothing that can be drawn."""
    stages = list(dict.fromkeys(str(r["stage"]) for r in records))
    shown = [(key, title) for key, title in CURVES if any(isinstance(r.get(key), int | float) for r in records)]
    if not shown:
        return None
    rows = (len(shown) + 2) // 3
    figure, grid = plt.subplots(rows, 3, figsize=(10.5, 2.7 * rows), squeeze=False, layout="constrained")
    palette = plt.get_cmap("viridis")
    for axes, (key, title) in zip(grid.flat, shown, strict=False):
        _style(axes, title)
        offset = 0
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        for n, stage in enumerate(stages):
            mine = [r for r in records if r["stage"] == stage]
            points = [(offset + i, float(v)) for i, r in enumerate(mine) if isinstance(v := r.get(key), int | float)]
            offset += len(mine)
            if points:
                colour = palette(n / max(1, len(stages) - 1) * 0.85)
                axes.plot(*zip(*points, strict=True), color=colour, marker="." if len(points) < 30 else "", label=stage)
    for axes in list(grid.flat)[len(shown):]:
        axes.set_visible(False)
    handles = {label: line for axes in grid.flat for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    return _save(figure, path)


def seeds(runs: Sequence[Results], path: Path) -> Path:
    """One panel a suite: every seed thin, the mean thick, by stage."""
    names = runs[0].suites
    colours = suite_colours(names)
    longest = max(runs, key=lambda run: len(run.stages))
    columns = min(3, len(names))
    rows = (len(names) + columns - 1) // columns
    figure, grid = plt.subplots(
        rows, columns, figsize=(3.6 * columns, 2.9 * rows), squeeze=False, layout="constrained", sharey=False
    )
    for axes, name in zip(grid.flat, names, strict=False):
        _style(axes, suite_label(name))
        curves = [[s.suites[name].strict for s in run.standing() if name in s.suites] for run in runs]
        for curve in curves:
            axes.plot(curve, color=colours[name], alpha=0.35, linewidth=1)
        complete = [c for c in curves if len(c) == len(longest.stages)]
        if complete:
            axes.plot([sum(v) / len(v) for v in zip(*complete, strict=True)], color=colours[name], linewidth=2.6)
        axes.set_xticks(range(len(longest.stages)), [s.name for s in longest.stages], rotation=30, ha="right")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        top = max([0.05, *(max(c) for c in curves if c)])
        axes.set_ylim(bottom=-0.03 * top, top=1.1 * top)
    for axes in list(grid.flat)[len(names):]:
        axes.set_visible(False)
    title = f"Strict success on held-out tasks, {len(runs)} seeds (thin) and their mean"
    figure.suptitle(title, fontsize=11, color=INK)
    return _save(figure, path)
