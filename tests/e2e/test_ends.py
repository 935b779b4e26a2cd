"""How a run ends: normally, by Ctrl-C, by kill -9. Nothing is left behind, and a mistake is one clear line."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from e2e_helpers import attempt_ids, command, finish, kill_group, leftovers, signal_run, start
from safetensors.torch import load_file, save_file


def wait_for_attempts(process: subprocess.Popen[str], folder: Path, number: int) -> None:
    while process.poll() is None and sum(attempt_ids(folder).values()) < number:
        time.sleep(0.05)
    assert process.poll() is None, process.communicate()[0][-3000:]


def test_interrupt_kill_and_normal_end_leave_nothing(base: Path, tmp_path: Path) -> None:
    scratch, folder = tmp_path / "scratch", tmp_path / "run"
    arguments = ("train", "--nproc", 2, "--preset", "smoke", "--base", base, "--dir", folder, "rpr.updates=6")
    process = start(scratch, *arguments)
    wait_for_attempts(process, folder, 4)
    assert signal_run(folder, signal.SIGSTOP) == 3  # a launcher and two workers; it must not end before the second starts
    second = subprocess.run(command(*arguments), capture_output=True, text=True, env=os.environ | {"TMPDIR": str(scratch)})
    signal_run(folder, signal.SIGCONT)
    assert second.returncode == 2 and "another process is training" in second.stderr, second.stderr
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130 and "Traceback" not in output, output[-3000:]
    assert leftovers(scratch) == []

    process = start(scratch, *arguments)
    wait_for_attempts(process, folder, 30)
    kill_group(process)
    output = finish(start(scratch, *arguments))
    assert "core" in output and (folder / "report.html").stat().st_size > 10_000
    assert max(attempt_ids(folder).values()) == 1
    assert leftovers(scratch) == []


def test_a_scheduler_that_ends_the_run_leaves_nothing(base: Path, tmp_path: Path) -> None:
    """SIGTERM in the middle of rollouts: one line, no lost task of the event loop, and the run goes on later."""
    scratch, folder = tmp_path / "scratch", tmp_path / "run"
    process = start(scratch, "train", "--preset", "smoke", "--base", base, "--dir", folder)
    wait_for_attempts(process, folder, 4)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130 and "the same command goes on" in output, output[-3000:]
    assert "Traceback" not in output and "never retrieved" not in output, output[-3000:]
    assert leftovers(scratch) == []


def mistake(*arguments: object) -> str:
    done = subprocess.run(command(*arguments), capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.strip().splitlines()) <= 3, done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def suites(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("suites")
    subprocess.run(command("tasks", "generate", folder / "all", "--preset", "smoke"), check=True, capture_output=True)
    return folder / "all"


def test_bad_input_is_one_clear_line(base: Path, suites: Path, tmp_path: Path) -> None:
    train = ("train", "--preset", "smoke", "--base", base, "--dir", tmp_path / "run")
    assert "did you mean" in mistake(*train, "rpr.update=3")
    assert "does not exist" in mistake(*train, f"tasks.train_dir={tmp_path / 'nowhere'}", f"tasks.suites_dir={suites}")
    nowhere = ("train", "--preset", "smoke", "--base", base, "--dir", tmp_path / "suites")
    assert "does not exist" in mistake(*nowhere, f"tasks.suites_dir={tmp_path / 'nowhere'}")
    assert "cannot be split" in mistake("train", "--preset", "smoke", "--base", base, "--dir", tmp_path / "tp", "world.tp=3")
    other = tmp_path / "other"
    shutil.copytree(base, other)
    (other / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    assert "mamba" in mistake("train", "--preset", "smoke", "--base", other, "--dir", tmp_path / "mamba")

    assert "harnesses names ['shy']" in mistake(*train, 'rollout.harnesses=["shy"]')
    long = ("train", "--preset", "smoke", "--base", base, "--dir", tmp_path / "long", "engine.context=4096")
    assert "max_position_embeddings" in mistake(*long, "model.context=4096")
    box = ("train", "--preset", "smoke", "--base", base, "--dir", tmp_path / "box", "sandbox.scratch=/dev/null/x")
    assert "/dev/null/x" in mistake(*box)
    assert attempt_ids(tmp_path / "box") == {}

    broken = tmp_path / "broken"
    shutil.copytree(suites, broken)
    (broken / "core" / "core-0000" / "task.toml").write_text("not toml")
    own = ("train", "--preset", "smoke", "--base", base, "--dir", tmp_path / "own", f"tasks.suites_dir={broken}")
    assert "core-0000" in mistake(*own)
    shutil.rmtree(broken / "core" / "core-0000")
    shutil.copytree(broken / "train" / "train-0000", broken / "core" / "core-0000")
    assert "equals training task" in mistake(*own)


def shrink(config: dict[str, object]) -> None:
    config["vocab_size"] = 300


def widen(config: dict[str, object]) -> None:
    config["hidden_size"] = 256


@pytest.mark.parametrize(
    ("change", "message"), [(shrink, "its tokenizer has"), (widen, "the model needs"), (None, "tokenizer.json is damaged")]
)
def test_a_checkpoint_that_does_not_fit_is_told_before_anything_runs(
    base: Path, suites: Path, tmp_path: Path, change: Callable[[dict[str, object]], None] | None, message: str
) -> None:
    odd = tmp_path / "odd"
    shutil.copytree(base, odd)
    if change is None:
        (odd / "tokenizer.json").write_text("{}")
    else:
        config = json.loads((odd / "config.json").read_text())
        change(config)
        (odd / "config.json").write_text(json.dumps(config))
    out = tmp_path / "out"
    arguments = ("--checkpoint", odd, "--suites", suites / "core", "--out", out, "--preset", "smoke")
    assert message in mistake("eval", *arguments)
    assert not list(tmp_path.rglob("*.jsonl"))


def run_eval(*arguments: object) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command("eval", "--preset", "smoke", *arguments), capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_evaluation_goes_on_but_never_with_another_models_attempts(base: Path, suites: Path, tmp_path: Path) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    first = run_eval("--checkpoint", base, "--suites", suites / "core", "--out", out)
    assert "core" in first and max(map(len, first.splitlines())) <= 80
    stored = json.loads((out / "results.json").read_text())
    assert stored["stages"][0]["suites"]["core"]["n"] == 8
    assert first.endswith(run_eval("--checkpoint", base, "--suites", suites / "core", "--out", out)), "the same table"
    before = attempt_ids(out)
    assert len(before) == 8 and set(before.values()) == {1}, "the second time nothing was left to do"

    shutil.copytree(base, other)
    tensors = load_file(other / "model.safetensors")
    save_file({name: torch.zeros_like(t) for name, t in tensors.items()}, other / "model.safetensors")
    assert " 0.0 [" in run_eval("--checkpoint", other, "--suites", suites / "core", "--out", out)
    assert len(attempt_ids(out)) == 16, "both models' attempts stand in one file"
    run_eval("--checkpoint", base, "--suites", suites / "core", "--out", out, "--seed", "7")
    assert len(attempt_ids(out)) == 24, "another seed is another measurement"


def test_no_verdict_at_all_is_an_error_and_not_a_result(base: Path, suites: Path, tmp_path: Path) -> None:
    suite = tmp_path / "suite"
    shutil.copytree(suites / "core" / "core-0000", suite / "core-0000")
    (suite / "core-0000" / "tests" / "test.sh").write_text("#!/bin/bash\nexit 1\n")
    arguments = ("eval", "--checkpoint", base, "--suites", suite, "--out", tmp_path / "out", "--preset", "smoke")
    assert "not one of 1 attempts got a verdict (verifier_failed 1)" in mistake(*arguments)
    assert not (tmp_path / "out" / "results.json").exists()


def test_collect_writes_the_file_that_was_named(base: Path, suites: Path, tmp_path: Path) -> None:
    out = tmp_path / "[a]b.jsonl"
    arguments = ("--checkpoint", base, "--tasks", suites / "long", "--preset", "smoke")
    subprocess.run(command("collect", *arguments, "--out", out), check=True, capture_output=True)
    assert len(out.read_text().splitlines()) == 4 and list(tmp_path.glob("*.jsonl")) == [out]
    assert "4 of 4 records" in subprocess.run(command("view", out), capture_output=True, text=True, check=True).stdout
    assert "must be a .jsonl file" in mistake("collect", *arguments, "--out", tmp_path / "x.json")
    assert "unknown harness 'shy'" in mistake("collect", *arguments, "--out", out, "--harness", "shy")


def test_a_stage_done_again_is_set_aside_once_and_can_be_interrupted(base: Path, tmp_path: Path) -> None:
    scratch, folder = tmp_path / "scratch", tmp_path / "run"
    arguments = ("train", "--preset", "smoke", "--base", base, "--dir", folder)
    finish(start(scratch, *arguments))
    first = json.loads((folder / "results.json").read_text())
    again = (*arguments, "--again-from", "rpr-1")
    process = start(scratch, *again)
    done_again = folder / "cycle_00" / "rpr"
    while process.poll() is None and not ((folder / "again_from").exists() and list(done_again.glob("rollouts.update0.*"))):
        time.sleep(0.02)
    kill_group(process)
    assert (folder / "again_from").read_text() == "rpr-1\n"
    assert "repeat that option" in mistake(*arguments)
    assert "finish that first" in mistake(*arguments, "--again-from", "rsr-1")
    finish(start(scratch, *again))
    (superseded,) = (folder / "superseded").iterdir()
    assert (superseded / "cycle_00" / "rpr" / "actor").is_dir() and not (superseded / "cycle_00" / "rsr").exists()
    second = json.loads((folder / "results.json").read_text())
    assert first["stages"][:2] == second["stages"][:2], "what stands before it is untouched"
    assert [s["name"] for s in second["stages"]] == ["base", "rsr-1", "rpr-1"]
    stages = [json.loads(line)["stage"] for line in (superseded / "metrics.jsonl").read_text().splitlines()]
    assert {"rpr-1", "eval.rpr-1", "rpr-1.critic"} == set(stages)
    assert not (folder / "again_from").exists() and max(attempt_ids(folder / "cycle_00").values()) == 1


def test_a_crashing_verifier_is_counted_and_never_a_zero(base: Path, suites: Path, tmp_path: Path) -> None:
    suite = tmp_path / "suite"
    for number in range(3):
        shutil.copytree(suites / "core" / f"core-000{number}", suite / f"core-000{number}")
    (suite / "core-0001" / "tests" / "test.sh").write_text("#!/bin/bash\nexit 1\n")
    arguments = ("eval", "--checkpoint", base, "--suites", suite, "--out", tmp_path / "out", "--preset", "smoke")
    done = subprocess.run(command(*arguments), capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verifier_failed 1" in done.stdout
    verdicts = {
        r["task_id"]: r["verdict"].get("error")
        for path in (tmp_path / "out").rglob("attempts.jsonl")
        for r in map(json.loads, path.read_text().splitlines())
    }
    assert verdicts == {"core-0000": None, "core-0001": "verifier_failed", "core-0002": None}


def test_full_disk_keeps_what_was_paid_for(base: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("no right to mount a small tmpfs")
    try:
        arguments = ("train", "--preset", "smoke", "--base", base, "--dir", disk / "run")
        message = mistake(*arguments)
        assert "No space left" in message or "not written" in message
        before = attempt_ids(disk / "run")
        assert before
        subprocess.run(["mount", "-o", "remount,size=200m", str(disk)], check=True)
        finish(start(tmp_path / "scratch", *arguments))
        after = attempt_ids(disk / "run")
        assert before.keys() <= after.keys() and max(after.values()) == 1
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)
