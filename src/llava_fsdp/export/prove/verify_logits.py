"""Compare the logits of a model with the logits of its export, loaded again from the exported folder.

Arguments of many functions here:
    model, shapes: a model of the right architecture, which may be on the meta device; its weights are not used.
    sources: stored values of the parameters, by name.
    rule: computes into how many tiles (square inputs of the vision tower) the model cuts an image, and which tokens the
        image gets.
    adapted: LoRA adapters that are not merged; None without such adapters.
"""

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import (
    MODEL_MAPPING,
    AutoConfig,
    AutoModelForImageTextToText,
    LlavaNextConfig,
    LlavaOnevisionConfig,
)
from transformers.utils import logging as transformers_logging

from llava_fsdp.config import FolderFormat, LoraConfig
from llava_fsdp.data.batching.batch import MicroBatch
from llava_fsdp.data.images.anyres import Size
from llava_fsdp.data.images.image_tokens import ImageTokens, join_tokens
from llava_fsdp.export.prove.logit_distance import Distance, distance
from llava_fsdp.export.write.folded_head import folding_rounds
from llava_fsdp.model.adapters.lora import put_adapters
from llava_fsdp.model.adapters.lora_merge import BASE_WEIGHT, merge_adapters
from llava_fsdp.model.adapters.lora_names import ENDINGS, is_adapter, without_base
from llava_fsdp.model.architecture import Architecture
from llava_fsdp.model.build import build_architecture
from llava_fsdp.model.load_weights import find_weights, load_weights, stored_buffers
from llava_fsdp.model.packed_attention.attention import attention_of_transformers
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.model.sources.pretrained_config import read_model
from llava_fsdp.model.weights.init_weights import computed_buffers, restore_buffers
from llava_fsdp.model.weights.tensor_files import Stored, open_tensors
from llava_fsdp.model.weights.weight_names import ours
from llava_fsdp.parallel.fsdp.materialize import materialize
from llava_fsdp.parallel.local_shards import local_shards
from llava_fsdp.parallel.precision.precision import MasterWeights
from llava_fsdp.runtime.errors import ModelError
from llava_fsdp.runtime.process.host import read_host
from llava_fsdp.runtime.text.log import log

CLOSE_MERGED = 2e-6
"""Largest accepted difference between weights that two programs merged in fp32, relative to the largest weight."""
TEXT_TOKENS = 24
"""Number of text tokens beside the image in the micro-batch for which logits are compared."""
ROOM = 1.2
"""Free memory that is needed to compute a model's logits, as a multiple of the bytes of its weights."""


@dataclass(frozen=True)
class Rounded:
    """The stored values of a parameter, converted to the dtype of an export when they are read."""

    stored: Stored
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    def rows(self, begin: int, end: int) -> torch.Tensor:
        return self.stored.rows(begin, end).to(self.dtype)


@dataclass(frozen=True)
class Adapted:
    """A model with LoRA adapters that are not merged into its weights. `modules` are the names of the modules that have
    adapters; `sources` are stored values of all parameters, those of the adapters included, by name."""

    lora: LoraConfig
    modules: list[str]
    sources: dict[str, Stored]

    @property
    def base(self) -> dict[str, Stored]:
        """Stored values of all parameters but those of the adapters, by their names in a model without adapters."""
        return {without_base(name): source for name, source in self.sources.items() if not is_adapter(name)}

    @property
    def merged(self) -> dict[str, Stored]:
        """Stored values of all parameters after the adapters are merged, by their names in a model without adapters."""
        return merge_adapters(self.sources, self.lora.scaling)


@torch.no_grad()
def prove_merge(adapted: Adapted) -> float:
    """Check that LoRA adapters are merged as peft merges them: every adapted module is built with peft's own layer, and
    merged by it in fp32. Weights are compared before they are rounded to the dtype of an export, which both sides would
    round in the same way. One module is in memory at a time.

    Return the largest difference between two weights of a module, relative to the module's largest weight. Raises
    ModelError if it is larger than another order of summation explains.
    """
    ours, largest = adapted.merged, 0.0
    for module in adapted.modules:
        expected = merged_by_peft(module, adapted)
        merged_rows = ours[f"{module}.weight"].rows(0, len(expected)).float()
        difference = relative_difference(merged_rows, expected)
        if not difference <= CLOSE_MERGED:
            raise ModelError(
                f"the merged weights of {module} differ by {difference:.3g} of the largest from those that peft merges "
                f"(bound {CLOSE_MERGED:.2g})"
            )
        largest = max(largest, difference)
    log().info("merged weights differ from peft's by %.2g of the largest (bound %.2g)", largest, CLOSE_MERGED)
    return largest


def merged_by_peft(module: str, adapted: Adapted) -> torch.Tensor:
    """Return the weight of an adapted module after peft has merged its LoRA adapter into it: float32 [out, in]. To be
    called under `torch.no_grad`, because it writes into parameters."""
    names = [name for name in (BASE_WEIGHT, *ENDINGS) if module + name in adapted.sources]
    stored = {name: adapted.sources[module + name] for name in names}
    rows, columns = stored[BASE_WEIGHT].shape
    holder: Any = nn.ModuleDict({"layer": nn.Linear(columns, rows, bias=False)})
    put_adapters(holder, adapted.lora, ["layer"])
    for name, parameter in holder.layer.named_parameters():
        parameter.copy_(stored[f".{name}"].rows(0, parameter.shape[0]))
    holder.layer.merge()
    return holder.layer.base_layer.weight.float()


def prove(
    folder_format: FolderFormat,
    model: Architecture,
    sources: dict[str, Stored],
    dtypes: dict[str, torch.dtype],
    folder: Path,
    rule: ImageTokens,
) -> Distance:
    """Load an exported folder and compare its logits with those of the weights that were exported, rounded to the
    dtypes of the export. Return the distance between them. With the format `projector`, which has the projector alone
    in two files, each of them is loaded into the source model.

    The logits must be equal if llava_fsdp's model class loads the export, and close if transformers' model class loads
    it. If weights were rounded, the log says how far the export is from the unrounded ones, which has no bound.

    Args:
        model: a model of the architecture; its weights are not used.
        sources, dtypes: by name of a weight, its values before the export and its dtype in the export.
        rule: computes which tokens an image gets.

    Raises:
        ModelError: the logits differ.
    """
    compute = compute_dtype(model)
    micro, sizes = random_rows(model, rule)
    source = load_copy(model, {n: Rounded(s, dtypes[n]) for n, s in sources.items()}, compute)
    expected = logits(source, micro)
    if folder_format is FolderFormat.projector:
        all_actual = []
        for file in ("mm_projector.bin", "mm_projector.safetensors"):
            replace_projector(source, folder / file)
            all_actual.append(logits(source, micro))
    else:
        del source
        gc.collect()
        all_actual = [logits_of_folder(folder_format, folder, micro, compute, sizes)]
    # A factor of the logits is multiplied into the weight of the output layer for transformers. If this rounds the
    # weight, logits differ as they do in bf16. `min` picks one of the weights that have a row for each token.
    head_is_rounded = folding_rounds(model.parts, dtypes[min(model.with_vocabulary() & dtypes.keys())])
    for actual in all_actual:
        difference = distance(actual, expected)
        error = difference.exceeds(torch.bfloat16 if head_is_rounded else compute, has_experts(model))
        if folder_format is not FolderFormat.hf and not difference.largest == 0:
            error = f"its logits differ by {difference.largest:.3g} of the largest, and must be equal"
        log().info("logits after reloading differ by %.2g of the largest logit, %s", difference.largest, difference)
        if error:
            raise ModelError(f"{folder} was written, but {error} from the source's")
    if any(source.dtype.itemsize > dtypes[name].itemsize for name, source in sources.items()):
        del all_actual
        gc.collect()
        exact = logits(load_copy(model, sources, compute), micro)
        log().info("rounding to the dtype of the export moves the logits by %s", distance(expected, exact))
    return difference


def has_experts(model: Architecture) -> bool:
    """Return whether the language model is a mixture of experts, whose weights are stored as [experts, out, in]."""
    return any(p.ndim == 3 for p in model.language.parameters())


def relative_difference(written: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest absolute difference between two tensors, relative to the largest expected absolute value."""
    return float((written - expected).abs().max() / expected.abs().max())


def compute_dtype(model: Architecture) -> torch.dtype:
    """Return the dtype for a model's logits on the CPU: fp32 if the host (or container) has memory for it, else
    bf16."""
    size = 4 * sum(p.numel() for p in model.parameters())
    if read_host().free > ROOM * size:
        return torch.float32
    log().info("computing in bf16: fp32 would take %.0f GiB", size / 2**30)
    return torch.bfloat16


def compute_place(model: Architecture, device: torch.device) -> tuple[torch.device, torch.dtype]:
    """Return where to compute a model's logits, and in which dtype: on the training's device if it is a GPU whose free
    memory holds the weights, in fp32 or else in bf16, and a forward pass; else on the CPU (`compute_dtype`)."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        count = sum(p.numel() for p in model.parameters())
        for dtype in (torch.float32, torch.bfloat16):
            if free > ROOM * dtype.itemsize * count:
                return device, dtype
    return torch.device("cpu"), compute_dtype(model)


def random_rows(model: Architecture, rule: ImageTokens) -> tuple[MicroBatch, list[Size]]:
    """Return a random micro-batch of two sequences, one with an image and one without, in which every token is a label;
    and the image's size, [(width, height)] in pixels: several tiles and padding, if the model cuts images."""
    tile = model.parts.image_size
    size = (tile, tile + tile // 3) if rule.needs_size(1) else (tile, tile)
    return random_micro_batch(model, rule, rule.of(size, 1), rule.count_tiles(size, 1)), [size]


def random_micro_batch(model: Architecture, rule: ImageTokens, tokens: np.ndarray, tiles: int) -> MicroBatch:
    """Return a random micro-batch of two sequences, one with an image or a video, in which every token is a label.

    Args:
        tokens: one element for each token of the image or the video, as `rule.of` or `rule.of_video` returns them.
        tiles: number of tiles of the image, or of frames of the video.
    """
    dice, tile = torch.Generator().manual_seed(0), model.parts.image_size
    rows, weights = (torch.from_numpy(a) for a in join_tokens([(tokens, tiles * rule.features)]))
    # only ids of the lower half of the vocabulary, as the <image> token may be one of the last
    ids = torch.randint(model.parts.language.vocab_size // 2, (2, len(rows) + TEXT_TOKENS), generator=dice)
    return MicroBatch(
        input_ids=ids,
        images={
            "positions": torch.arange(TEXT_TOKENS // 2, TEXT_TOKENS // 2 + len(rows)),
            "rows": rows,
            "weights": weights,
            "tiles": torch.randn((tiles, 3, tile, tile), generator=dice),
        },
        label_positions=torch.arange(ids.numel()),
        label_ids=torch.zeros(0),  # not used, because logits are computed and no loss
        scale=1.0,
    )


def load_copy(
    shapes: Architecture,
    sources: Any,
    compute: torch.dtype,
    adapted: Adapted | None = None,
    device: torch.device | str = "cpu",
) -> Architecture:
    """Return a model of the architecture of `shapes`, whose own weights are not used, on a device. During loading, host
    memory holds the model and only one other parameter at a time.

    Args:
        sources: stored values of the parameters, by name.
        compute: dtype of the parameters.
        adapted: says which modules get LoRA adapters; None: no module.
    """
    model = empty_copy(shapes, compute, adapted, device)
    load_weights(sources, local_shards(model, MasterWeights({})))
    return model


def empty_copy(
    shapes: Architecture, compute: torch.dtype, adapted: Adapted | None = None, device: torch.device | str = "cpu"
) -> Architecture:
    """Return a model of the architecture of `shapes` on a device, with parameters of the dtype `compute` that have no
    values yet. Its buffers have values: those in the files of the model, and those that transformers computes.
    `adapted` says which modules get LoRA adapters; None: no module."""
    model = build_architecture(shapes.parts, shapes.cfg.plain, compute)
    if adapted is not None:
        with torch.device("meta"):
            put_adapters(model, adapted.lora, adapted.modules)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(compute)
    buffers = stored_buffers(model)
    buffers |= computed_buffers(model, buffers)
    materialize(model, lambda empty: empty.to_empty(device=device))
    restore_buffers(model, buffers)
    return model.eval()


@torch.no_grad()
def logits(model: Architecture, micro: MicroBatch) -> torch.Tensor:
    """Return a model's logits for the label tokens of a micro-batch: float32 [labels, vocabulary]."""
    return model(**micro.inputs, return_logits=True)


def logits_of_folder(
    form: FolderFormat, folder: Path, micro: MicroBatch, compute: torch.dtype, sizes: list[Size]
) -> torch.Tensor:
    """Load an exported folder, in the format hf with transformers and otherwise with llava_fsdp, and return its logits
    for a micro-batch: float32 [labels, vocabulary]. `sizes`: width and height in pixels of each image."""
    if form is FolderFormat.hf:
        return reloaded_logits(folder, micro, micro.images["tiles"], compute, sizes)
    cfg = read_model(folder)  # the folder names its language model and vision tower
    parts = find_parts(cfg)
    model = build_architecture(parts, cfg, compute)
    # no projector of its own, and a seed that is not used: all weights are in the folder
    return logits(load_copy(model, find_weights(model, parts, cfg), compute), micro)


@torch.no_grad()
def replace_projector(model: Architecture, file: Path) -> None:
    """Load the projector in an exported file into a model, in place. Raises ModelError if the file does not have
    exactly the projector's parameters."""
    parameters = {n: p for n, p in model.named_parameters() if n.startswith("multi_modal_projector.")}
    stored = {ours(name): tensor for name, tensor in open_tensors(file).items()}
    if stored.keys() != parameters.keys():
        raise ModelError(f"{file} was written, but has {sorted(stored)} instead of {sorted(parameters)}")
    for name, parameter in parameters.items():
        parameter.copy_(stored[name].rows(0, parameter.shape[0]))


def reloaded_logits(
    folder: Path, micro: MicroBatch, images: torch.Tensor, dtype: torch.dtype, sizes: list[Size]
) -> torch.Tensor:
    """Load an exported folder with transformers, in this dtype, and return its logits for the label tokens of a
    micro-batch: float32 [labels, rows of the exported embeddings].

    Args:
        images: pixels of all images, normalised and cut into tiles; the model runs on their device.
        sizes: width and height in pixels of each image.
    """
    return exported_logits(open_export(folder, dtype).to(images.device), micro, images, sizes)


def open_export(folder: Path, dtype: torch.dtype) -> Any:
    """Load an exported folder with transformers. Raises ModelError if a weight of transformers' model is missing in the
    files, or the files have a weight that the model does not have."""
    transformers_logging.disable_progress_bar()
    config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    text = config.get_text_config()
    language = next((name for name in config.sub_configs if getattr(config, name, None) is text), "")
    loaded: Any = AutoModelForImageTextToText.from_pretrained(
        folder,
        dtype=dtype,
        # the vision part may have no attention, and then transformers refuses a name for all parts
        attn_implementation={language: attention_of_transformers(text)} if type(text) in MODEL_MAPPING else None,
        trust_remote_code=False,
        local_files_only=True,
        weights_only=True,
        output_loading_info=True,
    )
    model, differing = loaded
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if differing[kind]:
            raise ModelError(
                f"transformers loads {folder} with {kind}: {', '.join(map(str, sorted(differing[kind])[:3]))}"
            )
    return model.eval()


@torch.no_grad()
def exported_logits(model: Any, micro: MicroBatch, images: torch.Tensor, sizes: list[Size] | None) -> torch.Tensor:
    """Return the logits of an export, loaded with transformers, for the label tokens of a micro-batch: float32 [labels,
    rows of the exported embeddings].

    Args:
        images: pixels of all images, normalised and cut into tiles (square inputs of the vision tower), or of the
            frames of one video: [tiles or frames, 3, height, width].
        sizes: width and height in pixels of each image; None: `images` is a video.
    """
    config, pixels = model.config, images.to(model.dtype)
    ids, inputs = micro.input_ids.clone(), {}
    token = config.image_token_id if sizes is not None else config.video_token_id
    ids.view(-1)[micro.images["positions"]] = token
    if sizes is None:
        inputs["pixel_values_videos"] = pixels[None]
    elif len(images):
        inputs["pixel_values"] = pixels
    if isinstance(config, LlavaNextConfig | LlavaOnevisionConfig) and sizes and len(images):
        inputs["image_sizes"] = torch.tensor([(height, width) for width, height in sizes])
    if isinstance(config, LlavaOnevisionConfig) and sizes and len(images):
        # transformers joins tiles where this number is 1; where it is larger, each image is one tile
        single = len(images) > len(sizes)
        inputs["batch_num_images"] = torch.tensor([1 if single else max(2, len(sizes))])
    logits = model(input_ids=ids, **inputs).logits.float()
    return logits.flatten(0, 1)[micro.label_positions]
