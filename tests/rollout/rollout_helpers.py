"""Shared by the rollout tests: small suites, a tokenizer, random weights, scripted policies and sandboxes."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from megatron_rsi.rollout.chat import CHATML, TINY, Chat, ChatFormat
from megatron_rsi.rollout.engines.scripted import ScriptedEngine
from megatron_rsi.rollout.records import Check, Completion, Task, Trajectory, Turn, Verdict
from megatron_rsi.rollout.taskgen import Composite, task_files
from megatron_rsi.weights import ModelConfig, random_tensors

T = TypeVar("T")
SPECIALS = {"tiny": ["<|end|>", *TINY.prefix.values()], "chatml": ["<|im_end|>", "<|im_start|>"]}


def sizes(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(
        **{**dict(num_train=8, num_validation=4, num_core=6, num_ladder=2, num_long=4, ladder_rungs=(4, 5)), **changes}
    )


@functools.cache
def chat_of(name: str = "tiny") -> Chat:
    """Bytes as tokens, plus the special tokens of the format."""
    chat_format: ChatFormat = {"tiny": TINY, "chatml": CHATML}[name]
    alphabet = {symbol: n for n, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS[name])
    return Chat(tokenizer, chat_format)


def model_config(**changes: Any) -> ModelConfig:
    values: dict[str, Any] = dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=48, vocab_size=90, rope_theta=1e4, max_position_embeddings=128,
    )  # fmt: skip
    return ModelConfig(**{**values, **changes})


def weights(config: ModelConfig, seed: int = 0) -> dict[str, Any]:
    """Large enough that distributions are far from flat."""
    return dict(random_tensors(config, seed=seed, std=0.3))


def write_task(folder: Path, composite: Composite, seed: int = 0, **replaced: str | None) -> Path:
    """One generated task folder. ``replaced`` gives files (``tests__test_sh``) another text, None removes them."""
    files: dict[str, str] = task_files(composite, folder.name, random.Random(seed))
    for name, text in replaced.items():
        path = {"tests": "tests/test.sh", "solution": "solution/solve.sh", "toml": "task.toml"}.get(name, name)
        files.pop(path, None)
        if text is not None:
            files[path] = text
    for path, text in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return folder


def completion(num: int = 3, finish: str = "stop", version: int = 1) -> Completion:
    return Completion(ids=list(range(num)), logprobs=[-0.5] * num, finish=finish, weight_version=version)


def trajectory(task: Task | None = None, *, commands: tuple[str, ...] = ("ls",), **changes: Any) -> Trajectory:
    turns = [
        Turn(context_ids=[7, 8], completion=completion(), command=c, observation="ok", exit_code=0) for c in commands
    ]
    values: dict[str, Any] = dict(
        attempt_id="a/0", task_id=task.task_id if task else "t", harness="general", turns=turns,
        verdict=Verdict(passed=True, fraction=1.0, checks=[Check(name="c", passed=True)]),
    )  # fmt: skip
    return Trajectory(**{**values, **changes})


def scripted(chat: Chat, script: Callable[[str, int], str], context: int = 1 << 20) -> ScriptedEngine:
    """An engine whose n-th reply in a session is ``script(session, n)``, ended by the stop token."""
    calls: dict[str, int] = {}

    def reply(session: str, ids: list[int]) -> list[int]:
        number = calls[session] = calls.get(session, -1) + 1
        return [*chat.encode_text(script(session, number)), chat.stop_id]

    return ScriptedEngine(reply, context)


def replies_of(composite: Composite) -> list[str]:
    """What a perfect agent of the general harness says."""
    commands = [f"{n} {c}" for n, s in enumerate(composite.subtasks, 1) for c in s.commands]
    return [*commands, "done"]


Work = Coroutine[Any, Any, T]
