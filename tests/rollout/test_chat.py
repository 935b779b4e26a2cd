"""Token in, token out: every prompt begins with the exact tokens of the turn before."""

from __future__ import annotations

import random

import jinja2
import pytest
from rollout_helpers import chat_of
from tokenizers import Tokenizer, models

from megatron_rsi.rollout.chat import CHATML, TINY, Chat, Message

FORMATS = ("tiny", "chatml")
TEXTS = [
    "mv a.txt b",
    "",
    "ok\n",
    "\n\n",
    " leading",
    "é ü 漢",
    "a<|end|>b",
    "<|im_end|>\n<|im_start|>user\n",
    "<|user|>x",
]


def conversation(rng: random.Random, size: int) -> list[Message]:
    roles = ["system", "user"] + ["assistant", "tool"] * size
    return [Message(role, rng.choice(TEXTS)) for role in roles[:size]]  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FORMATS)
def test_prefix_property_over_120_turns(name: str) -> None:
    """Sampled ids are kept, also those that no text encodes to; a reply cut by its length is closed for the policy."""
    chat, rng = chat_of(name), random.Random(0)
    history: list[int] = []
    context = chat.opening([Message("system", "act"), Message("user", "do <|end|> it")])
    tail = [chat.stop_id] if name == "tiny" else [chat.stop_id, *chat.encode_text("\n")]
    for turn in range(120):
        prompt = history + context
        assert prompt[: len(history)] == history
        finish = rng.choice(["stop", "length"])
        reply = [rng.randrange(256) for _ in range(rng.randrange(1, 9))] + [chat.stop_id] * (finish == "stop")
        history = prompt + reply
        context = chat.after(finish, [Message("tool", rng.choice(TEXTS))])
        joined = history + context
        end = len(history) - (finish == "stop")
        assert joined[end : end + len(tail)] == tail, f"turn {turn}: the reply must end in stop and newline, once"
        assert joined[end + len(tail)] != chat.stop_id


@pytest.mark.parametrize("name", FORMATS)
def test_turn_by_turn_equals_all_at_once(name: str) -> None:
    chat, rng = chat_of(name), random.Random(1)
    for _ in range(20):
        messages = conversation(rng, 12)
        ids = chat.opening(messages[:2])
        for reply, observation in zip(messages[2::2], messages[3::2], strict=True):
            ids += [*chat.encode_text(reply.text), chat.stop_id] + chat.after("stop", [observation])
        assert ids == chat.opening(messages)


@pytest.mark.parametrize("name", FORMATS)
def test_special_tokens_spelled_in_text_stay_text(name: str) -> None:
    chat = chat_of(name)
    specials = set(chat.tokenizer.get_added_tokens_decoder())
    for text in TEXTS:
        ids = chat.encode_text(text)
        assert not specials & set(ids)
        assert chat.text_of([*ids, chat.stop_id]) == text
    one = chat.render([Message("user", "".join(TEXTS))])
    assert one.count(chat.stop_id) == 1 and sum(i in specials for i in one) == 2


@pytest.mark.parametrize("name", FORMATS)
def test_exactly_one_start_and_nothing_before_it(name: str) -> None:
    chat = chat_of(name)
    messages = [Message("system", "act"), Message("user", "go")]
    start = chat.tokenizer.token_to_id("<|system|>" if name == "tiny" else "<|im_start|>")
    ids = chat.opening(messages)
    assert ids[0] == start
    assert ids.count(start) == (1 if name == "tiny" else len(messages) + 1)
    heads = [chat.tokenizer.token_to_id(t) for t in ("<|system|>", "<|user|>", "<|assistant|>")]
    assert name != "tiny" or [ids.count(h) for h in heads] == [1, 1, 1]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("generation", [False, True])
def test_the_jinja_template_says_the_same(name: str, generation: bool) -> None:
    chat, rng = chat_of(name), random.Random(2)
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)  # as transformers compiles them
    template = environment.from_string(chat.format.jinja())
    for size in range(1, 14):
        messages = conversation(rng, size)
        text = template.render(
            messages=[{"role": m.role, "content": m.text} for m in messages], add_generation_prompt=generation
        )
        ids = chat.opening(messages) if generation else chat.render(messages)
        assert chat.tokenizer.decode(ids, skip_special_tokens=False) == text


def test_text_of_drops_one_stop_token_only() -> None:
    chat = chat_of("tiny")
    body = chat.encode_text("done")
    assert chat.text_of([*body, chat.stop_id]) == chat.text_of(body) == "done"
    assert chat.text_of([*body, chat.stop_id, chat.stop_id]) == "done<|end|>"
    assert chat.text_of([]) == chat.text_of([chat.stop_id]) == ""


def test_a_tokenizer_without_the_stop_token_is_refused(tmp_path) -> None:  # type: ignore[no-untyped-def]
    bare = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    for chat_format in (TINY, CHATML):
        with pytest.raises(ValueError, match="has no token"):
            Chat(bare, chat_format)
    with pytest.raises(ValueError, match="has no tokenizer.json"):
        Chat.from_dir(tmp_path)
    bare.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="knows none of the end tokens"):
        Chat.from_dir(tmp_path)


@pytest.mark.parametrize("name", FORMATS)
def test_from_dir_finds_the_format(name: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    chat = chat_of(name)
    chat.tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = Chat.from_dir(tmp_path)
    assert loaded.format is chat.format
    messages = [Message("user", "hello <|end|>")]
    assert loaded.render(messages) == chat.render(messages)
