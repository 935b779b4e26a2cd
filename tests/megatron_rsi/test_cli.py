import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from test_report import make_run

from megatron_rsi.cli import arrange
from megatron_rsi.rollout.records import Check, Completion, Review, Runbook, Trajectory, Turn, Verdict
from megatron_rsi.rollout.taskgen import compose, write_suite


def command(*arguments: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "megatron_rsi", *arguments],
        capture_output=True, text=True, timeout=120, cwd=cwd, env={**os.environ, "COLUMNS": "200", **env},
    )  # fmt: skip


def test_overrides_may_stand_anywhere() -> None:
    assert arrange(["train", "a.b=1", "--seed", "3", "c=2", "--dir", "x=y"]) == [
        "train", "--seed", "3", "--dir", "x=y", "a.b=1", "c=2",
    ]  # fmt: skip
    assert arrange(["tasks", "check", "dir"]) == ["tasks-check", "dir"]
    assert arrange(["--preset=a=b"]) == ["--preset=a=b"]


def test_the_documented_commands_exist() -> None:
    done = command("--help")
    assert done.returncode == 0
    names = ("train", "collect", "eval", "tasks-generate", "tasks-check", "tasks-overlap", "tasks-split", "view")
    for name in (*names, "report", "plan", "doctor"):
        assert name in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--preset", "tiny", "rpr.updats=3"], "error: unknown configuration key 'rpr.updats': did you mean"),
        (["train", "--preset", "missing.toml"], "error: no preset 'missing.toml'"),
        (["report", "nowhere"], "error: no run folder nowhere"),
        (["report"], "error: no run folder given"),
        (["view", "nowhere.jsonl"], "error: no file nowhere.jsonl"),
        (["view", "x", "--only", "good"], "error: --only is 'good', expected all, solved or failed"),
        (["tasks", "check", "nowhere"], "error: no folder nowhere"),
        (["tasks", "check", ".", "--jobs", "0"], "error: jobs=0 must lie in [1, 1024]"),
        (["tasks", "check", ".", "--sandbox", "podman"], "error: unknown sandbox kind 'podman'"),
        (["tasks", "overlap", "a", "b"], "error: task suite a does not exist"),
        (["tasks", "split", "a", "b"], "error: task suite a does not exist"),
        (["eval", "--checkpoint", "nowhere", "--suites", "s"], "error: no checkpoint in nowhere"),
        (["collect", "--checkpoint", "x", "--tasks", "t", "--out", "o"], "error: no checkpoint in x"),
        (["plan", "--base", "nowhere"], "error: base checkpoint nowhere has no config.json"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = command(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(message) and len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_where_an_error_comes_from_can_be_seen() -> None:
    done = command("report", "nowhere", MEGATRON_RSI_TRACEBACK="1")
    assert done.returncode == 1 and "Traceback" in done.stderr


def test_other_ranks_say_which_they_are() -> None:
    assert command("report", "nowhere", RANK="1").stderr.startswith("error on rank 1: ")


def test_a_mistake_found_by_two_processes_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a run folder")
    done = command("train", "--nproc", "2", "--dir", str(tmp_path / "file"), "world.device=cpu")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert [line[:7] for line in done.stderr.splitlines()] == ["error: "], done.stderr


def test_an_unknown_option_has_exit_code_2() -> None:
    assert command("train", "--prest", "tiny").returncode == 2


def test_plan_counts_the_tiny_model_by_hand() -> None:
    done = command("plan", "world.pp=2", "--seed", "1", "engine.max_batch=10", "--dir", "somewhere")
    lines = {line[:16].strip(): line[16:].split() for line in done.stdout.splitlines()}
    assert lines["run folder"] == ["somewhere"]
    layer = 128 * (128 + 64 + 64) + 128 * 128 + 3 * 128 * 256 + 2 * 128 + 2 * 32
    assert lines["actor"][2] == f"{1024 * 128 + 4 * layer + 128:,}"
    assert lines["engine KV cache"][:2] == ["20.0", "MiB"]  # 10 x 1024 tokens x 2 x 4 layers x 2 heads x 32 x 4 bytes


def test_plan_of_a_checkpoint_counts_what_transformers_counts(tmp_path: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=24,
        intermediate_size=96, vocab_size=100, tie_word_embeddings=False,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    done = command("plan", "--base", str(tmp_path))
    expected = sum(p.numel() for p in Qwen3ForCausalLM(config).parameters())
    assert f"{expected:,} parameters" in done.stdout


def trial(task: str, passed: bool) -> Trajectory:
    completion = Completion(ids=[5, 6], logprobs=[-0.1, -0.2], finish="stop", weight_version=3)
    turns = [
        Turn(context_ids=[1], completion=completion, command="ls [/red]", observation="a\nb\n", exit_code=0),
        Turn(context_ids=[1], completion=completion, command="mv a b", observation="", exit_code=1),
    ]
    verdict = Verdict(passed=passed, fraction=float(passed), checks=[Check(name="b exists", passed=passed)])
    return Trajectory(attempt_id=f"c0/{task}/retry/0", task_id=task, harness="retry", turns=turns, verdict=verdict)


def test_view_shows_trials_runbooks_and_reviews(tmp_path: Path) -> None:
    records = [
        trial("t1", True),
        trial("t2", False),
        Runbook(runbook_id="t1#0", task_id="t1", text="Goal: [b] exists"),
        Review(runbook_id="t1#0", accepted=False, source="screen", reasons=["leak"]),
    ]
    path = tmp_path / "records.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(r) + b"\n" for r in records) + b'{"attempt_id": "torn')
    shown = command("view", str(path)).stdout
    assert "c0/t1/retry/0  task t1  retry" in shown and "0 $ ls [/red]  (2 tokens, weights 3)" in shown
    assert "1 $ mv a b  exit 1" in shown and "not solved  checks 0/1 (0.00)  failed: b exists" in shown
    assert "Goal: [b] exists" in shown and "rejected by screen: leak" in shown and "4 of 4 records" in shown
    failed = command("view", str(path), "--only", "failed", "--task", "t2").stdout
    assert "t2" in failed and "task t1" not in failed and "1 of 1 records" in failed
    assert "1 of 4 records shown" in command("view", str(path), "--limit", "1", "--skip", "3").stdout


def test_view_names_a_malformed_line(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"attempt_id": "a"}\n')
    done = command("view", str(tmp_path / "x.jsonl"))
    assert done.returncode == 2 and "line 1: neither a trajectory, a runbook nor a review" in done.stderr


def test_report_of_several_runs(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"s{seed}", seed) for seed in (0, 1)]
    done = command("report", *map(str, runs))
    assert done.returncode == 0 and "mean ± sd" in done.stdout
    assert (tmp_path / "seeds.png").is_file() and all((run / "report.html").is_file() for run in runs)


def test_tasks_generate_writes_every_suite(tmp_path: Path) -> None:
    sizes = ["num_train=3", "num_validation=2", "num_core=2", "num_ladder=1", "num_long=1", "ladder_rungs=[4]"]
    overrides = ["gate.min_tasks=1", *(f"tasks.{size}" for size in sizes)]
    done = command("tasks", "generate", str(tmp_path / "t"), *overrides)
    assert done.returncode == 0, done.stderr
    counts = {line.split()[0]: int(line.split()[1]) for line in done.stdout.splitlines()}
    assert counts == {"train": 3, "validation": 2, "core": 2, "ladder_4": 1, "long": 1}
    assert all((folder / "task.toml").is_file() for folder in (tmp_path / "t" / "train").iterdir() if folder.is_dir())


def test_tasks_are_checked_compared_and_split(tmp_path: Path) -> None:
    write_suite(tmp_path / "a", [compose(random.Random(n), 1, "train") for n in range(4)], "t", random.Random(0))
    done = command("tasks", "check", str(tmp_path / "a"), "--json", str(tmp_path / "rows.json"))
    assert (done.returncode, done.stdout) == (0, "4 of 4 tasks are good\n"), done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["task_id"], row["ok"], row["tamper"]) for row in rows] == [(f"t-000{n}", True, True) for n in range(4)]
    assert set(json.loads((tmp_path / "a" / "checked.json").read_text())) == {row["hash"] for row in rows}
    done = command("tasks", "split", str(tmp_path / "a"), str(tmp_path / "b"), "--train", "1")
    assert done.returncode == 0 and sum(int(line.split()[1]) for line in done.stdout.splitlines()) == 4
    done = command("tasks", "overlap", str(tmp_path / "a"), str(tmp_path / "a"))
    assert done.returncode == 1 and "equal t-0003 t-0003" in done.stdout and "4 equal" in done.stdout


def test_a_sandbox_that_does_not_start_is_one_line(tmp_path: Path) -> None:
    write_suite(tmp_path / "a", [compose(random.Random(0), 1, "train")], "t", random.Random(0))
    no_daemon = {"DOCKER_HOST": f"unix://{tmp_path}/none.sock"}
    done = command("tasks", "check", str(tmp_path / "a"), "--sandbox", "docker", **no_daemon)
    assert done.returncode == 2 and done.stderr.startswith("error: sandbox: no Docker daemon at"), done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_doctor_says_what_is_there() -> None:
    done = command("doctor")
    states = {line[9:28].strip(): line.split()[0] for line in done.stdout.splitlines()}
    assert states["python"] == states["torch"] == states["packages"] == "ok"
    assert done.returncode == (1 if "problem" in states.values() else 0)


def test_an_interrupt_is_no_stack_trace(tmp_path: Path) -> None:
    endless = ["tasks", "generate", str(tmp_path / "tasks"), "tasks.num_train=20000"]
    process = subprocess.Popen([sys.executable, "-m", "megatron_rsi", *endless], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list(tmp_path.rglob("task.toml")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.strip() == "interrupted; the same command goes on where this one stopped"


def test_a_closed_pipe_is_no_stack_trace(tmp_path: Path) -> None:
    path = tmp_path / "many.jsonl"
    path.write_bytes((msgspec.json.encode(trial("t1", True)) + b"\n") * 2000)
    script = f"{sys.executable} -m megatron_rsi view {path} --limit 0 | head -n 2"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120)
    assert len(done.stdout.splitlines()) == 2 and done.stderr == ""
