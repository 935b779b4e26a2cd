"""Durable lines: a record counts when it is on disk whole; torn, damaged and unwritable ones are told apart."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from rollout_helpers import trajectory

from megatron_rsi.rollout.records import Review, Trajectory
from megatron_rsi.rollout.store import Store, store_files


def review(number: int) -> Review:
    return Review(runbook_id=f"r{number}", accepted=True, source="model", reasons=["line\nbreak \u2028 \x85"])


def store(folder: Path, writer: int = 0) -> Store[Review]:
    return Store(folder, "reviews", Review, writer)


def names(folder: Path) -> list[str]:
    return [r.runbook_id for r in store(folder).read()]


def test_what_is_appended_is_read_in_order_by_anyone(tmp_path: Path) -> None:
    first, second = store(tmp_path / "new", 0), store(tmp_path / "new", 1)
    assert first.read() == []
    for n in range(3):
        first.append(review(n))
        second.append(review(n + 10))
        assert len(names(tmp_path / "new")) == 2 * n + 2, "a record counts as soon as append returns"
    first.close()
    assert names(tmp_path / "new") == ["r0", "r1", "r2", "r10", "r11", "r12"]
    first.append(review(3))  # opened again
    assert store(tmp_path / "new").read()[3] == review(3)
    first.close(), second.close()


def test_whole_trajectories_come_back_equal(tmp_path: Path) -> None:
    made = [trajectory(attempt_id=f"a/{n}", guidance="é\n") for n in range(3)]
    with_store = Store(tmp_path, "rollouts", Trajectory)
    for t in made:
        with_store.append(t)
    with_store.close()
    assert Store(tmp_path, "rollouts", Trajectory).read() == made


def test_a_torn_line_never_counted_and_is_cut_on_the_next_write(tmp_path: Path) -> None:
    s = store(tmp_path)
    s.append(review(0)), s.append(review(1)), s.close()
    whole = s.path.read_bytes()
    for cut in range(1, len(whole) // 2):
        s.path.write_bytes(whole[:-cut])
        assert names(tmp_path) == ["r0"]
    s = store(tmp_path)
    s.append(review(2)), s.close()
    assert names(tmp_path) == ["r0", "r2"]
    s.path.write_bytes(b'{"torn')
    assert names(tmp_path) == []
    s = store(tmp_path)
    s.append(review(3)), s.close()
    assert names(tmp_path) == ["r3"]


@pytest.mark.parametrize("damage", [b"nonsense", b'{"runbook_id": 5}', b"\xff\xfe", b""])
def test_a_damaged_line_is_named(tmp_path: Path, damage: bytes) -> None:
    s = store(tmp_path)
    s.append(review(0)), s.close()
    line = s.path.read_bytes()
    s.path.write_bytes(line + damage + b"\n" + line)
    with pytest.raises(ValueError, match=r"reviews\.0\.jsonl line 2 is damaged \(.*\); delete that line"):
        store(tmp_path).read()


def test_a_full_disk_leaves_whole_records_only(tmp_path: Path) -> None:
    """A limit on the file's size stands for the full disk: the write that does not fit comes back in part."""
    script = textwrap.dedent("""
        import resource, sys
        from megatron_rsi.rollout.records import Review
        from megatron_rsi.rollout.store import Store, store_files
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        store = Store(sys.argv[1], "reviews", Review)
        for n in range(100):
            try:
                store.append(Review(runbook_id=f"r{n}", accepted=True, source="model"))
            except OSError as error:
                print(n, error.errno)
                break
    """)
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    number, code = map(int, done.stdout.split())
    assert code in (27, 28)  # EFBIG, ENOSPC
    data = (tmp_path / "reviews.0.jsonl").read_bytes()
    assert data.endswith(b"\n") and len(data) <= 1000 and number > 5
    assert names(tmp_path) == [f"r{n}" for n in range(number)]
    more = store(tmp_path)
    more.append(review(1000)), more.close()
    assert names(tmp_path)[-1] == "r1000"


def test_a_store_reads_its_own_files_only(tmp_path: Path) -> None:
    """Also where the name holds characters of a pattern, and where another store's name begins with it."""
    for name in ("a", "a.b", "[x]*"):
        for writer in (0, 11, None):
            store = Store(tmp_path, name, Review, writer)
            store.append(Review(runbook_id=f"{name} {writer}", accepted=True, source="model"))
            store.close()
    for name in ("a", "a.b", "[x]*"):
        assert {r.runbook_id for r in Store(tmp_path, name, Review).read()} == {f"{name} {w}" for w in (0, 11, None)}
    assert {p.name for p in store_files(tmp_path, "a")} == {"a.0.jsonl", "a.11.jsonl", "a.jsonl"}
    assert store_files(tmp_path / "nowhere", "a") == []
