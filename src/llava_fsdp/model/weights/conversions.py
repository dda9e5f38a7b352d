"""Convert names and layouts of weights between files and transformers' models, by transformers' own conversion rules.

For each class of models, transformers 5 has rules that connect the tensors in files with the parameters of modules. The
rules rename tensors, and merge, split or transpose them; for example, all experts of a layer are merged into one
tensor. `from_pretrained` and `save_pretrained` apply these rules. Here the same code of transformers runs on
LazyTensors (tensors that have no values in memory), so that no values are read: it finds where the values of each
parameter are in files (`plan_load`), and from which parameters each tensor of a saved model is made (`plan_save`).

The functions of transformers that this module calls are not public (transformers.core_model_loading and
transformers.conversion_mapping, 5.17 to 5.23). No other module calls them.
"""

import contextlib
import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model, revert_weight_conversion
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging as transformers_logging

from llava_fsdp.model.weights.lazy_tensor import Box, LazyTensor
from llava_fsdp.model.weights.tensor_files import WHOLE_MODEL, Stored, StoredTensor, open_tensors
from llava_fsdp.runtime.errors import ModelError
from llava_fsdp.runtime.files.safe_load import library_errors
from llava_fsdp.runtime.text.log import log

COMPARED_ROWS = 4096
"""Number of rows of two weights that are read and compared at a time."""


@dataclass(frozen=True)
class ConvertedTensor:
    """A model's parameter whose values are converted, when they are read, from one or several tensors in files."""

    lazy: LazyTensor
    parts: list[StoredTensor]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.lazy.shape)

    @property
    def dtype(self) -> torch.dtype:
        return reduce(torch.promote_types, [part.dtype for part in self.parts])

    def rows(self, begin: int, end: int) -> torch.Tensor:
        """Read rows [begin, end) of dimension 0, and only those parts of the files that contain these values."""
        return self.lazy.rows(begin, end).to(self.dtype)

    def part(self, box: Box) -> torch.Tensor:
        """Read a part of the parameter, as `StoredTensor.part` does."""
        return self.lazy.read(box).to(self.dtype)


@dataclass(frozen=True)
class LoadPlan:
    """Where in files the weights of one of transformers' models are, as `plan_load` finds it.

    Attributes:
        sources: from what parameters and buffers are read, by their names in the model; a tied parameter has each of
            its names.
        unused: names of tensors in the files that the model has no parameter for, as transformers renames them.
        misshapen: (shape in the files, shape in the model), by parameter name. These parameters are not in `sources`.
        model: the model, on the meta device. Its parameters have been replaced; only its modules may be used.
    """

    sources: dict[str, Stored]
    unused: list[str]
    misshapen: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    model: PreTrainedModel


def language_model_of(config: PretrainedConfig) -> PreTrainedModel:
    """Build transformers' language model with its output layer on the meta device; for the configuration of a
    vision-language model, the whole vision-language model."""
    return on_meta(AutoModelForImageTextToText if is_vision_language_model(config) else AutoModelForCausalLM, config)


def is_vision_language_model(config: PretrainedConfig) -> bool:
    """Return whether transformers' model for a configuration takes images and text, and returns text."""
    return type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def vision_tower_of(config: PretrainedConfig) -> PreTrainedModel:
    """Build transformers' model for a vision tower's configuration on the meta device."""
    return on_meta(AutoModel, config)


def whole_model_of(config: PretrainedConfig) -> PreTrainedModel:
    """Build transformers' vision-language model for a configuration on the meta device."""
    return on_meta(AutoModelForImageTextToText, config)


def on_meta(kind: Any, config: PretrainedConfig) -> PreTrainedModel:
    """Build a model on the meta device with one of transformers' auto classes. Raises ModelError if transformers
    cannot."""
    with torch.device("meta"), library_errors(f"transformers cannot build a {config.model_type} model"):
        return kind.from_config(copy.deepcopy(config), dtype=torch.float32, trust_remote_code=False)


def names_of_parts(model: Any) -> dict[str, str]:
    """Return {prefix of parameter names in transformers' model: prefix in llava_fsdp's} for the output layer and for
    the rest of the language model. Raises ModelError if the model has no language model with an output layer."""
    head = model.get_output_embeddings()
    path = next((path for path, module in model.named_modules() if module is head), None)
    if path is None:
        raise ModelError(f"a {type(model).__name__} has no language model with an output layer that could be trained")
    return {f"{path}.": "lm_head.", place_of(model, model.config.get_text_config()): "language_model."}


def place_of(model: nn.Module, part: PretrainedConfig) -> str:
    """Return the prefix of the parameter names of a language model or vision tower inside a larger model. Raises
    ModelError if the larger model has no submodule of transformers' class for this configuration."""
    kind = MODEL_MAPPING.get(type(part), None)
    path = next((path for path, module in model.named_modules() if kind is not None and type(module) is kind), None)
    if not path:
        raise ModelError(f"a {type(model).__name__} has no {part.model_type} in it that could be used alone")
    return f"{path}."


def plan_load(build: Callable[[], PreTrainedModel], tensors: Mapping[str, StoredTensor], folder: Path) -> LoadPlan:
    """Find where in files the values of each weight of a model are, as `from_pretrained` does, without reading values.
    Raise ModelError if transformers cannot convert the files' tensors to those of the model.

    Args:
        build: builds one of transformers' models on the meta device.
        tensors: the tensors in the files, by their names there; `folder`, which has them, is for error messages.
    """
    plan = run_conversion(build(), tensors, folder)
    if not plan.sources and any(name.startswith("vision_model.") for name in tensors):
        # a vision tower saved as part of a whole model; transformers has no rule for some of these (AIMv2)
        plan = run_conversion(build(), tensors, folder, {r"^vision_model\.": ""})
    return plan


def plan_whole(config: PretrainedConfig, folder: Path) -> LoadPlan:
    """Find where in a folder's files the weights and buffers of a vision-language model are."""
    return plan_load(lambda: whole_model_of(config), open_tensors(folder), folder)


def plan_load_with_extra_vocabulary(
    build: Callable[[PretrainedConfig], PreTrainedModel],
    config: PretrainedConfig,
    tensors: Mapping[str, StoredTensor],
    folder: Path,
) -> LoadPlan:
    """Find where in files the values of each weight of a model are, as `plan_load` does. If the files' embeddings and
    output layer have more rows than the configuration's vocabulary, find them for a model that has as many rows."""
    plan = plan_load(lambda: build(config), tensors, folder)
    vocabulary = config.get_text_config().vocab_size
    shapes = list(plan.misshapen.values())  # (shape in the files, shape in the model)
    rows = {  # numbers of rows of weights that differ from the model's only in having more rows than its vocabulary
        got[0]
        for got, expected in shapes
        if expected[:1] == (vocabulary,) and got[:1] > expected[:1] and got[1:] == expected[1:]
    }
    if len(rows) != 1:
        return plan
    config = copy.deepcopy(config)
    config.get_text_config().vocab_size = rows.pop()
    return plan_load(lambda: build(config), tensors, folder)


def tied_weights(model: Any) -> tuple[str, str] | None:
    """Return the names of the weights of the output layer and of the embeddings, if transformers' class ties them; else
    None. The class decides by `tie_word_embeddings` in one of the parts of its configuration."""
    head = model.get_output_embeddings()
    path = next((path for path, module in model.named_modules() if module is head and head is not None), None)
    for one, other in model.all_tied_weights_keys.items():
        if f"{path}.weight" in (one, other):
            return f"{path}.weight", other if one == f"{path}.weight" else one
    return None


def is_tied(
    build: Callable[[PretrainedConfig], PreTrainedModel],
    config: PretrainedConfig,
    tensors: Mapping[str, StoredTensor],
    folder: Path,
) -> bool:
    """Return whether the output layer has the weight of the embeddings after `from_pretrained`: the configuration says
    so, and the files do not hold two different weights. If they do, `from_pretrained` warns and keeps both. `build`
    builds a model on the meta device. `tensors` are those in the files of `folder`, by name; empty without files."""
    parts = (config, getattr(config, "text_config", None))
    if not any(getattr(part, "tie_word_embeddings", False) for part in parts):
        return False
    names = tied_weights(build(config))
    if names is None:
        return False
    if not any(name.endswith(last_parts(names[0])) for name in tensors):  # no file has an output layer
        return True
    sources = plan_load_with_extra_vocabulary(
        build, config, tensors, folder
    ).sources  # where each weight is in the files
    head, embeddings = (sources.get(name) for name in names)
    return head is None or embeddings is None or head is embeddings or has_same_values(head, embeddings)


def has_tied_weights(
    build: Callable[[PretrainedConfig], PreTrainedModel], config: PretrainedConfig, folder: Path | None
) -> bool:
    """Return whether the output layer of a model has the weight of its embeddings, as in the class of transformers that
    `build` builds on the meta device. Log a warning if the configuration says so and the folder's files hold two
    different weights: both are kept then. Without a folder, or without weights in it, the configuration decides."""
    tied = is_tied(build, config, {}, Path())
    if not tied or folder is None or not any((folder / name).is_file() for name in WHOLE_MODEL):
        return tied
    if is_tied(build, config, open_tensors(folder), folder):
        return True
    log().warning(
        "%s says tie_word_embeddings=true, and its files have an output layer with other values than the embeddings; "
        "both are kept, as transformers does", folder / "config.json",
    )  # fmt: skip
    return False


def last_parts(name: str) -> str:
    """Return the last two parts of a name with dots, such as `lm_head.weight`."""
    return ".".join(name.split(".")[-2:])


def has_same_values(one: Stored, other: Stored) -> bool:
    """Return whether two parameters have the same values in their files, read a range of rows at a time."""
    if one.shape != other.shape:
        return False
    dtype = torch.promote_types(one.dtype, other.dtype)
    for begin in range(0, one.shape[0], COMPARED_ROWS):
        end = min(begin + COMPARED_ROWS, one.shape[0])
        if not torch.equal(one.rows(begin, end).to(dtype), other.rows(begin, end).to(dtype)):
            return False
    return True


def run_conversion(
    model: Any, tensors: Mapping[str, StoredTensor], folder: Path, renames: dict[str, str] | None = None
) -> LoadPlan:
    """Find where in files the values of each weight of a model are, by running transformers' conversion on tensors that
    have shapes but no values.

    Args:
        model: one of transformers' models on the meta device. Its parameters are replaced.
        renames: renamings in addition to transformers' rules: pattern for names in the files -> replacement.
    """
    reads = {name: tensor.part for name, tensor in tensors.items()}
    lazy = {name: LazyTensor(tensor.shape, [name], reads[name]) for name, tensor in tensors.items()}
    rules: Any = get_model_conversion_mapping(model, renames)
    plan = model._get_dtype_plan(torch.float32)
    config = LoadStateDictConfig(dtype=torch.float32, dtype_plan=plan, weight_mapping=rules)
    transformers_logging.disable_progress_bar()
    failing = f"{folder} has weights that cannot be converted to those of a {model.config.model_type} model"
    with library_errors(failing):
        info, _ = convert_and_load_state_dict_in_model(model, lazy, config)
    if info.conversion_errors:
        name, why = next(iter(info.conversion_errors.items()))
        raise ModelError(f"{failing}: {name}: {why}")
    named = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    sources: dict[str, Stored] = {}
    for name, value in named:
        if isinstance(value, LazyTensor):
            parts = [tensors[source] for source in value.sources]
            # whether the conversion left a single tensor as it is in its file
            as_stored = len(parts) == 1 and value.read is reads[value.sources[0]]
            sources[name] = parts[0] if as_stored else ConvertedTensor(value, parts)
    for target, source in model.all_tied_weights_keys.items():  # files have one of the two names, or both
        for one, other in ((target, source), (source, target)):
            if one not in sources and other in sources:
                sources[one] = sources[other]
    misshapen = {name: (tuple(got), tuple(expected)) for name, got, expected in sorted(info.mismatched_keys)}
    return LoadPlan(sources, sorted(info.unexpected_keys), misshapen, model)


def plan_save(config: PretrainedConfig, read: Callable[[str, Box], torch.Tensor]) -> dict[str, LazyTensor]:
    """Find from which parameters each tensor in the files of a saved vision-language model is made, as
    `save_pretrained` does. Return the tensors by their names in the files; they can be read lazily.

    Names of vision towers contain the prefix `vision_model.`, which all releases of transformers can read. `read` gets
    a parameter's name in llava_fsdp (in transformers' model without the leading `model.`), and the part to read.
    """
    model: Any = whole_model_of(config)
    model._weight_conversions = get_model_conversion_mapping(model, add_legacy=False)
    return revert_conversion(model, lambda name: name.removeprefix("model."), read)


def plan_save_again(plan: LoadPlan, read: Callable[[str, Box], torch.Tensor]) -> dict[str, LazyTensor]:
    """Return the tensors that `save_pretrained` would write of a model loaded from a folder, by their names in the
    files (those in the folder, wherever transformers can tell), lazily made of the model's parameters. `plan`: how the
    model was loaded. `read` reads a part of a parameter or buffer, by its name in transformers' class."""
    # a fresh model on the meta device, with the renamings that transformers noted when it loaded the folder
    model: Any = whole_model_of(plan.model.config)
    loaded: Any = plan.model
    model._weight_conversions = loaded._weight_conversions
    return revert_conversion(model, lambda name: name, read)


def names_saved(model: Any) -> set[str]:
    """Return the names of the parameters and buffers that `save_pretrained` writes of one of transformers' models."""
    return model.state_dict().keys() - {*(model._keys_to_ignore_on_save or ()), *model.all_tied_weights_keys}


def revert_conversion(
    model: Any, rename: Callable[[str], str], read: Callable[[str, Box], torch.Tensor]
) -> dict[str, LazyTensor]:
    """Return the tensors that `save_pretrained` writes of one of transformers' models on the meta device, by their
    names in the files. `read` reads a part of a parameter; `rename` translates a name in this model for `read`."""
    names = names_saved(model)
    lazy_parameters: dict[str, Any] = {}
    for name, value in model.state_dict().items():
        our_name = rename(name)
        if name in names:
            lazy_parameters[name] = LazyTensor(
                value.shape, [our_name], lambda box, name_here=our_name: read(name_here, box)
            )
    with library_errors(f"transformers cannot write a {model.config.model_type} model with these parts"):
        outputs: Any = revert_weight_conversion(model, lazy_parameters)
    return outputs


def check_runs(config: PretrainedConfig) -> None:
    """Check on the meta device that transformers can compute the logits of a text with a vision-language model of this
    configuration: some language models return other outputs than it expects. Raises ModelError if it cannot."""
    model: Any = whole_model_of(config).bfloat16()  # some kernels of mixtures of experts need 16 bits
    failing = f"transformers cannot compute logits of a {config.model_type} with these parts"
    # operations that need values raise RuntimeError on the meta device, which is no error of the model
    with torch.no_grad(), library_errors(failing), contextlib.suppress(RuntimeError):
        model(input_ids=torch.zeros((1, 2), dtype=torch.int64, device="meta"))
