"""Compare what was read from a folder of transformers with what transformers' own class reads from it.

A model that is written and read again by this package could be wrong both times in the same way.
"""

import gc
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils import logging as transformers_logging

from llava_fsdp.data.images.image_tokens import ImageTokens
from llava_fsdp.export.prove.logit_distance import distance
from llava_fsdp.export.prove.verify_logits import (
    compute_dtype,
    exported_logits,
    has_experts,
    load_copy,
    logits,
    open_export,
    random_rows,
)
from llava_fsdp.model.llava.llava import Llava
from llava_fsdp.model.parts import read_json
from llava_fsdp.model.sources.llava_v1_5_config import is_original
from llava_fsdp.model.sources.pretrained import read_config
from llava_fsdp.model.weights.conversions import is_vision_language_model
from llava_fsdp.model.weights.tensor_files import WHOLE_MODEL, Stored
from llava_fsdp.runtime.errors import ModelError
from llava_fsdp.runtime.files.safe_load import library_errors
from llava_fsdp.runtime.text.log import log


def prove_reading(model: Llava, sources: dict[str, Stored], rule: ImageTokens) -> bool:
    """Compare the logits of weights that were read with those of transformers' own class for the folder that they come
    from: of text with an image for a whole model, of text alone for a language model. Raises ModelError if they differ.

    Return whether they were compared: False if transformers has no class for the folder (one of the original LLaVA), or
    cannot load it, which a warning says.

    Args:
        model: a model of the architecture that was read, without adapters; its weights are not used.
        sources: stored values of its parameters, by name, as they are in the folder.
        rule: computes which tokens an image gets.
    """
    parts, compute = model.parts, compute_dtype(model)
    folder = parts.whole or parts.language_folder
    if not any((folder / name).is_file() for name in WHOLE_MODEL):
        return False
    if parts.whole is not None and is_original(read_json(folder / "config.json", f"source={folder}")):
        return False
    micro, sizes = random_rows(model, rule)
    ids = micro.input_ids
    try:
        with library_errors(f"transformers cannot compute logits of {folder}"), torch.no_grad():
            if parts.whole is not None:
                expected = exported_logits(open_export(folder, compute), micro, micro.images["tiles"], sizes)
            else:
                expected = own_language_model(folder, compute)(input_ids=ids).logits.float().flatten(0, 1)
    except ModelError as error:
        log().warning("what was read is not compared with transformers' own class: %s", error)
        return False
    gc.collect()
    ours = load_copy(model, sources, compute)
    if parts.whole is not None:
        actual = logits(ours, micro)
    else:
        nothing = torch.zeros(0, dtype=torch.int64)
        places = torch.arange(ids.numel())
        actual = ours(ids, None, {}, nothing, places, return_logits=True)
    del ours
    gc.collect()
    difference = distance(actual, expected[:, : actual.shape[1]])
    log().info("logits of what was read differ by %.2g of the largest from transformers'", difference.largest)
    problem = difference.exceeds(compute, has_experts(model))
    if problem:
        raise ModelError(f"{folder} was read, but {problem} from those of transformers' own class")
    return True


def own_language_model(folder: Path, dtype: torch.dtype) -> Any:
    """Load a folder's language or vision-language model with its own class in transformers, in evaluation mode."""
    transformers_logging.disable_progress_bar()
    is_inside = is_vision_language_model(read_config(folder, "model.language"))
    kind = cast("Any", AutoModelForImageTextToText if is_inside else AutoModelForCausalLM)
    return kind.from_pretrained(
        folder, dtype=dtype, trust_remote_code=False, local_files_only=True, weights_only=True
    ).eval()
