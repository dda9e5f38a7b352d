"""Try the export of a model before it is trained, so that a model that cannot be exported is refused before the first
step and not after the last."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import PretrainedConfig

from llava_fsdp.data.batching.batch import MicroBatch
from llava_fsdp.data.images.anyres import Size
from llava_fsdp.export.prove.logit_distance import CLOSE
from llava_fsdp.export.prove.small_copy import small_copy
from llava_fsdp.export.prove.verify_logits import (
    Adapted,
    exported_logits,
    load_copy,
    logits,
    open_export,
    random_micro_batch,
    random_rows,
    relative_difference,
)
from llava_fsdp.export.write.adapter_folder import whole_rows
from llava_fsdp.export.write.chat_template import PROBE_SIZE
from llava_fsdp.export.write.folded_head import HEAD, with_folded_head
from llava_fsdp.export.write.formats import (
    SourceModel,
    hf_config,
    write_hf_config,
    write_hf_except_weights,
    write_hf_weights,
)
from llava_fsdp.export.write.generation_file import write_generation_of_class
from llava_fsdp.export.write.processor import TokenIds, check_image_tokens, has_tokenizer, preprocessor_fields
from llava_fsdp.export.write.weights_writer import Weights
from llava_fsdp.export.write.whole_folder import WholeSource, check_plan
from llava_fsdp.model.adapters.lora_names import is_adapter, without_base
from llava_fsdp.model.llava.llava import Llava
from llava_fsdp.model.load_weights import buffer_names
from llava_fsdp.model.sources.exportable import why_not_original
from llava_fsdp.model.weights.conversions import check_runs, plan_save
from llava_fsdp.model.weights.lazy_tensor import Box
from llava_fsdp.runtime.errors import ModelError
from llava_fsdp.runtime.files.safe_load import library_errors
from llava_fsdp.runtime.text.log import log

FRAMES = 3
"""Number of frames of the video for which logits are compared."""
WriteHf = Callable[[SourceModel, Weights, Path], None]
"""Function that writes the configuration and weights of a model folder for transformers, without a tokenizer."""
Inputs = list[tuple[MicroBatch, list[Size] | None]]
"""Test inputs. Each is a micro-batch, and the sizes in pixels of its images, or None if it has a video instead."""


class CannotBeExported(ModelError):
    """Error: transformers cannot load the export of a model, or would compute something else with it."""


def write_hf(source: SourceModel, weights: Weights, export_folder: Path) -> None:
    """Write the configuration and weights of a model folder for transformers, but no tokenizer. The image, padding and
    video tokens get the ids after those of the model's vocabulary."""
    first = source.vocabulary
    ids = TokenIds(image=first, pad=first + 1, video=None if source.sampling is None else first + 2)
    write_hf_config(source, weights.common_dtype, export_folder, ids, first + len(ids))
    write_hf_weights(source, weights, export_folder, first + len(ids))


def rehearse(source: SourceModel | WholeSource, dtype: torch.dtype) -> None:
    """Check, before training, that a model can be exported for transformers; else raise ModelError or ConfigError. For
    a LLaVA, a small copy is exported. For a whole model of transformers, the names and shapes of weights are checked,
    and whether `generate` ends answers at the right tokens. Only rank 0 calls this."""
    if isinstance(source, WholeSource):
        with TemporaryDirectory(prefix="llava_fsdp-") as made:
            # raises an error if the file that it writes does not end answers where it must
            write_generation_of_class(source.folder, source.model.language_config, Path(made))
        return check_plan(source)
    rehearse_hf(source, dtype)


@torch.random.fork_rng(devices=[])  # transformers draws random numbers while it loads, on this rank alone
def rehearse_hf(source: SourceModel, dtype: torch.dtype, write: WriteHf = write_hf) -> None:
    """Check that a model can be exported for transformers, before it is trained. Only rank 0 calls this. `write` writes
    the export of the small copy.

    First, all files except the weights are written into a temporary folder, and the processor in it is tried on an
    image. Then a small copy of the model with random weights is exported, loaded with transformers, and its logits are
    compared. If no small copy can be made, only names and shapes of the weights are checked, on the meta device.

    Raises:
        ModelError, ConfigError: the model cannot be exported.
    """
    model, parts = source.model, source.model.parts
    with TemporaryDirectory(prefix="llava_fsdp-") as made:
        rows = write_hf_except_weights(source, dtype, Path(made)).rows
        if has_tokenizer(parts.language_folder) and preprocessor_fields(parts.vision_folder):
            check_image_tokens(Path(made), PROBE_SIZE, len(source.image_tokens.of(PROBE_SIZE, 1)))
    try:
        small, weights, inputs, expected = prepare_copy(source)
    except ModelError as error:  # no small copy can be made
        log().warning(
            "the export is tried without values, as there is no small copy of a %s with a %s: %s",
            parts.language.model_type, parts.vision.model_type, error,
        )  # fmt: skip
        return rehearse_on_meta(source, dtype, rows)
    with TemporaryDirectory(prefix="llava_fsdp-") as made, name_the_model(model):
        names = with_folded_head(weights, small.model).shapes.keys() | buffer_names(small.model)
        check_names(hf_config(small, torch.float32, small.vocabulary), names)
        try:
            write(small, weights, Path(made))
            compare(Path(made), inputs, expected)
        except ModelError:
            rehearse_on_meta(source, dtype, rows)  # if this fails too, its message is clearer
            raise


def prepare_copy(source: SourceModel) -> tuple[SourceModel, Weights, Inputs, list[torch.Tensor]]:
    """Make a small copy of a model with random weights. Raises ModelError if that fails, or its logits are not finite.

    Returns:
        A description of the small copy, its weights with LoRA adapters merged, test inputs (a micro-batch and its image
            sizes, or one with a video and None), and the copy's logits for each: float32 [labels, vocabulary].
    """
    small, values = small_copy(source)
    model, rule = small.model, small.image_tokens
    adapted = Adapted(model.cfg.lora, model.adapted, dict(values)) if model.adapted else None
    sources = dict(values) if adapted is None else adapted.merged
    weights = Weights(
        shapes={name: tuple(tensor.shape) for name, tensor in sources.items()},
        dtypes=dict.fromkeys(sources, torch.float32),
        read=lambda name: whole_rows(sources[name]),
        on_first_rank=lambda action, _: action(),  # the other ranks write nothing
    )
    inputs: Inputs = [random_rows(model, rule)]
    if small.sampling is not None:
        inputs.append((random_micro_batch(model, rule, rule.of_video(FRAMES), FRAMES), None))
    ready = load_copy(model, values, torch.float32, adapted)
    with library_errors("transformers cannot run it"):
        expected = [logits(ready, micro) for micro, _ in inputs]
    if not all(tensor.isfinite().all() for tensor in expected):
        raise ModelError("its logits are not finite")
    return small, weights, inputs, expected


def compare(folder: Path, inputs: Inputs, expected: list[torch.Tensor]) -> None:
    """Raise ModelError if transformers computes other logits from the export of a small copy than the small copy itself
    (`expected`, float32 [labels, vocabulary] for each of the inputs)."""
    with library_errors("transformers cannot compute logits of the export of a small copy"):
        exported = open_export(folder, torch.float32)
        written = [exported_logits(exported, micro, micro.images["tiles"], sizes) for micro, sizes in inputs]
    # sizes None: a video; the export may have more rows of the vocabulary than the small copy
    for theirs, ours, (_, sizes) in zip(written, expected, inputs, strict=True):
        difference = relative_difference(theirs[:, : ours.shape[1]], ours)
        if not difference <= CLOSE:
            raise ModelError(
                f"transformers' logits of the export of a small copy differ by {difference:.2g} of the largest (bound "
                f"{CLOSE:.0e}), for {'a video' if sizes is None else 'an image'} and text"
            )


@contextmanager
def name_the_model(model: Llava) -> Iterator[None]:
    """Context manager that turns a ModelError into a CannotBeExported, whose message names the model's parts and a
    configuration key with which the training needs no export."""
    parts, cfg = model.parts, model.cfg
    try:
        yield
    except CannotBeExported:
        raise
    except ModelError as error:
        raise CannotBeExported(
            f"a {parts.language.model_type} with a {parts.vision.model_type}, model.projector_type="
            f"{cfg.projector_type} and model.patch_merge={cfg.patch_merge.value} cannot be exported to transformers: "
            f"{error}; {cure(model)}"
        ) from error


def cure(model: Llava) -> str:
    """Return advice for the user whose model cannot be exported for transformers: the key with which a training makes
    no export, and whether an export for the original LLaVA can be made later."""
    key = "export.merge=false" if model.cfg.lora.enabled else "export.enabled=false"
    later = " (llava-fsdp export format=llava can write one for the original's programs later)"
    return f"set {key} to train without an export{later if why_not_original(model) is None else ''}"


def rehearse_on_meta(source: SourceModel, dtype: torch.dtype, rows: int) -> None:
    """Check the export for transformers without values: raise CannotBeExported if transformers' model, on the meta
    device, does not have the same parameters, or does not run. `rows`: rows of the embeddings."""
    model, config = source.model, hf_config(source, dtype, rows)
    with name_the_model(model):
        names = {without_base(name) for name, _ in model.named_parameters() if not is_adapter(name)}
        names |= buffer_names(model)
        # a factor of the logits is exported in the weight of the output layer, which is then stored even if it is tied
        check_names(config, names if model.parts.logit_change.factor == 1.0 else names | {HEAD})
        check_runs(config)


def check_names(config: PretrainedConfig, names: Collection[str]) -> None:
    """Raise ModelError unless transformers' model with this configuration has exactly the parameters and saved buffers
    `names`, which are llava_fsdp's names; transformers' names are converted to these before they are compared."""
    needed = {name for output in plan_save(config, read_nothing).values() for name in output.sources}
    if needed != set(names):
        raise ModelError(f"transformers' class and this model do not agree about {min(needed ^ set(names))}")


def read_nothing(name: str, box: Box) -> torch.Tensor:
    raise AssertionError(f"{name} was read while an export was planned")
