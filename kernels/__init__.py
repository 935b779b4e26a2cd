"""The four fused operations of a PPO step over packed tokens. Imports torch and, where installed, triton."""

from .linear_logprob import linear_logprob
from .logprob import logprob
from .ppo_loss import ppo_loss
from .tb_gae import tb_gae

__all__ = ["linear_logprob", "logprob", "ppo_loss", "tb_gae"]
