"""The norm of the gradients over all ranks, and clipping."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from llava_fsdp.parallel.local_shards import plain_shard
from llava_fsdp.parallel.precision.precision import MasterWeights
from llava_fsdp.parallel.ranks.replicas import same_on_every_rank, sharded_norm

Reduction = tuple[DeviceMesh, tuple[int, ...]]
"""Over which ranks a norm is reduced: a mesh, and dimensions of the mesh."""


@torch.no_grad()
def clip_gradients(
    masters: MasterWeights, largest_norm: float | None, scale: float = 1.0, line: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Divide the gradients by the loss scale, and then scale them down so that their norm is at most `largest_norm`;
    None: they are not clipped.

    Args:
        line: the ranks that have all stages of the model together with this one; None: each rank has the whole model.

    Returns:
        float32 []: norm of all gradients over all ranks, after the division by `scale` and before clipping.
    """
    gradients = [gradient for p in masters.named.values() if (gradient := p.grad) is not None]
    shards = [plain_shard(gradient) for gradient in gradients]
    norm = gradient_norm(gradients, shards, line)
    if scale != 1.0:
        norm = norm / scale
        if shards:
            torch._foreach_mul_(shards, 1 / scale)
    if largest_norm is not None:
        factor = torch.clamp(largest_norm / (norm + 1e-6), max=1.0)  # that of torch.nn.utils.clip_grads_with_norm_
        shards_of_kinds: dict[Any, list[torch.Tensor]] = {}
        for shard in shards:  # one kernel for all tensors of a kind
            shards_of_kinds.setdefault((shard.device, shard.dtype), []).append(shard)
        for (device, _), of_kind in shards_of_kinds.items():
            torch._foreach_mul_(of_kind, factor.to(device))
    return norm


def gradient_norm(
    gradients: list[torch.Tensor], shards: list[torch.Tensor], line: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Return the norm of all gradients over all ranks, float32 [], with the same bits on every rank. Collective.

    Gradients that are DTensors may have several meshes. If a mesh does not contain all ranks, the other ranks hold
    copies of these gradients, which count once, or have other stages of the model.

    Args:
        shards: this rank's shards of the gradients, as plain tensors: operations on DTensors take the host much longer.
        line: the ranks that together have all stages of the model, with this one; None: each has the whole model.
    """
    groups: dict[Reduction | None, list[torch.Tensor]] = {}
    previous, norms_of_group = None, []
    # the norm is computed in fp32 also for bf16 gradients, so that it is not rounded to bf16
    every_norm = torch._foreach_norm(shards, 2, dtype=torch.float32) if shards else ()
    for gradient, norm in zip(gradients, every_norm, strict=True):
        kind = (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else (None, ())
        # those that are sharded over the same ranks are reduced together; most are sharded like the one before, and
        # comparing is faster than hashing a mesh
        if kind != previous:
            previous, norms_of_group = kind, groups.setdefault(reduction(gradient), [])
        norms_of_group.append(norm)
    # with stages, `norm_over_stages` makes the bits the same on every rank
    norm_of = same_on_every_rank if line is None else sharded_norm
    group_norms = []  # for each group of gradients, the norm over all its ranks
    for group, norms in groups.items():
        own_norms = torch.stack(norms)
        group_norms.append(torch.linalg.vector_norm(own_norms) if group is None else norm_of(own_norms, *group))
    if line is not None:
        return norm_over_stages(group_norms, line)
    return group_norms[0] if len(group_norms) == 1 else torch.linalg.vector_norm(torch.stack(group_norms))


def norm_over_stages(norms: list[torch.Tensor], line: dist.ProcessGroup) -> torch.Tensor:
    """Return the norm of the gradients of all stages, float32 [], with the same bits on every rank. Collective.

    Args:
        norms: norms of the gradients of this rank's stages; empty if they train nothing.
        line: the ranks that together have all stages, this one included.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    sum_of_squares = torch.stack(norms).square().sum() if norms else torch.zeros((), device=device)
    dist.all_reduce(sum_of_squares, group=line)
    norm = sum_of_squares.sqrt()
    dist.all_reduce(norm, dist.ReduceOp.MAX)  # ranks with the same stages may have added in another order
    return norm


def reduction(gradient: torch.Tensor) -> Reduction | None:
    """Return over which ranks a gradient is sharded, and so its norm is reduced: (mesh, those of its dimensions over
    which the gradient is not replicated). None if it is not a DTensor."""
    if not isinstance(gradient, DTensor):
        return None
    return gradient.device_mesh, tuple(
        n for n, placement in enumerate(gradient.placements) if not placement.is_replicate()
    )
