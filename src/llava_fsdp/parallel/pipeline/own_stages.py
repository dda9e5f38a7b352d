"""The stages of a model that a rank has."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from llava_fsdp.config import Config
from llava_fsdp.model.architecture import Architecture
from llava_fsdp.parallel.parallelism import Parallelism
from llava_fsdp.parallel.pipeline.pipeline import Pipeline
from llava_fsdp.parallel.pipeline.stages import StagePlan, children_of, plan_of_stages, remove_others, stage_of
from llava_fsdp.parallel.precision.precision import MasterWeights
from llava_fsdp.parallel.ranks.mesh import gather_lists
from llava_fsdp.parallel.ranks.rank_layout import Place
from llava_fsdp.runtime.text.log import log


@dataclass(frozen=True)
class Elsewhere:
    """A trained parameter that only ranks with other stages of the model have."""

    group: int
    """Number of the group of ranks that have it."""
    dtype: torch.dtype
    shape: tuple[int, ...]


class OwnStages:
    """The stages of a model that this rank has."""

    def __init__(self, model: Architecture, plan: StagePlan, place: Place):
        """Keep how a whole model, on the meta device, is divided into stages. `of` makes the stages themselves.

        Args:
            model: the whole model. The names of its language model's children are read.
            plan: which blocks each stage has.
            place: which stages this rank has.
        """
        self.plan = plan
        self.place = place
        children = children_of(model.language)
        assert children is not None, "checked by plan_stages"
        self.children = children
        self.roots: list[Architecture] = []

    @property
    def description(self) -> str:
        """How the model is divided, for the log."""
        ranks = "ranks" if self.place.stages == self.place.size else "ranks, two each"
        return f"{self.place.stages} stages on {self.place.size} groups of {ranks}: {self.plan}"

    def keep(self, model: Architecture) -> None:
        """Remove from a model, in place, the modules that this rank does not have."""
        blocks = {number for stage in self.place.own for number in self.plan.blocks[stage]}
        has_first, has_last = 0 in self.place.own, self.place.stages - 1 in self.place.own
        remove_others(model, self.children, blocks, has_first, has_last)

    def of(self, model: Architecture) -> list[nn.Module]:
        """Return this rank's stages as modules, which share the modules of the model. They are also kept as `roots`."""
        last = self.place.stages - 1
        self.roots = [
            stage_of(model, self.children, self.plan.blocks[number], number == 0, number == last)
            for number in self.place.own
        ]
        return list(self.roots)


def plan_own_stages(
    model: Architecture, cfg: Config, parallelism: Parallelism, counts: Sequence[float] | None
) -> OwnStages | None:
    """Plan how a whole model, which is on the meta device, is divided into stages, and log the plan. Return it with the
    stages of this rank; None without `parallel.pipeline`. `counts`: mean number of tokens, pairs of tokens that attend,
    labels and tiles of a sample; None without `parallel.pipeline`."""
    if parallelism.meshes.pipeline is None:
        return None
    assert counts is not None, "stages are planned from the sizes of samples"
    stages = OwnStages(model, plan_of_stages(cfg, model, counts), parallelism.place)
    log().log(logging.INFO if parallelism.is_first else logging.DEBUG, "%s", stages.description)
    return stages


def trained_elsewhere(pipeline: Pipeline, masters: MasterWeights) -> dict[str, Elsewhere]:
    """Return the trained parameters that this rank does not have, by name, with the number of the group of ranks that
    has each. Ranks with the same stages are a group. Collective: all ranks must call it."""
    index = pipeline.place.index
    trained_here = {name: Elsewhere(index, p.dtype, tuple(p.shape)) for name, p in masters.named.items()}
    # one rank of each group tells its parameters
    found = gather_lists([trained_here if pipeline.equal_ranks[0] == 0 else {}])
    return {name: place for each in found for name, place in each.items() if place.group != index}
