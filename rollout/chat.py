"""Chat rendering, token in and token out.

A format is data: what stands before and after each message. Text is encoded message by message and sampled ids are
kept as they are, so the prompt of every turn begins with exactly the tokens of the turn before. For the tiny format::

    <|system|>act<|end|><|user|>1 move a.txt to folder b<|end|><|assistant|>1 mv a.txt b<|end|><|tool|>ok<|end|>
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from tokenizers import Tokenizer

Role = Literal["system", "user", "assistant", "tool"]


class Message(NamedTuple):
    role: Role
    text: str


@dataclass(frozen=True)
class ChatFormat:
    """``prefix[role]`` + text + ``stop`` + ``tail``. ``stop`` is one special token, which the policy samples itself.

    ``begin`` stands once before everything, ``opener`` after the head of each reply that is asked for.
    """

    prefix: dict[str, str]
    stop: str
    tail: str = ""
    begin: str = ""
    opener: str = ""

    def jinja(self) -> str:
        """The same format as a Hugging Face chat template."""
        heads = "".join(
            f"{'{%'} if m['role'] == '{role}' %}}{text}{'{%'} endif %}}" for role, text in self.prefix.items()
        )
        return (
            self.begin + "{% for m in messages %}" + heads + "{{ m['content'] }}" + self.stop + self.tail + "{% endfor %}"
            "{% if add_generation_prompt %}" + self.prefix["assistant"] + self.opener + "{% endif %}"
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
CHATML_NO_THINKING = replace(CHATML, opener="<think>\n\n</think>\n\n")  # Qwen3 with enable_thinking=False
LLAMA3 = ChatFormat(
    prefix={
        role: f"<|start_header_id|>{name}<|end_header_id|>\n\n"
        for role, name in (("system", "system"), ("user", "user"), ("assistant", "assistant"), ("tool", "ipython"))
    },
    stop="<|eot_id|>",
    begin="<|begin_of_text|>",
)
FORMATS = {"tiny": TINY, "chatml": CHATML, "chatml_no_thinking": CHATML_NO_THINKING, "llama3": LLAMA3}


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
        self._begin = self._encode_format(chat_format.begin)
        self._reply_head = self._encode_format(chat_format.prefix["assistant"] + chat_format.opener)
        self._prefix = {role: self._encode_format(text) for role, text in chat_format.prefix.items()}

    @classmethod
    def from_dir(cls, folder: Path | str, name: str = "auto") -> Chat:
        """Loads ``tokenizer.json`` with the format ``name``; ``auto`` is the first whose stop token it knows."""
        path = Path(folder) / "tokenizer.json"
        if not path.exists():
            raise ValueError(f"{folder} has no tokenizer.json; --base takes a Hugging Face checkpoint folder")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the tokenizers library raises Exception itself
            raise ValueError(f"{path} is damaged: {error}") from None
        if name != "auto":
            if name not in FORMATS:
                raise ValueError(f"unknown chat format {name!r}, expected auto or one of {', '.join(FORMATS)}")
            return cls(tokenizer, FORMATS[name])
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
        return self._begin + self.render(messages) + self._reply_head

    def after(self, finish: str, messages: list[Message]) -> list[int]:
        """What follows a sampled reply: the end it did not sample itself, new messages, the head of the next reply."""
        closing = self._tail if finish == "stop" else [self.stop_id, *self._tail]
        return closing + self.render(messages) + self._reply_head

    def text_of(self, ids: list[int]) -> str:
        """Text of a sampled reply, without its stop token. Other special tokens stay visible (they are garbage)."""
        body = ids[:-1] if ids and ids[-1] == self.stop_id else ids
        return self.tokenizer.decode(body, skip_special_tokens=False)
