"""Dropout whose mask is computed by hashing the sample, the token, the channel and the layer.

Unlike a mask from a random generator, this mask is the same on any number of ranks, for any packing of samples, and
when a block is computed again in the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from llava_fsdp.model.packed_attention.attention import RowSegments
from llava_fsdp.runtime.seeds import derive

BITS = 24
"""Number of bits of the hash that are compared with the dropout probability, which is rounded to a multiple of
2**-24."""
MULTIPLIERS = (0x7FEB352D, 0x2C1B3C6D)
"""Multipliers of the hash: odd numbers below 2**31 that mix 32 bits well (found by Ettinger and Wellons)."""


@dataclass
class TokenKeys:
    """Hashes of each token's sample and position in a micro-batch, from which the dropout masks of all layers
    follow."""

    language: torch.Tensor | None = None
    """Hashes of the language model's tokens, int32 [rows, length]."""
    vision: torch.Tensor | None = None
    """Hashes of the vision tower's tokens, int32 [tiles, vision tokens]."""

    def set(
        self,
        seeds: torch.Tensor,
        tile_seeds: torch.Tensor,
        shape: torch.Size,
        segments: RowSegments | None,
        vision_tokens: int,
    ) -> None:
        """Compute the hashes of a micro-batch's tokens from the seeds, below 2**31, of its samples and tiles.

        Args:
            seeds: those of the tokens, int64, [rows, length] or broadcast to it.
            tile_seeds: those of the vision tower's input images, int64 [tiles].
            shape: [rows, length]
            segments: sample boundaries of a packed row (`RowSegments`); None: every row is one sample.
            vision_tokens: number of tokens that a tile has in the vision tower.
        """
        # positions in the samples, int64 [rows, length] or broadcast to it
        positions = torch.arange(shape[1], device=seeds.device)[None] if segments is None else segments.position_ids
        self.language = hash_pairs(seeds, positions)
        if not len(tile_seeds):
            tile_seeds = tile_seeds.new_zeros(1)  # without images, a trainable vision tower runs on a blank image
        self.vision = hash_pairs(tile_seeds[:, None], torch.arange(vision_tokens, device=seeds.device)[None])


class SampleDropout(nn.Module):
    """Dropout whose mask depends on the sample, the token, the channel and the layer, not on the rank or other samples.
    Values that are kept are divided by the probability of being kept."""

    def __init__(self, p: float, name: str, keys: TokenKeys):
        """Create the dropout, with probability `p`, of the module `name`. The name makes its masks differ from those of
        other modules; it begins with that of its part. `keys` has the hashes of the current micro-batch's tokens."""
        super().__init__()
        self.p = p
        # a tensor and not an int, which torch.compile would treat as a constant, so that it would compile every layer
        self.salt = torch.tensor(derive("dropout", name) % 2**31, device="cpu")
        self.keys = keys
        self.in_tower = name.startswith("vision_tower.")
        self.first_channel = 0
        """Number of the first channel of the input; not 0 if ranks have divided the channels among them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply dropout in training: [..., channels] -> [..., channels]. The mask is a hash of each token's key, the
        channel and the module's name."""
        if not self.training:
            return x
        keys = self.keys.vision if self.in_tower else self.keys.language
        assert keys is not None and keys.numel() * x.shape[-1] == x.numel(), (
            "TokenKeys.set was not called for this micro-batch"
        )
        keys = keys.reshape(x.shape[:-1])  # some blocks flatten rows and tokens into one dimension
        first, last = self.first_channel, self.first_channel + x.shape[-1]
        channels = hash_pairs(torch.arange(first, last, device=x.device), self.salt)
        value = mix_bits(keys[..., None] + channels)
        dropped = (value & (2**BITS - 1)) < int(self.p * 2**BITS)
        return x.masked_fill(dropped, 0) * (1 / (1 - self.p))


def hash_pairs(first: torch.Tensor, second: torch.Tensor | int) -> torch.Tensor:
    """Hash pairs of integers below 2**31, with broadcasting of the two tensors; the hashes are int32."""
    low = (first * 0x9E3779B1 + second * 0x85EBCA77) & 0xFFFFFFFF  # if int64 overflows, the low half is still right
    return mix_bits((low - 2**31).to(torch.int32))


def mix_bits(value: torch.Tensor) -> torch.Tensor:
    """Mix the bits of int32 values, so that a change of one bit of a value changes many bits of the result."""
    value = value ^ (value >> 16)
    value = value * MULTIPLIERS[0]
    value = value ^ (value >> 15)
    value = value * MULTIPLIERS[1]
    return value ^ (value >> 16)
