"""Run a step's micro-batches through the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from llava_fsdp.data.batching.batch import MicroBatch, Step
from llava_fsdp.model.architecture import Architecture, ImageInputs
from llava_fsdp.train.events.profiler import part
from llava_fsdp.train.state import TrainState

if TYPE_CHECKING:
    from llava_fsdp.parallel.pipeline.pipeline import Pipeline
    from llava_fsdp.train.sums.expert_sums import ExpertSums
    from llava_fsdp.train.sums.source_sums import SourceSums


class TrainingWork:
    """Computes this rank's stages for the micro-batches of a step, and adds up what they return."""

    def __init__(
        self,
        state: TrainState,
        micro_batches: list[MicroBatch],
        scale: float,
        sources: SourceSums,
        experts: ExpertSums,
    ):
        """Begin a step with these micro-batches.

        Args:
            scale: factor of each loss before the backward pass (the loss scale).
            sources: gets the losses by data source.
            experts: gets what the routers return, and adds the load-balance loss.
        """
        self.loader = state.loader
        self.micro_batches = micro_batches
        self.scale = scale
        self.sources, self.experts = sources, experts
        self.loss_sum = torch.zeros((), device=state.loader.device)
        """Sum of the losses; 0 without the last stage."""
        self.keys: dict[tuple[nn.Module, int], tuple[torch.Tensor | None, torch.Tensor | None]] = {}
        """{(stage, number of a micro-batch whose backward pass has not begun): its `TokenKeys.language` and `.vision`,
        the hashes from which dropout masks are computed}."""

    def forward(self, stage: nn.Module, number: int, hidden: torch.Tensor | None) -> torch.Tensor:
        """Run micro-batch `number` through a stage. `hidden`: output of the stage before; None for the first stage.

        The last stage returns the loss for the backward pass: the sum of the label losses times `MicroBatch.scale`,
        plus the load-balance loss, all times the loss scale. The others return hidden states, whose backward pass also
        trains the load-balance loss of the stage's experts.
        """
        assert isinstance(stage, Architecture)
        with part("forward"):
            micro = to_device(self.loader, stage, self.micro_batches[number])
            collector = self.sources.collector() if stage.is_last else None
            with self.experts.keep() as kept:  # kept: what the routers of experts return
                output = stage(**micro.inputs, hidden=hidden, collector=collector)
            # other micro-batches run before this one's backward pass, which may need its dropout masks again
            self.keys[stage, number] = stage.token_keys.language, stage.token_keys.vision
            if not stage.is_last:
                return self.experts.add_to_hidden(micro, kept, output, self.scale)
            self.sources.add(micro, collector)
            loss = micro.scale * output
            self.loss_sum += loss.detach()
            return self.experts.add(micro, kept, loss) * self.scale

    def before_backward(self, stage: nn.Module, number: int) -> None:
        """Restore the hashes from which the dropout masks of micro-batch `number` are computed: other micro-batches
        have run since, and activation checkpointing computes blocks again in the backward pass."""
        assert isinstance(stage, Architecture)
        stage.token_keys.language, stage.token_keys.vision = self.keys.pop((stage, number))


class EvaluationWork:
    """Computes this rank's stages for one micro-batch, without gradients."""

    def __init__(self, inputs_of: Callable[[nn.Module], Mapping[str, Any]], return_logits: bool):
        """Take what the stages need. `inputs_of` returns the arguments of a stage for the micro-batch, by name."""
        self.inputs_of = inputs_of
        self.return_logits = return_logits

    def forward(self, stage: nn.Module, number: int, hidden: torch.Tensor | None) -> torch.Tensor:
        return stage(**self.inputs_of(stage), hidden=hidden, return_logits=self.return_logits)


class PipelinedModel:
    """A model with its stages on different ranks. It has the arguments and results of a model that returns logits, on
    all ranks that process the same rows."""

    def __init__(self, model: nn.Module, pipeline: Pipeline):
        """Take the pipeline that runs the stages; `model`, this rank's stages, also describes the whole model."""
        assert isinstance(model, Architecture)  # FSDP has replaced its class by a subclass of that and of FSDPModule
        self.parts, self.language_config = model.parts, model.language_config
        self.pipeline = pipeline

    def __call__(
        self,
        input_ids: torch.Tensor,
        segments: Any,
        images: ImageInputs,
        seeds: Any,
        label_positions: torch.Tensor,
        *,
        return_logits: bool,
    ) -> torch.Tensor:
        """Return the logits at `label_positions`, float32 [labels, vocabulary], on every rank of the pipeline. They are
        computed by the last stage, and sent to the others. Collective. The arguments are those of `Llava.forward`.

        Args:
            return_logits: always true: the class stands for a model that is asked for logits. It is an argument because
                callers pass it to a model without a pipeline as well.
        """
        assert return_logits
        inputs_of_every_stage = {
            "input_ids": input_ids,
            "segments": segments,
            "images": images,
            "seeds": seeds,
            "label_positions": label_positions,
        }
        rows, length = input_ids.shape
        work = EvaluationWork(lambda stage: inputs_of_every_stage, return_logits=True)
        logits = self.pipeline.forward((rows, length), work)  # None without the last stage
        return self.pipeline.from_last(logits, (len(label_positions), self.language_config.vocab_size))


def to_device(loader: Any, stage: nn.Module, micro: MicroBatch) -> MicroBatch:
    """Return a micro-batch on the training's device, without images if the stage does not need them."""
    assert isinstance(stage, Architecture)
    return loader.to_device(micro if stage.is_first else replace(micro, images={}))


def run_pipeline(
    state: TrainState,
    step: Step,
    scale: float,
    sources: SourceSums,
    experts: ExpertSums,
) -> torch.Tensor:
    """Run the forward and backward passes of a step's micro-batches through the pipeline, and add their losses to
    `sources` and `experts`. Collective. `scale`: the loss scale.

    Returns:
        The label loss on this rank, float32 [], without `scale` and load-balance loss; 0 without the last stage.
    """
    assert state.pipeline is not None
    work = TrainingWork(state, step.micro_batches, scale, sources, experts)
    state.pipeline.run(work, [shape_of(micro) for micro in step.micro_batches])
    return work.loss_sum


def evaluate(
    state: TrainState, micro: MicroBatch, loader: Any = None, return_logits: bool = False
) -> torch.Tensor | None:
    """Run the forward pass of a micro-batch without gradients, and return its sum of losses, or its logits; None on
    ranks that do not have the last stage. Collective. `loader` moves it to the device; None: the training's loader."""
    loader = loader if loader is not None else state.loader
    if state.pipeline is not None:
        work = EvaluationWork(lambda stage: to_device(loader, stage, micro).inputs, return_logits)
        return state.pipeline.forward(shape_of(micro), work)
    return state.model(**loader.to_device(micro).inputs, return_logits=return_logits)


def shape_of(micro: MicroBatch) -> tuple[int, int]:
    """Return [rows, length] of a micro-batch, of the positions that this rank processes."""
    rows, length = micro.input_ids.shape
    return rows, length
