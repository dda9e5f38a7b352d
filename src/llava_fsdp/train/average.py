"""An exponential moving average of the weights, which is exported on request."""

import torch
from torch import nn

from llava_fsdp.parallel.local_shards import like, plain_shard
from llava_fsdp.parallel.precision.precision import MasterWeights


class WeightAverage:
    """Exponential moving average of the master weights in fp32, sharded like them. It begins as the weights with which
    training begins."""

    def __init__(self, masters: MasterWeights, decay: float):
        self.masters = masters
        self.decay = decay
        self.named = {name: like(p, plain_shard(p).detach().float().clone()) for name, p in masters.named.items()}

    def update(self) -> None:
        """Add the weights after an update: the average becomes decay * average + (1 - decay) * weights."""
        for name, average in self.named.items():  # one at a time, because bf16 weights are copied
            plain_shard(average).lerp_(plain_shard(self.masters.named[name]).detach().float(), 1 - self.decay)

    @torch.no_grad()
    def replace_weights(self) -> None:
        """Overwrite the weights of the model by the average. The state can then be exported, but not trained."""
        masters: dict[str, nn.Parameter] = self.masters.named
        for name, average in self.named.items():
            plain_shard(masters[name]).copy_(plain_shard(average))
        self.masters.refresh()
