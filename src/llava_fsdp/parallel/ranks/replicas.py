"""Compare replicas: ranks that hold the same rows of a tensor must hold exactly the same bits.

No other check detects a difference between replicas. A flipped bit in one rank's copy (from bad memory, or a GPU that
computes wrong sums) changes the gradients of all ranks, and is exported if that rank writes the export.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from xxhash import xxh3_64_intdigest

from llava_fsdp.parallel.local_shards import local
from llava_fsdp.parallel.ranks.consensus import rank_and_size

CHUNK = 1 << 24
"""Number of words (of up to 4 bytes) that are summed at a time on a GPU. Each int64 temporary then takes 128 MiB."""
WORDS = {4: torch.int32, 2: torch.int16, 1: torch.int8}
"""Size of a word in bytes -> the dtype as which a tensor's memory is read."""


def shared_tensors(
    tensors: Mapping[str, torch.Tensor], ranks: int
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return this rank's tensors of which other ranks hold copies, in two dicts by name: its part of the DTensors that
    are replicated over a dimension of their mesh or whose mesh does not contain all `ranks`, and the plain tensors,
    which each of the ranks holds whole. `ranks` is the number of ranks that have these tensors, or parts of them."""
    of_mesh, everywhere = {}, {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            everywhere[name] = local(tensor)
        elif tensor.device_mesh.size() < ranks or any(
            isinstance(p, Replicate) and n > 1 for p, n in zip(tensor.placements, tensor.device_mesh.shape, strict=True)
        ):
            of_mesh[name] = local(tensor)
    return of_mesh, everywhere


def shard_number(tensors: Iterable[torch.Tensor]) -> int:
    """Return the number of the shard that this rank holds of sharded tensors, all of which are sharded alike; 0 if none
    of them is sharded. Ranks with the same number are replicas of each other."""
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
    """Compute an unsigned 64-bit checksum of each tensor's memory. Waits for the device at most once."""
    found = {name: digest_on_host(t) for name, t in tensors.items() if t.device.type == "cpu"}
    on_device = {name: weighted_sum(t) for name, t in tensors.items() if t.device.type != "cpu"}
    if on_device:
        sums = torch.stack(list(on_device.values())).tolist()
        found |= {name: value % (1 << 64) for name, value in zip(on_device, sums, strict=True)}
    return {name: found[name] for name in tensors}


def digest_on_host(tensor: torch.Tensor) -> int:
    """Compute the 64-bit xxh3 digest of a CPU tensor's bytes, about as fast as memory can be read."""
    return xxh3_64_intdigest(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)


def weighted_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Compute a checksum of a tensor's memory, int64 []: the sum of (2i + 1) * word[i], modulo 2**64.

    A word has at most 32 bits. Sums of integers do not depend on the order of summation, so that ranks with equal
    tensors get equal sums. If one word changes, the sum changes by a number below 2**32 times an odd number. If the
    words i and j are swapped, the sum changes by the words' difference times 2(j - i), which is below 2**64 for fewer
    than 2**31 words. Neither change is 0 modulo 2**64.
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
    """A tensor or other value that should be equal on several ranks, but is not."""

    name: str
    ranks: tuple[int, ...]
    """Ranks with another value than the majority. Without a majority: all ranks that hold the tensor."""
    has_majority: bool
    """Whether more than half of the ranks have the same value; then the values of `ranks` are the wrong ones."""


@dataclass(frozen=True)
class RankChecksums:
    """Checksums, by name, of one rank's copies of what must be equal on several ranks."""

    shard: int
    """The rank's shard number. Ranks with the same number hold the same rows of the tensors in `of_mesh`."""
    of_mesh: dict[str, int]
    """Checksums of this rank's rows of sharded tensors, where other ranks hold copies of these rows."""
    everywhere: dict[str, int]
    """Checksums of tensors and other values that are the same on all ranks."""

    @property
    def totals(self) -> tuple[int, int, int]:
        """This rank's shard number, one checksum of all in `of_mesh`, and one of all in `everywhere`."""
        of_mesh, everywhere = (xxh3_64_intdigest(repr(sums).encode()) for sums in (self.of_mesh, self.everywhere))
        return self.shard, of_mesh, everywhere


def checksums_of_rank(
    tensors: Mapping[str, torch.Tensor], facts: Mapping[str, str], ranks: int | None = None
) -> list[RankChecksums]:
    """Compute the checksums of this rank's copies of what must be equal on several ranks. Return one object for each
    way in which tensors are distributed, each with its own replicas; the first also has what is equal on all ranks.

    Args:
        tensors: tensors by name, in the same order on every rank; those without a copy on another rank are left out.
        facts: other values that must be equal on every rank, as text by name.
        ranks: number of ranks that have these tensors, or parts of them; None: all ranks.
    """
    of_mesh, everywhere = shared_tensors(tensors, ranks or rank_and_size()[1])
    layouts: dict[Any, dict[str, torch.Tensor]] = {}
    for name in of_mesh:
        tensor = tensors[name]
        assert isinstance(tensor, DTensor)
        layouts.setdefault((tensor.device_mesh, tensor.placements), {})[name] = of_mesh[name]
    digests = {name: xxh3_64_intdigest(text.encode()) for name, text in facts.items()}
    found = []
    for tensors_of_layout in layouts.values() or [{}]:
        shard = shard_number(tensors[name] for name in tensors_of_layout)
        found.append(
            RankChecksums(shard, checksums(tensors_of_layout), {} if found else checksums(everywhere) | digests)
        )
    return found


def find_differences(of_rank: RankChecksums, gather: Callable[[list[Any]], list[Any]]) -> list[Difference]:
    """Compare checksums between ranks, and return the same list on every rank. Collective.

    Each rank first sends its shard number and a checksum of all its rows of sharded tensors, and one of all that must
    be equal on every rank. Only if these differ, each rank sends the checksum of every tensor. `gather`: takes this
    rank's list, and returns the lists of all ranks, concatenated in rank order."""
    totals = gather([of_rank.totals])
    # ranks with the same shard number hold the same rows of sharded tensors
    if len({(shard, total) for shard, total, _ in totals}) == len({shard for shard, *_ in totals}):
        if len({total for *_, total in totals}) == 1:
            return []
    return compare(gather([of_rank]))


def compare(found: list[RankChecksums]) -> list[Difference]:
    """Return the tensors and values that differ between ranks, given the checksums of each rank in rank order. What
    the majority of the ranks has is taken as right; without a majority, all ranks are named (`outvoted`)."""
    replicas: dict[int, list[int]] = {}  # shard number -> ranks that hold the same rows of sharded tensors (`of_mesh`)
    for rank, held in enumerate(found):
        replicas.setdefault(held.shard, []).append(rank)
    differing = [
        difference
        for ranks in replicas.values()
        for name in found[ranks[0]].of_mesh
        if (difference := outvoted(name, {rank: found[rank].of_mesh.get(name) for rank in ranks}))
    ]
    everywhere = {name for held in found for name in held.everywhere}  # what must be the same on all ranks
    for name in sorted(everywhere):
        if difference := outvoted(name, {rank: held.everywhere.get(name) for rank, held in enumerate(found)}):
            differing.append(difference)
    return differing


def outvoted(name: str, values: dict[int, int | None]) -> Difference | None:
    """Return the ranks whose checksum differs from that of the majority, or all ranks if there is no majority; None if
    all checksums are equal. `values`: rank -> checksum of its tensor; None if it has none."""
    value, votes = Counter(values.values()).most_common(1)[0]
    if votes == len(values):
        return None
    has_majority = 2 * votes > len(values)
    ranks = tuple(rank for rank, other in values.items() if other != value or not has_majority)
    return Difference(name, ranks, has_majority)


def sharded_norm(norms: torch.Tensor, mesh: DeviceMesh, sharded: Sequence[int]) -> torch.Tensor:
    """Return the norm of several sharded gradients together, float32 []. Collective for the ranks of the mesh.

    Args:
        norms: for each gradient the norm of this rank's shard, float32 [gradients].
        sharded: dimensions of the mesh over which the gradients are sharded.
    """
    for dimension in (n for n in sharded if mesh.size(n) > 1):
        norms = norms.square()  # in these steps and in this order, as torch reduces the norms of DTensors
        dist.all_reduce(norms, group=mesh.get_group(dimension))
        norms = norms.sqrt()
    return torch.linalg.vector_norm(norms)


def same_on_every_rank(norms: torch.Tensor, mesh: DeviceMesh, sharded: Sequence[int]) -> torch.Tensor:
    """Return the norm of several sharded gradients together, float32 [], with the same bits on all ranks. Collective.

    Each replica sums over its own shards, and the order of summation may depend on a machine's network links. Replicas
    that clip gradients by norms with different bits would drift apart. Therefore all ranks get the largest norm.

    Args:
        norms: for each gradient the norm of this rank's shard, float32 [gradients].
        mesh: the mesh of the ranks that hold these gradients.
        sharded: dimensions of the mesh over which the gradients are sharded.
    """
    value = sharded_norm(norms, mesh, sharded)
    # there may be replicas: along another dimension of the mesh, or in another mesh
    if sum(size > 1 for size in mesh.shape) > 1 or mesh.size() < dist.get_world_size():
        dist.all_reduce(value, dist.ReduceOp.MAX)
    return value
