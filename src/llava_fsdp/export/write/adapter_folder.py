"""Write LoRA adapter folders, which peft and the original LLaVA can load. A training with adapters writes such a folder
into each of its checkpoints, and one at its end.

`adapter_config.json` lists the adapted modules by their full names. `adapter_model.safetensors` has the adapters'
matrices and the trained biases, as in peft. The projector is saved twice: in `non_lora_trainables.bin`, which the
original LLaVA loads, and without a pickle in `non_lora_trainables.safetensors`.
"""

import shutil
import tempfile
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file

from llava_fsdp.checkpoint.safetensors_stream import write_tensors
from llava_fsdp.checkpoint.state_json import without_enums
from llava_fsdp.config import KeptDType, LoraConfig, ModelConfig
from llava_fsdp.export.card.model_card import FolderKind
from llava_fsdp.export.write.formats import (
    SourceModel,
    copy_or_convert_tokenizer,
    write_configs,
    write_generation_of_original,
    write_notes,
)
from llava_fsdp.export.write.whole_folder import WholeSource
from llava_fsdp.model.adapters.base_config import BASE_CONFIG, base_config
from llava_fsdp.model.adapters.lora_files import (
    ADAPTER_CONFIG,
    ADAPTER_FILES,
    OTHERS_FILES,
    AdapterFolder,
    adapter_folders,
    find_adapter,
    open_adapter,
)
from llava_fsdp.model.adapters.lora_names import is_adapter, without_base
from llava_fsdp.model.architecture import Architecture
from llava_fsdp.model.load_weights import NEWLINE, PROJECTOR_PREFIX, base_fingerprint
from llava_fsdp.model.sources.llava_v1_5_config import write_json
from llava_fsdp.model.sources.pretrained import public_name
from llava_fsdp.model.sources.pretrained_config import check_named_base
from llava_fsdp.model.weights.init_weights import Drawn
from llava_fsdp.model.weights.tensor_files import Stored, StoredTensor, open_file
from llava_fsdp.model.weights.weight_names import PEFT, in_adapter
from llava_fsdp.runtime.errors import ConfigError, ModelError
from llava_fsdp.runtime.files.provenance import NOTES, read_notes
from llava_fsdp.runtime.text.log import log

ROOM = 512
"""Estimated number of bytes that each tensor takes in the header of a safetensors file."""


@dataclass(frozen=True)
class Base:
    """The base model of a LoRA adapter, as `llava_fsdp.json` in the adapter's folder describes it.

    Attributes:
        seed: seed of those weights that are initialized randomly instead of loaded from a file.
        fingerprint: hash of all weights that are not saved in the adapter's folder; see `base_fingerprint`.
    """

    model: ModelConfig
    seed: int
    fingerprint: str

    @property
    def name(self) -> str:
        """The base model as the configuration names it: a folder, or a name on the Hugging Face hub."""
        return self.model.checkpoint or self.model.language


@dataclass(frozen=True)
class AdapterWriter:
    """Writer of the LoRA adapter folders of one training.

    Attributes:
        source: description of the model with which the adapter is used.
        modules: llava_fsdp's names of the modules that have adapters.
        small_files: contents of the configuration and tokenizer files that the original LLaVA reads, by their paths
            relative to the adapter folder.
    """

    source: SourceModel | WholeSource
    lora: LoraConfig
    modules: list[str]
    base: Base
    small_files: dict[str, bytes]
    is_of_class: ClassVar[bool] = False
    """Whether the files have the names of a class of transformers (`open_adapter`)."""
    kind: ClassVar[FolderKind] = FolderKind.adapters
    """Kind of the folder, for its model card."""

    def write(
        self,
        folder: Path,
        tensors: Mapping[str, Stored],
        now: Mapping[str, Any],
    ) -> None:
        """Write a LoRA adapter folder, which must be empty or absent before: the tensors, given by llava_fsdp's
        parameter names, their configuration, a model card, and `llava_fsdp.json`. Only one tensor of the adapters is in
        memory at a time. Tensors for which `is_apart` is true, such as the projector's, get files of their own
        (`non_lora_trainables`).

        `now` has the id of the training and the step that produced the adapter, by `run` and `step`.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.small_files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
        write_json(folder / ADAPTER_CONFIG, self.settings)
        self.write_adapters(folder, {n: t for n, t in tensors.items() if not self.is_apart(n)})
        self.write_others(folder, {n: t for n, t in tensors.items() if self.is_apart(n)})
        notes = {
            "dtype": KeptDType.keep.value,
            "lora": without_enums(asdict(self.lora)),
            "model": without_enums(asdict(self.base.model)),
            "seed": self.base.seed,
            "base": self.base.fingerprint,
            BASE_CONFIG: base_config(self.source.model.parts),
        }
        write_notes(replace(self.source, history={**self.source.history, **now}), folder, self.kind, notes)

    def write_adapters(self, folder: Path, tensors: Mapping[str, Stored]) -> None:
        """Write `adapter_model.safetensors`, the adapters' weights in the file that peft reads. `tensors` are their
        stored values by llava_fsdp's names; they are read one at a time."""
        renamed = {self.rename(name): tensor for name, tensor in tensors.items()}
        file = folder / ADAPTER_FILES[0]
        with ThreadPoolExecutor(1, "digest") as hasher:
            headers = {name: (t.dtype, t.shape) for name, t in renamed.items()}
            write_tensors(file, headers, lambda name: whole_rows(renamed[name]), hasher)
        shutil.copymode(folder / ADAPTER_CONFIG, file)  # write_tensors creates files that only their owner can read

    def write_others(self, folder: Path, tensors: Mapping[str, Stored]) -> None:
        """Write the files `non_lora_trainables`, from which the original LLaVA loads the projector."""
        renamed = {self.rename(name): whole_rows(tensor).contiguous().clone() for name, tensor in tensors.items()}
        save_file(renamed, folder / OTHERS_FILES[0], metadata={"format": "pt"})
        torch.save(renamed, folder / OTHERS_FILES[1])
        # safetensors may create files that only their owner can read
        shutil.copymode(folder / ADAPTER_CONFIG, folder / OTHERS_FILES[0])

    def rename(self, name: str) -> str:
        """Return the name in the files of a parameter or a module."""
        return in_adapter(name, self.source.model.cfg.projector_type)

    def is_apart(self, name: str) -> bool:
        """Return whether a parameter is saved in the files `non_lora_trainables`."""
        return is_projector(name)

    @property
    def settings(self) -> dict[str, Any]:
        """Contents of adapter_config.json, which peft reads. Keys that peft 0.7 (the original LLaVA's) does not know
        are left out unless the adapter needs them."""
        alpha = self.lora.alpha
        newer = {"use_dora": self.lora.use_dora, "use_rslora": self.lora.use_rslora}
        return {
            "alpha_pattern": {},
            "auto_mapping": None,
            "base_model_name_or_path": public_name(self.base.name),
            "bias": self.lora.bias.value,
            "fan_in_fan_out": False,
            "inference_mode": True,
            "init_lora_weights": True,
            "layers_pattern": None,
            "layers_to_transform": None,
            "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
            "lora_dropout": self.lora.dropout,
            "modules_to_save": None,
            "peft_type": "LORA",
            "r": self.lora.r,
            "rank_pattern": {},
            "revision": None,
            "target_modules": [self.rename(module).removeprefix(PEFT) for module in self.modules],
            "task_type": "CAUSAL_LM",
            **{key: True for key, used in newer.items() if used},
        }

    def nbytes(self, tensors: Mapping[str, Stored]) -> int:
        """Return about how many bytes a folder with these tensors takes, each with ROOM for its entry in the file's
        header. Tensors in `non_lora_trainables` (`is_apart`) are written twice: as .safetensors and as .bin."""
        sizes = {name: torch.Size(t.shape).numel() * t.dtype.itemsize + ROOM for name, t in tensors.items()}
        twice = sum(size for name, size in sizes.items() if self.is_apart(name))
        return sum(sizes.values()) + twice + sum(len(content) for content in self.small_files.values())


def is_projector(name: str) -> bool:
    """Return whether a parameter is saved in the files `non_lora_trainables` instead of together with the adapters: the
    projector's weights and the `image_newline` vector."""
    return name.startswith(PROJECTOR_PREFIX) or name == NEWLINE


def whole_rows(tensor: Stored) -> torch.Tensor:
    """Return all values of a parameter, read from a file, or generated if they are random, when this is called."""
    return tensor.rows(0, tensor.shape[0])


def small_files(source: SourceModel | WholeSource, dtype: torch.dtype) -> dict[str, bytes]:
    """Return the configuration and tokenizer files that the original LLaVA reads beside an adapter: path in the folder
    -> content; nothing for a whole model of transformers. Files that cannot be made for this model are left out, and
    the reason is logged. The configuration says that weights have the dtype `dtype`."""
    if isinstance(source, WholeSource):
        return {}
    steps = {"config.json": lambda folder: write_configs(source, dtype, folder)}
    steps["generation_config.json"] = lambda folder: write_generation_of_original(source, folder)
    steps["tokenizer"] = lambda folder: copy_or_convert_tokenizer(source, folder)
    with tempfile.TemporaryDirectory() as folder:
        for what, step in steps.items():
            try:
                step(Path(folder))
            except (ConfigError, ModelError) as error:
                log().info("adapter folders get no %s for the original LLaVA: %s", what, error)
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def adapter_tensors(model: ModelConfig, trained: Collection[str], sources: Mapping[str, Stored]) -> list[str]:
    """Return the names of the tensors to save in the LoRA adapter folder of a training: tensors that it trains, tensors
    of the adapter from which it continues, and the projector if it is not part of the base model. `sources` has the
    first values of each parameter: a StoredTensor is read from a file, and a Drawn is random."""
    before = adapter_folders(model.lora.checkpoint) if model.lora.checkpoint else ()

    def must_save(name: str, source: Stored) -> bool:
        is_from_adapter = isinstance(source, StoredTensor) and source.file.parent in before
        in_base = model.checkpoint is not None and not isinstance(source, Drawn)
        return name in trained or is_from_adapter or (is_projector(name) and not in_base)

    return [name for name, source in sources.items() if must_save(name, source)]


def check_base(model: Architecture, cfg: ModelConfig, digests: Mapping[str, str]) -> None:
    """Check that the LoRA adapter from which a training continues (`model.lora.checkpoint`) was trained on the base
    model of this training. `digests`: a hash of each weight that is frozen in this training, by name.

    The base model's configuration is compared with the one that the adapter's folder records; for a folder of peft or
    the original LLaVA, which records none, only the type of model. The fingerprint (hash) of the base model's weights
    is compared if the folder has one, and this training freezes all weights that it covers: others have no hash.

    Raises:
        ModelError: the adapter's folder has the fingerprint of another base model, or names one of another type.
    """
    if cfg.lora.checkpoint is None:
        return
    is_of_class = model.parts.class_config is not None
    adapter = open_adapter(find_adapter(cfg.lora.checkpoint, "model.lora.checkpoint"), is_of_class)
    where, key = cfg.checkpoint or cfg.language, "model.checkpoint or model.language"
    check_named_base(adapter, model.parts, where, key)
    names = {without_base(name) for name in adapter.tensors}
    frozen = {without_base(name) for name, _ in model.named_parameters() if not is_adapter(name)} - names
    if frozen <= {without_base(name) for name in digests}:
        check_fingerprint(adapter, base_fingerprint(digests, adapter.tensors), where, key)


def check_fingerprint(adapter: AdapterFolder, actual: str, where: str, key: str) -> None:
    """Raise ModelError if an adapter's folder has a fingerprint (hash) of its base model that differs from `actual`.

    Args:
        actual: fingerprint of the base model that is to be used.
        where: folder or hub name of that base model, for the error message.
        key: configuration key that names that base model, for the error message.
    """
    recorded = read_notes(adapter.folder).get("base")
    if recorded not in (None, actual):
        raise ModelError(
            f"{adapter.folder} is for another base: the weights of {where} have the fingerprint {actual}, and "
            f"{adapter.folder / NOTES} has {recorded}; give the base that it was trained on, to the bit, without the "
            f"adapter merged into it: {key}"
        )


def prove_adapter(folder: Path, tensors: Mapping[str, Stored], is_of_class: bool = False) -> None:
    """Read a LoRA adapter folder that was just written. Raise ModelError if one of the `tensors`, which were to be
    written, is missing in it or has other values; or if the projector's tensors in `non_lora_trainables.bin`, which the
    original LLaVA reads, differ from those in the safetensors file beside it. `is_of_class`: whether the base is a
    whole model of transformers, for whose adapters there is no such file."""
    written = open_adapter(folder, is_of_class).tensors
    pickled = {} if is_of_class else open_file(folder / OTHERS_FILES[1])
    by_name_in_file = {tensor.name: tensor for tensor in written.values()}
    compared = [(name, written.get(name), tensor) for name, tensor in tensors.items()]
    compared += [(name, by_name_in_file.get(name), tensor) for name, tensor in pickled.items()]
    for name, read, expected in compared:
        if read is None or read.dtype != expected.dtype or not torch.equal(whole_rows(read), whole_rows(expected)):
            raise ModelError(f"{folder} was written, but {name} differs from what was to be written")
