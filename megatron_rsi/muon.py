"""Muon: momentum whose update is made orthogonal by a Newton-Schulz iteration (Jordan et al., 2024).

    B <- mu B + (1 - mu) G,   U = (1 - mu) G + mu B,   W <- (1 - lr wd) W - lr sqrt(max(1, rows / columns)) NS(U)

As ``torch.optim.Muon``, save for two things: the iteration runs in float32 on a CPU (torch's is bfloat16 always, which
a processor without bfloat16 units computes ten times slower), and matrices of one shape go through it as one batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_STEPS = 5
EPS = 1e-7


def orthogonalise(matrices: Tensor) -> Tensor:
    """Nearly U V^T of each matrix U S V^T, [N, rows, columns]: singular values go to between about 0.7 and 1.2."""
    a, b, c = COEFFICIENTS
    dtype = torch.float32 if matrices.device.type == "cpu" else torch.bfloat16
    wide = matrices.size(1) <= matrices.size(2)
    x = (matrices if wide else matrices.mT).to(dtype)
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=EPS)
    for _ in range(NUM_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.mT


class Muon(torch.optim.Optimizer):
    """For matrices only. Raises ValueError for a parameter of another dimension."""

    def __init__(self, params: Iterable[Tensor], lr: float, weight_decay: float = 0.0, momentum: float = 0.95):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.dim() != 2:
                raise ValueError(f"Muon takes matrices, got a parameter of shape {tuple(parameter.shape)}")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "Muon evaluates no closure"
        for group in self.param_groups:
            updates: dict[torch.Size, list[tuple[Tensor, Tensor]]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    updates[parameter.shape].append((parameter, self._momentum(parameter, group["momentum"])))
            for pairs in updates.values():
                self._apply(pairs, group)

    def _momentum(self, parameter: Tensor, momentum: float) -> Tensor:
        state: dict[str, Any] = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        assert parameter.grad is not None
        buffer = state["momentum_buffer"].lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(buffer, momentum)

    def _apply(self, pairs: list[tuple[Tensor, Tensor]], group: dict[str, Any]) -> None:
        rows, columns = pairs[0][0].shape
        rate = group["lr"] * max(1.0, rows / columns) ** 0.5
        ortho = orthogonalise(torch.stack([update for _, update in pairs]))
        for (parameter, _), update in zip(pairs, ortho, strict=True):
            parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update.to(parameter.dtype), alpha=-rate)
