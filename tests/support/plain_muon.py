"""Muon for one process, by singular values, to compare the product's with."""

import math
from collections.abc import Iterable

import torch
from torch import nn

COEFFICIENTS = 3.4445, -4.7750, 2.0315


class PlainMuon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and AdamW's size of updates. Each matrix, or each slice of a stack of matrices, is
    decomposed in float64, and the polynomial of the Newton-Schulz iteration is applied to its singular values."""

    def __init__(self, matrices: Iterable[nn.Parameter], momentum: float, weight_decay: float):
        super().__init__([{"params": list(matrices)}], {"lr": 0.0, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.mul_(group["momentum"]).add_(p.grad, alpha=1 - group["momentum"])
                direction = group["momentum"] * mean + (1 - group["momentum"]) * p.grad
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * 0.2 * math.sqrt(max(p.shape[-2:])) * orthogonal(direction))


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.square().sum(-1, keepdim=True).sqrt().clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(5):
        values = a * values + b * values**3 + c * values**5
    return (left * values[..., None, :] @ right).to(matrix.dtype)
