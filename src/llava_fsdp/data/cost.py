"""What a sample costs to train on, so that ranks can be given equal work."""

from dataclasses import dataclass

from llava_fsdp.data.encode import Sample

UNIT = 1e6


@dataclass(frozen=True)
class CostModel:
    """FLOPs of a sample, forward and backward, as a polynomial of what it holds."""

    position: float = UNIT
    """Of a position, text or picture alike: the weights of the blocks."""
    pair: float = 0.0
    """Of a position attending to another one of its sample."""
    label: float = 0.0
    """Of a label: the output layer."""
    tile: float = 0.0
    """Of a picture's tile: tower and projector."""

    def __call__(self, sample: Sample, image_tokens: int) -> int:
        """In units of 1e6 FLOPs, at least 1: whole numbers add up alike in any order and on every machine.

        Args:
            image_tokens: rows of features that a tile has.
        """
        length = len(sample.input_ids)
        tiles = sum(int(rows.max(initial=0)) // image_tokens + 1 for rows in sample.image_rows)
        flops = self.position * length + self.pair * length**2 + self.label * sample.num_labels + self.tile * tiles
        return max(1, round(flops / UNIT))
