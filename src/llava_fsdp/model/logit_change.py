"""How a language model's class in transformers makes logits from the output of its output layer: many classes leave it
unchanged, some multiply or divide it, and some cap it with a tanh.

transformers' LLaVA classes leave it unchanged, whatever their language model is. In an export, a factor of the language
model is therefore multiplied into the weight of the output layer (`export/write/folded_head.py`).
"""

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from transformers import PretrainedConfig

from llava_fsdp.runtime.errors import ModelError


class LogitOperation(Enum):
    """What the value of a configuration key does."""

    MULTIPLIES = "the logits are multiplied by value"
    DIVIDES = "the logits are divided by value"
    WIDTH = "the logits are divided by (hidden_size / value)"
    CAPS = "the logits become tanh(logits / value) * value"


@dataclass(frozen=True)
class LogitKey:
    """What the value of a configuration key does to logits, in all types of language models but those in `unlike`."""

    key: str
    meaning: LogitOperation
    unlike: dict[str, LogitOperation | None]
    """`model_type` -> what the value does in language models of this type; None: nothing."""

    def meaning_in(self, model_type: str) -> LogitOperation | None:
        """Return what the value does in language models of one type; None: nothing."""
        return self.unlike.get(model_type, self.meaning)


TABLE = (
    LogitKey("logit_scale", LogitOperation.MULTIPLIES, {"mpt": None}),
    LogitKey("logits_scaling", LogitOperation.DIVIDES, {"hyperclovax": LogitOperation.MULTIPLIES, "minicpm3": None}),
    LogitKey("dim_model_base", LogitOperation.WIDTH, {}),
    LogitKey("logits_mup_width_multiplier", LogitOperation.DIVIDES, {}),
    LogitKey("lm_head_multiplier", LogitOperation.MULTIPLIES, {}),
    LogitKey("output_multiplier", LogitOperation.MULTIPLIES, {}),
    LogitKey("final_logit_softcapping", LogitOperation.CAPS, {}),
    LogitKey("logits_soft_cap", LogitOperation.CAPS, {}),
    LogitKey("output_logit_soft_cap", LogitOperation.CAPS, {}),
)
"""Configuration keys of transformers' language models that change logits, from all `...ForCausalLM` classes of
transformers 5.23. A factor is applied before a cap. If a model has a key that is missing here, the
comparison with transformers' class (`export/prove/compare_language.py`) ends its training before the first step."""
VISION_LANGUAGE = frozenset({
    "cohere_compass", "gemma3n", "gemma4", "gemma4_unified", "granite4_vision", "granite_docling",
    "hyperclovax_vision_v2", "inkling_mm_model", "inkling2", "mistral_large4", "muse_glimmer", "muse_spark",
    "paligemma",
})  # fmt: skip
"""Types of vision-language models whose class changes logits as the class of its language model does. The classes of
all others (LLaVA, InternVL, Aya Vision, ...) do not, whatever the configuration of their language model says."""


@dataclass(frozen=True)
class LogitChange:
    """How the logits of a language model are made from the output of its output layer."""

    factor: float = 1.0
    cap: float | None = None
    """Bound of the logits' absolute values, which is applied after the factor; None: there is no bound."""

    @property
    def changes_nothing(self) -> bool:
        """Whether the logits are the output of the output layer, unchanged."""
        return self.factor == 1.0 and self.cap is None

    def apply(self, output: torch.Tensor) -> torch.Tensor:
        """Return the logits of the output layer's `output` (any shape): times the factor, then capped by a tanh."""
        if self.factor != 1.0:
            output = output * self.factor
        return output if self.cap is None else torch.tanh(output / self.cap) * self.cap

    def apply_in_place(self, output: torch.Tensor) -> None:
        """Replace `output`, what the output layer returns, by the logits: it is multiplied by the factor, and then
        capped by a tanh. The bits are those that `apply` returns."""
        if self.factor != 1.0:
            output.mul_(self.factor)
        if self.cap is not None:
            output.div_(self.cap).tanh_().mul_(self.cap)

    def slope(self, logits: torch.Tensor) -> torch.Tensor | float:
        """Return the derivative of the logits with respect to the output of the output layer: a tensor of the logits'
        shape, or a number if it is the same for all."""
        if self.cap is None:
            return self.factor
        return (logits / self.cap).square_().neg_().add_(1).mul_(self.factor)


def logit_change(language: PretrainedConfig) -> LogitChange:
    """Return how the class of a language model in transformers makes logits. Raises ModelError if a value in the
    configuration is not a number, or is one with which no logits can be computed."""
    factor, cap = 1.0, None
    for row, meaning, value in values_of(language):
        match meaning:
            case LogitOperation.MULTIPLIES:
                factor *= value
            case LogitOperation.DIVIDES:
                factor /= value
            case LogitOperation.WIDTH:
                factor /= language.hidden_size / value
            case LogitOperation.CAPS:
                if cap is not None or value < 0:
                    raise ModelError(f"a {language.model_type} with {row.key}={value!r} is not supported")
                cap = value
    return LogitChange(factor, cap)


def values_of(language: PretrainedConfig) -> list[tuple[LogitKey, LogitOperation, float]]:
    """Return, for each key of a configuration that changes logits, its row in `TABLE`, what it means for this type of
    model, and its value. Raises ModelError if a value is not a number, or is 0 or infinite."""
    rows = []
    for row in TABLE:
        value, meaning = getattr(language, row.key, None), row.meaning_in(language.model_type)
        if value is None or meaning is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value == 0:
            raise ModelError(
                f"the configuration of the {language.model_type} has {row.key}={value!r}; it must be a number other "
                "than 0, as the logits are computed with it"
            )
        rows.append((row, meaning, float(value)))
    return rows


def keys_that_change(language: PretrainedConfig) -> list[str]:
    """Return the keys of a language model's configuration that change its logits, each with its value, as texts."""
    return [f"{row.key}={getattr(language, row.key)}" for row, *_ in values_of(language)]


def without_change(language: PretrainedConfig) -> dict[str, Any]:
    """Return configuration values, by key, with which transformers' class leaves the output layer's output as it is."""
    # WIDTH divides by hidden_size / value, and a cap of None is no cap; all others are factors
    neutral = {LogitOperation.WIDTH: language.hidden_size, LogitOperation.CAPS: None}
    return {row.key: neutral.get(meaning, 1.0) for row, meaning, _ in values_of(language)}
