"""Export a trained model to a folder that transformers can load, and its LoRA adapters to a folder that peft can load.

Before an exported folder gets its final name, it is read again and compared with the trained model.
"""

import gc
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from llava_fsdp.checkpoint.commit import AdapterCopy
from llava_fsdp.checkpoint.reader import saved_weights
from llava_fsdp.checkpoint.verify import Checkpoint
from llava_fsdp.config import Config, DType, FolderFormat, KeptDType, Quantizer, Which
from llava_fsdp.data.batching.batch import MicroBatch
from llava_fsdp.export.prove.logit_distance import CLOSE, Distance, bound_of_classes, distance
from llava_fsdp.export.prove.reload import comparable, logits_of_class
from llava_fsdp.export.prove.verify_logits import (
    Adapted,
    compute_place,
    empty_copy,
    has_experts,
    logits,
    prove_merge,
)
from llava_fsdp.export.write.adapter_folder import (
    AdapterWriter,
    Base,
    adapter_tensors,
    prove_adapter,
    small_files,
    whole_rows,
)
from llava_fsdp.export.write.class_adapter import writer_class
from llava_fsdp.export.write.folded_head import HEAD, folding_rounds, with_folded_head
from llava_fsdp.export.write.formats import source_of_run, write_folder
from llava_fsdp.export.write.weights_writer import Weights, publish_folder
from llava_fsdp.model.adapters.lora_files import FOLDER, check_changed
from llava_fsdp.model.adapters.lora_names import is_adapter, module_of
from llava_fsdp.model.architecture import Architecture
from llava_fsdp.model.build import build_architecture, copied_parts
from llava_fsdp.model.load_weights import base_fingerprint, find_weights, load_weights
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.model.sources.pretrained_config import read_model
from llava_fsdp.model.weights.tensor_files import Stored
from llava_fsdp.parallel.local_shards import local_shards, whole
from llava_fsdp.parallel.precision.precision import DTYPES, MasterWeights, norm_weights
from llava_fsdp.parallel.ranks.consensus import on_all_ranks, on_first_rank, rank_and_size
from llava_fsdp.runtime.errors import DamagedModel, LlavaFsdpError, ModelError
from llava_fsdp.runtime.files.durable_files import make_empty
from llava_fsdp.runtime.files.provenance import README, WHICH, check_folder, read_notes
from llava_fsdp.runtime.files.unfinished import EXPORT
from llava_fsdp.runtime.text.log import log
from llava_fsdp.train.pipeline_step import evaluate
from llava_fsdp.train.state import TrainState

LARGEST_MEAN = 0.5
"""Largest accepted mean difference, relative to the mean absolute logit, between logits that a training computes in 16
or 8 bits and those of a copy of its weights in fp32. A few hundredths are usual; logits of unrelated models differ by
more than 1."""
LARGEST_KL = 0.05
"""Kullback-Leibler divergence in nats per token from which on the effect of rounding is a warning."""


def export(state: TrainState, cfg: Config, is_first_rank: bool) -> Path:
    """Write the trained model to `output_dir/export` and, with `export.verify`, compare its logits with those of the
    model in memory. Collective.

    Trained weights are gathered one at a time. Frozen weights are read again from their source files, bit for bit. If
    the model has adapters, `output_dir/adapter` is written first, and the export is the base model with the adapters
    merged into it (with `export.merge=false` no model is exported).

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
        return Path(cfg.output_dir) / FOLDER  # that of the adapter
    final = Path(cfg.output_dir) / EXPORT
    staged = final.with_name(EXPORT + ".tmp")
    log().info(
        "export: writing %s%s; this may take minutes",
        final, ", reading it again and comparing it with the trained model" if cfg.export.verify else "",
    )  # fmt: skip
    sources = state.sources if adapted is None else adapted.merged

    def read(name: str) -> torch.Tensor:
        if adapted is None:
            return parameter_values(name, state, is_first_rank)
        return whole_rows(sources[name]) if is_first_rank else torch.empty(0)  # rank 0 has all values and merges them

    weights = Weights(
        shapes={name: tuple(source.shape) for name, source in sources.items()},
        dtypes=dict.fromkeys(sources, DTYPES[cfg.export.stored]),
        read=read,
        is_first_rank=is_first_rank,
    )
    source = source_of_run(whole_model(state), cfg, state.run, state.step)
    try:
        notes = {"dtype": cfg.export.dtype.value, **notes_of_which(cfg)}
        write_folder(FolderFormat.hf, source, weights, staged, notes)
    except LlavaFsdpError:  # raised on every rank
        if is_first_rank:
            shutil.rmtree(staged, ignore_errors=True)  # free the space, because the disk may be full
        raise
    if cfg.export.verify:
        try:
            if adapted is not None:
                on_first_rank(lambda: prove_merge(adapted), f"cannot merge the adapters of {cfg.output_dir}")
            verify(state, cfg, staged, weights)
        except ModelError as error:  # raised on every rank
            raise ModelError(f"{error}\n{how_to_go_on(cfg, final, staged)}") from error
    on_first_rank(lambda: publish_folder(staged, final), f"cannot complete {final}")
    return final


def how_to_go_on(cfg: Config, final: Path, staged: Path) -> str:
    """Return the end of an error message about an export that was written into the folder `staged` and refused, so that
    the folder does not get its name `final`. It says where the export's files and the trained weights are, and with
    which command the last checkpoint is exported without a comparison. The command has no `dtype` if `llava-fsdp
    export` does not know the value of `export.dtype`."""
    dtype = f"dtype={cfg.export.dtype.value}" if cfg.export.dtype.value in [kept.value for kept in KeptDType] else ""
    replaced = "overwrite=true" if final.exists() else ""
    which = "" if cfg.export.which is Which.last else f"which={cfg.export.which.value}"
    words = f"source={cfg.output_dir}", f"to={final}", which, dtype, "verify=false", replaced
    command = " ".join(["llava-fsdp export", *(shlex.quote(word) for word in words if word)])
    return (
        f"{final} was not made. The trained weights are in {cfg.output_dir}/checkpoints, and {staged} has what was "
        f"written. To compare again, start the run again; to export the weights without the comparison: {command}"
    )


def export_adapter(state: TrainState, cfg: Config, is_first_rank: bool) -> Adapted:
    """Write the trained LoRA adapters to `output_dir/adapter`, read them again and compare them. Collective.

    Returns:
        The base model and the adapters, with trained values on rank 0 and initial values on the other ranks.

    Raises:
        CheckpointError: the folder could not be written.
        ModelError: training did not change the adapters.
    """
    final = Path(cfg.output_dir) / FOLDER
    staged = final.with_name(FOLDER + ".tmp")
    sources = sources_with_trained(state, is_first_rank)
    names = adapter_tensors(cfg.model, state.trained, sources)
    tensors = {name: sources[name] for name in names}

    def write() -> None:
        """Write the adapter to a staging folder, check it, and publish it."""
        check_changed(
            tensors,
            f"the adapter of {cfg.output_dir} after step {state.step}",
            "train it for more steps, or write nothing of a rehearsal: export.enabled=false",
        )
        make_empty(staged)
        writer = writer_of(state, cfg)
        writer.write(staged, tensors, {"run": state.run, "step": state.step, **notes_of_which(cfg)})
        prove_adapter(staged, tensors, writer.is_of_class)
        publish_folder(staged, final)
        log().info(
            "adapters are in %s; vLLM ignores their names without an error: serve %s, or see %s",
            final, f"{cfg.output_dir}/{EXPORT}" if cfg.export.merge else "a merged export", final / README,
        )  # fmt: skip

    on_first_rank(write, f"cannot write {final}")
    modules = sorted({module_of(name) for name in names if is_adapter(name)})
    return Adapted(cfg.model.lora, modules, sources)


def sources_with_trained(state: TrainState, is_first_rank: bool) -> dict[str, Stored]:
    """Return all parameters by name: frozen ones in their source files, and trained ones with their values in memory on
    rank 0, and their initial values on other ranks. Collective."""
    trained = {name: parameter_values(name, state, is_first_rank) for name in state.trained}
    return state.sources | ({name: MemoryTensor(values) for name, values in trained.items()} if is_first_rank else {})


def folder_of(cfg: Config) -> Path | None:
    """Return the folder that `export` writes: the merged model, or the adapter alone; None if exports are off."""
    if not cfg.export.enabled:
        return None
    is_adapter = cfg.model.lora.enabled and not cfg.export.merge
    return Path(cfg.output_dir) / (FOLDER if is_adapter else EXPORT)


def notes_of_which(cfg: Config) -> dict[str, str]:
    """Return the entry of an export's notes that says which weights it has, unless they are those of the last step."""
    return {} if cfg.export.which is Which.last else {WHICH: cfg.export.which.value}


def is_current(state: TrainState, cfg: Config) -> bool:
    """Return whether `output_dir` already has an undamaged export of this step, of the configured weights and dtype.
    Collective."""
    wanted = {"run": state.run, "step": state.step, WHICH: None, **notes_of_which(cfg)}
    folders = {FOLDER: wanted} if cfg.model.lora.enabled else {}
    if cfg.export.merge or not cfg.model.lora.enabled:
        folders[EXPORT] = {**wanted, "dtype": cfg.export.dtype.value}

    def look() -> bool:
        """Return whether each folder exists undamaged and has the notes of this export."""
        for name, notes in folders.items():
            folder = Path(cfg.output_dir) / name
            try:
                found = read_notes(folder)
                if any(found.get(key) != value for key, value in notes.items()):
                    return False
                check_folder(folder)
            except DamagedModel as error:
                log().warning("%s\nIt is written anew", error)
                return False
        return True

    return on_first_rank(look, f"cannot read {cfg.output_dir}/{EXPORT}")


def parameter_values(name: str, state: TrainState, is_first_rank: bool) -> torch.Tensor:
    """Return a whole parameter on the CPU of rank 0; the result on other ranks is not used. A trained parameter is
    gathered from all ranks (collective), also if only ranks with other stages of the model have it (`state.elsewhere`).
    A frozen parameter is read from its source file."""
    master = state.masters.named.get(name)
    full = whole(master) if master is not None else None
    if state.pipeline is not None and (full is not None or name in state.elsewhere):
        full = state.pipeline.on_rank_0(full, state.elsewhere.get(name))
    if full is not None:
        return full.cpu() if is_first_rank else full
    source = state.sources[name]
    return source.rows(0, source.shape[0]) if is_first_rank else torch.empty(0)


def verify(state: TrainState, cfg: Config, staged: Path, weights: Weights) -> None:
    """Read the exported folder again, before it gets its final name, and compare it with the trained model. Collective.

    1. Every weight that llava_fsdp reads from the folder is the trained one, rounded to `export.dtype`, to the bit.
    2. A copy of the model on rank 0, with the trained weights, has the logits of the model in training, on a few
    samples. The copy is on the GPU, if there is room, or on the CPU. If the model's base is quantized, this is left
    out, because the copy's base is not.
    3. The copy with rounded weights has the logits that transformers computes from the folder.

    The log says how far the logits of 3 are from those of 2: the effect of rounding, to which no bound applies.
    `weights` are what was exported: the trained weights, with LoRA adapters merged into them. Raises ModelError if the
    export is not the trained model."""
    failing = f"{staged} was written, but cannot be read back"
    model = plain_model(state)
    # a micro-batch of two samples, the sizes of its images, and the positions at which logits are compared
    probe, sizes = state.loader.steps.probe()
    micro = comparable(model, probe)
    live_values, placed = live_logits(state, micro).cpu(), state.loader.to_device(micro)
    written: dict[str, Stored] = {}
    copies: list[Architecture] = []

    def prepare() -> None:
        written.update(weights_in(staged))
        device, compute = compute_place(model, placed.input_ids.device)
        copies.append(empty_copy(model, compute, device=device))

    on_first_rank(prepare, failing)
    parameters = dict(copies[0].named_parameters()) if copies else {}
    check_and_load_weights(
        weights, with_folded_head(weights, model), staged, written, parameters, used_dtypes(model, cfg)
    )

    log().info("export: its weights are the trained ones rounded to %s, equal to the bit", cfg.export.dtype.value)

    def compare() -> None:
        """Compare the logits of the trained copy with those of the model in training, and those that transformers
        computes from the written weights with those that llava_fsdp computes."""
        device, compute = next((parameter.device, parameter.dtype) for parameter in copies[0].parameters())
        batch = placed.map(lambda values: values.to(device))
        trained = logits(copies[0], batch).cpu()
        if cfg.model.quantize.mode is Quantizer.none:
            check_copy(trained, live_values, cfg, compute)
        rounded = {name: written[name] for name in weights.shapes}
        load_weights(rounded, local_shards(copies[0], MasterWeights({})))
        ours = logits(copies[0], batch).cpu()
        copies.clear()
        gc.collect()
        theirs = logits_of_class(model, staged, batch, compute, sizes, rounded).cpu()
        found = distance(theirs, ours)
        # the export's output layer contains the factor of the logits, by which it may be rounded once more
        head_is_rounded = folding_rounds(model.parts, DTYPES[cfg.export.stored])
        allowed = torch.bfloat16 if head_is_rounded else compute
        wrong = found.exceeds(allowed, has_experts(model))
        if wrong:
            raise ModelError(f"{staged} was written, but transformers computes something else from it: {wrong}")
        by = f"computed in {short_name(compute)} by transformers and by llava_fsdp"
        bound = bound_of_classes(allowed, has_experts(model))
        log_close(f"the exported weights, {by}", found, bound, by_largest=allowed == torch.float32)
        report_rounding(distance(theirs, trained), cfg)

    on_first_rank(compare, failing)


def weights_in(folder: Path) -> dict[str, Stored]:
    """Return the weights in an exported folder by llava_fsdp's names, read as `model.checkpoint` is."""
    cfg = read_model(folder)
    parts = find_parts(cfg)
    return find_weights(build_architecture(parts, cfg, torch.float32), parts, cfg)


def check_copy(trained: torch.Tensor, live: torch.Tensor, cfg: Config, compute: torch.dtype) -> None:
    """Raise ModelError if a copy of the trained model has other logits than the model in training.

    Args:
        trained: logits of the copy: float32 [labels, vocabulary].
        live: those of the model in training, which may compute in 16 or 8 bits.
        compute: dtype in which the copy computes.
    """
    found = distance(trained, live)
    in_fp32 = cfg.precision.param_dtype is DType.fp32 and not cfg.precision.linear.in_8_bits
    # with fewer bits, single logits may differ by much, so that only the mean difference is bounded
    if not (found.largest <= CLOSE if in_fp32 else found.mean <= LARGEST_MEAN):
        raise ModelError(
            f"a copy of the trained weights has other logits than the model in training: they differ by "
            f"{found.largest:.2g} of the largest, {found}; please report it"
        )
    linear = f" and {cfg.precision.linear.value}" if cfg.precision.linear.in_8_bits else ""
    by = f"computed in {short_name(compute)} and as in training ({cfg.precision.param_dtype.value}{linear})"
    log_close(f"the trained weights, {by}", found, CLOSE if in_fp32 else LARGEST_MEAN, by_largest=in_fp32)


def log_close(what: str, found: Distance, bound: float, by_largest: bool) -> None:
    """Log that the logits of two computations, which `what` names, differ by less than `bound`: in the largest
    difference with `by_largest`, else in the mean one."""
    shown = f"{found.largest:.2g} of the largest logit" if by_largest else f"{found}, as rounding to few bits does"
    log().info("export: %s: logits differ by %s, within the bound of %.2g", what, shown, bound)


def short_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in the configuration, such as bf16."""
    return next(name.value for name, own in DTYPES.items() if own == dtype)


def report_rounding(distance_of_rounding: Distance, cfg: Config) -> None:
    """Log how far rounding to `export.dtype` moves the logits of the trained model (`distance_of_rounding`): a warning
    if the probabilities of tokens change much (`kl`, a divergence) and training did not round in the same way."""
    dtype = cfg.export.dtype.value
    text = (
        f"export: the trained weights, as trained and rounded to export.dtype={dtype}: logits differ by "
        f"{distance_of_rounding}"
    )
    # the dtype to which training itself rounds the weights; those with adapters it uses unrounded
    used = DType.fp32 if cfg.model.lora.enabled else cfg.precision.param_dtype
    if distance_of_rounding.kl > LARGEST_KL and used is not cfg.export.stored:
        log().warning(
            "%s: the export is not as good as the losses of the training say. Start the run again with "
            "export.dtype=%s, which only writes the export anew", text, used.value,
        )  # fmt: skip
    else:
        log().info("%s; that is usual, and a KL above %.2g would be a warning", text, LARGEST_KL)


def live_logits(state: TrainState, micro: MicroBatch) -> torch.Tensor:
    """Return the logits of the model in training: float32 [labels, vocabulary]. Collective."""
    for root in state.roots:
        root.eval()
    with torch.no_grad():
        found = evaluate(state, micro, return_logits=True)
    for root in state.roots:
        root.train()
    if state.pipeline is not None:
        assert isinstance(state.model, Architecture)
        found = state.pipeline.from_last(found, (len(micro.label_positions), state.model.language_config.vocab_size))
    assert found is not None, "only ranks of a pipeline may have no logits"
    return found


def used_dtypes(model: Architecture, cfg: Config) -> dict[str, torch.dtype]:
    """Return the dtype to which training rounds each weight of a model without adapters before it is used: fp32 (no
    rounding) for norms that are kept in fp32, and for all weights if the run has adapters, which are added to the
    results of their layers."""
    norms = norm_weights(model, cfg.precision)
    used = torch.float32 if cfg.model.lora.enabled else DTYPES[cfg.precision.param_dtype]
    return {name: torch.float32 if parameter in norms else used for name, parameter in model.named_parameters()}


@torch.no_grad()
def check_and_load_weights(
    trained: Weights,
    exported: Weights,
    staged: Path,
    written: dict[str, Stored],
    copies: dict[str, torch.nn.Parameter],
    used_dtypes: dict[str, torch.dtype],
) -> None:
    """Check that every weight in an exported folder is the trained one, rounded to the dtype of the export, to the bit;
    and load the trained weights into a copy of the model, whose logits are compared afterwards. Both are done at once,
    because each weight is gathered from all ranks only once. Collective: rank 0 compares, the others send.

    Args:
        trained: the trained weights.
        exported: the same, with the factor of the logits multiplied into the weight of the output layer.
        staged: the exported folder, for messages.
        written: on rank 0, the weights in the folder, by name. Changed: an output layer that has a factor is replaced
            by the trained one without it, rounded to the dtype of the export, because the copy multiplies its logits.
        copies: on rank 0, the parameters of the copy by name, which get the trained values; empty on other ranks.
        used_dtypes: dtype to which training rounds each weight before it is used, by name. The copy's values are so
            rounded.

    Raises:
        ModelError: a weight in the folder is not the trained one, or has a value that is not finite.
    """
    errors: list[Exception] = []  # raised after the collectives, in which the other ranks wait for rank 0

    def check_and_load(name: str, values: torch.Tensor, original: torch.Tensor, has_factor: bool) -> None:
        """Raise ModelError unless the weight in the folder is `values`, rounded; put `original` (the same without the
        factor of the logits) into the copy."""
        dtype = exported.dtypes[name]
        if not values.isfinite().all():
            raise ModelError(f"{name} has values that are not finite: the training has diverged")
        rows = min(len(values), len(copies[name])) if name in copies else len(values)  # a file may have more rows
        if not torch.equal(written[name].rows(0, rows).float(), values[:rows].to(dtype).float()):
            raise ModelError(f"{staged} was written, but {name} in it is not the trained one")
        if name in copies:
            copies[name].copy_(original[:rows].to(used_dtypes[name]))
            if has_factor:
                written[name] = MemoryTensor(original[:rows].to(dtype))

    for name in exported.dtypes:
        values = exported.read(name)
        has_factor = name == HEAD and exported is not trained
        # a model whose output layer is its embedding has no such weight in training, and none in the copy
        original = trained.read(name) if has_factor and name in trained.shapes else values
        if copies and not errors:  # only on rank 0
            try:
                check_and_load(name, values, original, has_factor)
            except Exception as error:  # such as a file that cannot be read
                errors.append(error)

    def refuse() -> None:
        if errors:
            raise errors[0]

    on_first_rank(refuse, f"{staged} was written, but cannot be read back")


def whole_model(state: TrainState) -> torch.nn.Module:
    """Return the model in training or, if each rank has only some stages of it, the whole model on the meta device."""
    if state.pipeline is None:
        return state.model
    assert isinstance(state.model, Architecture)
    return build_architecture(copied_parts(state.model), state.model.cfg, state.model.compute_dtype, state.model.kernel)


def plain_model(state: TrainState) -> Architecture:
    """Return the model on the meta device as it is exported: whole, without adapters and not quantized."""
    model = whole_model(state)
    assert isinstance(model, Architecture)
    parts = copied_parts(model)
    return build_architecture(parts, model.cfg.plain, torch.float32)


def writer_of(state: TrainState, cfg: Config) -> AdapterWriter:
    """Return the writer of the run's LoRA adapters. It has all that their folders contain besides the tensors."""
    names = adapter_tensors(cfg.model, state.trained, state.sources)
    source = source_of_run(whole_model(state), cfg, state.run, state.step)
    return writer_class(source)(
        source=source,
        lora=cfg.model.lora,
        modules=sorted({module_of(name) for name in names if is_adapter(name)}),
        base=Base(cfg.model, cfg.seed, base_fingerprint(state.digests, names)),
        small_files=small_files(source, next(iter(state.masters.named.values())).dtype),
    )


def adapter_in_checkpoints(state: TrainState, cfg: Config) -> AdapterCopy | None:
    """Return an object that writes a folder with the LoRA adapters into each checkpoint, and knows the folder's size.
    None on ranks other than 0, and without adapters. Collective."""

    if not cfg.model.lora.enabled:
        return None

    def prepare() -> AdapterCopy | None:
        """Return what writes the adapter next to each checkpoint; None on ranks other than 0."""
        if rank_and_size()[0] > 0:
            return None
        writer, trained = writer_of(state, cfg), state.masters.named
        names = adapter_tensors(cfg.model, state.trained, state.sources)
        frozen = {name: state.sources[name] for name in names if name not in state.trained}

        def write(folder: Path, found: Checkpoint) -> None:
            tensors = frozen | saved_weights(found)
            step, run = found.facts["step"], found.facts["run"]
            writer.write(folder, {n: tensors[n] for n in names}, {"run": run, "step": step})

        shapes = {n: MemoryTensor(p.detach()) if (p := trained.get(n)) is not None else state.sources[n] for n in names}
        return AdapterCopy(writer.nbytes(shapes), write)

    return on_all_ranks(prepare, "folders of adapters cannot be prepared")


@dataclass(frozen=True)
class MemoryTensor:
    """A tensor in memory with the interface of a tensor in a file (`Stored`)."""

    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def rows(self, begin: int, end: int) -> torch.Tensor:
        return self.tensor[begin:end]
