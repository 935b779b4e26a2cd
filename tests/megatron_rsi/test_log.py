import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

from megatron_rsi.log import Log, Metrics, Timer, format_step, read_metrics


def captured(terminal: bool = False) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=200, highlight=False), out


def test_step_line_has_a_fixed_order() -> None:
    values = {"tok/s": 8123.4, "ev": -0.31, "clip": 0.08, "kl": 0.0123, "solved": 0.25, "reward": 0.41}
    values["mem_bytes"] = 2e9
    seconds = {"sync": 0.04, "train": 3.25, "generate": 4.0}
    assert format_step("c0.rpr", 3, 8, values, seconds) == (
        "c0.rpr 3/8  reward 0.410  solved 0.250  kl 0.0123  clip 0.08  ev -0.310  tok/s 8,123  mem 2.0G"
        "  | generate 4.0s train 3.2s sync 0.0s"
    )
    assert format_step("base", 1, 2, {}, {}) == "base 1/2"


def test_nested_parts_count_once() -> None:
    timer = Timer()
    start = time.perf_counter()
    with timer("train"):
        time.sleep(0.02)
        with timer("sync"):
            time.sleep(0.03)
        with timer("train"):
            time.sleep(0.01)
    wall = time.perf_counter() - start
    assert timer.seconds["sync"] >= 0.03 and timer.seconds["train"] >= 0.03
    assert sum(timer.seconds.values()) == pytest.approx(wall, abs=2e-3)


def test_time_is_kept_when_a_part_fails_and_can_be_moved() -> None:
    timer = Timer()
    with pytest.raises(KeyError), timer("generate"):
        time.sleep(0.01)
        raise KeyError
    assert timer.seconds["generate"] >= 0.01
    total = timer.seconds["generate"]
    timer.move("generate", "sandbox", 0.004)
    assert timer.seconds == pytest.approx({"generate": total - 0.004, "sandbox": 0.004})
    with pytest.raises(ValueError, match="unknown part 'trian'"):
        timer.add("trian", 1.0)


def test_metrics_hold_every_step_and_the_time_of_the_stage(tmp_path: Path) -> None:
    console, out = captured()
    log = Log(tmp_path, console=console)
    with log.stage("c0.rpr"):
        with log.timer("train"):
            time.sleep(0.01)
        log.step("c0.rpr", 1, 2, {"reward": torch.tensor(0.5), "nan": float("nan"), "extra": [1, 2]})
        with log.timer("generate"):
            time.sleep(0.01)
        log.step("c0.rpr", 2, 2, {"reward": 0.75})
    log.close()
    first, second, stage = read_metrics(tmp_path / "metrics.jsonl")
    assert (first["reward"], first["nan"], first["extra"], first["step"]) == (0.5, None, [1, 2], 1)
    assert set(first["seconds"]) == {"train"} and set(second["seconds"]) == {"generate"}  # type: ignore[call-overload]
    assert stage["kind"] == "time" and stage["stage"] == "c0.rpr"
    assert sum(stage["seconds"].values()) == pytest.approx(stage["wall_s"], abs=2e-3)  # type: ignore[attr-defined]
    assert "c0.rpr 2/2  reward 0.750" in out.getvalue() and "\x1b" not in out.getvalue()


def test_other_ranks_are_silent(tmp_path: Path) -> None:
    console, out = captured()
    log = Log(tmp_path, rank=1, console=console)
    with log.stage("base"), log.progress("tasks", 3) as bar:
        bar.advance(3)
        log.step("base", 1, 1, {"loss": 1.0})
        log.warning("x")
    assert out.getvalue() == "" and list(tmp_path.iterdir()) == []


def test_progress_prints_now_and_then_off_a_terminal_and_a_bar_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for every_s, num_lines in ((0.0, 100), (3600.0, 0)):
        monkeypatch.setattr("megatron_rsi.log.PRINT_EVERY_S", every_s)
        console, out = captured()
        with Log(console=console).progress("trials", 100) as bar:
            for _ in range(100):
                bar.advance()
        assert len(out.getvalue().splitlines()) == num_lines
    console, out = captured(terminal=True)
    with Log(console=console).progress("trials", 4) as bar:
        bar.advance(4, note="2 solved")
    assert "4/4" in out.getvalue() and "2 solved" in out.getvalue()


def test_text_of_the_model_is_not_markup() -> None:
    console, out = captured()
    Log(console=console).info("[/bold] [red]ls[/red]")
    assert out.getvalue() == "[/bold] [red]ls[/red]\n"


def test_a_torn_line_is_removed_and_never_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind":"step","stage":"a","step":1}\n{"kind":"st')
    assert [r["step"] for r in read_metrics(path)] == [1]
    metrics = Metrics(path)
    metrics.write({"kind": "step", "stage": "a", "step": 2})
    metrics.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_a_file_that_is_one_torn_line_becomes_empty(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind"')
    Metrics(path).close()
    assert path.read_bytes() == b""


def test_a_step_repeated_after_a_resume_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path)
    for step, reward in [(1, 0.1), (2, 0.2), (2, 0.3), (3, 0.4)]:
        metrics.write({"kind": "step", "stage": "a", "step": step, "reward": reward})
    metrics.close()
    assert [(r["step"], r["reward"]) for r in read_metrics(path)] == [(1, 0.1), (2, 0.3), (3, 0.4)]


def test_a_malformed_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind":"step"}\nnonsense\n{}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_metrics(path)


def test_kill_leaves_whole_lines_only(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from megatron_rsi.log import Metrics\n"
        "metrics = Metrics(Path(sys.argv[1]))\n"
        "print('ready', flush=True)\n"
        "n = 0\n"
        "while True:\n"
        "    n += 1\n"
        "    metrics.write({'kind': 'step', 'stage': 'a', 'step': n, 'text': 'x' * 3000})\n"
    )
    path = tmp_path / "metrics.jsonl"
    writer = subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE)
    assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
    while path.stat().st_size < 100_000:
        time.sleep(0.005)
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    Metrics(path).close()
    steps = [json.loads(line)["step"] for line in path.read_bytes().split(b"\n")[:-1]]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) > 10


def test_a_full_disk_is_an_error_and_leaves_whole_lines(tmp_path: Path) -> None:
    script = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "from megatron_rsi.log import Metrics\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "metrics = Metrics(Path(sys.argv[1]))\n"
        "try:\n"
        "    for n in range(100): metrics.write({'step': n, 'text': 'x' * 90})\n"
        "except OSError as error: print('refused', n)\n"
    )
    path = tmp_path / "metrics.jsonl"
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    word, count = done.stdout.split()
    assert word == "refused" and int(count) >= 5
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == list(range(int(count)))
