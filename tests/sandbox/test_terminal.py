"""Programs that draw or wait for keys, typed into the terminal of each kind of box."""

from __future__ import annotations

import time

import pytest
from conftest import Driver


def expect(box: Driver, keys: str, *wanted: str) -> str:
    """Type, then read on until all of ``wanted`` was drawn. Returns everything drawn."""
    drawn, deadline = box.type(keys, wait_s=0.1), time.monotonic() + 20
    while not all(text.encode() in drawn for text in wanted):
        assert time.monotonic() < deadline, drawn
        drawn += box.type("", wait_s=0.1)
    return drawn.decode()


def test_a_prompt_that_computes(box: Driver) -> None:
    expect(box, "python3 -i -q\n", ">>> ")
    expect(box, "x = 6\n", ">>> ")
    expect(box, "x * 7\n", "42", ">>> ")
    expect(box, "\x04", "$ ")


def test_a_pager(box: Driver) -> None:
    pager = "less" if box.exec("command -v less").exit_code == 0 else "more"
    box.exec("seq 1000 > numbers")
    first = expect(box, f"{pager} numbers\n", "38")
    assert "1000" not in first
    expect(box, "1000 ", "1000") if pager == "more" else expect(box, "G", "1000", "END")
    expect(box, "q", "$ ")
    expect(box, "echo over $((40 + 2))\n", "over 42")


def test_cat_and_the_keys_that_end_it(box: Driver) -> None:
    expect(box, "cat\n", "cat")
    expect(box, "hallo wörld\n", "hallo wörld\r\nhallo wörld")
    expect(box, "\x03", "^C")
    expect(box, "echo code $?\n", "code 130")
    expect(box, "read -s -n 3 x; echo got-$x\n", "read")
    expect(box, "abc", "got-abc")


def test_it_is_a_terminal_of_its_own(box: Driver) -> None:
    expect(box, "stty size; tty; echo $TERM\n", "40 160", "/dev/pts/", "xterm")
    expect(box, "cd /tmp; sleep 100 &\n", "[1]")
    assert box.out("pwd") == "/app\n"
    assert box.kill_processes() >= 2
    expect(box, "pwd; jobs\n", "/app")
    assert "sleep 100" not in box.processes()
    expect(box, "exit\n", "exit")
    expect(box, "echo new $((1 + 1))\n", "new 2")


def test_a_flood_is_cut(box: Driver) -> None:
    drawn = box.type("yes\n", wait_s=0.5, max_output_bytes=1000)
    assert b"bytes omitted" in drawn and len(drawn) < 1100
    expect(box, "\x03", "^C")
    expect(box, "echo calm $((2 + 3))\n", "calm 5")


@pytest.mark.parametrize("wait_s", [0.0, float("nan")])
def test_waits_must_be_finite(box: Driver, wait_s: float) -> None:
    with pytest.raises(ValueError, match="timeout_s"):
        box.type("x", wait_s=wait_s)
