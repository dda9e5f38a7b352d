"""Load the weights of a sharded model, from files or randomly initialised: each rank reads only its own part, one
parameter at a time. Compute digests (hashes of the values) of weights, by which a resumed run recognizes them.

The argument `tensors` of functions has the tensors of a folder's files by their names there; results have llava_fsdp's
parameter names.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PretrainedConfig

from llava_fsdp.config import ModelConfig
from llava_fsdp.model.adapters.lora import bound_of_a
from llava_fsdp.model.adapters.lora_files import find_adapter, initial_values_from, open_adapter
from llava_fsdp.model.adapters.lora_merge import BASE_WEIGHT, RowLengths
from llava_fsdp.model.adapters.lora_names import LORA_A, LORA_B, MAGNITUDE, is_adapter, without_base
from llava_fsdp.model.architecture import Architecture
from llava_fsdp.model.parts import Parts, read_json
from llava_fsdp.model.sources.llava_v1_5_config import TOWER, is_original
from llava_fsdp.model.sources.pretrained import read_config
from llava_fsdp.model.weights.conversions import (
    ConvertedTensor,
    LoadPlan,
    is_vision_language_model,
    language_model_of,
    names_of_parts,
    place_of,
    plan_load,
    plan_load_with_extra_vocabulary,
    plan_whole,
    vision_tower_of,
    whole_model_of,
)
from llava_fsdp.model.weights.init_weights import Drawn, DrawRule, Rule, draw_rule
from llava_fsdp.model.weights.quantization import QuantizedLinear, weight_shape
from llava_fsdp.model.weights.tensor_files import Stored, StoredTensor, open_tensors
from llava_fsdp.model.weights.weight_names import COMPUTED, ORIGINAL_TOWER, projector_name
from llava_fsdp.runtime.errors import ModelError
from llava_fsdp.runtime.text.log import log

PROJECTOR_PREFIX = "multi_modal_projector."
NEWLINE = "image_newline"
LINEAR = re.compile(rf"{re.escape(PROJECTOR_PREFIX)}linear_(\d+)\.(?:weight|bias)")
"""Pattern for the names of the parameters of a projector's linear layers."""
DIGESTING = 4
"""Number of threads per rank that compute digests of frozen weights."""
DIGESTED_BYTES = 16 << 20
"""Number of bytes of a weight that a thread reads at once to compute the weight's digest."""


class ParameterShard(Protocol):
    """Protocol of a rank's shard of one parameter: the rows [begin, end) of dimension 0, and a range of their
    columns."""

    @property
    def begin(self) -> int: ...

    @property
    def end(self) -> int: ...

    @property
    def columns(self) -> tuple[int, int] | None:
        """Range of columns (indices of dimension 1); None: all."""
        ...

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors that hold the shard's values, such as the fp32 master weight and its compute dtype copy."""
        ...


def find_weights(
    model: Architecture, parts: Parts, cfg: ModelConfig, projector: Path | None = None, seed: int = 0
) -> dict[str, Stored]:
    """Find the source of each parameter's initial values for a meta-device model: tensors in files, or random values.

    Args:
        projector: folder or file of the projector; None: the projector is initialised randomly, unless it is part of
            `model.checkpoint` or of the adapter's files.

    Raises:
        ModelError: no file has a parameter, or a file has it in another shape.
    """
    stored = base_weights(model, parts, cfg, projector)
    adapter: dict[str, Stored] = {}
    if cfg.lora.checkpoint is not None:
        folder = find_adapter(cfg.lora.checkpoint, "model.lora.checkpoint")
        opened = open_adapter(folder, is_of_class=parts.class_config is not None)
        adapter = dict(initial_values_from(opened, model, cfg.lora))
        beside = {without_base(n): tensor for n, tensor in adapter.items() if not is_adapter(n)}
        if projector is not None or cfg.projector == "random":  # the projector in the adapter folder is not used
            beside = {n: tensor for n, tensor in beside.items() if not n.startswith(PROJECTOR_PREFIX)}
        check_projector_names(beside, model, f"model.lora.checkpoint={cfg.lora.checkpoint}")
        stored |= beside
    is_llava = parts.whole is not None and parts.class_config is None
    extended = model.with_vocabulary() if is_llava else set()  # exports add rows to these parameters
    sources: dict[str, Stored] = {}
    for own_name, _ in model.named_parameters():
        if is_adapter(own_name):
            continue  # `adapter_sources` adds the adapters' parameters
        shape = weight_shape(model, own_name)
        name = without_base(own_name)
        # whether the parameter gets random values if no file has it
        drawn = parts.whole is None and (
            cfg.random_weights or (projector is None and name.startswith(PROJECTOR_PREFIX))
        )
        if parts.grid_pinpoints is None:  # LLaVA too draws an end-of-line vector if there is none (llava_arch.py:83-88)
            drawn = drawn or name == NEWLINE
        if name in stored:
            check_shape(name, shape, stored[name], may_have_more_rows=name in extended)
            _ = stored[name].dtype  # raises ModelError for the dtype of a quantized model
            sources[own_name] = stored[name]
        elif drawn:
            if name.startswith(PROJECTOR_PREFIX) and cfg.lora.checkpoint is not None and cfg.projector == "auto":
                raise ModelError(
                    f"model.lora.checkpoint={cfg.lora.checkpoint} has no projector; give the one that it was trained "
                    "with: model.projector=PATH"
                )
            sources[own_name] = Drawn(name, shape, draw_rule(model, own_name), seed)
        else:
            raise missing(name, parts, projector)
    return sources | adapter_sources(model, sources, adapter, seed)


def base_weights(model: Architecture, parts: Parts, cfg: ModelConfig, projector: Path | None) -> dict[str, Stored]:
    """Find in files the parameters of a model without its adapters, by name: in the folder of a whole model, or in
    those of the language model and the vision tower. `projector` is the folder or file of a separate projector; None:
    there is none."""
    if parts.class_config is not None:
        return class_weights(parts, model)
    if parts.whole is not None:
        return whole_model(parts, model)
    stored: dict[str, Stored] = {}
    if not cfg.random_weights:
        stored |= vision_tower(open_tensors(parts.vision_folder), parts, model)
        language = read_config(parts.language_folder, "model.language")
        stored |= language_model(open_tensors(parts.language_folder), language, parts.language_folder, model)
    if projector is not None:
        alone = projector_alone(projector)
        check_projector_names(alone, model, f"model.projector={projector}")
        stored |= alone
    return stored


def buffer_names(model: nn.Module) -> set[str]:
    """Return the names of a model's buffers that are saved in its files, such as the correction biases of routers."""
    saved = model.state_dict().keys()
    quantized = tuple(f"{path}." for path, module in model.named_modules() if isinstance(module, QuantizedLinear))
    return {name for name, _ in model.named_buffers() if name in saved and not name.startswith(quantized)}


def stored_buffers(model: Architecture) -> dict[str, torch.Tensor]:
    """Read the buffers that the files of a model have, on the CPU, by name. All others are computed; so are all of a
    small copy of a model (for tests of an export), which has no files. `model`: the whole model, not a stage of it. Its
    values are not used."""
    expected = {name: buffer for name, buffer in model.named_buffers() if name in buffer_names(model)}
    if not expected or model.parts.is_small_copy:
        return {}
    sources = base_weights(model, model.parts, model.cfg, None)
    found = {name: (sources[name], buffer) for name, buffer in expected.items() if name in sources}
    # `rows` ignores its range for a scalar
    return {n: stored.rows(0, buf.shape[0] if buf.ndim else 0).to(buf.dtype) for n, (stored, buf) in found.items()}


def missing(name: str, parts: Parts, projector: Path | None) -> ModelError:
    """Return the error to raise if the parameter `name` is in no file. `projector` is the projector's path, if
    separate."""
    if name == "lm_head.weight":
        return ModelError(
            f"{parts.whole or parts.language_folder} has no weights for {name}, its output layer; if this is to have "
            "the weight of the embeddings, set tie_word_embeddings to true in its config.json"
        )
    if parts.whole is not None:
        return ModelError(f"{parts.whole} has no weights for {name}; is it the model that its configuration says?")
    if name.startswith(PROJECTOR_PREFIX):
        return ModelError(
            f"model.projector={projector} has no weights of a projector ({name}); give a run, an export, or LLaVA's "
            "mm_projector.bin"
        )
    is_vision = name.startswith("vision_tower.")
    folder, config = (parts.vision_folder, parts.vision) if is_vision else (parts.language_folder, parts.language)
    return ModelError(
        f"{folder} has no weights for {name}: its files are incomplete, or they name the weights of a "
        f"{config.model_type} in a way that is not supported yet"
    )


def adapter_sources(
    model: nn.Module, base: dict[str, Stored], given: dict[str, Stored], seed: int
) -> dict[str, Stored]:
    """Find from where the initial values of the parameters of a model's LoRA adapters are read.

    Args:
        base: sources of the parameters that do not belong to adapters.
        given: stored parameters of an adapter whose training is continued. Adapter parameters that are not among them
            get peft's initial values.
        seed: seed of the random initialisation.

    Raises:
        ModelError: a tensor in `given` has another shape than the parameter.
    """
    sources: dict[str, Stored] = {}
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        if not is_adapter(name):
            continue
        if name in given:
            if given[name].shape != shape:
                raise ModelError(
                    f"{name} has shape {list(given[name].shape)} in model.lora.checkpoint, and this model needs "
                    f"{list(shape)}; it is from another model"
                )
            sources[name] = given[name]
        elif name.endswith(LORA_A):
            bound = bound_of_a(model.get_submodule(name.rpartition(".")[0]))
            sources[name] = Drawn(name, shape, DrawRule(Rule.UNIFORM, bound), seed)
        elif name.endswith(LORA_B):
            sources[name] = Drawn(name, shape, DrawRule(Rule.ZEROS), seed)
        else:  # DoRA's magnitudes begin as the norms of the weight's rows
            sources[name] = RowLengths(base[name.removesuffix(MAGNITUDE) + BASE_WEIGHT])
    return sources


def vision_tower(tensors: Mapping[str, StoredTensor], parts: Parts, model: nn.Module) -> dict[str, Stored]:
    """Return where the parameters of the vision tower are, by llava_fsdp's names. `tensors` are those of its folder, by
    their names there. The folder may contain a whole CLIP, SigLIP or vision-language model."""
    folder = parts.vision_folder
    config = read_config(folder, "model.vision")
    if not is_vision_language_model(config):
        plan = plan_load(lambda: vision_tower_of(parts.vision), tensors, folder)
        return by_our_names(plan, {"": "vision_tower."}, model, folder)
    plan = plan_load_with_extra_vocabulary(whole_model_of, config, tensors, folder)
    return by_our_names(plan, {place_of(plan.model, parts.vision): "vision_tower."}, model, folder)


def language_model(
    tensors: Mapping[str, StoredTensor], config: PretrainedConfig, folder: Path, model: nn.Module
) -> dict[str, Stored]:
    """Return where the parameters of the language model are, by llava_fsdp's names. `tensors` are those of its folder,
    by their names there. The folder's configuration (`config`) may be that of a vision-language model. Log a warning if
    the folder of a language model has tensors that are neither parameters nor buffers that are computed (COMPUTED)."""
    plan = plan_load(lambda: language_model_of(config), tensors, folder)
    unused = [] if is_vision_language_model(config) else [name for name in plan.unused if not COMPUTED.search(name)]
    if unused:
        log().warning(
            "%s has %d weights that a %s model has no place for, such as %s; they are not used",
            folder, len(unused), config.model_type, unused[0],
        )  # fmt: skip
    return by_our_names(plan, names_of_parts(plan.model), model, folder)


def whole_model(parts: Parts, model: nn.Module) -> dict[str, Stored]:
    """Return where all parameters of a LLaVA model are, by llava_fsdp's names: in its folder `parts.whole`, and if that
    has no vision tower, in `parts.vision_folder`. Raises ModelError if `parts.whole` has a tensor of another model."""
    folder = parts.whole
    assert folder is not None
    tensors = open_tensors(folder)
    if is_original(read_json(folder / "config.json", f"model.checkpoint={folder}")):
        return original_model(tensors, parts, folder, model)
    plan = plan_load_with_extra_vocabulary(whole_model_of, read_config(folder, "model.checkpoint"), tensors, folder)
    refuse_unused(plan.unused, folder)
    # {prefix of transformers' names: ours}
    return by_our_names(plan, {"model.": "", "lm_head.": "lm_head."}, model, folder)


def class_weights(parts: Parts, model: nn.Module) -> dict[str, Stored]:
    """Return where the parameters and buffers of `model`, a whole model of transformers, are in its folder, by its
    class's names. Raises ModelError if a tensor of the folder has no place in the class, or another shape."""
    assert parts.whole is not None and parts.class_config is not None
    plan = plan_whole(parts.class_config, parts.whole)
    refuse_unused(plan.unused, parts.whole)
    refuse_misshapen(plan.misshapen, parts.whole)
    names = parameter_names(model) | buffer_names(model)
    return {name: source for name, source in plan.sources.items() if name in names}


def original_model(
    tensors: Mapping[str, StoredTensor], parts: Parts, folder: Path, model: nn.Module
) -> dict[str, Stored]:
    """Return where the parameters of a LLaVA model are stored, by llava_fsdp's names. `tensors`: those in a folder of
    the original LLaVA, by their names there; a vision tower that they lack is read from `parts.vision_folder`."""
    stored: dict[str, Stored] = {}
    tower: dict[str, StoredTensor] = {}
    language: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        our_name = projector_name(name)
        if our_name is not None:
            stored[our_name] = tensor
        elif name.startswith(ORIGINAL_TOWER):
            tower[name.removeprefix(ORIGINAL_TOWER)] = tensor
        else:
            language[name] = tensor
    refuse_unused(sorted(stored.keys() - parameter_names(model)), folder)
    # the embeddings in the folder may have more rows than the configuration's vocabulary
    plan = plan_load_with_extra_vocabulary(language_model_of, parts.language, language, folder)
    refuse_unused(plan.unused, folder)
    stored |= by_our_names(plan, names_of_parts(plan.model), model, folder)
    if tower:
        plan = plan_load(lambda: vision_tower_of(parts.vision), tower, folder)
        refuse_unused(plan.unused, folder)
        return stored | by_our_names(plan, {"": "vision_tower."}, model, folder)
    if parts.vision_folder == folder / TOWER:  # a configuration without weights
        return stored
    return stored | vision_tower(open_tensors(parts.vision_folder), parts, model)


def by_our_names(plan: LoadPlan, prefixes: dict[str, str], model: nn.Module, folder: Path) -> dict[str, Stored]:
    """Return where in files the parameters and buffers of a model are, by llava_fsdp's names instead of transformers'.

    Args:
        plan: where in files the parameters of one of transformers' models are.
        prefixes: prefix of names in transformers' model -> prefix of names in llava_fsdp's model. The first one that
            fits is used; parameters to which none fits are left out.
        folder: the folder of the files, for error messages.

    Raises:
        ModelError: a parameter has another shape in the files, or `model` does not have this parameter.
    """
    refuse_misshapen({n: both for n, both in plan.misshapen.items() if n.startswith(tuple(prefixes))}, folder)
    stored: dict[str, Stored] = {}
    for name, source in plan.sources.items():
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
        if prefix is not None:
            stored[prefixes[prefix] + name.removeprefix(prefix)] = source
    homeless = sorted(stored.keys() - parameter_names(model) - buffer_names(model))
    if homeless:
        raise ModelError(
            f"{folder} has {homeless[0]}, which a {plan.model.config.model_type} model needs and llava_fsdp does not "
            "train or keep: this kind of model is not supported yet"
        )
    return stored


def refuse_misshapen(shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]], folder: Path) -> None:
    """Raise ModelError if parameters have another shape in a folder's files than in the model. `shapes`: (shape in the
    files, shape in the model) of these parameters, by name."""
    for name, (got, expected) in shapes.items():
        raise ModelError(
            f"{name} has shape {list(got)} in {folder}, and this model needs {list(expected)}; it is from another model"
        )


def parameter_names(model: nn.Module) -> set[str]:
    """Return the names of all parameters as they are without LoRA adapters; tied parameters with each of their
    names."""
    return {without_base(name) for name, _ in model.named_parameters(remove_duplicate=False)}


def refuse_unused(names: list[str], folder: Path) -> None:
    """Raise ModelError if files have tensors that are neither parameters of the model nor buffers that it computes."""
    unknown = [name for name in names if not COMPUTED.search(name)]
    if unknown:
        raise ModelError(
            f"{folder} has {len(unknown)} weights that this model has no place for, {unknown[0]} for one; is it the "
            "model that its configuration says?"
        )


def projector_alone(path: Path) -> dict[str, Stored]:
    """Open the projector's tensors in a file or folder, which contains a projector or a whole LLaVA model. Raises
    ModelError if it was trained together with rows of the token embeddings (LLaVA's mm_use_im_start_end)."""
    tensors = open_tensors(path, projector_only=True)
    named = {projector_name(name): tensor for name, tensor in tensors.items()}
    others = sorted(name for name in tensors if projector_name(name) is None)
    if others and any(t.file.stem == "mm_projector" for t in tensors.values()):
        raise ModelError(f"{path} holds {others[0]} beside a projector; mm_use_im_start_end=True is not supported")
    return {name: tensor for name, tensor in named.items() if name is not None}


def check_projector_names(names: Collection[str], model: Architecture, what: str) -> None:
    """Raise ModelError if files hold a projector of another type than the model has. `names`: all parameters in the
    files; without one of a projector nothing is checked. `what`: the setting that names the files."""
    got = {name for name in names if name.startswith(PROJECTOR_PREFIX)}
    wanted = {name for name in parameter_names(model) if name.startswith(PROJECTOR_PREFIX)}
    if not got or got == wanted:
        return
    layers = sorted({int(found[1]) for name in got if (found := LINEAR.fullmatch(name))})
    kind = "linear" if layers == [1] else f"mlp{len(layers)}x_gelu" if layers == list(range(1, len(layers) + 1)) else ""
    holds = f"holds a projector of type {kind}" if kind and len(layers) * 2 == len(got) else f"has {min(got ^ wanted)}"
    raise ModelError(
        f"{what} {holds}, and the model's is {model.cfg.projector_type}"
        + (
            f"; set model.projector_type={kind} (in a model folder, mm_projector_type in its config.json)"
            if kind
            else ""
        )
    )


def check_shape(name: str, expected: tuple[int, ...], stored: Stored, may_have_more_rows: bool) -> None:
    """Raise ModelError if a parameter's shape in a file is not `expected`; `may_have_more_rows`: dimension 0 may be
    larger."""
    got = stored.shape
    if got == expected or (may_have_more_rows and got[:1] > expected[:1] and got[1:] == expected[1:]):
        return
    file = stored.file if isinstance(stored, StoredTensor) else "?"
    raise ModelError(
        f"{name} has shape {list(got)} in {file}, and this model needs {list(expected)}; it is from another model"
    )


def fingerprint(model: nn.Module, digests: Mapping[str, str]) -> str:
    """Return a hash of the names and shapes of all parameters of a model, and of the values of its frozen parameters,
    whose digests are `digests`.

    When a run resumes, the hash shows whether the frozen parameters are still the same; the trained parameters are in
    the checkpoint. A quantized parameter is represented by its values before quantization.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        described = [name, list(weight_shape(model, name)), parameter.requires_grad, digests.get(name)]
        digest.update(json.dumps(described).encode())
    return digest.hexdigest()[:32]


def base_fingerprint(digests: Mapping[str, str], apart: Collection[str]) -> str:
    """Return a hash of the values of a LoRA adapter's base model, without the weights that are saved with the adapter.

    Args:
        digests: of the base model's weights, by their names in the model with or without adapters.
        apart: names of the weights that are saved with the adapter.
    """
    without = {without_base(name) for name in apart}
    by_name = {without_base(name): digest for name, digest in digests.items()}
    described = sorted((name, digest) for name, digest in by_name.items() if name not in without)
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:32]


def weight_digests(
    model: nn.Module,
    sources: Mapping[str, Stored],
    rank: int = 0,
    size: int = 1,
    gather: Callable[[list[tuple[str, str]]], list[tuple[str, str]]] = list,
    watch: Callable[[Iterable[str]], Iterable[str]] = iter,
    trained: bool = False,
) -> dict[str, str]:
    """Compute the digests of all frozen parameters of a model, by name; with `trained`, those of the parameters that
    train, before training. Each of `size` ranks computes some of them.

    Args:
        sources: where the parameters' values are read from.
        gather: returns the (name, digest) pairs of all ranks, given those of this rank.
        watch: wraps the iteration over this rank's names, to show progress: a frozen 13B model has 26 GB.
    """
    shapes = {name: weight_shape(model, name) for name, p in model.named_parameters() if p.requires_grad is trained}
    # the largest first, and then divided in turn, so that ranks read about as many bytes
    by_size = sorted(shapes, key=lambda name: (-math.prod(shapes[name]), name))
    with ThreadPoolExecutor(DIGESTING) as threads:
        names = by_size[rank::size]
        digests = threads.map(lambda name: digest_of(sources[name], shapes[name]), names)
        return dict(gather(list(zip(watch(names), digests, strict=True))))


def digest_of(source: Stored, shape: tuple[int, ...]) -> str:
    """Return the SHA-256 of a parameter's values; if it is randomly initialised, a text with its distribution and seed.
    Rows of a file beyond `shape` are left out."""
    if isinstance(source, Drawn):
        return f"{source.rule.kind.value} {source.rule.scale!r} {source.seed}"
    digest = hashlib.sha256(str(source.dtype).encode())
    step = max(1, DIGESTED_BYTES // max(1, math.prod(shape[1:]) * source.dtype.itemsize))
    for begin in range(0, shape[0], step):
        rows = source.rows(begin, min(shape[0], begin + step)).contiguous()
        digest.update(rows.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


@torch.no_grad()
def load_weights(
    sources: dict[str, Stored],
    shards: Mapping[str, ParameterShard],
    watch: Callable[[Iterable[str]], Iterable[str]] = iter,
    packed: Mapping[str, QuantizedLinear] | None = None,
) -> None:
    """Copy the values of every parameter of a model from its source, such as a file, into this rank's shard.

    A rank reads only its own rows of files and, where a weight is stored or only moved by a conversion, only its own
    columns. A weight that will be quantized is read whole, because its scales depend on the whole weight.

    Args:
        watch: wraps the iteration over parameter names, to show progress.
        packed: quantized layers, by the names of their weights; None: no weight is quantized.

    Raises:
        ModelError: a value that this rank reads is NaN or infinite, or too large for the dtype that it is loaded into.
    """
    assert sources.keys() == shards.keys(), sources.keys() ^ shards.keys()
    for name in watch(sources):
        shard = shards[name]
        layer = (packed or {}).get(name)
        if layer is None:
            values = part_of(sources[name], shard)
        else:
            values = sources[name].rows(0, layer.out_features)
        check_values(name, sources[name], values, shard.tensors if layer is None else [])
        if layer is not None:
            values = layer.pack(values)[shard.begin : shard.end]
        for tensor in shard.tensors:  # such as the fp32 master weight and its copy in the compute dtype
            tensor.copy_(values)


def check_values(name: str, source: Stored, values: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Raise ModelError if values that were read for a parameter are not finite, or too large for one of the tensors
    that they will be copied into. `source`: what they were read from; Drawn: they are random initial values."""
    if isinstance(source, Drawn) or not values.numel():
        return
    least, most = (float(end) for end in values.aminmax())  # both are NaN if a value is
    if not (math.isfinite(least) and math.isfinite(most)):
        raise ModelError(
            f"{place_in_files(source)} has values that are NaN or infinite, for {name}: a training that starts from "
            "them has no loss; get the file again, or start from an earlier one"
        )
    largest = max(-least, most)
    for tensor in tensors:
        if largest > torch.finfo(tensor.dtype).max:
            raise ModelError(
                f"{place_in_files(source)} has a value of {largest:.4g} for {name}, and the largest number of "
                f"{str(tensor.dtype).removeprefix('torch.')} is {torch.finfo(tensor.dtype).max:.4g}; set precision=bf16"
            )


def place_in_files(source: Stored) -> str:
    """Return the file and the tensor from which a parameter is read. If there are several, those with values that are
    NaN or infinite are named; they are read again for this."""
    match source:
        case StoredTensor():
            return f"{source.file}: {source.name}"
        case ConvertedTensor():
            bad = [part for part in source.parts if not part.rows(0, max(1, *part.shape[:1])).isfinite().all()]
            return ", ".join(place_in_files(part) for part in (bad or source.parts)[:3])
    # such as the weight in RowLengths
    inside: Any = [value for value in vars(source).values() if hasattr(value, "rows")]
    return ", ".join(map(place_in_files, inside)) or f"a {type(source).__name__}"


def part_of(source: Stored, shard: ParameterShard) -> torch.Tensor:
    """Read the part of a parameter that this rank holds, and from a tensor in files only this part."""
    if shard.columns is None:
        return source.rows(shard.begin, shard.end)
    if isinstance(source, (StoredTensor, ConvertedTensor)):
        return source.part(((shard.begin, shard.end), shard.columns, *((0, size) for size in source.shape[2:])))
    return source.rows(shard.begin, shard.end)[:, slice(*shard.columns)]
