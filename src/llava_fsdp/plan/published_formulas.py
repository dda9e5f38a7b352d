"""The field's simple formulas for bytes of model states, as they are quoted, and why a real run differs.

P parameters, N ranks. ZeRO: arXiv 1910.02054, section 3 and figure 1, whose K = 12 bytes are the optimizer's (an fp32
copy and two moments); half precision: the memory of Adam as Hugging Face's course counts it.
"""

from dataclasses import dataclass

K = 12


@dataclass(frozen=True)
class Formula:
    """One quoted formula."""

    name: str
    text: str
    bytes: float
    differs: str
    """Why a run here holds something else."""


def formulas(parameters: float, ranks: int) -> list[Formula]:
    """Bytes per rank of parameters, gradients and optimizer by each."""
    return [
        Formula(
            "DDP, ZeRO-0", "16P", zero(0, parameters, ranks),
            "other parts of the same sum (4 fp32 weights, 4 fp32 gradients, 8 moments), and 2P gathered",
        ),
        Formula(
            "ZeRO-1", "4P + 12P/N", zero(1, parameters, ranks),
            "whole weights (2P) and whole gradients in fp32 (4P) are there only while a step runs",
        ),
        Formula(
            "ZeRO-2", "2P + 14P/N", zero(2, parameters, ranks),
            "gradients are added in fp32, 16P/N at rest; the whole copy (2P) is there only while it runs",
        ),
        Formula(
            "ZeRO-3", "16P/N", zero(3, parameters, ranks),
            "the same at rest; the unit that runs, the next one and the root unit come on top while it runs",
        ),
        Formula(
            "half precision", "2 bytes x 4 x P", half_precision(parameters),
            "weights, gradients and both moments in 16 bits and nothing else: precision=bf16_pure on one rank",
        ),
    ]  # fmt: skip


def zero(stage: int, parameters: float, ranks: int) -> float:
    """ZeRO's own bytes per rank."""
    whole = {0: 2 + 2 + K, 1: 2 + 2, 2: 2, 3: 0}[stage]
    shared = {0: 0, 1: K, 2: 2 + K, 3: 2 + 2 + K}[stage]
    return parameters * (whole + shared / ranks)


def half_precision(parameters: float) -> float:
    """Weights, gradients and two moments of 2 bytes."""
    return 2 * 4 * parameters
