"""Write a model's weights into files, with the tensors of only one file in memory at a time."""

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path

import torch
from safetensors.torch import save_file

from llava_fsdp.model.architecture import Architecture
from llava_fsdp.model.build import build_architecture, copied_parts
from llava_fsdp.model.load_weights import PROJECTOR_PREFIX, buffer_names, stored_buffers
from llava_fsdp.model.weights.init_weights import computed_buffers
from llava_fsdp.model.weights.lazy_tensor import Box, LazyTensor, whole
from llava_fsdp.parallel.ranks.consensus import on_first_rank
from llava_fsdp.runtime.errors import ModelError
from llava_fsdp.runtime.files.durable_files import sync_folder, sync_tree

SHARD_BYTES = 5 * 10**9
ReadPart = Callable[[str, Box], torch.Tensor]
"""Reads a part of a parameter, given llava_fsdp's name of it."""


@dataclass(frozen=True)
class Weights:
    """Weights of a model to write into files. They may be sharded: they are gathered from the ranks one parameter at a
    time, and only the first rank receives and writes them."""

    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]
    read: Callable[[str], torch.Tensor]
    """Gathers the parameter of this name on the CPU of the first rank. Collective."""
    is_first_rank: bool = True
    watch: Callable[[Iterable[str]], Iterable[str]] = iter
    """Yields the names that it is given, and shows progress."""
    on_first_rank: Callable[[Callable[[], object], str], object] = on_first_rank
    """Runs an action on rank 0, and raises its error on every rank. With one rank, it just calls the action."""

    @property
    def common_dtype(self) -> torch.dtype:
        """The narrowest dtype to which all weights of the model can be converted without loss."""
        return reduce(torch.promote_types, self.dtypes.values())


def with_values(weights: Weights, values: Mapping[str, torch.Tensor]) -> Weights:
    """Return weights with further tensors, by name, which every rank has whole; they keep their own dtypes."""
    return replace(
        weights,
        shapes=weights.shapes | {name: tuple(tensor.shape) for name, tensor in values.items()},
        dtypes=weights.dtypes | {name: tensor.dtype for name, tensor in values.items()},
        read=lambda name: values[name] if name in values else weights.read(name),
    )


def with_buffers(weights: Weights, model: Architecture) -> Weights:
    """Return weights to which those buffers of a model are added that are saved in files. No training changes them, so
    they are read from the files of the model before training, or computed as transformers does. `model` may be sharded.
    """
    names = buffer_names(model)
    if not names:
        return weights
    fresh = build_architecture(
        copied_parts(model), model.cfg.plain, torch.float32
    )  # a sharded model computes no buffers
    stored = stored_buffers(fresh)
    values = stored | computed_buffers(fresh, stored)
    return with_values(weights, {name: tensor for name, tensor in values.items() if name in buffer_names(fresh)})


def write_shards(
    weights: Weights,
    export_folder: Path,
    plan: Callable[[ReadPart], dict[str, LazyTensor]],
    vocabulary: Collection[str],
    trained: int,
    rows: int,
) -> None:
    """Write all weights of a model as safetensors files of at most 5 GB, with an index file if there are several. Rank
    0 has the tensors of only one file in memory at a time. Collective.

    Args:
        plan: returns the tensors to write, by name. It is given the function with which their values are read later.
        vocabulary: llava_fsdp's names of the parameters with a row for each token: embeddings and output layer.
        trained: number of rows of these parameters that are trained.
        rows: number of rows of these parameters to write; rows after the trained ones are the trained rows' mean.
    """
    # the parameters of one group, gathered on rank 0; a group is all tensors that are made of the same parameters
    held: dict[str, torch.Tensor] = {}

    def convert(group: TensorGroup) -> dict[str, torch.Tensor]:
        """Return the tensors of a group as they are written, by name, made of the parameters in `held`."""
        converted = {}
        for name, dtype in group.outputs.items():
            converted[name] = outputs[name].read(whole(outputs[name].shape)).to(dtype).contiguous()
        num_written, num_held = (sum(t.numel() for t in tensors.values()) for tensors in (converted, held))
        if num_written != num_held:  # the conversion only moves values, so each must be written once
            raise ModelError(
                f"{', '.join(group.parameters)} have {num_held} values, and transformers' model takes {num_written}"
            )
        return converted

    outputs = plan(lambda name, box: held[name][tuple(slice(*span) for span in box)])
    files = plan_files(outputs, weights)
    names = iter(weights.watch([group.parameters[0] for file in files for group in file]))
    index: dict[str, str] = {}
    total = 0
    for number, file in enumerate(files, start=1):
        path = export_folder / (
            "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        )
        tensors: dict[str, torch.Tensor] = {}
        errors: list[Exception] = []  # raised after the collectives, in which the other ranks wait for rank 0
        for group in file:
            next(names)  # shows progress
            gathered = {name: weights.read(name) for name in group.parameters}
            if weights.is_first_rank and not errors:
                try:
                    for name, tensor in gathered.items():
                        held[name] = with_rows(tensor, trained, rows) if name in vocabulary else tensor
                    tensors |= convert(group)
                except Exception as error:
                    errors.append(error)
            held.clear()
        index |= dict.fromkeys(tensors, path.name)
        total += sum(t.nbytes for t in tensors.values())
        weights.on_first_rank(partial(save, tensors, path, errors), f"cannot write {path}")
    if len(files) > 1:
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1)
        index_file = export_folder / "model.safetensors.index.json"
        weights.on_first_rank(lambda: index_file.write_text(text), "cannot write the index of shards")


def save(tensors: dict[str, torch.Tensor], path: Path, errors: list[Exception]) -> None:
    """Write tensors into a safetensors file; or, if earlier steps of an export failed, raise the first exception."""
    if errors:
        raise errors[0]
    save_file(tensors, path, metadata={"format": "pt"})


@dataclass
class TensorGroup:
    """Tensors that must be in the same file, because they are made of the same parameters of the model.

    Attributes:
        parameters: llava_fsdp's names of these parameters.
        outputs: names and dtypes of the tensors in the file.
        nbytes: size of the tensors in bytes.
    """

    parameters: list[str]
    outputs: dict[str, torch.dtype]
    nbytes: int


def plan_files(outputs: dict[str, LazyTensor], weights: Weights) -> list[list[TensorGroup]]:
    """Decide which tensors (`outputs`, by name) are written into which file, and return the groups of each file. A
    group has the tensors made of the same parameters. A file has groups of at most 5 GB together, or one group."""
    groups: dict[str, TensorGroup] = {}  # by each of its parameters
    for name, output in outputs.items():
        dtype = reduce(torch.promote_types, [weights.dtypes[source] for source in output.sources])
        group = TensorGroup([*output.sources], {name: dtype}, output.numel() * dtype.itemsize)
        for other in {id(groups[s]): groups[s] for s in output.sources if s in groups}.values():
            group.parameters = list(dict.fromkeys(other.parameters + group.parameters))
            group.outputs = other.outputs | group.outputs
            group.nbytes += other.nbytes
        groups |= dict.fromkeys(group.parameters, group)
    files: list[list[TensorGroup]] = [[]]
    file_bytes = 0
    for group in {id(group): group for group in groups.values()}.values():
        if files[-1] and file_bytes + group.nbytes > SHARD_BYTES:
            files.append([])
            file_bytes = 0
        files[-1].append(group)
        file_bytes += group.nbytes
    return files


def plan_renamed(
    shapes: Mapping[str, Sequence[int]], rename: Callable[[str], str], read: ReadPart
) -> dict[str, LazyTensor]:
    """Return the tensors that `write_shards` writes if each parameter becomes one tensor with another name. `shapes`
    are by llava_fsdp's names of the parameters, whose values are read later with `read`."""
    return {
        rename(name): LazyTensor(shape, [name], lambda box, name=name: read(name, box))
        for name, shape in shapes.items()
    }


def with_rows(tensor: torch.Tensor, trained: int, rows: int) -> torch.Tensor:
    """Return the first `trained` rows of a parameter, followed by copies of their mean until there are `rows` rows."""
    mean = tensor[:trained].float().mean(dim=0, keepdim=True)
    return torch.cat([tensor[:trained], mean.to(tensor.dtype).expand(rows - trained, -1)])


def write_projector(weights: Weights, export_folder: Path, rename: Callable[[str], str]) -> None:
    """Write the projector's weights as `mm_projector.bin` (a pickle, for the original LLaVA) and as
    `mm_projector.safetensors`. Collective; the first rank writes. `rename`: our name -> name in the files."""
    tensors: dict[str, torch.Tensor] = {}
    for name in (n for n in weights.shapes if n.startswith(PROJECTOR_PREFIX)):
        tensor = weights.read(name)
        if weights.is_first_rank:
            tensors[rename(name)] = tensor.to(weights.dtypes[name]).contiguous().clone()

    def write() -> None:
        torch.save(tensors, export_folder / "mm_projector.bin")
        save_file(tensors, export_folder / "mm_projector.safetensors", metadata={"format": "pt"})

    on_first_rank(write, f"cannot write {export_folder}")


def publish_folder(export_folder: Path, final: Path) -> None:
    """Flush all files of the finished folder `export_folder` to disk, then rename it to `final`, replacing an older
    one."""
    sync_tree(export_folder)
    shutil.rmtree(final, ignore_errors=True)
    os.rename(export_folder, final)
    sync_folder(final.parent)
