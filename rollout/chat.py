"""Chat rendering, token in and token out.

A format is data: what stands before and after each message. Text is encoded message by message and sampled ids are
kept as they are, so the prompt of every turn begins with exactly the tokens of the turn before. For the tiny format::

    <|system|>act<|end|><|user|>1 move a.txt to folder b<|end|><|assistant|>1 mv a.txt b<|end|><|tool|>ok<|end|>
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from tokenizers import Tokenizer

Role = Literal["system", "user", "assistant", "tool"]


class Message(NamedTuple):
    role: Role
    text: str


@dataclass(frozen=True)
class ChatFormat:
    """``prefix[role]`` + text + ``stop`` + ``tail``. ``stop`` is one special token, which the policy samples itself."""

    prefix: dict[str, str]
    stop: str
    tail: str = ""

    def jinja(self) -> str:
        """The same format as a Hugging Face chat template."""
        heads = "".join(
            f"{'{%'} if m['role'] == '{role}' %}}{text}{'{%'} endif %}}" for role, text in self.prefix.items()
        )
        return (
            "{% for m in messages %}" + heads + "{{ m['content'] }}" + self.stop + self.tail + "{% endfor %}"
            "{% if add_generation_prompt %}" + self.prefix["assistant"] + "{% endif %}"
        )


TINY = ChatFormat(prefix={r: f"<|{r}|>" for r in ("system", "user", "assistant", "tool")}, stop="<|end|>")
CHATML = ChatFormat(
    prefix={
        "system": "<|im_start|>system\n",
        "user": "<|im_start|>user\n",
        "assistant": "<|im_start|>assistant\n",
        "tool": "<|im_start|>user\n",
    },
    stop="<|im_end|>",
    tail="\n",
)
FORMATS = {"tiny": TINY, "chatml": CHATML}


class Chat:
    """Renders messages to ids with one tokenizer and one format.

    Raises ValueError when a special token of the format is not one token of the tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, chat_format: ChatFormat):
        self.tokenizer, self.format = tokenizer, chat_format
        stop = tokenizer.token_to_id(chat_format.stop)
        if stop is None:
            raise ValueError(
                f"the tokenizer has no token {chat_format.stop!r}, which this chat format ends messages with; "
                f"choose another format of {sorted(FORMATS)}"
            )
        self.stop_id: int = stop
        self._tail = self._encode_format(chat_format.tail)
        self._prefix = {role: self._encode_format(text) for role, text in chat_format.prefix.items()}

    @classmethod
    def from_dir(cls, folder: Path | str) -> Chat:
        """Loads ``tokenizer.json`` and picks the format whose stop token it knows."""
        path = Path(folder) / "tokenizer.json"
        if not path.exists():
            raise ValueError(f"{folder} has no tokenizer.json; --base takes a Hugging Face checkpoint folder")
        tokenizer = Tokenizer.from_file(str(path))
        for chat_format in FORMATS.values():
            if tokenizer.token_to_id(chat_format.stop) is not None:
                return cls(tokenizer, chat_format)
        raise ValueError(f"{path} knows none of the end tokens {[f.stop for f in FORMATS.values()]}")

    def _encode_format(self, text: str) -> list[int]:
        self.tokenizer.encode_special_tokens = False
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def encode_text(self, text: str) -> list[int]:
        """Plain text to ids. A special token spelled out in the text is text, never a control token."""
        self.tokenizer.encode_special_tokens = True
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def render(self, messages: list[Message]) -> list[int]:
        ids: list[int] = []
        for message in messages:
            ids += self._prefix[message.role] + self.encode_text(message.text) + [self.stop_id] + self._tail
        return ids

    def opening(self, messages: list[Message]) -> list[int]:
        """The first prompt: the messages, then the head of the assistant's reply."""
        return self.render(messages) + self._prefix["assistant"]

    def after(self, finish: str, messages: list[Message]) -> list[int]:
        """What follows a sampled reply: the end it did not sample itself, new messages, the head of the next reply."""
        closing = self._tail if finish == "stop" else [self.stop_id, *self._tail]
        return closing + self.render(messages) + self._prefix["assistant"]

    def text_of(self, ids: list[int]) -> str:
        """Text of a sampled reply, without its stop token. Other special tokens stay visible (they are garbage)."""
        body = ids[:-1] if ids and ids[-1] == self.stop_id else ids
        return self.tokenizer.decode(body, skip_special_tokens=False)
