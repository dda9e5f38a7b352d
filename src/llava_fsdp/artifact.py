"""A trained model as a folder that transformers loads, proven before it is called done."""

import contextlib
import copy
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import GenerationConfig, LlavaConfig, LlavaForConditionalGeneration

from llava_fsdp.checkpoint import on_first_rank, sync_folder
from llava_fsdp.config import Config, DType, Feature
from llava_fsdp.data.steps import MicroBatch
from llava_fsdp.errors import ModelError
from llava_fsdp.log import log
from llava_fsdp.model.llava import Llava
from llava_fsdp.model.names import theirs
from llava_fsdp.model.parts import EXPORT, NOTES
from llava_fsdp.processor import write_processor, write_tokenizer
from llava_fsdp.sharding.precision import DTYPES
from llava_fsdp.sharding.shards import whole
from llava_fsdp.state import TrainState

SHARD_BYTES = 5 * 10**9


def export(state: TrainState, cfg: Config, is_first_rank: bool) -> Path:
    """Write `output_dir/export` and, with `export.verify`, compare its logits with the model's. A collective.

    Trained weights are gathered one at a time; frozen ones are read again from where they came from, so that they
    leave with the very bits they had.

    Raises:
        CheckpointError: the folder could not be written.
        ModelError: what was written does not give the model's logits.
    """
    final = Path(cfg.output_dir) / EXPORT
    staged = final.with_name(EXPORT + ".tmp")
    model = unwrapped(state.model)
    image_id, rows = on_first_rank(lambda: begin(staged, model, cfg, state), f"cannot write {staged}")
    write_weights(state, model, cfg, rows, staged, is_first_rank)
    if cfg.export.verify:
        verify(state, cfg, image_id, staged)
    on_first_rank(lambda: replace(staged, final), f"cannot complete {final}")
    return final


def is_current(state: TrainState, cfg: Config) -> bool:
    """Whether `output_dir/export` is this run's, at this step and in this dtype. A collective."""

    def look() -> bool:
        notes = Path(cfg.output_dir) / EXPORT / NOTES
        found = json.loads(notes.read_text()) if notes.is_file() else {}
        wanted = {"run": state.run, "step": state.step, "dtype": cfg.export.dtype.value}
        return wanted.items() <= found.items()

    return on_first_rank(look, f"cannot read {cfg.output_dir}/{EXPORT}")


def unwrapped(model: nn.Module) -> Llava:
    assert isinstance(model, Llava)  # FSDP makes a subclass of it
    return model


def begin(staged: Path, model: Llava, cfg: Config, state: TrainState) -> tuple[int, int]:
    """Everything but the weights; returns the image tag's id and the rows of the vocabulary."""
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    parts = model.parts
    image_id, pad_id, rows = write_tokenizer(parts.language_folder, staged, parts.language.vocab_size, cfg)
    text = type(parts.language).from_dict({**parts.language.to_dict(), "vocab_size": rows, "use_cache": True})
    config = LlavaConfig(
        vision_config=copy.deepcopy(parts.vision),  # LlavaConfig resets what the live tower reads
        text_config=text,
        image_token_index=image_id,
        image_seq_length=model.image_tokens,
        vision_feature_layer=cfg.model.select_layer,
        vision_feature_select_strategy="default" if cfg.model.select_feature is Feature.patch else "full",
        tie_word_embeddings=bool(parts.language.tie_word_embeddings),
        architectures=["LlavaForConditionalGeneration"],
        dtype=str(DTYPES[cfg.export.dtype]).removeprefix("torch."),
    )
    config.pad_token_id = pad_id
    config.save_pretrained(staged)
    write_processor(parts.vision_folder, staged, config, cfg)
    GenerationConfig(
        bos_token_id=parts.language.bos_token_id, eos_token_id=parts.language.eos_token_id, pad_token_id=pad_id
    ).save_pretrained(staged)
    notes = {
        "run": state.run,
        "stage": cfg.stage.name,
        "step": state.step,
        "dtype": cfg.export.dtype.value,
        "template": cfg.data.template,
        "image_aspect_ratio": cfg.data.image_aspect_ratio.value,
        "vocab_size": parts.language.vocab_size,
        "language": cfg.model.language,
        "vision": cfg.model.vision,
    }
    (staged / NOTES).write_text(json.dumps(notes, indent=1) + "\n")
    return image_id, rows


def write_weights(
    state: TrainState,
    model: Llava,
    cfg: Config,
    rows: int,
    staged: Path,
    is_first_rank: bool,
) -> None:
    """Safetensors shards of at most 5 GB under the hub's names; rank 0 holds one shard at a time."""
    dtype = DTYPES[cfg.export.dtype]
    shapes = {name: torch.Size(source.shape) for name, source in state.sources.items()}
    plan = plan_shards(shapes, dtype.itemsize)
    index: dict[str, str] = {}
    for number, names in enumerate(plan, start=1):
        file = "model.safetensors" if len(plan) == 1 else f"model-{number:05d}-of-{len(plan):05d}.safetensors"
        tensors: dict[str, torch.Tensor] = {}
        for name in names:
            tensor = parameter_values(name, state, is_first_rank)
            if is_first_rank:
                tensors[theirs(name)] = with_rows(name, tensor, rows, model).to(dtype).contiguous()
                index[theirs(name)] = file
        on_first_rank(
            lambda t=tensors, f=file: save_file(t, staged / f, metadata={"format": "pt"}), f"cannot write {file}"
        )
    if len(plan) > 1:
        total = sum(s.numel() for s in shapes.values()) * dtype.itemsize
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1)
        on_first_rank(
            lambda: (staged / "model.safetensors.index.json").write_text(text), "cannot write the index of shards"
        )


def plan_shards(shapes: dict[str, torch.Size], item_size: int) -> list[list[str]]:
    plan: list[list[str]] = [[]]
    filled = 0
    for name, shape in shapes.items():
        size = shape.numel() * item_size
        if plan[-1] and filled + size > SHARD_BYTES:
            plan.append([])
            filled = 0
        plan[-1].append(name)
        filled += size
    return plan


def parameter_values(name: str, state: TrainState, is_first_rank: bool) -> torch.Tensor:
    """A whole parameter on the CPU of rank 0; a collective for what trains."""
    master = state.masters.named.get(name)
    if master is not None:
        full = whole(master)
        return full.cpu() if is_first_rank else full
    source = state.sources[name]
    return source.rows(0, source.shape[0]) if is_first_rank else torch.empty(0)


def with_rows(name: str, tensor: torch.Tensor, rows: int, model: Llava) -> torch.Tensor:
    """A vocabulary cut to what was trained and padded with its mean row; other parameters as they are."""
    if not name.startswith(("language_model.embed", "lm_head.")):
        return tensor
    trained = tensor[: model.parts.language.vocab_size].float()
    padding = trained.mean(dim=0, keepdim=True).expand(rows - len(trained), -1)
    return torch.cat([trained, padding])


def verify(state: TrainState, cfg: Config, image_id: int, staged: Path) -> None:
    """Load what was written with transformers, on rank 0's CPU, and compare logits on a few samples.

    Raises:
        ModelError: they differ by more than rounding to `export.dtype` explains.
    """
    micro = state.loader.steps.probe()
    state.model.eval()
    placed = state.loader.to_device(micro)
    with torch.no_grad():
        ours = state.model(
            placed.input_ids, placed.image_positions, placed.image_rows, placed.images, placed.label_positions
        ).cpu()
    state.model.train()

    def compare() -> None:
        dtype = DTYPES[cfg.precision.param_dtype]
        reloaded = reloaded_logits(staged, micro, placed.images.cpu(), image_id, dtype)
        difference = float((reloaded[:, : ours.shape[1]] - ours).abs().max() / ours.abs().max())
        bound = 1e-4 if (cfg.export.dtype, cfg.precision.param_dtype) == (DType.fp32, DType.fp32) else 0.05
        log().info("export: logits after reloading differ by %.2g of the largest (bound %.2g)", difference, bound)
        if not difference <= bound:
            raise ModelError(f"{staged} was written, but its logits differ by {difference:.3g} from the model's")

    on_first_rank(compare, f"{staged} was written, but cannot be read back")


@torch.no_grad()
def reloaded_logits(
    folder: Path, micro: MicroBatch, images: torch.Tensor, image_id: int, dtype: torch.dtype
) -> torch.Tensor:
    """float32 [labels, rows]: what transformers' own model says of the micro-batch."""
    with quiet_transformers():
        model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()
    ids = micro.input_ids.clone()
    ids.view(-1)[micro.image_positions] = image_id
    pictures = images.to(dtype) if len(images) else None
    logits = model(input_ids=ids, pixel_values=pictures).logits.float()
    return logits.flatten(0, 1)[micro.label_positions]


@contextlib.contextmanager
def quiet_transformers() -> Any:
    """No progress bars of transformers' between our own lines."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def replace(staged: Path, final: Path) -> None:
    shutil.rmtree(final, ignore_errors=True)
    os.rename(staged, final)
    sync_folder(final.parent)
