"""How a run ends: normally, by Ctrl-C, by kill -9. Nothing is left behind, and a mistake is one clear line."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from e2e_helpers import attempt_ids, command, finish, kill_group, leftovers, signal_run, start


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

    broken = tmp_path / "broken"
    shutil.copytree(suites, broken)
    (broken / "core" / "core-0000" / "task.toml").write_text("not toml")
    own = ("train", "--preset", "smoke", "--base", base, "--dir", tmp_path / "own", f"tasks.suites_dir={broken}")
    assert "core-0000" in mistake(*own)
    shutil.rmtree(broken / "core" / "core-0000")
    shutil.copytree(broken / "train" / "train-0000", broken / "core" / "core-0000")
    assert "equals training task" in mistake(*own)


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
        for path in (tmp_path / "out").rglob("attempts.*.jsonl")
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
