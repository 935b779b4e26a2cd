import base64
import io
import json
import re
from pathlib import Path

import matplotlib.image
import pytest
from rich.console import Console

from megatron_rsi import gate, report
from megatron_rsi.config import load, save_provenance
from megatron_rsi.log import Metrics
from megatron_rsi.results import Results, read_results, sort_suites

STAGES = [("base", 0.27, True), ("rsr-1", 0.55, True), ("rpr-1", 0.5, False), ("rsr-2", 0.7, True)]


def suite(strict: float, n: int = 256) -> dict[str, object]:
    low, high = gate.wilson(round(strict * n), n)
    rate = round(strict * n) / n
    return {"strict": rate, "ci95": [low, high], "partial": min(1.0, rate + 0.2), "n": n, "turns": 4.25, "tokens": 61.0}


def make_run(folder: Path, seed: int = 0, stages: int = 4, shift: float = 0.0) -> Path:
    """The files of a run, as the trainer writes them."""
    save_provenance(folder, load("tiny", [f"seed={seed}"]), ["megatron-rsi", "train", "--seed", str(seed)])
    metrics, written = Metrics(folder / "metrics.jsonl"), []
    for name, strict, adopted in STAGES[:stages]:
        suites = {"long": suite(0.01, 100), "ladder_10": suite(0.05, 100), "ladder_4": suite(strict / 3, 100)}
        suites["core"] = suite(strict + shift)
        written.append({"name": name, "adopted": adopted, "wall_s": 100.0, "suites": suites})
        for step in (1, 2, 3):
            metrics.write({"kind": "step", "stage": name, "step": step, "reward": strict + step / 100, "kl": 0.01})
        metrics.write({"kind": "time", "stage": name, "wall_s": 12.0, "seconds": {"train": 8.0, "sandbox": 2.5}})
    metrics.write({"kind": "time", "stage": "base", "wall_s": 3.0, "seconds": {"train": 2.0, "other": 1.0}})
    metrics.close()
    (folder / "results.json").write_text(json.dumps({"seed": seed, "stages": written}))
    (folder / "cycle_00").mkdir(exist_ok=True)
    before = {str(i): float(i % 2) for i in range(80)}
    gate.save(gate.decide(before, before, 0.0125, stage="rsr-1"), folder / "cycle_00" / "gate_rsr.json")
    return folder


def run_report(folder: Path, width: int = 200) -> tuple[report.Report, str]:
    out = io.StringIO()
    return report.make(folder, Console(file=out, width=width, highlight=False)), out.getvalue()


def test_whole_run(tmp_path: Path) -> None:
    made, printed = run_report(make_run(tmp_path))
    assert made.notes == []
    rows = [line.split() for line in printed.splitlines()]
    assert next(r for r in rows if r[:1] == ["base"])[:5] == ["base", "yes", "27.0", "[22,", "33]"]
    assert next(r for r in rows if r[:1] == ["rpr-1"])[1] == "no"
    assert "gate rsr-1: adopted: +0.0 points on 80 paired tasks" in printed
    assert "core: 27.0 [22, 33] % at base, 69.9 [64, 75] % at rsr-2 (+43.0 points; the 95 % intervals do not" in printed
    assert next(r for r in rows if r[:1] == ["all"]) == ["all", "0.0", "10.0", "34.0", "0.0", "0.0", "1.0", "45.0"]
    for picture in (made.success, made.time, made.learning):
        assert picture is not None
        pixels = matplotlib.image.imread(picture)
        assert pixels.shape[0] > 200 and pixels.shape[1] > 600 and pixels[..., :3].std() > 0.02


def test_the_page_stands_alone(tmp_path: Path) -> None:
    made, _ = run_report(make_run(tmp_path))
    page = made.html.read_text()
    assert not re.findall(r"""(?:src|href)=["'](?!data:image/png;base64,)""", page)
    inlined = re.findall(r"data:image/png;base64,([A-Za-z0-9+/=]+)", page)
    assert [base64.b64decode(data) for data in inlined] == [
        (tmp_path / name).read_bytes() for name in ("success.png", "time.png", "learning.png")
    ]
    for text in ("megatron-rsi train --seed 0", "[rpr]", "ladder_10", "Adoption gate", "rpr-1"):
        assert text in page


def test_names_from_files_are_escaped(tmp_path: Path) -> None:
    make_run(tmp_path)
    text = (tmp_path / "results.json").read_text().replace('"rsr-2"', '"<script>x</script>"')
    (tmp_path / "results.json").write_text(text)
    page = run_report(tmp_path)[0].html.read_text()
    assert "<script>" not in page and "&lt;script&gt;" in page


def test_a_run_before_its_first_evaluation_gets_what_there_is(tmp_path: Path) -> None:
    make_run(tmp_path)
    (tmp_path / "results.json").unlink()
    made, printed = run_report(tmp_path)
    assert made.success is None and made.time is not None and made.learning is not None
    assert "has not finished its first evaluation" in made.notes[0]
    assert made.notes[0] in made.html.read_text() and f"note: {made.notes[0]}" in printed


def test_results_without_metrics(tmp_path: Path) -> None:
    make_run(tmp_path, stages=1)
    (tmp_path / "metrics.jsonl").unlink()
    made, _ = run_report(tmp_path)
    assert made.success is not None and made.time is None and made.learning is None
    assert "metrics.jsonl is missing" in made.notes[0]


def test_suites_that_are_missing_in_a_stage(tmp_path: Path) -> None:
    make_run(tmp_path)
    results = json.loads((tmp_path / "results.json").read_text())
    del results["stages"][0]["suites"]["long"], results["stages"][2]["suites"]["core"]
    for name in ("turns", "tokens", "partial"):
        del results["stages"][1]["suites"]["core"][name]
    (tmp_path / "results.json").write_text(json.dumps(results))
    made, printed = run_report(tmp_path)
    assert made.success is not None and made.notes == []
    assert next(line.split() for line in printed.splitlines() if line.split()[:1] == ["rpr-1"])[2] == "-"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "malformed"),
        ('{"seed": 0, "stages": []}', "holds no stage yet"),
        ('{"seed": 0, "stages": [{"name": "a", "suites": {"core": {"strict": 1.2, "ci95": [0, 1], "n": 3}}}]}', "1.2"),
        ('{"seed": 0, "stages": [{"name": "a", "suites": {"core": {"strict": 0.2, "n": 3}}}]}', "ci95"),
    ],
)
def test_malformed_results_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_results(tmp_path)
    with pytest.raises(ValueError, match="nothing to report on"):
        report.make(tmp_path, Console(file=io.StringIO()))


def test_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no run folder"):
        report.make(tmp_path / "nowhere")


def test_a_narrow_terminal_shows_every_number_whole(tmp_path: Path) -> None:
    make_run(tmp_path)
    out = io.StringIO()
    report.make(tmp_path, Console(file=out, width=80, force_terminal=True, highlight=False, no_color=True))
    assert "…" not in out.getvalue() and "69.9" in out.getvalue() and "[64, 75]" in out.getvalue()


def test_suites_are_ordered_by_difficulty() -> None:
    assert sort_suites({"long", "ladder_10", "other", "ladder_4", "core"}) == [
        "core", "ladder_4", "ladder_10", "long", "other"
    ]  # fmt: skip


def test_a_rolled_back_stage_leaves_the_model_before_it_standing(tmp_path: Path) -> None:
    results: Results = read_results(make_run(tmp_path))
    assert [s.name for s in results.standing()] == ["base", "rsr-1", "rsr-1", "rsr-2"]


def test_aggregate_gives_mean_and_spread_over_seeds(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / str(seed), seed, shift=shift) for seed, shift in [(2, 0.1), (0, 0.0), (1, -0.1)]]
    text = report.aggregate(runs, tmp_path / "seeds.png")
    rows = {line.split(" | ")[0].strip("| "): line for line in reversed(text.splitlines())}  # core is first
    assert text.count("| mean ± sd |") == len(read_results(tmp_path / "0").suites)
    assert rows["0"] == "| 0 | 27.0 | 55.1 | 50.0 (rolled back) | 69.9 | +43.0 |"
    # base 44/256, 69/256, 95/256: mean 27.08, sd 9.96; the third column repeats the model that stands
    assert rows["mean ± sd"].startswith("| mean ± sd | 27.1 ± 10.0 | 54.9 ± 10.0 | 54.9 ± 10.0 | 70.1 ± 10.0 |")
    assert rows["core"].startswith("| core | 27.1 ± 10.0 | 70.1 ± 10.0 |")
    assert "| long | 1.0 ± 0.0 | 1.0 ± 0.0 | +0.0 to +0.0 | 21.0 ± 0.0 → 21.0 ± 0.0 |" in text
    assert matplotlib.image.imread(tmp_path / "seeds.png").shape[1] > 600


def test_aggregate_of_unfinished_runs_and_of_runs_that_do_not_compare(tmp_path: Path) -> None:
    whole, half = make_run(tmp_path / "a", 0), make_run(tmp_path / "b", 1, stages=2)
    text = report.aggregate([whole, half], tmp_path / "seeds.png")
    assert "| 1 | 27.0 | 55.1 | - | - | +28.1 |" in text
    with pytest.raises(ValueError, match="two of the runs have seed 0"):
        report.aggregate([whole, whole])
    other = make_run(tmp_path / "c", 2)
    (other / "results.json").write_text((other / "results.json").read_text().replace("rsr-1", "sft"))
    with pytest.raises(ValueError, match="seed 2 has stages base, sft"):
        report.aggregate([whole, half, other])
    with pytest.raises(ValueError, match="no run folder given"):
        report.aggregate([])
