"""Reading Harbor task folders: what is malformed or cannot be honoured is refused by name."""

from __future__ import annotations

import asyncio
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from rollout_helpers import sizes, write_task

from megatron_rsi.rollout.hygiene import require_disjoint
from megatron_rsi.rollout.taskgen import compose, generate_suites
from megatron_rsi.rollout.tasks import (
    content_hash,
    environment_files,
    load_suite,
    load_task,
    prepare,
    sandbox_spec,
)
from megatron_rsi.sandbox import SandboxError, SandboxPool, SandboxSpec

TOML = """schema_version = "1.4"
[task]
name = "org/x"
[agent]
timeout_sec = 7
[verifier]
timeout_sec = 3.5
[environment]
workdir = "/work"
memory_mb = 100
docker_image = "busybox"
env = {{ COLOUR = "${{TEST_COLOUR:-green}}", N = 3 }}
[metadata]
baseline_fraction = 0.25
max_turns = 9
{more}"""


def write(folder: Path, **changes: str | bytes | None) -> Path:
    """A small task by hand; a value of None leaves the file out."""
    files: dict[str, str | bytes | None] = {
        "instruction.md": "do it\n", "task.toml": TOML.format(more=""), "tests/test.sh": "exit 0\n",
        "environment/Dockerfile": "FROM x\nWORKDIR /work\nCOPY files/ /work/\n", "environment/files/a/b.txt": "b",
        "environment/one.txt": "1",
    }  # fmt: skip
    names = {
        "toml": "task.toml",
        "dockerfile": "environment/Dockerfile",
        "instruction": "instruction.md",
        "tests": "tests/test.sh",
    }
    for name, text in (files | {names[k]: v for k, v in changes.items()}).items():
        if text is not None:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def test_every_value_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEST_COLOUR", raising=False)
    task = load_task(write(tmp_path / "t"))
    assert (task.task_id, task.instruction, task.workdir, task.memory_mb) == ("t", "do it", "/work", 100)
    assert (task.agent_timeout_s, task.verifier_timeout_s, task.max_turns) == (7.0, 3.5, 9)
    assert (task.baseline_fraction, task.docker_image) == (0.25, "busybox")
    assert task.env == {"COLOUR": "green", "N": "3"}
    monkeypatch.setenv("TEST_COLOUR", "red")
    assert load_task(tmp_path / "t").env["COLOUR"] == "red"


def test_what_a_task_states_overrides_the_configured_box(tmp_path: Path) -> None:
    configured = SandboxSpec(memory_mb=300, max_processes=40, disk_mb=20, image="base")
    toml = "[environment]\ncpus = 1.5\nstorage_mb = 30\nmemory = '2G'\nenv = { A = 'b' }\n"
    stated = load_task(write(tmp_path / "stated", toml=toml))
    assert sandbox_spec(stated, configured) == replace(
        configured, env={"A": "b"}, cpus=1.5, disk_mb=30, memory_mb=2048
    )
    silent = load_task(write(tmp_path / "silent", toml="[environment]\nworkdir = '/work'\n"))
    assert sandbox_spec(silent, configured) == replace(configured, workdir="/work")


def test_the_configured_limits_and_the_healthcheck_reach_the_box(
    runner: asyncio.Runner, tmp_path: Path
) -> None:
    check = "[environment.healthcheck]\ncommand = 'echo x >> tries; test $(wc -l < tries) = {n}'\n"
    check += "retries = 2\ninterval_sec = 0\n"
    good, bad = (load_task(write(tmp_path / n, toml=check.replace("{n}", n), dockerfile=None)) for n in ("2", "3"))

    async def main() -> int:
        async with SandboxPool("bubblewrap", 1, SandboxSpec(memory_mb=96, max_processes=12), tmp_path / "s") as pool:
            async with pool.lease(sandbox_spec(good, pool.spec)) as box:
                await prepare(box, good)
                forks = "n=0; while [ $n -lt 40 ]; do sleep 9 & n=$((n+1)); done"
                await box.exec(forks, timeout_s=10)
                counted = await box.kill_processes()
            async with pool.lease(sandbox_spec(bad, pool.spec)) as box:
                with pytest.raises(SandboxError, match="healthcheck failed 2 times"):
                    await prepare(box, bad)
            return counted

    assert 6 <= runner.run(main()) <= 13


def test_a_variable_that_is_not_set_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "t", toml=TOML.format(more="").replace("${TEST_COLOUR:-green}", "${NOT_SET_ANYWHERE}"))
    with pytest.raises(ValueError, match="task.toml: environment.env.COLOUR needs the variable NOT_SET_ANYWHERE"):
        load_task(folder)


@pytest.mark.parametrize("name", ["instruction", "toml", "tests"])
def test_missing_files_are_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"is not a Harbor task: .* is missing"):
        load_task(write(tmp_path / "t", **{name: None}))
    with pytest.raises(ValueError, match="does not exist"):
        load_task(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (dict(toml="a = = 1"), "task.toml is not valid TOML"), (dict(toml=b"\xff"), "task.toml is not valid TOML"),
        (dict(instruction=" \n"), "instruction.md is empty"), (dict(instruction=b"\xff\xfe"), "instruction.md is not UTF-8"),
        (dict(toml="agent = 3"), r"\[agent\] must be a table"),
        (dict(toml="artifacts = []"), r"the top level has \['artifacts'\], which this trainer does not support"),
        (dict(toml="[agent]\nuser = 'x'"), r"\[agent\] has \['user'\]"),
        (dict(toml="[verifier]\nuser = 'x'"), r"\[verifier\] has \['user'\]"),
        (dict(toml="[[steps]]\nname = 'x'"), r"the top level has \['steps'\]"),
        (dict(toml="[task]\ntypo = 1"), r"\[task\] has \['typo'\]"),
        (dict(toml="[environment]\nallow_internet = true"), "allow_internet = true; only false is supported"),
        (dict(toml="[environment]\ngpus = 1"), "gpus = 1; only 0 is supported"),
        (dict(toml="[environment]\nmemory_mb = 8"), r"environment.memory_mb must lie in \[16, .*got 8"),
        (dict(toml="[environment]\nmemory = '2X'"), "environment.memory must look like '512M' or '2G'; better memory_mb"),
        (dict(toml="[environment]\ncpus = 0"), r"environment.cpus must lie in \[0.01, 1024\], got 0"),
        (dict(toml="[environment]\nstorage_mb = 0"), r"environment.storage_mb must lie in \[1, "),
        (dict(toml="[environment]\nbuild_timeout_sec = -1"), r"environment.build_timeout_sec must lie in \[1, "),
        (dict(toml="[environment.healthcheck]\nretries = 2"), "environment.healthcheck.command is missing"),
        (dict(toml="[environment.healthcheck]\ncommand = 'x'\nretries = 0"), "healthcheck.retries must lie in"),
        (dict(toml="[agent]\ntimeout_sec = 0"), r"agent.timeout_sec must lie in \[0.1, 86400\], got 0"),
        (dict(toml="[verifier]\ntimeout_sec = nan"), "verifier.timeout_sec must lie in .* got nan"),
        (dict(toml="[metadata]\nmax_turns = 0"), "metadata.max_turns must lie in .* got 0"),
        (dict(toml="[environment]\nnetwork_mode = 'public'"), "network_mode = 'public'; only 'no-network'"),
        (dict(toml="[agent]\nnetwork_mode = 'allowlist'"), "agent.network_mode = 'allowlist'"),
        (dict(toml="[verifier]\nenvironment_mode = 'separate'"), "environment_mode = 'separate'"),
        (dict(toml="[environment]\nmemory_mb = 'much'"), "environment.memory_mb is 'much', expected int"),
        (dict(toml="[environment]\ndocker_image = 5"), "environment.docker_image is 5, expected str"),
        (dict(toml="[agent]\ntimeout_sec = true"), "agent.timeout_sec is True, expected float"),
        (dict(toml="[metadata]\nbaseline_fraction = 1.0"), r"baseline_fraction must lie in \[0, 1\), got 1.0"),
    ],
)  # fmt: skip
def test_malformed_folders_are_refused_with_the_file_and_the_reason(
    tmp_path: Path, changes: dict[str, str], text: str
) -> None:
    folder = write(tmp_path / "t", **changes)
    with pytest.raises(ValueError, match=text) as caught:
        load_task(folder)
    assert str(tmp_path) in str(caught.value)


def test_start_files_of_a_dockerfile(tmp_path: Path) -> None:
    lines = "FROM x  # base\n\nWORKDIR /work\nCOPY files/ /work/\nCOPY one.txt two.txt\n"
    lines += "WORKDIR sub\nCOPY one.txt .\nCOPY one.txt /abs/\n"
    task = load_task(write(tmp_path / "t", dockerfile=lines))
    assert environment_files(task) == {
        "/work/a/b.txt": b"b", "/work/two.txt": b"1", "/work/sub/one.txt": b"1", "/abs/one.txt": b"1"
    }  # fmt: skip
    assert environment_files(load_task(write(tmp_path / "u", dockerfile=None))) == {}


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("RUN apt-get install x", "'RUN apt-get install x' needs an image build"),
        ("COPY --chown=a b c", "needs an image build"),
        ("COPY ../../secret /work/", "copies from outside its folder"), ("COPY /etc/passwd /work/", "copies from outside"),
        ("COPY link.txt /work/", "copies from outside"), ("COPY files/ /work/", "copies from outside"),
        ("COPY nothing.txt /work/", "copies nothing.txt, which does not exist"),
    ],
)  # fmt: skip
def test_dockerfiles_that_cannot_be_honoured(tmp_path: Path, line: str, text: str) -> None:
    folder = write(tmp_path / "t", dockerfile=f"FROM x\n{line}\n")
    (tmp_path / "secret").write_text("s")
    (folder / "environment" / "link.txt").symlink_to(tmp_path / "secret")
    (folder / "environment" / "files" / "link.txt").symlink_to("/etc/passwd")
    with pytest.raises(ValueError, match=text):
        environment_files(load_task(folder))


def test_generated_suites_load(tmp_path: Path) -> None:
    paths = generate_suites(tmp_path, 0, sizes())
    assert sorted(paths) == ["core", "ladder_4", "ladder_5", "long", "train", "validation"]
    suites = {name: load_suite(path) for name, path in paths.items()}
    assert {n: len(s) for n, s in suites.items()} == {
        "core": 6,
        "ladder_4": 2,
        "ladder_5": 2,
        "long": 4,
        "train": 8,
        "validation": 4,
    }
    for suite in suites.values():
        for task in suite:
            assert all(name.startswith(task.workdir + "/") for name in environment_files(task))
            assert task.max_turns >= 6
    for name in set(suites) - {"train"}:
        require_disjoint(suites["train"], suites[name], name)


def test_suites_without_tasks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist; make one with"):
        load_suite(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds no task folders"):
        load_suite(tmp_path)
    write(tmp_path / "good")
    write(tmp_path / "bad", toml="x = 1")
    with pytest.raises(ValueError, match="bad/task.toml"):
        load_suite(tmp_path)


def test_an_overlap_is_found_under_another_name_and_with_other_tests(tmp_path: Path) -> None:
    composite, other = (compose(random.Random(n), 2, "train") for n in (0, 1))
    train = [load_task(write_task(tmp_path / n, c)) for n, c in (("a", composite), ("b", other))]
    twin = load_task(write_task(tmp_path / "twin", composite, seed=5, tests="exit 0\n"))
    with pytest.raises(ValueError, match="task twin of suite core equals training task a"):
        require_disjoint(train, [twin], "core")
    require_disjoint(train[1:], [twin], "core")


def test_the_content_hash_sees_instruction_and_start_files(tmp_path: Path) -> None:
    folder = write(tmp_path / "t")
    first = content_hash(load_task(folder))
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert content_hash(load_task(copy)) == first
    (copy / "tests" / "test.sh").write_text("exit 1\n")
    assert content_hash(load_task(copy)) == first
    (copy / "environment" / "files" / "a" / "b.txt").write_text("c")
    assert content_hash(load_task(copy)) != first
    (folder / "instruction.md").write_text("do that\n")
    assert content_hash(load_task(folder)) != first
