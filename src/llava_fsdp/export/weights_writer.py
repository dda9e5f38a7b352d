"""Write a model's weights into files, with the tensors of only one file in memory at a time."""

import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import torch
from safetensors.torch import save_file

from llava_fsdp.distributed.consensus import on_first_rank
from llava_fsdp.model.load_weights import PROJECTOR_PREFIX
from llava_fsdp.runtime.durable_files import sync_folder, sync_tree

SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class Weights:
    """Weights of a model to write into files. They are gathered from the ranks one parameter at a time, and only the
    first rank receives and writes them."""

    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]
    read: Callable[[str], torch.Tensor]  # name -> whole parameter, on the CPU of the first rank; a collective
    is_first_rank: bool = True
    watch: Callable[[Iterable[str]], Iterable[str]] = iter

    @property
    def widest(self) -> torch.dtype:
        """Narrowest dtype that can represent the values of all weights."""
        return reduce(torch.promote_types, self.dtypes.values())


def write_shards(weights: Weights, staged: Path, rename: Callable[[str], str], trained: int, rows: int) -> None:
    """Write all weights as safetensors files of at most 5 GB, with an index file if there are several. Rank 0 has the
    tensors of only one file in memory at a time.

    Args:
        rename: function from llava_fsdp's parameter name to the name in the files.
        trained: number of rows of the embeddings that are trained; `lm_head` counts as an embedding.
        rows: number of rows of the embeddings to write; rows after the trained ones are the trained rows' mean.
    """
    plan = plan_shards(weights)
    index: dict[str, str] = {}
    names = iter(weights.watch(name for shard in plan for name in shard))
    total = 0
    for number, shard in enumerate(plan, start=1):
        file = "model.safetensors" if len(plan) == 1 else f"model-{number:05d}-of-{len(plan):05d}.safetensors"
        tensors: dict[str, torch.Tensor] = {}
        for name in (next(names) for _ in shard):
            tensor = weights.read(name)
            if weights.is_first_rank:
                tensors[rename(name)] = with_rows(name, tensor, trained, rows).to(weights.dtypes[name]).contiguous()
        index |= dict.fromkeys(tensors, file)
        total += sum(t.nbytes for t in tensors.values())
        path = staged / file
        on_first_rank(lambda t=tensors, p=path: save_file(t, p, metadata={"format": "pt"}), f"cannot write {path}")
    if len(plan) > 1:
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1)
        on_first_rank(
            lambda: (staged / "model.safetensors.index.json").write_text(text), "cannot write the index of shards"
        )


def plan_shards(weights: Weights) -> list[list[str]]:
    plan: list[list[str]] = [[]]
    filled = 0
    for name, shape in weights.shapes.items():
        size = torch.Size(shape).numel() * weights.dtypes[name].itemsize
        if plan[-1] and filled + size > SHARD_BYTES:
            plan.append([])
            filled = 0
        plan[-1].append(name)
        filled += size
    return plan


def with_rows(name: str, tensor: torch.Tensor, trained: int, rows: int) -> torch.Tensor:
    """Return a parameter as it is to be written: of an embedding or `lm_head`, the first `trained` rows, followed by
    copies of their mean up to `rows` rows; other parameters unchanged."""
    if not name.startswith(("language_model.embed", "lm_head.")):
        return tensor
    mean = tensor[:trained].float().mean(dim=0, keepdim=True)
    return torch.cat([tensor[:trained], mean.to(tensor.dtype).expand(rows - trained, -1)])


def write_projector(weights: Weights, staged: Path, rename: Callable[[str], str]) -> None:
    """Write the projector's weights twice: as `mm_projector.bin` (a pickle, for the original LLaVA) and as
    `mm_projector.safetensors`."""
    tensors: dict[str, torch.Tensor] = {}
    for name in (n for n in weights.shapes if n.startswith(PROJECTOR_PREFIX)):
        tensor = weights.read(name)
        if weights.is_first_rank:
            tensors[rename(name)] = tensor.to(weights.dtypes[name]).contiguous().clone()

    def write() -> None:
        torch.save(tensors, staged / "mm_projector.bin")
        save_file(tensors, staged / "mm_projector.safetensors", metadata={"format": "pt"})

    on_first_rank(write, f"cannot write {staged}")


def publish_folder(staged: Path, final: Path) -> None:
    """Flush all files of the finished folder `staged` to disk, then rename it to `final`, replacing a folder there."""
    sync_tree(staged)
    shutil.rmtree(final, ignore_errors=True)
    os.rename(staged, final)
    sync_folder(final.parent)
