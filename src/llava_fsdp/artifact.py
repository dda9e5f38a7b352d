"""A trained model as a folder that transformers loads, proven before it is called done."""

import os
import shutil
from pathlib import Path

import torch
from torch import nn

from llava_fsdp.checkpoint import on_first_rank, sync_folder, sync_tree
from llava_fsdp.config import Config, DType, FolderFormat, LinearKind
from llava_fsdp.errors import LlavaFsdpError, ModelError
from llava_fsdp.formats import Subject, write_folder
from llava_fsdp.log import log
from llava_fsdp.model.llava import Llava
from llava_fsdp.model.parts import EXPORT, NOTES
from llava_fsdp.proof import CLOSE, CLOSE_BF16, CLOSE_FP8, apart, reloaded_logits
from llava_fsdp.sharding.precision import DTYPES
from llava_fsdp.sharding.shards import whole
from llava_fsdp.state import TrainState
from llava_fsdp.untrusted import read_json
from llava_fsdp.writing import Weights


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
    subject = Subject(
        model=unwrapped(state.model),
        template=cfg.data.template,
        aspect=cfg.data.trained_aspect,
        grid_pinpoints=cfg.data.grid_pinpoints,
        max_length=cfg.data.max_length,
        language=cfg.model.language,
        vision=cfg.model.vision,
        renamed_tower=None,
        history={
            "run": state.run,
            "stage": cfg.stage.name,
            "step": state.step,
            "train": [part.value for part in cfg.model.train],
        },
    )
    weights = Weights(
        shapes={name: tuple(source.shape) for name, source in state.sources.items()},
        dtypes=dict.fromkeys(state.sources, DTYPES[cfg.export.dtype]),
        read=lambda name: parameter_values(name, state, is_first_rank),
        is_first_rank=is_first_rank,
    )
    try:
        write_folder(FolderFormat.hf, subject, weights, staged, {"dtype": cfg.export.dtype.value})
    except LlavaFsdpError:  # raised on every rank alike
        if is_first_rank:
            shutil.rmtree(staged, ignore_errors=True)  # on a full disk half a model is in the way
        raise
    if cfg.export.verify:
        verify(state, cfg, staged)
    on_first_rank(lambda: replace(staged, final), f"cannot complete {final}")
    return final


def is_current(state: TrainState, cfg: Config) -> bool:
    """Whether `output_dir/export` is this run's, at this step and in this dtype. A collective."""

    def look() -> bool:
        notes = Path(cfg.output_dir) / EXPORT / NOTES
        found = read_json(notes) if notes.is_file() else {}
        wanted = {"run": state.run, "step": state.step, "dtype": cfg.export.dtype.value}
        return wanted.items() <= found.items()

    return on_first_rank(look, f"cannot read {cfg.output_dir}/{EXPORT}")


def unwrapped(model: nn.Module) -> Llava:
    assert isinstance(model, Llava)  # FSDP makes a subclass of it
    return model


def parameter_values(name: str, state: TrainState, is_first_rank: bool) -> torch.Tensor:
    """A whole parameter on the CPU of rank 0; a collective for what trains."""
    master = state.masters.named.get(name)
    if master is not None:
        full = whole(master)
        return full.cpu() if is_first_rank else full
    source = state.sources[name]
    return source.rows(0, source.shape[0]) if is_first_rank else torch.empty(0)


def verify(state: TrainState, cfg: Config, staged: Path) -> None:
    """Load what was written with transformers, on rank 0's CPU, and compare logits on a few samples.

    Raises:
        ModelError: they differ by more than rounding to `export.dtype` explains.
    """
    micro = state.loader.steps.probe()
    state.model.eval()
    placed = state.loader.to_device(micro)
    with torch.no_grad():
        ours = state.model(*placed.inputs[:-1]).cpu()
    state.model.train()

    def compare() -> None:
        reloaded = reloaded_logits(staged, micro, placed.images.cpu(), DTYPES[cfg.precision.param_dtype])
        difference = apart(reloaded[:, : ours.shape[1]], ours)
        bound = CLOSE if (cfg.export.dtype, cfg.precision.param_dtype) == (DType.fp32, DType.fp32) else CLOSE_BF16
        bound = CLOSE_FP8 if cfg.precision.linear is LinearKind.fp8 else bound
        log().info("export: logits after reloading differ by %.2g of the largest (bound %.2g)", difference, bound)
        if not difference <= bound:
            raise ModelError(f"{staged} was written, but its logits differ by {difference:.3g} from the model's")

    on_first_rank(compare, f"{staged} was written, but cannot be read back")


def replace(staged: Path, final: Path) -> None:
    """What is named as done is on the disk: its notes alone would keep a later start from writing it again."""
    sync_tree(staged)
    shutil.rmtree(final, ignore_errors=True)
    os.rename(staged, final)
    sync_folder(final.parent)
