"""Folders of adapters, which peft and the original LLaVA load: in every checkpoint of a run that has some, and at its
end.

What is adapted is named in full, in the original's names. `adapter_model.safetensors` holds adapters and biases, as
peft has them; `non_lora_trainables` the projector, as the original has it, once for it and once without a pickle.
"""

import shutil
import tempfile
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from llava_fsdp.checkpoint.safetensors_stream import write_tensors
from llava_fsdp.checkpoint.state_json import jsonable
from llava_fsdp.config import KeptDType, LoraConfig, ModelConfig
from llava_fsdp.export.formats import (
    Subject,
    write_configs,
    write_notes,
    write_originals_tokenizer,
)
from llava_fsdp.model.init_weights import Drawn
from llava_fsdp.model.llava_v1_5_config import write_json
from llava_fsdp.model.load_weights import NEWLINE, PROJECTOR_PREFIX, base_fingerprint
from llava_fsdp.model.lora_files import (
    ADAPTER_CONFIG,
    ADAPTER_FILES,
    OTHERS_FILES,
    adapter_folders,
    find_adapter,
    open_adapter,
)
from llava_fsdp.model.lora_names import is_adapter, without_base
from llava_fsdp.model.tensor_files import Stored, StoredTensor, open_file
from llava_fsdp.model.weight_names import in_adapter, original
from llava_fsdp.runtime.errors import ConfigError, ModelError
from llava_fsdp.runtime.log import log
from llava_fsdp.runtime.provenance import NOTES, read_notes

ROOM = 512
"""Bytes for what the files say of each tensor."""


@dataclass(frozen=True)
class Base:
    """What an adapter is for."""

    model: ModelConfig
    """How the base is found and built."""
    seed: int
    """Of weights that are drawn, and in no file."""
    fingerprint: str
    """Of every weight that does not come with the adapter; see `base_fingerprint`."""

    @property
    def name(self) -> str:
        return self.model.checkpoint or self.model.language


@dataclass(frozen=True)
class AdapterWriter:
    """Writes folders of the same adapter at several steps; what all of them have in common is made once."""

    subject: Subject
    lora: LoraConfig
    modules: list[str]
    """That have adapters, by our names."""
    base: Base
    small: dict[str, bytes]
    """Files for the original, by their paths in the folder."""

    def write(
        self,
        folder: Path,
        tensors: Mapping[str, Stored],
        said: dict[str, Any],
        dtype: KeptDType = KeptDType.keep,
    ) -> None:
        """Make the folder, or fill an empty one. One tensor of the adapters is in memory at a time.

        Args:
            tensors: all that the folder holds, by the names of our parameters.
            said: which run, stage and step made it.
            dtype: what the tensors were rounded to before.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.small.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
        write_json(folder / ADAPTER_CONFIG, self.settings)
        self.write_adapters(folder, {n: t for n, t in tensors.items() if not is_projector(n)})
        self.write_others(folder, {n: t for n, t in tensors.items() if is_projector(n)})
        notes = {
            "dtype": dtype.value,
            "lora": jsonable(asdict(self.lora)),
            "model": jsonable(asdict(self.base.model)),
            "seed": self.base.seed,
            "base": self.base.fingerprint,
        }
        write_notes(replace(self.subject, history=said), folder, notes)

    def write_adapters(self, folder: Path, tensors: Mapping[str, Stored]) -> None:
        own = {self.rename(name): tensor for name, tensor in tensors.items()}
        file = folder / ADAPTER_FILES[0]
        with ThreadPoolExecutor(1, "digest") as hasher:
            described = {name: (t.dtype, t.shape) for name, t in own.items()}
            write_tensors(file, described, lambda name: whole(own[name]), hasher)
        shutil.copymode(folder / ADAPTER_CONFIG, file)  # as the umask says: it was made for its owner alone

    def write_others(self, folder: Path, tensors: Mapping[str, Stored]) -> None:
        """The original looks for its file even where nothing but adapters was trained."""
        own = {self.rename(name): whole(tensor).contiguous().clone() for name, tensor in tensors.items()}
        save_file(own, folder / OTHERS_FILES[0], metadata={"format": "pt"})
        torch.save(own, folder / OTHERS_FILES[1])
        shutil.copymode(folder / ADAPTER_CONFIG, folder / OTHERS_FILES[0])

    def rename(self, name: str) -> str:
        return in_adapter(name, self.subject.model.cfg.projector_type)

    @property
    def settings(self) -> dict[str, Any]:
        """adapter_config.json, with no key that the peft of the original (0.7) refuses unless it must be there."""
        named = partial(original, projector_type=self.subject.model.cfg.projector_type)
        alpha = self.lora.alpha
        newer = {"use_dora": self.lora.use_dora, "use_rslora": self.lora.use_rslora}
        return {
            "alpha_pattern": {},
            "auto_mapping": None,
            "base_model_name_or_path": self.base.name,
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
            "target_modules": [named(module) for module in self.modules],
            "task_type": "CAUSAL_LM",
            **{key: True for key, used in newer.items() if used},
        }

    def nbytes(self, tensors: Mapping[str, Stored]) -> int:
        """That a folder takes on the disk."""
        sizes = {name: torch.Size(t.shape).numel() * t.dtype.itemsize + ROOM for name, t in tensors.items()}
        twice = sum(size for name, size in sizes.items() if is_projector(name))
        return sum(sizes.values()) + twice + sum(len(content) for content in self.small.values())


def is_projector(name: str) -> bool:
    """Whether a parameter goes into `non_lora_trainables`."""
    return name.startswith(PROJECTOR_PREFIX) or name == NEWLINE


def whole(tensor: Stored) -> torch.Tensor:
    return tensor.rows(0, tensor.shape[0])


def small_files(subject: Subject, dtype: torch.dtype) -> dict[str, bytes]:
    """What the original reads beside the weights; without what it cannot have of this model, which is said."""
    steps = {"config.json": lambda made: write_configs(subject, dtype, made)}
    steps["tokenizer"] = lambda made: write_originals_tokenizer(subject, made)
    with tempfile.TemporaryDirectory() as made:
        for what, step in steps.items():
            try:
                step(Path(made))
            except (ConfigError, ModelError) as error:
                log().info("folders of adapters have no %s for the original LLaVA: %s", what, error)
        files = sorted(path for path in Path(made).rglob("*") if path.is_file())
        return {path.relative_to(made).as_posix(): path.read_bytes() for path in files}


def comes_along(model: ModelConfig, trained: Collection[str], sources: Mapping[str, Stored]) -> list[str]:
    """What a run's adapter folder holds, by name: what trains, and what the base alone would lack: a projector that
    is no part of it, and what the adapter that the run has gone on from brought with it.
    """
    before = adapter_folders(model.lora.checkpoint) if model.lora.checkpoint else ()

    def lacks(name: str, source: Stored) -> bool:
        brought = isinstance(source, StoredTensor) and source.file.parent in before
        in_base = model.checkpoint is not None and not isinstance(source, Drawn)
        return name in trained or brought or (is_projector(name) and not in_base)

    return [name for name, source in sources.items() if lacks(name, source)]


def check_base(model: nn.Module, cfg: ModelConfig, digests: Mapping[str, str]) -> None:
    """An adapter that a run goes on from is for the base that the run has. What another program wrote does not say for
    which, and where the run trains weights that the adapter's base had frozen nothing can be compared.

    Args:
        digests: of the run's frozen weights; see `frozen_digests`.

    Raises:
        ModelError: its notes have the fingerprint of another base.
    """
    if cfg.lora.checkpoint is None:
        return
    found = open_adapter(find_adapter(cfg.lora.checkpoint, "model.lora.checkpoint"))
    said = read_notes(found.folder).get("base")
    own = {without_base(name) for name in found.tensors}
    base = {without_base(name) for name, _ in model.named_parameters() if not is_adapter(name)} - own
    if said is None or not base <= {without_base(name) for name in digests}:
        return
    there = base_fingerprint(digests, found.tensors)
    if there != said:
        raise ModelError(
            f"model.lora.checkpoint={cfg.lora.checkpoint} is for another base: the weights of "
            f"{cfg.checkpoint or cfg.language} have the fingerprint {there}, and {found.folder / NOTES} says {said}; "
            "give the base that it was trained on, to the bit. A model that the adapter is merged into already is none"
        )


def prove_adapter(folder: Path, tensors: Mapping[str, Stored]) -> None:
    """What a folder says when it is read again is what was written, bit for bit, and its two twins are equal.

    Raises:
        ModelError: naming a tensor that differs.
    """
    found = open_adapter(folder).tensors
    twin = open_file(folder / OTHERS_FILES[1])
    stored = {tensor.name: tensor for tensor in found.values()}
    pairs = [(name, found.get(name), tensor) for name, tensor in tensors.items()]
    pairs += [(name, stored.get(name), tensor) for name, tensor in twin.items()]
    for name, read, expected in pairs:
        if read is None or read.dtype != expected.dtype or not torch.equal(whole(read), whole(expected)):
            raise ModelError(f"{folder} was written, but {name} is another there")
