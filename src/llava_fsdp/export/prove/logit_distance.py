"""Measure how far the logits of one model are from those of another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import kl_div

CLOSE = 1e-4
"""Largest accepted difference between logits that two classes compute in fp32 from the same weights, relative to the
largest logit. They may differ because one class may sum in another order."""
CLOSE_16_BIT = 0.05
"""Largest accepted mean difference between logits that two classes compute in 16 bits from the same weights, relative
to the mean absolute logit. The largest difference is no measure: one of millions of logits may be far off."""
CLOSE_EXPERTS = 0.3
"""The same for a mixture of experts, where another rounding may send a token to other experts."""
TOKENS = 256
"""Number of tokens whose probabilities are computed at once."""


@dataclass(frozen=True)
class Distance:
    """How far logits are from the expected ones: 0 if all are equal. Differences are NaN if a logit is NaN."""

    largest: float
    """Largest absolute difference, relative to the largest expected absolute logit."""
    mean: float
    """Mean absolute difference, relative to the mean expected absolute logit."""
    kl: float
    """Mean Kullback-Leibler divergence of the predicted probabilities from the expected ones, in nats per token."""
    changed: float
    """Share of tokens after which another next token is the likeliest."""

    def __str__(self) -> str:
        return (
            f"{self.mean:.2g} of the mean logit (KL {self.kl:.2g}, another likeliest token at {self.changed:.2%} of "
            "the positions)"
        )

    def exceeds(self, compute: torch.dtype, has_experts: bool) -> str:
        """Return what is wrong if logits that two classes computed from the same weights, both in the dtype `compute`,
        differ by more than another order of summation explains; an empty text if they do not."""
        bound = bound_of_classes(compute, has_experts)
        value, of = (self.largest, "largest") if compute == torch.float32 else (self.mean, "mean")
        if value <= bound:  # NaN is not
            return ""
        return f"its logits differ by {value:.3g} of the {of} (bound {bound:.2g}, computed in {compute})"


def bound_of_classes(compute: torch.dtype, has_experts: bool) -> float:
    """Return the largest accepted difference between logits that two classes compute in the dtype `compute` from the
    same weights: relative to the largest logit in fp32, to the mean absolute logit in 16 bits."""
    if compute == torch.float32:
        return CLOSE
    return CLOSE_EXPERTS if has_experts else CLOSE_16_BIT


@torch.no_grad()
def distance(actual: torch.Tensor, expected: torch.Tensor) -> Distance:
    """Compare logits with the expected ones: both float32 [labels, vocabulary]. If `actual` has more columns, the last
    ones are left out: an export has more rows of the vocabulary than are trained."""
    actual = actual[:, : expected.shape[1]]
    difference = (actual - expected).abs()
    kl, changed = 0.0, 0
    for some_actual, some_expected in zip(actual.split(TOKENS), expected.split(TOKENS), strict=True):
        log_actual, log_expected = some_actual.log_softmax(-1), some_expected.log_softmax(-1)
        kl += float(kl_div(log_actual, log_expected, reduction="sum", log_target=True))
        changed += int((some_actual.argmax(-1) != some_expected.argmax(-1)).sum())
    return Distance(
        largest=ratio(difference.max(), expected.abs().max()),
        mean=ratio(difference.mean(), expected.abs().mean()),
        kl=max(kl, 0.0) / len(expected),
        changed=changed / len(expected),
    )


def ratio(difference: torch.Tensor, size: torch.Tensor) -> float:
    """Divide one scalar by another; 0 for a difference of 0, even if `size` is 0."""
    return float(difference / size) if difference != 0 else 0.0
