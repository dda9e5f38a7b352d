"""What all ranks agree to do between two steps, by one small collective on the CPU. Nothing else stops a rank alone."""

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Votes:
    """What is asked for; of all ranks together, what any of them asks for."""

    stop: bool = False
    save: bool = False
    failed: bool = False
    """A checkpoint that is being written in the background could not be."""
    lost: bool = False
    """The run's folder is not where it was, as rank 0 alone knows."""

    def agreed(self) -> "Votes":
        """A collective."""
        return Votes(*any_rank(self.stop, self.save, self.failed, self.lost))


def any_rank(*flags: bool) -> tuple[bool, ...]:
    """Which of them any rank has set. A collective; 0.13 ms between two processes on gloo, nothing at world size 1."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return flags
    votes = torch.tensor(flags, dtype=torch.int32)
    dist.all_reduce(votes, dist.ReduceOp.MAX)  # a tensor of the CPU goes by gloo, on machines with GPUs too
    return tuple(map(bool, votes.tolist()))
