"""Put the factor of a language model's logits into the exported weight of its output layer.

The logits of transformers' LLaVA classes are the output of the output layer, whatever the class of the language model
does with it (`model/logit_change.py`). A factor is therefore multiplied into the weight that is written. If the
weight is that of the embeddings, the export gets an output layer of its own.
"""

import math
from dataclasses import replace
from typing import Any

import torch

from llava_fsdp.export.write.weights_writer import Weights
from llava_fsdp.model.architecture import Architecture
from llava_fsdp.model.logit_change import without_change
from llava_fsdp.model.parts import Parts

HEAD = "lm_head.weight"


def fields_of_folded_head(parts: Parts) -> dict[str, Any]:
    """Return values for the language model's configuration in an export whose output layer contains the factor by which
    the language model multiplies its logits. They switch that factor off, and say that the output layer has a weight of
    its own. Empty if the language model does not change its logits."""
    if parts.logit_change.changes_nothing:
        return {}
    return {**without_change(parts.language), "tie_word_embeddings": False}


def factor_to_fold(parts: Parts) -> float:
    """Return the factor that the exported weight of the output layer must contain, because the language model
    multiplies its logits by it; 1 for a whole model of transformers, whose class does that itself."""
    return parts.logit_change.factor if parts.class_config is None else 1.0


def with_folded_head(weights: Weights, model: Architecture) -> Weights:
    """Return the weights of a model to export, in which the weight of the output layer contains the factor by which the
    language model multiplies its logits.

    The weight is first rounded to the dtype of the export, as it is without a factor. Multiplying by a power of two
    changes no digit of it; after another factor it is rounded again (`folding_rounds`).
    """
    factor = factor_to_fold(model.parts)
    if factor == 1.0:
        return weights
    # without an output layer of its own, the model uses the weight of the embeddings
    source = HEAD if HEAD in weights.shapes else min(model.with_vocabulary() - {HEAD})
    dtype = weights.dtypes[source]

    def read(name: str) -> torch.Tensor:
        if name != HEAD:
            return weights.read(name)
        head = weights.read(source)  # all ranks take part in gathering it; only the first one gets the values
        return (head.to(dtype).float() * factor).to(dtype) if weights.is_first_rank else head

    shapes = {**weights.shapes, HEAD: weights.shapes[source]}
    return replace(weights, shapes=shapes, dtypes={**weights.dtypes, HEAD: dtype}, read=read)


def folding_rounds(parts: Parts, dtype: torch.dtype) -> bool:
    """Return whether the weight of the output layer, in this dtype, is rounded when the factor of the language model's
    logits is multiplied into it, so that the export's logits differ in their last digits."""
    factor = abs(factor_to_fold(parts))
    if factor == 1.0 or dtype == torch.float32:
        return False
    # small numbers in fp16 have fewer digits, so that even a power of two rounds them
    return dtype == torch.float16 or math.frexp(factor)[0] != 0.5
