"""Kill -9 at ten moments, then the same command: nothing finished is lost, nothing runs twice, the same attempts train."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

from e2e_helpers import attempt_ids, consumed, finish, kill_group, leftovers, record_files, start

NUM_KILLS = 10


def num_lines(folder: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in record_files(folder))


def test_ten_kills_change_nothing(base: Path, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    arguments = ("train", "--preset", "smoke", "--base", base)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    finish(start(scratch, *arguments, "--dir", whole))
    total = num_lines(whole)
    rng = random.Random(0)
    kills = sorted(rng.sample(range(2, total), NUM_KILLS))  # at this many lines on disk, so all stages are hit
    for lines in kills:
        process = start(scratch, *arguments, "--dir", broken)
        while process.poll() is None and (not broken.exists() or num_lines(broken) < lines):
            time.sleep(0.02)
        assert process.poll() is None, process.communicate()[0][-3000:]
        before = attempt_ids(broken)
        kill_group(process)
        assert before.keys() <= attempt_ids(broken).keys()
    finish(start(scratch, *arguments, "--dir", broken))
    assert max(attempt_ids(broken).values()) == 1
    assert attempt_ids(whole).keys() <= attempt_ids(broken).keys() or _same_but_for_guided(whole, broken)
    assert consumed(whole) == consumed(broken)
    names = [[s["name"] for s in json.loads((f / "results.json").read_text())["stages"]] for f in (whole, broken)]
    assert names[0] == names[1] == ["base", "rsr-1", "rpr-1"]
    assert leftovers(scratch) == []


def _same_but_for_guided(whole: Path, broken: Path) -> bool:
    """Which runbooks are executed depends on what was sampled, and a batch of another composition may round differently."""
    missing = attempt_ids(whole).keys() - attempt_ids(broken).keys()
    return all(".guided/" in name for name in missing)
