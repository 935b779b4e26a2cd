"""Checkpoints on disk: whole or not there.

A checkpoint is a folder ``step_00000012`` with one file a rank, written under a temporary name, synced, renamed, and
only then marked ``DONE``. A folder without the marker is never loaded and is swept away by the next save. Nothing that
exists is touched before the new checkpoint is complete, so a full disk leaves the old one intact.

Hugging Face folders (``config.json``, ``model.safetensors``, tokenizer files) are exported and read here too.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .parallel import World
from .policy import ModelConfig, Policy
from .weights import check_tensors, rules

DONE = "DONE"
_LAYOUT = "layout.json"
_TEMPORARY = ".tmp-"


# ---- resumable state
def save(directory: Path | str, world: World, step: int, state: Mapping[str, Any], *, keep: int = 2) -> Path:
    """Write this step's state of all ranks; afterwards only the newest ``keep`` checkpoints remain.

    ``state`` is anything torch.save takes: this rank's own part, such as ``{"actor": policy.state_dict(), ...}``.
    Collective. If any rank fails to write (a full disk, say), every rank raises OSError, the unfinished folder is
    removed, and older checkpoints stay.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep}")
    root, name = Path(directory), f"step_{step:08d}"
    part = root / f"{_TEMPORARY}{name}"
    failure = _attempt(lambda: _start(part)) if world.is_main else None
    _raise_together(world, failure, part)
    _raise_together(world, _attempt(lambda: _write_torch(part / _rank_file(world.rank), dict(state))), part)
    if world.is_main:
        failure = _attempt(lambda: _publish(part, root / name, {"size": world.size, "tp": world.tp, "pp": world.pp}))
    _raise_together(world, failure, part)
    if world.is_main:
        _sweep(root, keep)
    world.barrier()
    return root / name


def latest(directory: Path | str) -> Path | None:
    """The newest complete checkpoint of a folder, None when there is none."""
    found = _complete(Path(directory))
    return found[-1] if found else None


def load(path: Path | str, world: World) -> dict[str, Any]:
    """This rank's state. Raises ValueError for an incomplete or damaged checkpoint, or another parallel layout."""
    folder = Path(path)
    if not (folder / DONE).is_file():
        raise ValueError(f"{folder} is not a complete checkpoint: it has no {DONE} marker")
    try:
        saved = msgspec.json.decode((folder / _LAYOUT).read_bytes(), type=dict[str, int])
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"{folder / _LAYOUT} is damaged ({error}): remove {folder} to go on from the one before") from None
    here = {"size": world.size, "tp": world.tp, "pp": world.pp}
    if saved != here:
        raise ValueError(
            f"checkpoint {folder} was written by {_layout_text(saved)}, this run has {_layout_text(here)}: "
            "resume with the same layout, or start from its exported Hugging Face weights"
        )
    file = folder / _rank_file(world.rank)
    if not file.is_file():
        raise ValueError(f"checkpoint {folder} lacks {file.name}")
    try:
        return torch.load(file, map_location="cpu", weights_only=False)
    except (RuntimeError, EOFError, OSError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error


def _layout_text(layout: Mapping[str, int]) -> str:
    return f"{layout['size']} processes with tp={layout['tp']} pp={layout['pp']}"


def _rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.pt"


def _complete(root: Path) -> list[Path]:
    return sorted(p for p in root.glob("step_*") if (p / DONE).is_file())


def _attempt(action: Any) -> str | None:
    """Run it; an operating system error (full disk, no permission) becomes its message."""
    try:
        action()
    except (OSError, RuntimeError) as error:  # torch.save reports a failed write as RuntimeError
        return f"{type(error).__name__}: {error}"
    return None


def _raise_together(world: World, failure: str | None, part: Path) -> None:
    failures = [f"rank {rank}: {f}" for rank, f in enumerate(world.all_gather_object(failure)) if f]
    if failures:
        if world.is_main:
            shutil.rmtree(part, ignore_errors=True)
        raise OSError(f"checkpoint not written ({'; '.join(failures)}); older checkpoints are intact")


def _start(part: Path) -> None:
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)


def _write_torch(path: Path, state: Any) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def _write_text(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _publish(part: Path, final: Path, layout: Mapping[str, int]) -> None:
    _write_text(part / _LAYOUT, json.dumps(layout))
    _sync_folder(part)
    shutil.rmtree(final, ignore_errors=True)
    part.rename(final)
    _write_text(final / DONE, "")
    _sync_folder(final)
    _sync_folder(final.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sweep(root: Path, keep: int) -> None:
    kept = set(_complete(root)[-keep:])
    for folder in [*root.glob("step_*"), *root.glob(f"{_TEMPORARY}*")]:
        if folder not in kept:
            (folder / DONE).unlink(missing_ok=True)  # from here on it is not a checkpoint, even if removal is cut short
            shutil.rmtree(folder, ignore_errors=True)


# ---- Hugging Face folders
def export_hf(policy: Policy, directory: Path | str, tokenizer_files: Iterable[Path | str] = ()) -> Path:
    """Write ``config.json``, ``model.safetensors`` and copies of the tokenizer files; replaces the folder atomically.

    Collective; the first rank writes. A critic is written with ``value_head.*`` tensors. An existing folder stays
    until the new one is complete. Raises OSError on all ranks when writing fails.
    """
    final = Path(directory)
    part = final.with_name(f"{_TEMPORARY}{final.name}")
    tensors = {}
    for name, tensor in policy.hf_tensors():
        if policy.world.is_main:
            tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
    failure = None
    if policy.world.is_main:
        failure = _attempt(lambda: _write_hf(policy, part, final, tensors, [Path(f) for f in tokenizer_files]))
    _raise_together(policy.world, failure, part)
    return final


def _write_hf(policy: Policy, part: Path, final: Path, tensors: dict[str, Tensor], tokenizer_files: list[Path]) -> None:
    _start(part)
    config = policy.config.to_hf()
    if policy.value_head:
        config["tie_word_embeddings"] = False
    config["torch_dtype"] = str(policy.model.config.params_dtype).removeprefix("torch.")
    _write_text(part / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
    weights = part / "model.safetensors"
    try:
        save_file(tensors, weights, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"cannot write {weights}: {error}") from error
    for file in tokenizer_files:
        shutil.copy(file, part / file.name)
    for path in part.iterdir():
        _sync_folder(path)  # fsync works on any descriptor
    _sync_folder(part)
    old = final.with_name(f"{_TEMPORARY}old-{final.name}")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    part.rename(final)
    _sync_folder(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def load_hf_dir(directory: Path | str) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Config and full tensors of a Hugging Face folder, with one weight file or shards and an index.

    Tensors come in the order of ``weights.rules``, as a policy streams them: files keep them by name.

    Raises ValueError, naming the file, when the folder, its config, a shard or a tensor is missing, unreadable, of a
    shape that the config does not say, or not finite.
    """
    config, tensors = read_hf_config(directory), _read_weights(Path(directory))
    used = dict(tensors)
    value_head = "value_head.weight" in tensors
    if value_head or config.tie_word_embeddings:
        used.pop("lm_head.weight", None)
    table = rules(config, value_head)
    try:
        check_tensors(table, used)
    except ValueError as error:
        raise ValueError(f"checkpoint {directory}: {error}") from None
    return config, {name: tensors[name] for rule in table for name in rule.names} | tensors


def read_hf_config(directory: Path | str) -> ModelConfig:
    """``config.json`` of a Hugging Face folder. Raises ValueError, naming the file, when it is missing or no such config."""
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise ValueError(f"{directory} is not a Hugging Face checkpoint: no config.json")
    try:
        return ModelConfig.from_hf(msgspec.json.decode(path.read_bytes(), type=dict[str, Any]))
    except (msgspec.DecodeError, UnicodeDecodeError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not the configuration of a model: {error}") from None


def _read_weights(folder: Path) -> dict[str, Tensor]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return _read_safetensors(folder / "model.safetensors")
    try:
        placed = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except msgspec.DecodeError as error:
        raise ValueError(f"{index} is not an index of weight files: {error}") from None
    tensors = {n: t for file in sorted(set(placed.values())) for n, t in _read_safetensors(folder / file).items()}
    absent = sorted(placed.keys() - tensors.keys())
    if absent:
        raise ValueError(f"{index} lists tensors that its files do not hold: {', '.join(absent[:5])}")
    return tensors


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise ValueError(f"missing weight file {path}")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
