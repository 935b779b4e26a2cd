"""Muon against torch's own, and the orthogonality of its updates."""

from __future__ import annotations

import pytest
import torch

from megatron_rsi.muon import Muon, orthogonalise


def matrices() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((8, 24), (24, 8), (8, 24), (16, 16))]


def train(optimizer_class: type[torch.optim.Optimizer], **options: float) -> list[torch.Tensor]:
    parameters, generator = matrices(), torch.Generator().manual_seed(1)
    optimizer = optimizer_class(parameters, lr=0.1, weight_decay=0.1, momentum=0.9, **options)  # type: ignore[call-arg]
    for _ in range(5):
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
    return [p.detach() for p in parameters]


def test_same_steps_as_torch_but_for_its_bfloat16() -> None:
    for ours, theirs in zip(train(Muon), train(torch.optim.Muon), strict=True):
        assert (ours - theirs).norm() / theirs.norm() < 5e-3  # bfloat16 keeps 8 bits


@pytest.mark.parametrize("shape", [(3, 8, 24), (3, 24, 8), (1, 1, 5)])
def test_singular_values_come_close_to_one(shape: tuple[int, int, int]) -> None:
    x = orthogonalise(torch.randn(shape, generator=torch.Generator().manual_seed(2)) * 100)
    values = torch.linalg.svdvals(x)
    assert x.dtype == torch.float32 and values.min() > 0.6 and values.max() < 1.3
    assert not orthogonalise(torch.zeros(shape)).any()


def test_only_matrices_and_parameters_without_a_gradient_stay() -> None:
    with pytest.raises(ValueError, match="takes matrices"):
        Muon([torch.nn.Parameter(torch.zeros(3))], lr=0.1)
    (parameter,) = matrices()[:1]
    before = parameter.detach().clone()
    Muon([parameter], lr=0.1).step()
    assert torch.equal(parameter, before)
