"""Export a trained model to a folder that transformers can load, and its LoRA adapters to a folder that peft can load.

Before an exported folder gets its final name, it is read again and compared with the trained model.
"""

import copy
import dataclasses
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from llava_fsdp.checkpoint.commit import AdapterFolder
from llava_fsdp.checkpoint.reader import saved_weights
from llava_fsdp.checkpoint.verify import Checkpoint
from llava_fsdp.config import Config, DType, FolderFormat, LinearKind, Quantizer
from llava_fsdp.distributed.consensus import on_all_ranks, on_first_rank, rank_and_size
from llava_fsdp.distributed.local_shards import whole
from llava_fsdp.distributed.precision import DTYPES
from llava_fsdp.export.adapter_folder import (
    AdapterWriter,
    Base,
    adapter_tensors,
    prove_adapter,
    small_files,
    whole_rows,
)
from llava_fsdp.export.formats import history, source_of_run, write_folder
from llava_fsdp.export.verify_logits import (
    CLOSE_8_BIT,
    Adapted,
    bound_in,
    compute_dtype,
    load_copy,
    logits,
    relative_difference,
    reloaded_logits,
)
from llava_fsdp.export.weights_writer import Weights, publish_folder
from llava_fsdp.model.llava import Llava, build_llava
from llava_fsdp.model.load_weights import base_fingerprint
from llava_fsdp.model.lora_files import FOLDER, check_changed
from llava_fsdp.model.lora_names import is_adapter, module_of
from llava_fsdp.model.pretrained import EXPORT
from llava_fsdp.model.tensor_files import Stored
from llava_fsdp.runtime.durable_files import make_empty
from llava_fsdp.runtime.errors import DamagedModel, LlavaFsdpError, ModelError
from llava_fsdp.runtime.log import log
from llava_fsdp.runtime.provenance import check_folder, read_notes
from llava_fsdp.train.pipeline_step import evaluate
from llava_fsdp.train.state import TrainState


def export(state: TrainState, cfg: Config, is_first_rank: bool) -> Path:
    """Write the trained model to `output_dir/export` and, with `export.verify`, compare its logits with those of the
    model in memory. Collective: all ranks must call it.

    Trained weights are gathered one at a time. Frozen weights are read again from their source files, bit for bit. If
    the model has adapters, `output_dir/adapter` is written first. The export is then the base model with the adapters
    merged into it; it is not written with `export.merge=false`.

    Returns:
        The folder of the export, or that of the adapter if there is no export.

    Raises:
        CheckpointError: the folder could not be written.
        ModelError: the export's logits differ from the model's, or training did not change the adapters.
    """
    adapted = export_adapter(state, cfg, is_first_rank) if cfg.model.lora.enabled else None
    if adapted is not None and not cfg.export.merge:
        if is_first_rank and (Path(cfg.output_dir) / EXPORT).exists():
            log().warning(
                "%s/%s is of an earlier step than its adapter; export.merge=true writes it anew", cfg.output_dir, EXPORT
            )
        return Path(cfg.output_dir) / FOLDER
    final = Path(cfg.output_dir) / EXPORT
    staged = final.with_name(EXPORT + ".tmp")
    sources = state.sources if adapted is None else adapted.merged

    def read(name: str) -> torch.Tensor:
        if adapted is None:
            return parameter_values(name, state, is_first_rank)
        return whole_rows(sources[name]) if is_first_rank else torch.empty(0)  # rank 0 has all values and merges them

    weights = Weights(
        shapes={name: tuple(source.shape) for name, source in sources.items()},
        dtypes=dict.fromkeys(sources, DTYPES[cfg.export.dtype]),
        read=read,
        is_first_rank=is_first_rank,
    )
    source = source_of_run(whole_model(state), cfg, state.run, state.step)
    try:
        write_folder(FolderFormat.hf, source, weights, staged, {"dtype": cfg.export.dtype.value})
    except LlavaFsdpError:  # raised on every rank
        if is_first_rank:
            shutil.rmtree(staged, ignore_errors=True)  # free the space, because the disk may be full
        raise
    if cfg.export.verify:
        verify(state, cfg, staged, adapted, is_first_rank)
    on_first_rank(lambda: publish_folder(staged, final), f"cannot complete {final}")
    return final


def export_adapter(state: TrainState, cfg: Config, is_first_rank: bool) -> Adapted:
    """Write the trained LoRA adapters to `output_dir/adapter`, read them again and compare them. Collective: all ranks
    must call it.

    Returns:
        The base model and the adapters, with trained values on rank 0 and initial values on the other ranks.

    Raises:
        CheckpointError: the folder could not be written.
        ModelError: training did not change the adapters.
    """
    final = Path(cfg.output_dir) / FOLDER
    staged = final.with_name(FOLDER + ".tmp")
    sources = with_trained(state, is_first_rank)
    names = adapter_tensors(cfg.model, state.trained, sources)
    tensors = {name: sources[name] for name in names}

    def write() -> None:
        check_changed(
            tensors,
            f"the adapter of {cfg.output_dir} after step {state.step}",
            "train it for more steps, or write nothing of a rehearsal: export.enabled=false",
        )
        make_empty(staged)
        notes = history(state.run, cfg.stage.name, state.step, cfg.model.train)
        writer_of(state, cfg).write(staged, tensors, notes)
        prove_adapter(staged, tensors)
        publish_folder(staged, final)

    on_first_rank(write, f"cannot write {final}")
    modules = sorted({module_of(name) for name in names if is_adapter(name)})
    return Adapted(cfg.model.lora, modules, sources)


def with_trained(state: TrainState, is_first_rank: bool) -> dict[str, Stored]:
    """Return the current values of all parameters by name: frozen parameters as tensors in their source files, and on
    rank 0 trained parameters as tensors in memory. On other ranks, trained parameters have their initial values.
    Collective: all ranks must call it."""
    trained = {name: parameter_values(name, state, is_first_rank) for name in state.trained}
    return state.sources | ({name: MemoryTensor(values) for name, values in trained.items()} if is_first_rank else {})


def is_current(state: TrainState, cfg: Config) -> bool:
    """Return whether `output_dir` already contains an undamaged export of the model after the training's current step,
    in the configured dtype. Collective: all ranks must call it."""
    wanted = {"run": state.run, "step": state.step}
    folders = {FOLDER: wanted} if cfg.model.lora.enabled else {}
    if cfg.export.merge or not cfg.model.lora.enabled:
        folders[EXPORT] = {**wanted, "dtype": cfg.export.dtype.value}

    def look() -> bool:
        for name, notes in folders.items():
            folder = Path(cfg.output_dir) / name
            try:
                if not notes.items() <= read_notes(folder).items():
                    return False
                check_folder(folder)
            except DamagedModel as error:
                log().warning("%s\nIt is written anew", error)
                return False
        return True

    return on_first_rank(look, f"cannot read {cfg.output_dir}/{EXPORT}")


def parameter_values(name: str, state: TrainState, is_first_rank: bool) -> torch.Tensor:
    """Return the values of the whole parameter `name` on the CPU of rank 0; the result on other ranks is not used. A
    trained parameter is gathered from all ranks, which all must call this; a frozen one is read from its source
    file."""
    master = state.masters.named.get(name)
    full = whole(master) if master is not None else None
    if state.pipeline is not None and (full is not None or name in state.elsewhere):
        full = state.pipeline.on_rank_0(full, state.elsewhere.get(name))
    if full is not None:
        return full.cpu() if is_first_rank else full
    source = state.sources[name]
    return source.rows(0, source.shape[0]) if is_first_rank else torch.empty(0)


def verify(state: TrainState, cfg: Config, staged: Path, adapted: Adapted | None, is_first_rank: bool) -> None:
    """Load the exported folder with transformers on rank 0's CPU, and compare its logits with those of the trained
    model on a few samples. Collective: all ranks must call it.

    Args:
        staged: the exported folder, before it gets its final name.
        adapted: the base model and the adapters, for a model with adapters; else None.

    Raises:
        ModelError: the logits differ by more than rounding to `export.dtype` can explain.
    """
    micro, sizes = state.loader.steps.probe()
    placed = state.loader.to_device(micro)
    for root in state.roots:
        root.eval()
    with torch.no_grad():
        found = evaluate(state, micro, return_logits=True)
    for root in state.roots:
        root.train()
    if state.pipeline is not None:
        assert isinstance(state.model, Llava)
        found = state.pipeline.from_last(found, (len(micro.label_positions), state.model.parts.language.vocab_size))
    assert found is not None, "only ranks of a pipeline may have no logits"
    live = found.cpu()
    quantised = cfg.model.quantize.mode is not Quantizer.none
    sources = with_trained(state, is_first_rank) if quantised and adapted is None else {}

    def compare() -> None:
        ours, images = live, placed.images.cpu()
        if quantised:
            ours = logits(in_full_precision(state.model, sources, adapted), dataclasses.replace(micro, images=images))
        reloaded = reloaded_logits(staged, micro, images, DTYPES[cfg.precision.param_dtype], sizes)
        difference = relative_difference(reloaded[:, : ours.shape[1]], ours)
        in_fp32 = (cfg.export.dtype, cfg.precision.param_dtype) == (DType.fp32, DType.fp32)
        bound = bound_in(torch.float32 if in_fp32 else torch.bfloat16, whole_model(state))
        bound = bound if cfg.precision.linear is LinearKind.same else CLOSE_8_BIT
        log().info("export: logits after reloading differ by %.2g of the largest (bound %.2g)", difference, bound)
        if not difference <= bound:
            raise ModelError(
                f"{staged} was written, but its logits differ by {difference:.3g} from the model's, which must "
                f"be at most {bound:.2g}: has the loss risen, or jumped? A training that has diverged does this; if it "
                "has not, please report it"
            )

    on_first_rank(compare, f"{staged} was written, but cannot be read back")


def whole_model(state: TrainState) -> torch.nn.Module:
    """Return the model in training or, if each rank has only some stages of it, a copy of the whole model on the meta
    device, for its shapes and its configuration."""
    if state.pipeline is None:
        return state.model
    assert isinstance(state.model, Llava)
    # a second model would change the attention implementation in the configuration of the first
    parts = copy.deepcopy(state.model.parts)
    # None: transformers' own way to run experts. The one registered for training sends tokens to other ranks, which
    # fails on the meta device, on which `build_llava` runs the model.
    parts.language._experts_implementation = None
    return build_llava(parts, state.model.cfg, state.model.compute_dtype, state.model.kernel)


def in_full_precision(model: torch.nn.Module, sources: dict[str, Stored], adapted: Adapted | None) -> Llava:
    """Build a copy of the model as it is exported, with weights in full precision, for a training whose base model is
    quantized.

    Args:
        model: the model in training.
        sources: the current values of all parameters, by name; used only without adapters.
        adapted: the base model and the adapters; None if the model has no adapters.
    """
    assert isinstance(model, Llava)
    plain = build_llava(model.parts, model.cfg.plain, torch.float32)
    return load_copy(plain, sources if adapted is None else adapted.sources, compute_dtype(plain), adapted)


def writer_of(state: TrainState, cfg: Config) -> AdapterWriter:
    """Create the object that writes folders with this run's LoRA adapters."""
    names = adapter_tensors(cfg.model, state.trained, state.sources)
    source = source_of_run(whole_model(state), cfg, state.run, state.step)
    return AdapterWriter(
        source=source,
        lora=cfg.model.lora,
        modules=sorted({module_of(name) for name in names if is_adapter(name)}),
        base=Base(cfg.model, cfg.seed, base_fingerprint(state.digests, names)),
        small_files=small_files(source, next(iter(state.masters.named.values())).dtype),
    )


def in_checkpoints(state: TrainState, cfg: Config) -> AdapterFolder | None:
    """Return how rank 0 writes a folder with the LoRA adapters into each checkpoint: a function and the size of such a
    folder. Return None on the other ranks, and if the model has no adapters. Collective: all ranks must call it."""

    if not cfg.model.lora.enabled:
        return None

    def prepare() -> AdapterFolder | None:
        if rank_and_size()[0] > 0:
            return None
        writer, trained = writer_of(state, cfg), state.masters.named
        names = adapter_tensors(cfg.model, state.trained, state.sources)
        frozen = {name: state.sources[name] for name in names if name not in state.trained}

        def write(folder: Path, found: Checkpoint) -> None:
            tensors = frozen | saved_weights(found)
            step, run = found.facts["step"], found.facts["run"]
            writer.write(folder, {n: tensors[n] for n in names}, history(run, cfg.stage.name, step, cfg.model.train))

        shapes = {n: MemoryTensor(p.detach()) if (p := trained.get(n)) is not None else state.sources[n] for n in names}
        return AdapterFolder(writer.nbytes(shapes), write)

    return on_all_ranks(prepare, "folders of adapters cannot be prepared")


@dataclass(frozen=True)
class MemoryTensor:
    """A tensor in memory with the same interface as a tensor in a file (`Stored`), so that it can be used in its
    place."""

    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def rows(self, begin: int, end: int) -> torch.Tensor:
        return self.tensor[begin:end]
