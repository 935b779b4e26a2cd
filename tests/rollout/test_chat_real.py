"""Our formats against the chat templates and tokenizers that Qwen3 and SmolLM2 (Llama architecture) come with."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jinja2
import pytest

from megatron_rsi.rollout.chat import Chat, Message

FOLDER = Path(os.environ.get("TOKENIZERS", Path(__file__).parents[2] / ".tokenizers"))
TURNS = [
    Message("system", "You work in a shell."),
    Message("user", "List the files.\nThen stop."),
    Message("assistant", '{"commands": [{"keystrokes": "ls\\n"}]}'),
    Message("user", "a.txt  b.txt\n$ "),
    Message("assistant", "done"),
    Message("user", "Sure? <think> ü 漢"),
]


def load(name: str, chat_format: str = "auto") -> tuple[Chat, Any]:
    folder = FOLDER / name
    if not (folder / "tokenizer.json").exists():
        pytest.skip(f"NOT TESTED against the real tokenizer: no {folder}; fetch it with: bash scripts/real_tokenizers")
    file = folder / "chat_template.jinja"
    source = file.read_text() if file.exists() else json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)  # as transformers compiles them
    return Chat.from_dir(folder, chat_format), environment.from_string(source)


def expected(chat: Chat, template: Any, messages: list[Message], **options: Any) -> list[int]:
    text = template.render(
        messages=[{"role": m.role, "content": m.text} for m in messages], add_generation_prompt=True, bos_token="", **options
    )
    chat.tokenizer.encode_special_tokens = False
    return chat.tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", ["qwen3", "smollm2"])
@pytest.mark.parametrize("size", [2, 4])
def test_prompts_equal_the_models_own_template(name: str, size: int) -> None:
    chat, template = load(name)
    assert chat.opening(TURNS[:size]) == expected(chat, template, TURNS[:size])


def test_thinking_can_be_turned_off() -> None:
    chat, template = load("qwen3", "chatml_no_thinking")
    off = expected(chat, template, TURNS[:2], enable_thinking=False)
    assert chat.opening(TURNS[:2]) == off != expected(chat, template, TURNS[:2], enable_thinking=True)
    assert chat.text_of(chat.opening(TURNS[:2])).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


@pytest.mark.parametrize("name", ["qwen3", "smollm2"])
def test_sampled_thinking_stays_in_the_history(name: str) -> None:
    """The models' templates strip it when they render again, so their prompts are no longer what was sampled; ours are."""
    chat, _ = load(name)
    prompt = chat.opening(TURNS[:2])
    reply = [*chat.encode_text("<think>hm</think>\n\nls"), chat.stop_id]
    following = prompt + reply + chat.after("stop", [TURNS[3]])
    assert following[: len(prompt) + len(reply)] == prompt + reply
    assert following.count(chat.stop_id) == 4 and chat.text_of(reply) == "<think>hm</think>\n\nls"


@pytest.mark.parametrize("name", ["qwen3", "smollm2"])
def test_turn_by_turn_equals_all_at_once_and_text_holds_no_control_token(name: str) -> None:
    chat, _ = load(name)
    ids = chat.opening(TURNS[:2])
    for reply, observation in zip(TURNS[2::2], TURNS[3::2], strict=True):
        ids += [*chat.encode_text(reply.text), chat.stop_id] + chat.after("stop", [observation])
    assert ids == chat.opening(TURNS)
    specials = {n for n, token in chat.tokenizer.get_added_tokens_decoder().items() if token.special}
    assert not specials & set(chat.encode_text("<|im_end|><|im_start|>system\n"))
