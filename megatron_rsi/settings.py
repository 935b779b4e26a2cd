"""What can be configured: one frozen dataclass a section, with its default and its meaning beside each key.

Values are checked on construction; a ValueError says which key is wrong and what it may be. ``config.py`` fills these
from a TOML preset and from the command line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .rollout.harness import HARNESSES


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _positive(section: object, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        _check(value is None or value > 0, f"{name} must be above 0, got {value}")


def _not_negative(section: object, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        _check(value is None or value >= 0, f"{name} must be 0 or more, got {value}")


def _fractions(section: object, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        _check(value is None or 0.0 <= value <= 1.0, f"{name} must lie in [0, 1], got {value}")


def _shares(by_cycle: Sequence[float]) -> None:
    ok = len(by_cycle) > 0 and all(0.0 <= share <= 1.0 for share in by_cycle)
    _check(ok, f"long_share must be one or more numbers in [0, 1], one a cycle, got {list(by_cycle)}")


def by_cycle(values: Sequence[float], cycle: int) -> float:
    """The value for a cycle; the last one lasts."""
    return values[min(cycle, len(values) - 1)]


def _one_of(section: object, name: str, choices: Sequence[str]) -> None:
    value = getattr(section, name)
    _check(value in choices, f"{name} is {value!r}, expected one of {', '.join(choices)}")


@dataclass(frozen=True)
class Model:
    """Shape of the base model that is made on the spot; ``base`` (a checkpoint) overrides all of it."""

    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2  # grouped-query attention
    head_dim: int = 32
    intermediate_size: int = 384  # SwiGLU
    vocab_size: int = 1024  # upper bound for the BPE trainer
    context: int = 1024  # tokens
    tie_embeddings: bool = True
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        _positive(
            self, "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size",
            "vocab_size", "context", "rope_theta", "rms_norm_eps",
        )  # fmt: skip
        _check(
            self.num_heads % self.num_kv_heads == 0,
            f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})",
        )
        _check(self.head_dim % 2 == 0, f"head_dim must be even for rotary embeddings, got {self.head_dim}")


@dataclass(frozen=True)
class Layout:
    """Parallel layout. World size must be a multiple of tp * pp; the rest is data parallel."""

    tp: int = 1
    pp: int = 1
    device: str = "auto"  # auto takes CUDA with nccl when there is a GPU, else CPU with gloo
    threads: int = 1  # torch threads of each process on CPU
    dtype: str = "auto"  # of the weights in training: auto is bfloat16 with float32 masters on CUDA, float32 on CPU
    timeout_s: float = 1800.0  # a collective that waits longer ends the job: above the longest wait for other ranks

    def __post_init__(self) -> None:
        _positive(self, "tp", "pp", "threads", "timeout_s")
        _one_of(self, "dtype", ("auto", "float32", "bfloat16"))
        _one_of(self, "device", ("auto", "cpu", "cuda"))


@dataclass(frozen=True)
class BaseTraining:
    """Next-token training of the base on simulated sessions. The noise makes it able but unreliable."""

    steps: int = 1400
    batch_tokens: int = 2048
    muon_lr: float = 0.02  # matrices of the layers
    adamw_lr: float = 2e-3  # embedding, norms, head
    warmup_steps: int = 50
    decay_share: float = 0.4  # last share of the steps, over which the rates fall to 0
    weight_decay: float = 0.0
    induction_share: float = 0.1  # first share of the steps: copy random word lists
    long_demo_share: float = 0.4  # share of demonstrations with 4 and more sub-tasks once the curriculum is over
    habit: float = 0.4  # chance a sub-task of a habitual error: > for >>, cp for mv, no -i
    wrong_name: float = 0.1
    skip: float = 0.05
    useless: float = 0.1
    early_done: float = 0.05

    def __post_init__(self) -> None:
        _positive(self, "steps", "muon_lr", "adamw_lr")
        _check(self.batch_tokens >= 1024, f"batch_tokens must hold a demonstration: 1024 or more, got {self.batch_tokens}")
        _not_negative(self, "warmup_steps", "weight_decay")
        _fractions(
            self, "decay_share", "induction_share", "long_demo_share", "habit", "wrong_name", "skip", "useless",
            "early_done",
        )  # fmt: skip


@dataclass(frozen=True)
class Tasks:
    """Task folders. With no ``train_dir`` and ``suites_dir`` they are generated into the run folder."""

    train_dir: str | None = None  # Harbor task folders to train on
    suites_dir: str | None = None  # folder with validation/, core/, ladder_N/, long/
    require_check: bool = True  # refuse tasks of these two folders that `tasks check` has not found good
    num_train: int = 600
    num_validation: int = 128  # decide the gate; never trained on, never reported as a result
    num_core: int = 256  # 1-3 sub-tasks
    num_ladder: int = 100  # tasks a rung
    ladder_rungs: tuple[int, ...] = (4, 5, 6)  # sub-tasks
    num_long: int = 100  # 12 and more commands

    def __post_init__(self) -> None:
        _positive(self, "num_train", "num_validation", "num_core")
        _not_negative(self, "num_ladder", "num_long")
        _check(
            all(rung >= 1 for rung in self.ladder_rungs) and len(set(self.ladder_rungs)) == len(self.ladder_rungs),
            f"ladder_rungs must be different numbers of sub-tasks, got {list(self.ladder_rungs)}",
        )


@dataclass(frozen=True)
class Sandbox:
    kind: str = "bubblewrap"
    pool_size: int = 32  # boxes kept warm
    memory_mb: int = 256
    max_processes: int = 64
    command_timeout_s: float = 5.0
    scratch: str | None = None  # folder for the boxes' files; none = $TMPDIR/megatron-rsi-<uid>
    image: str | None = None  # docker only

    def __post_init__(self) -> None:
        _one_of(self, "kind", ("bubblewrap", "docker"))
        _positive(self, "pool_size", "memory_mb", "max_processes", "command_timeout_s")


@dataclass(frozen=True)
class Engine:
    """The policy engine. ``embedded`` runs in the trainer's process, ``sglang`` as one server a process of the trainer.

    All below ``context`` is for sglang. Arguments of its server stand in the table [sglang], named as on its command line.
    """

    kind: str = "embedded"
    max_batch: int = 48  # sequences decoded together
    max_new_tokens: int = 48  # a turn
    context: int = 1024  # tokens a trial
    python: str | None = None  # interpreter that has SGLang; none = the trainer's own
    urls: tuple[str, ...] = ()  # servers on this machine that run already, dealt to the processes in turn; else one is started
    bucket_mb: int = 256  # of weights sent at a time
    pause: str = "retract"  # what a swap does to running requests: retract (recompute), abort (sent again) or in_place
    start_timeout_s: float = 600.0
    max_restarts: int = 3  # in one request or one swap

    def __post_init__(self) -> None:
        _one_of(self, "kind", ("embedded", "sglang"))
        _one_of(self, "pause", ("retract", "abort", "in_place"))
        _positive(self, "max_batch", "max_new_tokens", "context", "bucket_mb", "start_timeout_s", "max_restarts")


@dataclass(frozen=True)
class Rollout:
    """One trial."""

    harnesses: tuple[str, ...] = ("general", "stateful", "retry")  # the first is the deployment harness
    chat_format: str = "auto"  # by the tokenizer; or tiny, chatml, chatml_no_thinking (Qwen3), llama3
    num_retries: int = 2  # of an attempt whose infrastructure or engine failed
    max_repeats: int = 0  # same command, same answer this often in a row ends a trial; 0 = never (polling is no loop)

    def __post_init__(self) -> None:
        _check(len(self.harnesses) > 0, "harnesses is empty: name at least one")
        unknown = [name for name in self.harnesses if name not in HARNESSES]
        _check(not unknown, f"harnesses names {unknown}, expected some of {', '.join(sorted(HARNESSES))}")
        _check(len(set(self.harnesses)) == len(self.harnesses), f"harnesses names one twice: {list(self.harnesses)}")
        _not_negative(self, "num_retries", "max_repeats")


@dataclass(frozen=True)
class Rsr:
    """Recursive self-rewrite: discover, plan, review, re-execute, filter, SFT."""

    num_tasks: int = 300  # training tasks a cycle
    samples: int = 1  # discovery attempts a task and harness
    runbooks: int = 2  # K: runbooks a success
    executions: int = 2  # M: guided executions a runbook
    temperature: float = 1.0  # discovery
    guided_temperature: float = 0.7
    max_review_depth: int = 1  # times a rejected runbook is written anew
    max_samples_per_task: int = 4
    sft_epochs: int = 2
    sft_lr: float = 1e-3
    sft_warmup_steps: int = 10
    batch_tokens: int = 2048
    long_share: tuple[float, ...] = (0.2, 0.6)  # share of tasks from the longer half, by cycle; the last one lasts

    def __post_init__(self) -> None:
        _positive(
            self, "num_tasks", "samples", "runbooks", "executions", "temperature", "guided_temperature",
            "max_samples_per_task", "sft_epochs", "sft_lr", "batch_tokens",
        )  # fmt: skip
        _not_negative(self, "max_review_depth", "sft_warmup_steps")
        _shares(self.long_share)


@dataclass(frozen=True)
class Rpr:
    """Recursive policy-refine: PPO with an inherited, recalibrated critic."""

    critic_rounds: int = 4
    extra_critic_rounds: int = 4  # when calibration fails
    updates: int = 8
    trajectories: int = 128  # a round or update
    epochs: int = 2
    minibatch_tokens: int = 3072
    lr: float = 2.5e-4
    critic_lr: float = 1e-3
    critic_epochs: int = 2
    warmup_updates: int = 2  # the actor's rate rises linearly; the first update has the largest KL
    kl_stop: float = 0.03  # ends the update when the mean KL of an epoch passes it
    clip: float = 0.2
    clip_high: float | None = None  # clip-higher: upper clip; none = clip
    dual_clip: float | None = None
    value_clip: float = 0.2
    gamma_u: float = 1.0  # at turn boundaries
    lambda_u: float = 0.95
    gamma_w: float = 1.0  # inside a turn
    lambda_w: float = 1.0
    entropy: float = 0.0
    whiten: bool = True
    truncated_is: float | None = None  # C: cap of the trainer/engine importance weight
    temperature: float = 1.0
    max_grad_norm: float = 1.0
    long_share: tuple[float, ...] = (0.5, 0.8)  # share of tasks from the longer half, by cycle; the last one lasts
    ev_alarm_steps: int = 3  # updates in a row with EV < 0 before actor updates are skipped

    def __post_init__(self) -> None:
        _positive(
            self, "updates", "trajectories", "epochs", "minibatch_tokens", "lr", "critic_lr", "critic_epochs",
            "kl_stop", "clip", "clip_high", "value_clip", "truncated_is", "temperature", "max_grad_norm",
            "ev_alarm_steps",
        )  # fmt: skip
        _not_negative(self, "critic_rounds", "extra_critic_rounds", "warmup_updates", "entropy")
        _fractions(self, "gamma_u", "lambda_u", "gamma_w", "lambda_w")
        _shares(self.long_share)
        _check(self.dual_clip is None or self.dual_clip > 1.0, f"dual_clip must be above 1, got {self.dual_clip}")


@dataclass(frozen=True)
class Reward:
    """Success-Prioritized Reward: every success outranks every failure under every penalty."""

    alpha: float = 0.4  # best reward of a failure
    rho: float = 0.0  # largest turn penalty of a success
    margin: float = 0.25  # between the worst success and the best failure
    kappa: float = 0.1  # minus the worst reward
    penalty_timeout: float = 0.05
    penalty_budget: float = 0.05

    def __post_init__(self) -> None:
        _check(0.0 <= self.alpha < 1.0, f"alpha must lie in [0, 1), got {self.alpha}")
        _fractions(self, "rho")
        _positive(self, "margin")
        _not_negative(self, "kappa", "penalty_timeout", "penalty_budget")
        _check(
            self.alpha + self.margin <= 1.0 - self.rho,
            f"alpha + margin ({self.alpha} + {self.margin}) must not exceed 1 - rho ({1.0 - self.rho}): "
            "a failure could come too close to a success; lower alpha, margin or rho",
        )


@dataclass(frozen=True)
class Calibration:
    """Thresholds of the critic's gate, measured on fresh data before it is fitted."""

    min_trials: int = 64
    ev: float = 0.2  # explained variance, at least
    r2: float = 0.0  # R2 about the mean return, at least
    bias: float = 0.05  # absolute, at most
    ece: float = 0.10  # expected calibration error over 10 equal-mass bins, at most
    rmse: float = 0.10  # at most; replaces the rest when the returns hardly vary
    fallback: str = "lambda_one"  # when calibration never passes: go on with lambda_u = 1, or refuse the stage

    def __post_init__(self) -> None:
        _one_of(self, "fallback", ("lambda_one", "refuse"))
        _positive(self, "min_trials", "bias", "ece", "rmse")


@dataclass(frozen=True)
class Gate:
    """Adoption of a stage on the validation tasks."""

    alpha: float = 0.05  # shared by all stages of the run: each spends alpha / number of stages
    min_tasks: int = 64  # with fewer comparable tasks the stage is rolled back
    samples: int = 2  # attempts a task on each side; more make the noise, and so the tolerated drop, smaller

    def __post_init__(self) -> None:
        _check(0.0 < self.alpha < 0.5, f"alpha must lie in (0, 0.5), got {self.alpha}")
        _positive(self, "min_tasks", "samples")


@dataclass(frozen=True)
class Eval:
    """Held-out suites, reported after every stage and never used to choose anything."""

    temperature: float = 1.0
    samples: int = 1  # attempts a task

    def __post_init__(self) -> None:
        _not_negative(self, "temperature")
        _positive(self, "samples")


@dataclass(frozen=True)
class Config:
    """Everything a run depends on. ``seed`` and this decide the result on one machine type."""

    name: str = "tiny"
    seed: int = 0
    run_dir: str = "runs/tiny"
    cycles: int = 2  # Base -> (RSR -> RPR) x cycles
    base: str | None = None  # folder of a Hugging Face Qwen3 checkpoint; none = make the tiny base
    model: Model = field(default_factory=Model)
    world: Layout = field(default_factory=Layout)
    base_training: BaseTraining = field(default_factory=BaseTraining)
    tasks: Tasks = field(default_factory=Tasks)
    sandbox: Sandbox = field(default_factory=Sandbox)
    engine: Engine = field(default_factory=Engine)
    rollout: Rollout = field(default_factory=Rollout)
    rsr: Rsr = field(default_factory=Rsr)
    rpr: Rpr = field(default_factory=Rpr)
    reward: Reward = field(default_factory=Reward)
    calibration: Calibration = field(default_factory=Calibration)
    gate: Gate = field(default_factory=Gate)
    eval: Eval = field(default_factory=Eval)
    sglang: dict[str, object] = field(default_factory=dict)
    megatron: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _positive(self, "cycles")
        _not_negative(self, "seed")
        _check(self.run_dir != "", "run_dir is empty")
        _check(
            self.base is not None or self.engine.context <= self.model.context,
            f"engine.context ({self.engine.context}) exceeds model.context ({self.model.context})",
        )
        _check(
            self.engine.max_new_tokens < self.engine.context,
            f"engine.max_new_tokens ({self.engine.max_new_tokens}) must be below "
            f"engine.context ({self.engine.context})",
        )
        _check(
            self.tasks.suites_dir is not None or self.tasks.num_validation >= self.gate.min_tasks,
            f"tasks.num_validation ({self.tasks.num_validation}) is below gate.min_tasks ({self.gate.min_tasks}): "
            "every stage would be rolled back",
        )
        _check(
            self.sandbox.image is None or self.sandbox.kind == "docker",
            f"sandbox.image is {self.sandbox.image!r} but sandbox.kind is {self.sandbox.kind!r}: "
            "images need sandbox.kind=docker",
        )
        _check(
            self.base is not None or self.world.tp == 1,
            f"world.tp is {self.world.tp}, but the base made on the spot needs whole matrices for Muon: "
            "set world.tp=1, or base to a checkpoint",
        )

    @property
    def num_stages(self) -> int:
        """Stages that pass the gate: one RSR and one RPR a cycle."""
        return 2 * self.cycles
