"""Replicas compared: ranks that hold the same rows of a tensor must hold the same bits.

Nothing else would notice that they differ. A bit that flips in one rank's copy (memory, or a GPU that computes wrong
sums) changes the gradients of all and is exported where that copy is the one that is written.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate
from xxhash import xxh3_64_intdigest

from llava_fsdp.sharding.shards import local

CHUNK = 1 << 24
"""Words that are summed at a time on a GPU: 128 MiB for each int64 temporary."""
WORDS = {4: torch.int32, 2: torch.int16, 1: torch.int8}


def shared_tensors(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Of some tensors by name, those of which other ranks hold the very rows that this rank holds.

    Returns:
        This rank's rows of DTensors that are replicated over a dimension of their mesh; and tensors that are no
        DTensors, which every rank holds whole.
    """
    of_mesh, everywhere = {}, {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            everywhere[name] = local(tensor)
        elif any(
            isinstance(p, Replicate) and n > 1 for p, n in zip(tensor.placements, tensor.device_mesh.shape, strict=True)
        ):
            of_mesh[name] = local(tensor)
    return of_mesh, everywhere


def shard_number(tensors: Iterable[torch.Tensor]) -> int:
    """Which shard of the mesh this rank holds: ranks with the same number are replicas of each other."""
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            coordinate = tensor.device_mesh.get_coordinate()
            assert coordinate is not None
            number = 0
            for place, size, placement in zip(coordinate, tensor.device_mesh.shape, tensor.placements, strict=True):
                number = number if isinstance(placement, Replicate) else number * size + place
            return number
    return 0


def checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Unsigned 64 bits of each tensor's memory, by name, with one wait for the device at most."""
    found = {name: digest_on_host(t) for name, t in tensors.items() if t.device.type == "cpu"}
    on_device = {name: weighted_sum(t) for name, t in tensors.items() if t.device.type != "cpu"}
    if on_device:
        sums = torch.stack(list(on_device.values())).tolist()
        found |= {name: value % (1 << 64) for name, value in zip(on_device, sums, strict=True)}
    return {name: found[name] for name in tensors}


def digest_on_host(tensor: torch.Tensor) -> int:
    """xxh3 of a CPU tensor's bytes where they lie; it hashes about as fast as memory is read."""
    return xxh3_64_intdigest(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)


def weighted_sum(tensor: torch.Tensor) -> torch.Tensor:
    """int64 []: the words of a tensor's memory, each times an odd number by its place, added up modulo 2**64.

    Integers add up to the same in any order, so that it is the same on every rank. Word i, of at most 32 bits, is
    multiplied with 2i + 1. One word that changes adds a number below 2**32 times an odd one, and two that are swapped
    add their difference times 2(j - i), below 2**64 as long as there are fewer than 2**31 words: neither is 0.
    """
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    flat = flat.view(next(words for size, words in WORDS.items() if flat.numel() % size == 0))
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for begin in range(0, flat.numel(), CHUNK):
        words = flat[begin : begin + CHUNK].to(torch.int64)
        total += words.mul_(torch.arange(2 * begin + 1, 2 * (begin + len(words)), 2, device=words.device)).sum()
    return total


@dataclass(frozen=True)
class Difference:
    """A tensor of which some replicas hold other bits than the rest."""

    name: str
    ranks: tuple[int, ...]
    """Those that most of the replicas outvote; all of them where none of the values has a majority."""
    is_told: bool
    """A majority has told which ranks are wrong."""


@dataclass(frozen=True)
class Held:
    """What one rank has of what others have too."""

    shard: int
    """Its place on the mesh: ranks of one number hold the same rows of the mesh's tensors."""
    of_mesh: dict[str, int]
    everywhere: dict[str, int]

    @property
    def totals(self) -> tuple[int, int, int]:
        of_mesh, everywhere = (xxh3_64_intdigest(repr(sums).encode()) for sums in (self.of_mesh, self.everywhere))
        return self.shard, of_mesh, everywhere


def held_by_this_rank(tensors: Mapping[str, torch.Tensor], facts: Mapping[str, str]) -> Held:
    """
    Args:
        tensors: by name, in the same order on every rank.
        facts: what is no tensor and must be the same on every rank, as text by name.
    """
    of_mesh, everywhere = shared_tensors(tensors)
    digests = {name: xxh3_64_intdigest(text.encode()) for name, text in facts.items()}
    return Held(shard_number(tensors.values()), checksums(of_mesh), checksums(everywhere) | digests)


def find_differences(own: Held, gather: Callable[[list[Any]], list[Any]]) -> list[Difference]:
    """What differs between replicas, the same on every rank. A collective.

    Ranks send three numbers; only where these differ does each send the checksum of every tensor.

    Args:
        gather: every rank's items, in the order of ranks.
    """
    totals = gather([own.totals])
    if len({(shard, total) for shard, total, _ in totals}) == len({shard for shard, *_ in totals}):
        if len({total for *_, total in totals}) == 1:
            return []
    return compare(gather([own]))


def compare(found: list[Held]) -> list[Difference]:
    """
    Args:
        found: by rank.
    """
    replicas: dict[int, list[int]] = {}
    for rank, held in enumerate(found):
        replicas.setdefault(held.shard, []).append(rank)
    differing = [
        difference
        for ranks in replicas.values()
        for name in found[ranks[0]].of_mesh
        if (difference := outvoted(name, {rank: found[rank].of_mesh.get(name) for rank in ranks}))
    ]
    everywhere = {name for held in found for name in held.everywhere}
    for name in sorted(everywhere):
        if difference := outvoted(name, {rank: held.everywhere.get(name) for rank, held in enumerate(found)}):
            differing.append(difference)
    return differing


def outvoted(name: str, values: dict[int, int | None]) -> Difference | None:
    """
    Args:
        values: by rank.
    """
    value, votes = Counter(values.values()).most_common(1)[0]
    if votes == len(values):
        return None
    is_told = 2 * votes > len(values)
    return Difference(name, tuple(r for r, own in values.items() if own != value or not is_told), is_told)


def same_on_every_rank(norm: DTensor) -> torch.Tensor:
    """The whole of a number that shards have parts of, float32 [], to the bit the same on all ranks. A collective.

    Each replica adds up its own shards. Groups on machines with other links may add them in another order, and weights
    that are clipped by the one's sum and by the other's would drift apart.
    """
    value = norm.full_tensor()
    if sum(size > 1 for size in norm.device_mesh.shape) > 1:
        dist.all_reduce(value, dist.ReduceOp.MAX)
    return value
