"""The report of a run: a table, pictures and one self-contained HTML page, from the files of its run folder.

    python -m megatron_rsi report runs/tiny                    # one run
    python -m megatron_rsi report runs/s0 runs/s1 runs/s2      # and the table over seeds

A run that is still going or was cut short gets the report of what is there, with a note on what is not.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

import jinja2
import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from . import gate
from .config import write_atomic
from .log import read_metrics
from .results import Results, StageResult, SuiteResult, mean_and_deviation, read_results, sort_suites

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title><style>
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2430; max-width: 1000px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2.2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 14px; }
th, td { padding: .3rem .8rem .3rem 0; text-align: right; border-bottom: 1px solid #e5e7eb; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } .wrap { overflow-x: auto; } img { max-width: 100%; }
.muted { color: #6b7280; } .note { background: #fff7e6; padding: .5rem .8rem; border-left: 3px solid #e08a2e; }
pre { background: #f6f7f9; padding: .8rem; overflow-x: auto; font-size: 13px; }
td.text { white-space: normal; text-align: left; }
</style></head><body>
<h1>{{ title }}</h1>
{% for note in notes %}<p class="note">{{ note }}</p>{% endfor %}
{% if headline %}<p>{{ headline }}</p>{% endif %}
{% for table in tables %}
<h2>{{ table.title }}</h2><div class="wrap"><table>
<tr>{% for cell in table.header %}<th>{{ cell }}</th>{% endfor %}</tr>
{% for row in table.rows %}<tr>{% for cell in row %}<td{% if cell|length > 60 %} class="text"{% endif %}>{{ cell }}</td>
{% endfor %}</tr>{% endfor %}
</table></div>{% endfor %}
{% for picture in pictures %}<h2>{{ picture.title }}</h2><img alt="{{ picture.title }}"
 src="data:image/png;base64,{{ picture.data }}">{% endfor %}
{% for text in texts %}<h2>{{ text.title }}</h2><pre>{{ text.body }}</pre>{% endfor %}
</body></html>
"""


class Grid(msgspec.Struct, frozen=True):
    """A table that can be printed, put into the page and written as Markdown."""

    title: str
    header: list[str]
    rows: list[list[str]]

    def rich(self, narrow: bool = False) -> Table:
        """``narrow`` puts intervals on a line of their own, for terminals of 80 columns."""
        table = Table(title=self.title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for n, name in enumerate(self.header):
            header = name.replace("_", "\n") if narrow else name
            table.add_column(header, justify="left" if n == 0 else "right", no_wrap=True)
        for row in self.rows:
            table.add_row(*(cell.replace(" [", "\n[") if narrow else cell for cell in row))
        return table

    def markdown(self) -> str:
        lines = [self.header, ["---"] + ["---:"] * (len(self.header) - 1), *self.rows]
        return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Paths of what was made (None: there was nothing to make it from) and what was missing."""

    html: Path
    success: Path | None
    time: Path | None
    learning: Path | None
    notes: list[str]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def _strict(suite: SuiteResult | None) -> str:
    return "-" if suite is None else f"{_percent(suite.strict)} [{100 * suite.ci95[0]:.0f}, {100 * suite.ci95[1]:.0f}]"


def success_grid(results: Results) -> Grid:
    """Strict success in percent with its 95 % interval, by stage and suite."""
    names = results.suites
    rows = [
        [s.name, "yes" if s.adopted else "no", *(_strict(s.suites.get(n)) for n in names), _seconds(s.wall_s)]
        for s in results.stages
    ]
    title = "Strict success on held-out tasks, % [95 % interval]"
    return Grid(title, ["stage", "adopted", *names, "wall s"], rows)


def detail_grid(results: Results) -> Grid:
    """Mean fraction of checks, turns and sampled tokens, by stage and suite."""
    rows = [
        [s.name, name, str(r.n), _percent(r.strict), _percent(r.partial), _mean(r.turns), _mean(r.tokens)]
        for s in results.stages
        for name in sort_suites(set(s.suites))
        for r in [s.suites[name]]
    ]
    header = ["stage", "suite", "attempts", "strict %", "checks passed %", "turns", "tokens"]
    return Grid("Every suite of every stage", header, rows)


def suite_grid(stage: StageResult) -> Grid:
    """One stage, a row a suite; fits 80 columns."""
    rows = [
        [name, str(r.n), _strict(r), _percent(r.partial), _mean(r.turns), _mean(r.tokens)]
        for name in sort_suites(set(stage.suites))
        for r in [stage.suites[name]]
    ]
    header = ["suite", "attempts", "strict % [95 %]", "checks %", "turns", "tokens"]
    return Grid(f"Strict success of {stage.name}", header, rows)


def _mean(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def stage_seconds(records: Sequence[dict[str, object]]) -> dict[str, dict[str, float]]:
    """Stage -> part -> seconds; launches of one stage (before and after a resume) are added up."""
    times: dict[str, dict[str, float]] = {}
    for record in records:
        if record.get("kind") != "time":
            continue
        seconds = msgspec.convert(record.get("seconds", {}), dict[str, float])
        parts = times.setdefault(str(record.get("stage")), {})
        for part, spent in seconds.items():
            parts[part] = parts.get(part, 0.0) + spent
    return times


def time_grid(times: dict[str, dict[str, float]]) -> Grid:
    from .log import PARTS

    rows = [
        [stage, *(f"{parts.get(p, 0.0):.1f}" for p in PARTS), f"{sum(parts.values()):.1f}"]
        for stage, parts in times.items()
    ]
    if rows:
        sums = [sum(parts.get(p, 0.0) for parts in times.values()) for p in PARTS]
        rows.append(["all", *(f"{s:.1f}" for s in sums), f"{sum(sums):.1f}"])
    return Grid("Seconds by part", ["stage", *PARTS, "sum"], rows)


def gate_grid(run_dir: Path, notes: list[str]) -> Grid:
    """Every decision of the run, in order of time."""
    rows = []
    for path in sorted(run_dir.glob("cycle_*/**/gate*.json"), key=lambda p: p.stat().st_mtime):
        try:
            decision = gate.load(path)
        except ValueError as error:
            notes.append(str(error))
            continue
        change = f"{100 * decision.difference:+.1f} [{100 * decision.ci95[0]:+.1f}, {100 * decision.ci95[1]:+.1f}]"
        stage = decision.stage or str(path.relative_to(run_dir))
        rows.append([stage, change, str(decision.num_tasks), decision.reason])
    return Grid("Adoption gate on validation tasks", ["stage", "change in points [95 %]", "tasks", "decision"], rows)


def headline(results: Results) -> str:
    """First against last standing model on the core suite (or the first suite there is)."""
    if not results.suites:
        return "no suite has been measured"
    name = "core" if "core" in results.suites else results.suites[0]
    standing = [s for s in results.standing() if name in s.suites]
    first, last = standing[0].suites[name], standing[-1].suites[name]
    apart = "do not overlap" if first.ci95[1] < last.ci95[0] else "overlap"
    return (
        f"{name}: {_strict(first)} % at {standing[0].name}, {_strict(last)} % at {standing[-1].name} "
        f"({100 * (last.strict - first.strict):+.1f} points; the 95 % intervals {apart}; n = {last.n})"
    )


def _metrics(folder: Path, notes: list[str]) -> list[dict[str, object]]:
    path = folder / "metrics.jsonl"
    if not path.is_file():
        notes.append("metrics.jsonl is missing: no learning curves, no split of the time")
        return []
    try:
        return read_metrics(path)
    except ValueError as error:
        notes.append(str(error))
        return []


def _results(folder: Path, notes: list[str]) -> Results | None:
    try:
        return read_results(folder)
    except ValueError as error:
        notes.append(str(error))
        return None


def make(run_dir: Path | str, console: Console | None = None) -> Report:
    """Prints the tables and writes success.png, time.png, learning.png and report.html into the run folder.

    Raises ValueError when there is no such folder or nothing at all to report on.
    """
    from . import figures  # matplotlib takes a second to import

    folder = Path(run_dir)
    if not folder.is_dir():
        raise ValueError(f"no run folder {folder}")
    notes: list[str] = []
    results, records = _results(folder, notes), _metrics(folder, notes)
    if results is None and not records:
        raise ValueError(f"nothing to report on in {folder}: " + "; ".join(notes))
    times = stage_seconds(records)
    steps = [r for r in records if r.get("kind") == "step"]
    success = figures.success(results, folder / "success.png") if results else None
    time = figures.stage_times(times, folder / "time.png") if times else None
    learning = figures.learning_curves(steps, folder / "learning.png") if steps else None
    tables = [success_grid(results), detail_grid(results)] if results else []
    tables += [t for t in (gate_grid(folder, notes), time_grid(times)) if t.rows]
    pictures = [("Success", success), ("Time", time), ("Learning curves", learning)]
    html = _write_page(folder, results, notes, tables, [(t, p) for t, p in pictures if p is not None])
    _print(console or Console(), [t for t in tables if t.title != "Every suite of every stage"], results, notes)
    return Report(html=html, success=success, time=time, learning=learning, notes=notes)


def _print(console: Console, tables: Sequence[Grid], results: Results | None, notes: Sequence[str]) -> None:
    if not console.is_terminal:
        console.width = 160  # a log file has no edge to wrap at
    for table in tables:
        if table.header[-1] == "decision":
            for row in table.rows:
                console.print(f"gate {row[0]}: {row[-1]}", markup=False, highlight=False, soft_wrap=True)
        else:
            console.print(table.rich(narrow=console.width < 110))
    if results:
        console.print(headline(results), markup=False, highlight=False, soft_wrap=True)
    for note in notes:
        console.print(f"note: {note}", markup=False, highlight=False, style="yellow", soft_wrap=True)


def _write_page(
    folder: Path, results: Results | None, notes: list[str], tables: list[Grid], pictures: list[tuple[str, Path]]
) -> Path:
    named = {"Commands": "command.txt", "Configuration": "config.toml", "Environment": "env.json"}
    files = {title: folder / name for title, name in named.items()}
    environment = jinja2.Environment(autoescape=True)
    page = environment.from_string(_PAGE).render(
        title=f"Run {folder.resolve().name}" + (f", seed {results.seed}" if results else ""),
        notes=notes,
        headline=headline(results) if results else "",
        tables=tables,
        pictures=[{"title": t, "data": base64.b64encode(p.read_bytes()).decode()} for t, p in pictures],
        texts=[{"title": t, "body": p.read_text(errors="replace")} for t, p in files.items() if p.is_file()],
    )
    target = folder / "report.html"
    write_atomic(target, page)
    return target


# ------------------------------------------------------------------------------------------------------ over seeds


def aggregate(run_dirs: Sequence[Path | str], picture: Path | str | None = None) -> str:
    """Markdown: core by stage for every seed with mean and spread, then first against last stage for every suite.

    "Last" is the model that stands at the end, after roll-backs. Writes ``picture`` (seeds.png) when given. Raises
    ValueError when a run cannot be read, two runs share a seed, or their stages have different names.
    """
    if not run_dirs:
        raise ValueError("no run folder given")
    runs = sorted((read_results(folder) for folder in run_dirs), key=lambda run: run.seed)
    _check_comparable(runs)
    if picture is not None:
        from . import figures

        figures.seeds(runs, Path(picture))
    grids = [_by_stage(runs, suite) for suite in sort_suites(set(runs[0].suites))]
    return "\n\n".join(grid.markdown() for grid in [*grids, _first_to_last(runs)]) + "\n"


def _check_comparable(runs: Sequence[Results]) -> None:
    by_seed: dict[int, Results] = {}
    longest = max(([s.name for s in run.stages] for run in runs), key=len)
    for run in runs:
        if run.seed in by_seed:
            raise ValueError(f"two of the runs have seed {run.seed}: a spread over seeds needs different ones")
        by_seed[run.seed] = run
        names = [s.name for s in run.stages]
        if names != longest[: len(names)]:
            raise ValueError(f"seed {run.seed} has stages {', '.join(names)}, others {', '.join(longest)}")


def _spread_cell(values: Sequence[float]) -> str:
    mean, deviation = mean_and_deviation(values)
    return f"{100 * mean:.1f} ± {100 * deviation:.1f}"


def _stage_cell(stage: StageResult, suite: str) -> str:
    if suite not in stage.suites:
        return "-"
    return _percent(stage.suites[suite].strict) + ("" if stage.adopted else " (rolled back)")


def _by_stage(runs: Sequence[Results], suite: str) -> Grid:
    longest = max(runs, key=lambda run: len(run.stages))
    stages = [s.name for s in longest.stages]
    rows = []
    for run in runs:
        cells = [_stage_cell(s, suite) for s in run.stages] + ["-"] * (len(stages) - len(run.stages))
        standing = [s.suites[suite].strict for s in run.standing() if suite in s.suites]
        rows.append([str(run.seed), *cells, f"{100 * (standing[-1] - standing[0]):+.1f}" if standing else "-"])
    columns = [[r.standing()[n].suites[suite].strict for r in runs if n < len(r.stages)
                and suite in r.standing()[n].suites] for n in range(len(stages))]  # fmt: skip
    gains = [c[-1] - c[0] for r in runs if (c := [s.suites[suite].strict for s in r.standing() if suite in s.suites])]
    rows.append(["mean ± sd", *(_spread_cell(c) if c else "-" for c in columns), _spread_cell(gains) if gains else "-"])
    return Grid(f"{suite} by stage", [f"seed ({suite}, %)", *stages, "gain"], rows)


def _first_to_last(runs: Sequence[Results]) -> Grid:
    rows = []
    for suite in sort_suites({name for run in runs for name in run.suites}):
        curves = [[s.suites[suite] for s in r.standing() if suite in s.suites] for r in runs]
        pairs = [(curve[0], curve[-1]) for curve in curves if curve]
        partial = [(a.partial, b.partial) for a, b in pairs if a.partial is not None and b.partial is not None]
        checks = " → ".join(_spread_cell(side) for side in zip(*partial, strict=True)) if partial else "-"
        gains = [b.strict - a.strict for a, b in pairs]
        first, last = _spread_cell([a.strict for a, _ in pairs]), _spread_cell([b.strict for _, b in pairs])
        rows.append([suite, first, last, f"{100 * min(gains):+.1f} to {100 * max(gains):+.1f}", checks])
    header = ["suite", "first stage, strict %", "last stage, strict %", "gain over seeds", "checks passed %"]
    return Grid(f"{len(runs)} seeds", header, rows)
