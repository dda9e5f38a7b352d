"""The kernel that adds gradients on one rank adds those that FSDP keeps whole, too, and changes no bit."""

import pytest
import torch
from harness import RankPool
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from llava_fsdp.parallel.fsdp.waiting_gradients import GradientIntoWaiting, add_with_kernel
from llava_fsdp.parallel.local_shards import local
from llava_fsdp.parallel.precision.precision import COLUMNS
from llava_fsdp.parallel.ranks.world import World

MICRO_BATCHES = 3
Found = tuple[list[torch.Tensor], list[int]]


def two_steps(world: World, ways: list[bool | None]) -> list[Found]:
    """For each way to add (FSDP's, the plain one, the compiled kernel) the gradients of the second step, and the number
    of gradients that the hooks added in each micro-batch of both steps."""
    torch._inductor.config.compile_threads = 1  # a pool of a process that was forked from waits for nobody here
    mesh = init_device_mesh("cpu", (world.size,))
    found = []
    for compiled in ways:
        torch.manual_seed(0)
        # sizes: an even number of rows of the kernel, an odd one, and one that the kernel leaves to torch
        model = nn.Sequential(nn.Linear(7, COLUMNS), nn.Linear(COLUMNS, 33), nn.Linear(33, 5), nn.Linear(5, 3))
        model[3].requires_grad_(False)
        frozen = {*model[3].bfloat16().parameters()}
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for layer in (*model[:3], model):
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=False, ignored_params=frozen)
        if compiled is not None:
            add_with_kernel(model, compiled)
        added: list[int] = []
        call = GradientIntoWaiting.__call__

        def counted(self: GradientIntoWaiting, gathered: torch.Tensor) -> None:
            had = gathered.grad is not None
            call(self, gathered)  # noqa: B023  used before the next way
            added[-1] += had and gathered.grad is None  # noqa: B023

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(GradientIntoWaiting, "__call__", counted)
            for _ in range(2):
                model.zero_grad()
                for micro in range(MICRO_BATCHES):
                    added.append(0)
                    model.set_requires_gradient_sync(micro == MICRO_BATCHES - 1)
                    model.set_reshard_after_backward(micro == MICRO_BATCHES - 1)
                    given = torch.randn(5 + micro, 7, generator=torch.Generator().manual_seed(10 * world.rank + micro))
                    model(given.bfloat16()).square().sum().backward()
        gradients = [local(p.grad) for p in model.parameters() if p.grad is not None]
        found.append((gradients, added))
    return found


@pytest.mark.ranks
def test_the_kernel_adds_waiting_gradients_with_the_same_bits(pools: dict[int, RankPool]) -> None:
    for fsdp, *ours in pools[2].run(two_steps, [None, False, True]):
        assert len(fsdp[0]) == 6 and any(gradient.count_nonzero() for gradient in fsdp[0])
        assert fsdp[1] == [0] * 2 * MICRO_BATCHES
        for gradients, added in ours:
            assert added == [0, 6, 6] * 2  # FSDP casts those of the first micro-batch
            assert all(map(torch.equal, gradients, fsdp[0]))
