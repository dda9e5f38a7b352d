"""Numbers of ranks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RankCounts:
    """Numbers of ranks: in all, per copy of the model (of which hybrid strategies have several), and per node."""

    world_size: int
    shard_size: int
    node_size: int
