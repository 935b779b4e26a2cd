"""Generated suites: families, groups, sizes, and in real boxes that every task can be solved and is not solved by nothing."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from rollout_helpers import sizes, write_task

from megatron_rsi.rollout.families import FAMILIES, SubTask
from megatron_rsi.rollout.taskcheck import check
from megatron_rsi.rollout.taskgen import (
    GROUPS,
    Composite,
    compose,
    compose_long,
    draw_subtask,
    generate_suites,
    group_of,
    task_files,
)
from megatron_rsi.rollout.tasks import load_suite, load_task


def instances(group: str, number: int, seed: int = 0) -> list[SubTask]:
    rng = random.Random(seed)
    return [s for _ in range(number) for s in compose(rng, 3, group).subtasks]


def texts(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()}


def one_of_each(seed: int) -> list[Composite]:
    """Every family once, three to a task."""
    rng, names = random.Random(seed), list(FAMILIES)
    made = []
    for start in range(0, len(names), 3):
        queue = names[start : start + 3]
        words = [f"w{chr(97 + n % 26)}{chr(97 + n // 26)}x" for n in range(300)]
        rng.shuffle(words)
        draw = iter(words)
        subtasks = tuple(draw_subtask(rng, draw, "train", name) for name in queue)
        made.append(Composite(subtasks, tuple(rng.choice(s.wordings) for s in subtasks)))
    return made


def test_families_and_checks() -> None:
    assert len(FAMILIES) >= 8
    found = instances("train", 400)
    assert {s.family for s in found} == set(FAMILIES)
    counts = Counter(len(s.checks) for s in found)
    assert min(counts) == 1 and max(counts) >= 10 and max(counts) <= 11
    for s in found:
        assert len(set(s.wordings)) >= 3 and s.commands and s.hint
        assert not all(c.initially for c in s.checks), "nothing to do"
        index, wrong = s.habit
        assert s.commands[index] != wrong, "the habit is the right command"


def test_every_instance_belongs_to_exactly_one_group() -> None:
    slots = [slot for group in GROUPS.values() for slot in group]
    assert sorted(slots) == list(range(16))
    seen = {group: {(s.family, s.words) for s in instances(group, 400)} for group in GROUPS}
    for group, found in seen.items():
        assert len(found) > 500
        for other in set(GROUPS) - {group}:
            assert not found & seen[other]
    for group in GROUPS:
        assert all(group_of(s) == group for s in instances(group, 50, seed=1))


def test_held_out_wording_is_never_used_in_training_or_validation() -> None:
    for group in GROUPS:
        rng, num_kept_back, num_clauses = random.Random(0), 0, 0
        for _ in range(300):
            task = compose(rng, 2, group)
            num_clauses += 2
            num_kept_back += sum(c == s.wordings[-1] for c, s in zip(task.clauses, task.subtasks, strict=True))
        assert num_kept_back == 0 if group != "heldout" else 0.15 < num_kept_back / num_clauses < 0.35


def test_names_of_a_task_never_clash() -> None:
    rng = random.Random(0)
    for _ in range(200):
        task = compose(rng, 9, "train")
        assert len(task.files) == sum(len(s.files) for s in task.subtasks)
        assert len(set(task.folders)) == len(task.folders)


def test_a_runbook_hint_holds_no_deliverable() -> None:
    for s in instances("train", 300):
        assert not set(s.words) & set(s.hint.split()) and (not s.secret or s.secret not in s.hint)


@pytest.mark.parametrize(("low", "high"), [(12, 19), (20, 26)])
def test_long_tasks_need_as_many_commands_as_they_say(low: int, high: int) -> None:
    rng = random.Random(0)
    for _ in range(20):
        task = compose_long(rng, "heldout", low, high)
        assert low <= task.num_commands <= high and len(task.subtasks) <= 9
        assert all(group_of(s) == "heldout" for s in task.subtasks)


def test_suites(tmp_path: Path) -> None:
    """Held-out suites are the same for every seed, the others are not; a suite that is there is kept."""
    first, second = (generate_suites(tmp_path / str(seed), seed, sizes()) for seed in (0, 1))
    for name in first:
        same = texts(first[name]) == texts(second[name])
        assert same == (name not in ("train", "validation")), name
    again = generate_suites(tmp_path / "again", 0, sizes())
    assert {n: texts(p) for n, p in again.items()} == {n: texts(p) for n, p in first.items()}
    marker = first["core"] / "marker"
    marker.mkdir()
    generate_suites(tmp_path / "0", 3, sizes())
    assert marker.exists()
    commands = [
        len((Path(t.path) / "solution/solve.sh").read_text().splitlines()) - 3 for t in load_suite(second["long"])
    ]
    assert len(commands) == 4 and min(commands[:2]) >= 12 and min(commands[2:]) >= 20
    for rung in (4, 5):
        assert all(t.instruction.count("\n") == rung - 1 for t in load_suite(first[f"ladder_{rung}"]))


def test_a_half_written_suite_is_written_anew(tmp_path: Path) -> None:
    partial = tmp_path / "core.partial" / "core-0000"
    partial.mkdir(parents=True)
    (partial / "instruction.md").write_text("torn")
    paths = generate_suites(tmp_path, 0, sizes())
    assert len(load_suite(paths["core"])) == 6 and not partial.exists()


def test_secret_values_stay_out_of_the_instruction() -> None:
    for s in instances("heldout", 300):
        if s.secret:
            assert all(s.secret not in wording.split() for wording in s.wordings)
            assert any(s.secret in text for text in s.files.values())


# ---- in real boxes


def test_every_family_is_solved_by_its_reference_and_not_by_nothing(tmp_path: Path) -> None:
    """Also checks f0 to 1e-5: the share of checks that hold before anything is done."""
    for seed in range(3):
        for n, composite in enumerate(one_of_each(seed)):
            write_task(tmp_path / "suite" / f"s{seed}-{n}", composite)
    generate_suites(tmp_path / "suite" / "made", 7, sizes(num_core=4, num_train=4))
    rows = check(tmp_path / "suite", jobs=4)
    assert len(rows) >= 33
    assert [(r.task_id, r.message) for r in rows if not r.ok] == []
    assert all(r.reference for r in rows) and any(r.nothing > 0 for r in rows)


def test_the_habit_of_every_family_fails(tmp_path: Path) -> None:
    """The mistake that the base is taught is a mistake: with it the verifier says no."""
    for n, composite in enumerate(one_of_each(5)):
        for s in composite.subtasks:
            index, wrong = s.habit
            commands = [*s.commands[:index], wrong, *s.commands[index + 1 :]]
            single = Composite((s,), (s.wordings[0],))
            solution = "cd /app\n" + "\n".join(commands) + "\ntrue\n"
            write_task(tmp_path / f"{s.family}-{n}", single, solution=solution)
    rows = check(tmp_path, jobs=4)
    assert len(rows) == len(FAMILIES)
    assert [r.task_id for r in rows if r.reference] == []
    assert all("the reference solution fails" in r.message for r in rows)


def test_broken_tasks_are_reported_by_name(tmp_path: Path) -> None:
    composite = Composite((s := instances("train", 1)[0],), (s.wordings[0],))
    good = task_files(composite, "x", random.Random(0))["task.toml"]
    passing = "echo 1 > /logs/verifier/reward.txt\n"
    write_task(tmp_path / "broken-reference", composite, solution="#!/bin/bash\ntrue\n")
    write_task(tmp_path / "passes-by-itself", composite, tests=passing)
    write_task(tmp_path / "no-solution", composite, solution=None)
    write_task(tmp_path / "no-verdict", composite, tests="true\n")
    write_task(tmp_path / "no-tests", composite, tests=None)
    wrong = composite.baseline + 0.1
    lines = [f"baseline_fraction = {wrong}" if line.startswith("baseline") else line for line in good.splitlines()]
    write_task(tmp_path / "wrong-baseline", composite, toml="\n".join(lines))
    messages = {r.task_id: r.message for r in check(tmp_path, jobs=3)}
    expected = {
        "broken-reference": "the reference solution fails", "passes-by-itself": "an agent that does nothing passes",
        "no-solution": "solution/solve.sh is missing", "no-verdict": "the verifier failed after doing nothing",
        "no-tests": "tests/test.sh is missing", "wrong-baseline": "metadata.baseline_fraction says",
    }  # fmt: skip
    assert messages.keys() == expected.keys()
    for name, text in expected.items():
        assert text in messages[name]


def test_metadata_matches_the_folder(tmp_path: Path) -> None:
    composite = compose(random.Random(0), 3, "train")
    task = load_task(write_task(tmp_path / "t", composite))
    assert task.baseline_fraction == pytest.approx(composite.baseline, abs=1e-6)
    assert task.max_turns == 4 + 2 * composite.num_commands
    assert task.instruction == composite.instruction
