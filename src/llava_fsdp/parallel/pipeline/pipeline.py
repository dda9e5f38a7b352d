"""Pipeline parallelism: groups of ranks have different stages of a model and pass micro-batches on to each other.

torch.distributed.pipelining gives the order of forward and backward passes. torch's `PipelineStage` assumes that all
micro-batches have the same shape, reduces gradients once a step, and keeps weights gathered. `PackedStage` does none of
these, so that all sharding strategies work within a stage as they do without a pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, _utils
from torch.distributed.pipelining._backward import stage_backward
from torch.distributed.pipelining.schedules import FORWARD, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.pipelining.stage import _RecvInfo

from llava_fsdp.config import ParallelConfig
from llava_fsdp.parallel.eval_mode import forget_order
from llava_fsdp.parallel.parallelism import Parallelism
from llava_fsdp.parallel.ranks.rank_layout import Place, place_of_group
from llava_fsdp.parallel.sharding_strategies import begin_micro_batch


class ForwardWork(Protocol):
    """What the stages of a rank compute in a forward pass."""

    def forward(self, stage: nn.Module, number: int, hidden: torch.Tensor | None) -> torch.Tensor:
        """Run a stage (`stage`: its part of the model) on micro-batch `number`, and return its output: hidden states
        or, from the last stage, the loss. `hidden`: output of the stage before; None for the first stage."""
        ...


class StageWork(ForwardWork, Protocol):
    """What the stages of a rank compute in a training step."""

    def before_backward(self, stage: nn.Module, number: int) -> None:
        """Prepare the backward pass of a micro-batch, which may run blocks of the stage again."""
        ...


class GroupTensor(Protocol):
    """A tensor that only one group of ranks has."""

    @property
    def group(self) -> int:
        """Number of the group."""
        ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


class PackedStage(PipelineStage):
    """One stage of a model, for micro-batches of different shapes, which every rank knows without asking others.

    Buffers are allocated when a message is expected, and freed after the micro-batch's backward pass.
    """

    def __init__(
        self,
        root: nn.Module,
        number: int,
        parallelism: Parallelism,
        hidden: _utils._TensorMeta,
        group: dist.ProcessGroup,
    ):
        """Create stage `number` from `root`, its part of the model and a root of FSDP. `hidden`: dtype of hidden
        states, and a shape of which only the last dimension counts. `group`: the ranks that process the same rows."""
        # torch gets an empty module: it would gather all weights of an FSDP module before the first forward pass
        super().__init__(nn.Identity(), number, parallelism.place.stages, parallelism.device, group=group)
        self.root = root
        self.units = [module for module in root.modules() if isinstance(module, FSDPModule)]
        self.has_run = False
        self.plan = parallelism.plan
        self.hidden = hidden
        self.work: StageWork | None = None

    def begin_step(self, work: StageWork, shapes: Sequence[tuple[int, int]]) -> None:
        """Prepare a step of micro-batches of these shapes ([rows, length]), which `work` computes: fill the fields in
        which torch keeps what this stage gets from the stages beside it, and sends to them. torch would find the shapes
        by running the stage, and expects the same in each micro-batch."""
        self.work = work
        metas = [meta_of((*shape, self.hidden.shape[-1]), self.hidden.dtype) for shape in shapes]
        first = () if self.is_first else (metas[0],)
        self.chunks, self.has_backward = len(shapes), True
        self._stage_meta = _utils._StageMeta(
            inputs=first, outputs=(metas[0],), input_grads=first, output_grads=(metas[0],)
        )
        before, behind = self.stage_index - 1, self.stage_index + 1
        self.act_send_info = {0: [] if self.is_last else [behind]}
        self.grad_send_info = [] if self.is_first else [before]
        for number, meta in enumerate(metas):
            self.args_recv_info[number] = () if self.is_first else (_RecvInfo("hidden", before, None, meta),)
            self.grad_recv_info[number] = () if self.is_last else (_RecvInfo("gradient", behind, None, meta),)
        self.clear_runtime_states()

    def end_step(self) -> None:
        """Drop what was kept for the step."""
        self.work = None
        self.clear_runtime_states()

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        allocate(self.args_recv_info[fwd_chunk_id], self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        allocate(self.grad_recv_info[bwd_chunk_id], self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run this stage forward on micro-batch `kwargs["number"]`; torch's schedules call this. The first argument, if
        any, is the output of the stage before."""
        assert self.work is not None
        hidden = args[0] if args else None
        if self.has_run:
            # FSDP lists its units in the order of forward passes. Two forward passes may run before a backward pass,
            # which would then gather units of the other micro-batch again, and free them.
            forget_order(self.units)
        output = self.checked(self.work.forward(self.root, kwargs["number"], hidden))
        self.has_run = True  # in the first forward pass FSDP makes the list that `forget_order` clears
        return output

    def checked(self, output: torch.Tensor) -> torch.Tensor:
        """Return the output of the stage. The next stage receives it in a buffer of the dtype `self.hidden.dtype`."""
        assert self.is_last or output.dtype is self.hidden.dtype, f"hidden states are {output.dtype}"
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass of a micro-batch, then free the buffers of its received messages."""
        assert self.work is not None
        self.work.before_backward(self.root, bwd_chunk_id)
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        for info in (*self.args_recv_info[bwd_chunk_id], *self.grad_recv_info[bwd_chunk_id]):
            info.buffer = None

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[torch.Tensor | None, ...], None]:
        """Run a backward pass, with the settings of the sharding strategy instead of torch's own. Return (gradients of
        the stage's inputs, None), as torch's method does."""
        assert backward_type == "full", "FSDP's hooks do not run if the gradients of weights are computed apart"
        begin_micro_batch(self.root, self.plan, last_backward)
        norms = getattr(self.root, "gathered_first", None)
        if norms is not None:
            # The unit of fp32 norms stays gathered until the step's last backward pass: its module computes nothing, so
            # that no hook in the graph of another micro-batch would gather it again.
            norms.set_reshard_after_backward(last_backward)
        return stage_backward(bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], bwd_kwargs["input_values"]), None

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Do nothing: the backward passes have reduced the gradients."""

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: shapes are known."""

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: shapes are known."""

    def _post_metadata_inference_cleanup(self) -> None:
        """Do nothing: no pass was run to find shapes."""


def meta_of(shape: Sequence[int], dtype: torch.dtype) -> _utils._TensorMeta:
    """Describe contiguous hidden states of a shape and dtype, as torch's pipeline stages keep such descriptions."""
    strides = torch.empty(shape, device="meta").stride()
    return _utils._TensorMeta(shape=torch.Size(shape), stride=strides, dtype=dtype, requires_grad=True)


def allocate(infos: Sequence[_RecvInfo], device: torch.device) -> None:
    """Allocate the buffers of messages that will be received."""
    for info in infos:
        assert info.tensor_meta is not None
        # zeros: in a dry run nothing is received, and what is computed must stay finite
        info.buffer = torch.zeros(info.tensor_meta.shape, dtype=info.tensor_meta.dtype, device=device)


@dataclass(frozen=True)
class Pass:
    """A forward or backward pass of one micro-batch through one stage."""

    stage: int
    is_forward: bool
    micro_batch: int


def passes_of(parallel: ParallelConfig, index: int, micro_batches: int) -> list[Pass]:
    """Return the forward and backward passes of a step in the order in which ranks with the same stages run them: that
    of the schedule 1F1B or, if each rank has several stages, of interleaved 1F1B. `index`: number of the group of these
    ranks; it has stage `index` and, if there are several, each `parallel.pipeline`-th one after that."""
    if parallel.stages_per_rank == 1:
        # forward passes before the first backward pass: one for each stage from this one on
        ahead = min(micro_batches, parallel.pipeline - index)
        order = [Pass(index, True, number) for number in range(ahead)]
        for number in range(micro_batches):
            order.append(Pass(index, False, number))
            if ahead + number < micro_batches:
                order.append(Pass(index, True, ahead + number))
        return order
    place = place_of_group(parallel, index)
    actions = ScheduleInterleaved1F1B([FakeStage(place, n) for n in place.own], micro_batches).pipeline_order[index]  # type: ignore[arg-type]
    found = [(a.stage_index, a.computation_type is FORWARD, a.microbatch_index) for a in actions if a is not None]
    return [Pass(stage, is_forward, number) for stage, is_forward, number in found if number is not None]


class FakeStage:
    """What a schedule of torch reads of a stage, to find its order of passes without ranks."""

    def __init__(self, place: Place, number: int):
        self.num_stages, self.group_size, self.group_rank = place.stages, place.size, place.index
        self.stage_index = number
        self.stage_index_to_group_rank: dict[int, int] = {}


class Pipeline:
    """The stages of a model that this rank has, and their connections to the ranks with the other stages."""

    def __init__(
        self,
        roots: list[nn.Module],
        parallelism: Parallelism,
        width: int,
        dtype: torch.dtype,
    ):
        """Create the stages. Collective: all ranks must call it.

        Args:
            roots: this rank's stages, each a root of FSDP, in order.
            width, dtype: last dimension and dtype of hidden states.
        """
        mesh = parallelism.meshes.pipeline
        assert mesh is not None
        self.place = parallelism.place
        self.roots = roots
        self.group = mesh.get_group("pipeline")
        """The ranks that process the same rows, one of each group."""
        self.stage_group = mesh.get_group("stage")
        self.equal_ranks = parallelism.layout.equal_ranks(parallelism.world.rank)
        """(i, n): this rank is number i of the n ranks with the same stages."""
        self.width, self.dtype, self.device = width, dtype, parallelism.device
        hidden = meta_of((1, 1, width), dtype)
        self.stages = [
            PackedStage(root, number, parallelism, hidden, self.group)
            for root, number in zip(roots, self.place.own, strict=True)
        ]
        self.schedules: dict[int, Schedule1F1B | ScheduleInterleaved1F1B] = {}
        """{number of micro-batches in a step: schedule}, for the numbers that have occurred."""

    @property
    def has_last(self) -> bool:
        """Whether this rank has the last stage."""
        return self.place.index == self.place.size - 1

    def schedule(self, micro_batches: int) -> Schedule1F1B | ScheduleInterleaved1F1B:
        """Return torch's schedule of a step with so many micro-batches. Each is made once."""
        if micro_batches not in self.schedules:
            # the last stage returns the loss itself, and gradients are sums: nothing is divided by the micro-batches
            settings: dict[str, Any] = {"loss_fn": lambda output, _: output, "scale_grads": False}
            self.schedules[micro_batches] = (
                Schedule1F1B(self.stages[0], micro_batches, **settings)
                if len(self.stages) == 1
                else ScheduleInterleaved1F1B(list(self.stages), micro_batches, **settings)
            )
        return self.schedules[micro_batches]

    def run(self, work: StageWork, shapes: Sequence[tuple[int, int]]) -> None:
        """Run the forward and backward passes of a step. Collective: all ranks must call it.

        Args:
            work: computes the passes of this rank's stages.
            shapes: [rows, length] of each micro-batch, the same on all ranks that process the same rows.
        """
        for stage in self.stages:
            stage.begin_step(work, shapes)
        # the keyword arguments of `forward_maybe_with_nosync` for each micro-batch; targets and losses are not used
        numbers = [{"number": number} for number in range(len(shapes))]
        self.schedule(len(shapes))._step_microbatches(None, numbers, [None] * len(shapes), None, return_outputs=False)
        for stage in self.stages:
            stage.end_step()

    def forward(self, shape: tuple[int, int], work: ForwardWork) -> torch.Tensor | None:
        """Run the forward pass of one micro-batch of shape [rows, length], without a backward pass; `work` computes the
        stages. Return the output of the last stage; None on ranks without it. Collective: all ranks must call it."""
        output = None
        for stage in self.stages:
            hidden = None
            if not stage.is_first:
                hidden = torch.empty((*shape, self.width), dtype=self.dtype, device=self.device)
                dist.recv(hidden, group=self.group, group_src=(stage.stage_index - 1) % self.place.size)
            output = stage.checked(work.forward(stage.root, 0, hidden))  # 0: number of the only micro-batch
            if not stage.is_last:
                dist.send(output.contiguous(), group=self.group, group_dst=(stage.stage_index + 1) % self.place.size)
        return output if self.has_last else None

    def from_last(self, value: torch.Tensor | None, shape: Sequence[int]) -> torch.Tensor:
        """Broadcast a float32 tensor of a shape that all ranks know, from the ranks with the last stage to those with
        the others, and return it. `value` is None on ranks that do not have the last stage. Collective."""
        value = value if value is not None else torch.empty(tuple(shape), device=self.device)
        dist.broadcast(value, group=self.group, group_src=self.place.size - 1)
        return value

    def gather_in_stage(self, items: list[Any]) -> list[Any]:
        """Return the lists of all ranks with this rank's stages, joined in rank order. Collective among these ranks."""
        values: list[Any] = [None] * self.equal_ranks[1]  # one for each of these ranks
        dist.all_gather_object(values, items, group=self.stage_group)
        return [item for of_rank in values for item in of_rank]

    def on_rank_0(self, value: torch.Tensor | None, elsewhere: GroupTensor | None) -> torch.Tensor:
        """Send a tensor to rank 0 from a rank that has it, and return it there; the result on other ranks is not used.
        Ranks with the same stages are a group, and all ranks of one group have the tensor. All ranks must call this.

        Args:
            value: the tensor; None on ranks that do not have it.
            elsewhere: on ranks that do not have the tensor, its group, dtype and shape; else None.
        """
        is_first = self.equal_ranks[0] == 0  # the first of the ranks with the same stages
        if value is not None:
            if self.place.index > 0 and is_first:
                dist.send(value.contiguous(), group=self.group, group_dst=0)
            return value
        assert elsewhere is not None, "some group has the tensor"
        if self.place.index > 0 or not is_first:
            return torch.empty(0)
        received = torch.empty(elsewhere.shape, dtype=elsewhere.dtype, device=self.device)
        dist.recv(received, group=self.group, group_src=elsewhere.group)
        return received
