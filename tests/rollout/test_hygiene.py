"""Task sets apart and known: overlap, splitting, canaries, admission."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from pathlib import Path

import pytest
from rollout_helpers import sizes, write_task

from megatron_rsi.rollout.hygiene import (
    MAX_CONTAINMENT,
    overlaps,
    require_checked,
    require_disjoint,
    split,
    strip_canaries,
    write_checked,
)
from megatron_rsi.rollout.records import Task
from megatron_rsi.rollout.taskcheck import check
from megatron_rsi.rollout.taskgen import compose, generate_suites
from megatron_rsi.rollout.tasks import content_hash, folder_hash, load_suite, load_task


def task(name: str, text: str, folder: Path) -> Task:
    return Task(task_id=name, path=str(folder / name), instruction=text)


def test_containment_by_hand(tmp_path: Path) -> None:
    """24 words hold 12 runs of 13; the first 18 words hold 6 of them."""
    text = " ".join(f"w{n}" for n in range(24))
    known = [task("all", text.upper() + "!", tmp_path), task("none", "other words", tmp_path)]
    known += [task("half", " ".join(text.split()[:18]) + " and so on", tmp_path)]
    found = overlaps([task("new", text, tmp_path)], known)
    assert found == [("new", "all", 1.0), ("new", "half", 0.5)]
    assert overlaps([task("short", " ".join(text.split()[:19]), tmp_path)], known) == []
    with pytest.raises(ValueError, match="task new of suite core repeats 100 % of training task all"):
        require_disjoint([task("all", text + " extra", tmp_path)], [task("new", text, tmp_path)], "core")
    require_disjoint(known[1:], [task("new", text, tmp_path)], "core")


def test_nothing_of_the_generated_suites_is_refused(tmp_path: Path) -> None:
    paths = generate_suites(tmp_path, 0, sizes(num_train=200, num_validation=40, num_core=60, num_ladder=20, num_long=20))
    suites = {name: load_suite(path) for name, path in paths.items()}
    for known, name in itertools.product(("train", "validation"), suites):
        if name != known and name != "train":
            require_disjoint(suites[known], suites[name], name)
            worst = max((pair.containment for pair in overlaps(suites[name], suites[known])), default=0.0)
            assert worst < MAX_CONTAINMENT / 2, (known, name)


def test_a_split_depends_on_the_content_alone(tmp_path: Path) -> None:
    for number in range(60):
        write_task(tmp_path / "a" / f"t{number}", compose(random.Random(number), 1, "train"))
    shutil.copytree(tmp_path / "a" / "t0", tmp_path / "a" / "twin")
    tasks, shares = load_suite(tmp_path / "a"), {"train": 8.0, "validation": 1.0, "heldout": 1.0}
    parts = split(tasks, shares)
    assert sum(map(len, parts.values())) == 61 and len(parts["train"]) > 36
    assert all(len({t.task_id for t in part} & {"t0", "twin"}) in (0, 2) for part in parts.values())
    again = split(reversed(tasks[:30]), shares)
    assert all({t.task_id for t in again[n]} <= {t.task_id for t in parts[n]} for n in shares)
    with pytest.raises(ValueError, match="shares must be positive"):
        split(tasks, {"train": 1.0, "validation": 0.0})


def test_canaries_are_stripped() -> None:
    text = "#!/bin/bash\n# canary 0123456789abcdef0123456789abcdef\necho canary\n"
    assert strip_canaries(text) == "#!/bin/bash\necho canary\n"


def test_only_checked_tasks_are_admitted(tmp_path: Path) -> None:
    suite = tmp_path / "suites" / "core"
    composite = compose(random.Random(0), 1, "train")
    good, bad = write_task(suite / "good", composite), write_task(suite / "bad", composite, solution="#!/bin/bash\ntrue\n")
    with pytest.raises(ValueError, match=f"is not checked, or was changed since; run: .* tasks check {suite}"):
        require_checked(load_suite(suite), suite)
    rows = {row.task_id: row for row in check(tmp_path / "suites", jobs=2)}
    assert (rows["good"].ok, rows["good"].tamper, rows["bad"].ok, rows["bad"].tamper) == (True, True, False, True)
    assert rows["good"].hash == folder_hash(load_task(good))
    recorded = json.loads((tmp_path / "suites" / "checked.json").read_text())
    assert recorded == {row.hash: row.message for row in rows.values()}
    require_checked([load_task(good)], suite)
    with pytest.raises(ValueError, match="task bad of .* is bad: the reference solution fails"):
        require_checked(load_suite(suite), suite)
    shutil.rmtree(bad)
    (good / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    with pytest.raises(ValueError, match="changed since"):
        require_checked(load_suite(suite), suite)
    (tmp_path / "suites" / "checked.json").write_text("{")
    with pytest.raises(ValueError, match="checked.json is damaged"):
        require_checked(load_suite(suite), suite)


def test_one_task_alone_is_admitted_after_its_check(tmp_path: Path) -> None:
    loaded = load_task(write_task(tmp_path / "t", compose(random.Random(0), 1, "train")))
    write_checked(tmp_path / "t", {folder_hash(loaded): ""})
    require_checked([loaded], tmp_path)


def test_generated_suites_are_admitted_and_another_size_is_told(tmp_path: Path) -> None:
    paths = generate_suites(tmp_path, 0, sizes())
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    assert generate_suites(tmp_path, 0, sizes()) == paths
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before
    for path in paths.values():
        require_checked(load_suite(path), path)
    with pytest.raises(ValueError, match=f"{paths['core']} exists with 6 tasks, but the configuration says 7"):
        generate_suites(tmp_path, 0, sizes(num_core=7))


def test_the_hash_of_a_folder_sees_every_file(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "t", compose(random.Random(0), 1, "train"))
    seen = {folder_hash(load_task(folder))}
    for name in ("instruction.md", "task.toml", "tests/test.sh", "solution/solve.sh", "environment/Dockerfile", "new"):
        with (folder / name).open("a") as file:
            file.write("\n# more\n")
        seen.add(folder_hash(load_task(folder)))
    assert len(seen) == 7
    assert len(content_hash(load_task(folder))) == 64
