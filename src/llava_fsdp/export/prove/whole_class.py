"""Load an exported folder of a whole model with its own class in transformers, and compare it with what was exported:
its weights to the bit, its logits, and that it generates."""

import inspect
from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from llava_fsdp.data.batching.batch import MicroBatch
from llava_fsdp.export.prove.verify_logits import open_export
from llava_fsdp.model.weights.tensor_files import Stored
from llava_fsdp.runtime.errors import ModelError
from llava_fsdp.runtime.files.safe_load import library_errors
from llava_fsdp.runtime.text.log import log

GENERATED_TOKENS = 2
"""Number of tokens that an export generates to show that it can."""


def without_padding(micro: MicroBatch) -> MicroBatch:
    """Return a copy of a micro-batch of padded rows in which `label_positions` are all tokens of its samples, so that
    logits of padding are not compared."""
    return replace(micro, label_positions=mask_of(micro).flatten().nonzero()[:, 0])


def mask_of(micro: MicroBatch) -> torch.Tensor:
    """Return the attention mask of padded rows, bool [rows, length]. A blank sample, which is added to a micro-batch
    that has no image, has the length 0 in `sample_lengths`; it ends with its last token that is not 0."""
    columns = torch.arange(micro.input_ids.shape[1], device=micro.input_ids.device)
    lengths, ends = micro.sample_lengths.to(columns.device), ((micro.input_ids != 0) * (columns + 1)).amax(1)
    return columns[None] < torch.where(lengths > 0, lengths, ends)[:, None]


def prove_class(folder: Path, weights: Mapping[str, Stored]) -> None:
    """Load an exported folder with its class in transformers, and let it generate some tokens. Raise ModelError if that
    fails, or if a loaded weight differs by a bit from the one to write (`weights`, by the class's names)."""
    dtype = reduce(torch.promote_types, [stored.dtype for stored in weights.values()])
    model = open_export(folder, dtype)
    check_loaded(model, weights, folder)
    check_generates(model, torch.arange(1, 1 + GENERATED_TOKENS)[None], {}, folder)
    log().info("transformers' %s loads %d weights, equal to the bit, and generates", type(model).__name__, len(weights))


@torch.no_grad()
def logits_of_export(
    folder: Path, micro: MicroBatch, dtype: torch.dtype, weights: Mapping[str, Stored]
) -> torch.Tensor:
    """Load an exported folder with its class, and return its logits at the label positions of a micro-batch of padded
    rows: float32 [labels, vocabulary].

    Args:
        dtype: dtype in which the class computes.
        weights: the weights that were to be written, by the class's names.

    Raises:
        ModelError: a weight is another one after loading, or the class does not generate.
    """
    model = open_export(folder, dtype)
    check_loaded(model, weights, folder)
    model = model.to(micro.input_ids.device)
    inputs = accepted_inputs(model, micro.images)
    row = row_with_images(model, micro)
    length = int(mask_of(micro)[row].sum())
    # inputs of the shape of the token ids have a value for each token; others belong to the images
    of_row = {n: v[row, :length][None] if v.shape == micro.input_ids.shape else v for n, v in inputs.items()}
    check_generates(model, micro.input_ids[row, :length][None], of_row, folder)
    mask = mask_of(micro).long()
    found = model(input_ids=micro.input_ids, attention_mask=mask, use_cache=False, **inputs)
    return found.logits.float().flatten(0, 1)[micro.label_positions]


def check_loaded(model: Any, weights: Mapping[str, Stored], folder: Path) -> None:
    """Raise ModelError unless the parameters of a loaded class are those in `weights`, to the bit in the dtype of the
    class. Parameters that are not in `weights` are not compared."""
    parameters = dict(model.named_parameters())
    if lacking := sorted(weights.keys() - parameters.keys()):
        raise ModelError(f"{folder} was written, but transformers' {type(model).__name__} has no {lacking[0]}")
    for name, stored in weights.items():
        if not torch.equal(stored.rows(0, stored.shape[0]).to(parameters[name].dtype), parameters[name]):
            raise ModelError(f"{folder} was written, but transformers loads another {name} from it")


def check_generates(model: Any, ids: torch.Tensor, inputs: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Raise ModelError unless a loaded class generates an answer to a prompt, and stops at a token that ends one.

    Args:
        ids: the prompt, int64 [1, length].
        inputs: what the class needs besides, such as the pixels of all images of the prompt.
    """
    model.generation_config = GenerationConfig()  # the folder's may draw tokens, or search for an answer
    arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False, **inputs}
    with library_errors(f"{folder} was written, but transformers cannot generate with it"), torch.no_grad():
        generated = model.generate(**arguments, max_new_tokens=GENERATED_TOKENS)[0]
        # then generate again with the first token of the answer as the token that ends one
        first = int(generated[-GENERATED_TOKENS])
        ends = {"eos_token_id": first, "pad_token_id": first}
        stopped = model.generate(**arguments, max_new_tokens=GENERATED_TOKENS, **ends)[0]
    keeps_prompt = torch.equal(generated[:-GENERATED_TOKENS], ids[0])
    if not keeps_prompt or not torch.equal(stopped, generated[: ids.shape[1] + 1]):
        raise ModelError(
            f"{folder} was written, but transformers generates {generated.tolist()} and {stopped.tolist()}"
        )


def row_with_images(model: Any, micro: MicroBatch) -> int:
    """Return the index of the row of a micro-batch that has the most image tokens; 0 if the model has no such token."""
    token = getattr(model.config, "image_token_id", None)
    return 0 if token is None else int((micro.input_ids == token).sum(1).argmax())


def accepted_inputs(model: Any, images: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return those of a micro-batch's image inputs that transformers' `model` accepts, with floats in its dtype. The
    positions of the tokens are left out, because the model computes them itself."""
    names = inspect.signature(model.forward).parameters.keys() - {"position_ids"}
    return {
        name: value.to(model.dtype) if value.is_floating_point() else value
        for name, value in images.items()
        if name in names
    }
