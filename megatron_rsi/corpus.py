"""The synthetic corpus of the tiny base model: shell sessions, plans and reviews drawn from the *training* generator.

The sessions carry deliberate noise (careless habits, wrong names, skipped steps, wasted commands, early ends), so the base
can act, plan and review but solves only part of the tasks. That noise is the only reason for the base's weakness.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from .rollout.chat import TINY, Chat, Message
from .rollout.families import WORDS
from .rollout.harness import render_observation
from .rollout.taskgen import MAX_SUBTASKS, Composite, compose, compose_long
from .runbook import plan_prompt, replan_prompt, review_prompt
from .shellsim import ShellSim

PRE_TOKENIZER = r"\.[A-Za-z]+| ?[A-Za-z]+| ?\d| ?[^\sA-Za-z\d]+|\n|\s"


class Noise(Protocol):
    """Probabilities: ``habit`` and ``skip`` and ``early_done`` a sub-task, ``wrong_name`` and ``useless`` a command."""

    @property
    def habit(self) -> float: ...
    @property
    def wrong_name(self) -> float: ...
    @property
    def skip(self) -> float: ...
    @property
    def useless(self) -> float: ...
    @property
    def early_done(self) -> float: ...


class Curriculum(Noise, Protocol):
    """``induction_share``: first share of the training, copying only. ``long_demo_share``: of 4 and more sub-tasks."""

    @property
    def induction_share(self) -> float: ...
    @property
    def long_demo_share(self) -> float: ...


@dataclass(frozen=True)
class Sample:
    """One training sequence: ids int[T] and mask bool[T], True where the loss is taken."""

    ids: list[int]
    mask: list[bool]


def sample_from(chat: Chat, messages: list[Message]) -> Sample:
    """Renders messages; the loss is on the assistant's tokens with their end token."""
    ids: list[int] = []
    mask: list[bool] = []
    for message in messages:
        rendered = chat.render([message])
        head = len(chat.opening([])) if message.role == "assistant" else len(rendered)
        ids += rendered
        mask += [False] * head + [True] * (len(rendered) - head)
    return Sample(ids, mask)


class Session:
    """Types one demonstration into the simulator, noise included."""

    def __init__(self, task: Composite, rng: random.Random, noise: Noise):
        self.task, self.rng, self.noise = task, rng, noise
        self.shell = ShellSim(task.files, task.folders)
        self.messages: list[Message] = []

    def say(self, reply: str, observation: str | None) -> None:
        self.messages.append(Message("assistant", reply))
        if observation is not None:
            self.messages.append(Message("tool", observation))

    def type(self, step: int, command: str) -> int:
        out, err, code = self.shell.run(command)
        self.say(f"{step} {command}", render_observation(code, out, f"x: {err}" if err else ""))
        return code

    def work(self, step: int, habit: float) -> None:
        """Does one sub-task, with a wasted command, a wrong name or the careless habit now and then."""
        subtask, rng = self.task.subtasks[step - 1], self.rng
        commands = list(subtask.commands)
        if rng.random() < habit:
            index, wrong = subtask.habit
            commands[index] = wrong
        for command in commands:
            if rng.random() < self.noise.useless:
                self.type(step, rng.choice(["pwd", *(f"cat {path}" for path in list(subtask.files)[:1])]))
            if rng.random() < self.noise.wrong_name:
                wrong_command = self._misname(command)
                if self.type(step, wrong_command) == 0 or rng.random() < 0.3:
                    continue  # unnoticed, or noticed and not mended
            self.type(step, command)

    def _misname(self, command: str) -> str:
        names = [w for w in self.task.subtasks[0].words + self.task.subtasks[-1].words if f"{w}." in command]
        return command.replace(self.rng.choice(names), self.rng.choice(WORDS), 1) if names else command

    def run(self, habit: float) -> None:
        for step in range(1, len(self.task.subtasks) + 1):
            if self.rng.random() < self.noise.early_done:
                break
            if self.rng.random() >= self.noise.skip:
                self.work(step, habit)

    def failed_steps(self) -> list[int]:
        """Steps whose files differ from what the reference commands leave."""
        ideal = ShellSim(self.task.files, self.task.folders)
        for subtask in self.task.subtasks:
            for command in subtask.commands:
                ideal.run(command)
        return [n for n, s in enumerate(self.task.subtasks, 1) if not _same(ideal, self.shell, s.words)]


def _same(a: ShellSim, b: ShellSim, words: tuple[str, ...]) -> bool:
    def part(items: dict[str, str]) -> dict[str, str]:
        return {path: text for path, text in items.items() if any(w in path for w in words)}

    return part(a.files) == part(b.files) and part(a.modes) == part(b.modes)


def runbook_text(task: Composite, rng: random.Random, fault: str = "") -> str:
    """A runbook: one hint a milestone, a check, a recovery. ``fault`` plants what the reviewer must find."""
    hints = [f"{n} {s.hint}" for n, s in enumerate(task.subtasks, 1)]
    if fault == "leak":
        index = rng.randrange(len(hints))
        hints[index] += " " + (task.subtasks[index].secret or rng.choice(WORDS))
    if fault == "parts":
        del hints[rng.randrange(len(hints))]
    return "\n".join([f"goal {len(task.subtasks)} parts", *hints, "check no errors", "retry when missing"])


def act_sample(task: Composite, rng: random.Random, noise: Noise, harness: str, guided: bool) -> list[Message]:
    guidance = runbook_text(task, rng) if guided else ""
    session = Session(task, rng, noise)
    session.run(noise.habit * (0.25 if guided else 1.0))
    failed = session.failed_steps()
    if harness == "retry" and failed:
        session.say("done", "not passed")
        for step in failed:
            session.work(step, noise.habit / 2)
    if harness == "stateful":
        if rng.random() < 0.2:
            session.say("done", "state work check first")
        session.say("check", "state check")
        for step in failed:
            if rng.random() < 0.5:
                session.work(step, noise.habit / 2)
    session.say("done", None)
    head = [Message("system", f"act {harness}\n{guidance}".rstrip()), Message("user", task.instruction)]
    return head + session.messages


def plan_sample(task: Composite, rng: random.Random) -> list[Message]:
    replies = [f"{n} {c}" for n, s in enumerate(task.subtasks, 1) for c in s.commands]
    messages = plan_prompt(task.instruction, replies)
    fault = rng.choice(["leak", "parts"]) if rng.random() < 0.1 else ""
    text = runbook_text(task, rng, fault)
    if not fault:
        return [*messages, Message("assistant", text)]
    return [*replan_prompt(messages, text, [fault]), Message("assistant", runbook_text(task, rng))]


def review_sample(task: Composite, rng: random.Random) -> list[Message]:
    fault = rng.choice(["leak", "parts"]) if rng.random() < 0.5 else ""
    verdict = f"reject {fault}" if fault else "ok"
    return [*review_prompt(task.instruction, runbook_text(task, rng, fault)), Message("assistant", verdict)]


def copy_sample(rng: random.Random) -> list[Message]:
    """Names to repeat: the quickest way to the attention heads that every command needs.

    Most are bare names, where nothing but the name before tells the next one: without them the model copies from numbered
    places only and never learns to write two names in a row. The rest are numbered lines, as in an instruction.
    """
    words = rng.sample(WORDS, rng.randint(3, 10))
    if rng.random() < 0.8:
        text = "".join(f" {word}" for word in words)
    else:
        endings = [rng.choice([".txt", ".log", ".conf", ".sh", "", f" {rng.choice(WORDS)}"]) for _ in words]
        text = "\n".join(f"{n % 10} {word}{ending}" for n, (word, ending) in enumerate(zip(words, endings, strict=True)))
    return [Message("system", "copy"), Message("user", text), Message("assistant", text)]


def draw_messages(rng: random.Random, settings: Curriculum, progress: float) -> list[Message]:
    """One example. ``progress`` in [0, 1] is how far the training is: names to copy, then short tasks, then all.

    Nothing but copying at first: without the attention heads that it makes, no command ever gets its names right.
    """
    if progress < settings.induction_share or rng.random() < 0.03:
        return copy_sample(rng)
    progress = (progress - settings.induction_share) / (1.0 - settings.induction_share)
    if progress < 0.3:
        size = 1 if progress < 0.1 else rng.randint(1, 3)
        return act_sample(compose(rng, size, "train"), rng, settings, "general", guided=False)
    size = rng.randint(4, MAX_SUBTASKS) if rng.random() < settings.long_demo_share else rng.randint(1, 3)
    long = size == MAX_SUBTASKS and rng.random() < 0.5
    task = compose_long(rng, "train", 12, 26) if long else compose(rng, size, "train")
    kind = rng.random()
    if kind < 0.08:
        return plan_sample(task, rng)
    if kind < 0.14:
        return review_sample(task, rng)
    harness = rng.choice(["general", "general", "general", "stateful", "retry"])
    return act_sample(task, rng, settings, harness, guided=harness == "general" and rng.random() < 0.3)


def train_tokenizer(seed: int, settings: Curriculum, vocab_size: int) -> Tokenizer:
    """Byte-level BPE in which every name of the pool is one token after a space, where commands have it."""
    rng = random.Random(f"tokenizer:{seed}")
    texts = [m.text for _ in range(1500) for m in draw_messages(rng, settings, 1.0)]
    texts += [f"{w} {w}" for w in WORDS] * 60
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKENIZER), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|pad|>", TINY.stop, *TINY.prefix.values()]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(specials) + len(alphabet):
        raise ValueError(f"model.vocab_size must be {len(specials) + len(alphabet)} or more, got {vocab_size}")
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=specials,
            show_progress=False,
            initial_alphabet=alphabet,
        ),
    )
    return tokenizer


Batches = Callable[[int], list[Sample]]


def batches(chat: Chat, settings: Curriculum, seed: int, num_steps: int, batch_tokens: int, context: int) -> Batches:
    """Returns step -> the samples of that step, at most ``batch_tokens`` tokens. A function of the seed and step alone."""

    def draw(step: int) -> list[Sample]:
        rng = random.Random(f"base:{seed}:{step}")
        samples: list[Sample] = []
        total = 0
        while True:
            sample = sample_from(chat, draw_messages(rng, settings, step / num_steps))
            if len(sample.ids) > min(context, batch_tokens):
                continue
            total += len(sample.ids)
            if total > batch_tokens:
                return samples
            samples.append(sample)

    return draw
