"""Published formulas for the bytes of parameters, gradients and optimizer state, and why a real run differs from them.

P is the number of parameters, N the number of ranks. The ZeRO formulas are from arXiv 1910.02054, section 3 and figure
1; their K = 12 bytes per parameter are the optimizer's (an fp32 copy and two moments). The formula "half precision" is
the memory of Adam as Hugging Face's course counts it.
"""

from dataclasses import dataclass

K = 12


@dataclass(frozen=True)
class Formula:
    """A published formula for the bytes of parameters, gradients and optimizer state on a rank."""

    name: str
    text: str
    bytes: float
    differs: str
    """Why a run of this package needs another amount."""


def formulas(parameters: float, ranks: int) -> list[Formula]:
    """Return published formulas for the memory of weights, gradients and optimizer states on a rank, with their values
    for so many trainable parameters and ranks."""
    return [
        Formula(
            "DDP, ZeRO-0", "16P", zero(0, parameters, ranks),
            "other parts of the same sum (4 fp32 weights, 4 fp32 gradients, 8 moments), and 2P gathered",
        ),
        Formula(
            "ZeRO-1", "4P + 12P/N", zero(1, parameters, ranks),
            "whole weights (2P) and whole gradients in fp32 (4P) exist only while a step runs",
        ),
        Formula(
            "ZeRO-2", "2P + 14P/N", zero(2, parameters, ranks),
            "gradients are added in fp32, 16P/N between steps; the whole copy (2P) exists only while a step runs",
        ),
        Formula(
            "ZeRO-3", "16P/N", zero(3, parameters, ranks),
            "the same between steps; the unit that runs, the next one and the root unit come on top in a step",
        ),
        Formula(
            "half precision", "2 bytes x 4 x P", 2.0 * 4 * parameters,
            "weights, gradients and both moments in 16 bits and nothing else: precision=bf16_pure on one rank",
        ),
    ]  # fmt: skip


def zero(stage: int, parameters: float, ranks: int) -> float:
    """Return the bytes on a rank at a ZeRO stage (0 to 3), as in the ZeRO paper: for each parameter 2 of the weight, 2
    of the gradient and K of the optimizer, each whole on every rank or shared among the ranks."""
    whole = {0: 2 + 2 + K, 1: 2 + 2, 2: 2, 3: 0}[stage]
    shared = {0: 0, 1: K, 2: 2 + K, 3: 2 + 2 + K}[stage]
    return parameters * (whole + shared / ranks)
