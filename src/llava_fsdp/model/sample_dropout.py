"""Dropout whose mask is a function of the sample, the position, the channel and the layer.

A generator's mask depends on what else a rank runs. This one is the same on any number of ranks, however samples are
packed, and when a block runs again for its backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from llava_fsdp.runtime.seeds import derive

BITS = 24
"""Of a hash that decide: a probability is exact to 2**-24."""
MULTIPLIERS = (0x7FEB352D, 0x2C1B3C6D)
"""Odd numbers below 2**31 with which a 32-bit hash mixes well (Ettinger's and Wellons' search)."""


@dataclass
class TokenKeys:
    """What the masks of a forward pass are made of; it stays until the next one, because blocks run again."""

    language: torch.Tensor | None = None
    """int32 [rows, length]"""
    vision: torch.Tensor | None = None
    """int32 [tiles, positions]"""

    def set(
        self,
        seeds: torch.Tensor,
        tile_seeds: torch.Tensor,
        shape: torch.Size,
        segments: tuple[torch.Tensor, torch.Tensor, tuple[int, ...]] | None,
        tower_positions: int,
    ) -> None:
        """
        Args:
            seeds: int64 [samples], below 2**31.
            tile_seeds: int64 [tiles], likewise.
            shape: [rows, length]; without segments a row is a sample.
        """
        if segments is None:
            positions = torch.arange(shape[1], device=seeds.device)[None]
            own = seeds[:, None]
        else:
            positions, boundaries, _ = segments
            own = seeds.repeat_interleave(boundaries.diff(), output_size=shape[1])[None]
        self.language = hashed(own, positions)
        shown = tile_seeds if len(tile_seeds) else tile_seeds.new_zeros(1)  # a tower that trains runs a blank image
        self.vision = hashed(shown[:, None], torch.arange(tower_positions, device=seeds.device)[None])


class SampleDropout(nn.Module):
    """Inverted dropout: what stays is divided by the probability that it does."""

    def __init__(self, p: float, name: str, keys: TokenKeys):
        """
        Args:
            name: of the module; each has masks of its own.
        """
        super().__init__()
        self.p = p
        # a tensor, because a whole number of a module is a constant to the compiler, which then compiles every layer
        self.salt = torch.tensor(derive("dropout", name) % 2**31, device="cpu")
        self.keys = keys
        self.in_tower = name.startswith("vision_tower.")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., channels] -> [..., channels]"""
        if not self.training:
            return x
        keys = self.keys.vision if self.in_tower else self.keys.language
        assert keys is not None and keys.numel() * x.shape[-1] == x.numel(), "a forward pass tells its samples first"
        keys = keys.reshape(x.shape[:-1])  # some blocks lay their rows end to end
        channels = hashed(torch.arange(x.shape[-1], device=x.device), self.salt)
        value = mixed(keys[..., None] + channels)
        dropped = (value & (2**BITS - 1)) < int(self.p * 2**BITS)
        return x.masked_fill(dropped, 0) * (1 / (1 - self.p))

    def extra_repr(self) -> str:
        return f"p={self.p}"


def hashed(first: torch.Tensor, second: torch.Tensor | int) -> torch.Tensor:
    """int32: a hash of two numbers of at most 31 bits, whatever shapes they broadcast to."""
    low = (first * 0x9E3779B1 + second * 0x85EBCA77) & 0xFFFFFFFF  # where int64 wraps, its low half is right
    return mixed((low - 2**31).to(torch.int32))


def mixed(value: torch.Tensor) -> torch.Tensor:
    """int32 -> int32: a bit that differs changes many. Products wrap and shifts keep the sign, as int32's do."""
    value = value ^ (value >> 16)
    value = value * MULTIPLIERS[0]
    value = value ^ (value >> 15)
    value = value * MULTIPLIERS[1]
    return value ^ (value >> 16)
