"""Set the dtypes in which weights are stored, used in the forward and backward pass, and updated by the optimizer."""

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from llava_fsdp.config import DType, MasterDType, PrecisionConfig
from llava_fsdp.parallel.precision.fp8 import StoredFp8Linear, prepare_scales, weight_storer
from llava_fsdp.parallel.precision.summed_linear import SummedLinear

DTYPES = {DType.bf16: torch.bfloat16, DType.fp16: torch.float16, DType.fp32: torch.float32}
MASTERS = {MasterDType.bf16: torch.bfloat16, MasterDType.fp32: torch.float32}


def store_weights(model: nn.Module, cfg: PrecisionConfig, sharded: bool) -> None:
    """Cast every parameter of a meta-device model to the dtype in which it is stored. To be called before layers are
    divided among ranks (`divide_layers`): the local tensor of a DTensor keeps its dtype.

    Frozen weights are stored in the compute dtype, because FSDP does not cast parameters that it ignores. Trainable
    weights are stored in the master dtype with FSDP (`sharded`); without FSDP they are stored in the compute dtype, and
    `MasterWeights` holds separate masters. Norms may stay in fp32. Buffers (rotary frequencies) keep their dtype.
    """
    compute, master = DTYPES[cfg.param_dtype], MASTERS[cfg.master_dtype]
    kept = norm_weights(model, cfg)
    for parameter in model.parameters():
        stored = master if parameter.requires_grad and sharded else compute
        stored = torch.float32 if parameter in kept else stored
        if parameter.dtype != stored:
            assert not isinstance(parameter, DTensor), "its local tensor would keep its dtype"
            parameter.data = parameter.data.to(stored)


def norms_kept_in_fp32(model: nn.Module, cfg: PrecisionConfig) -> list[nn.Module]:
    """Return the model's normalization layers if `precision.norm_dtype` keeps them in fp32, else an empty list.

    The weight of a norm is around 1, where neighbouring bf16 numbers differ by 1/128: bf16 would lose smaller updates.
    """
    if cfg.norm_dtype is cfg.param_dtype:
        return []
    return [m for m in model.modules() if is_norm(m)]


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a normalization layer: its class name contains `Norm`, it has no submodules, and its
    parameters have at most one dimension."""
    is_leaf = not any(True for _ in module.children()) and all(p.ndim <= 1 for p in module.parameters())
    return is_leaf and "Norm" in type(module).__name__


def norm_weights(model: nn.Module, cfg: PrecisionConfig) -> set[nn.Parameter]:
    """Return the parameters of the norms that are kept in fp32."""
    return {p for norm in norms_kept_in_fp32(model, cfg) for p in norm.parameters()}


def compute_norms_in_fp32(model: nn.Module, cfg: PrecisionConfig) -> list[RemovableHandle]:
    """Make norms kept in fp32 cast their input to fp32 and their output to the compute dtype. Return the hooks."""
    hooks = []
    for norm in norms_kept_in_fp32(model, cfg):
        hooks.append(norm.register_forward_pre_hook(lambda _, inputs: (inputs[0].float(), *inputs[1:])))
        hooks.append(norm.register_forward_hook(lambda _, inputs, output: output.to(DTYPES[cfg.param_dtype])))
    return hooks


class MasterWeights:
    """The master weights by parameter name: the tensors that the optimizer updates and that checkpoints contain.

    With FSDP, or if the master dtype is the compute dtype, the master weights are the model's own parameters.
    Otherwise, which is possible only on a single rank, the model's parameters are copies of the master weights in the
    compute dtype. The backward pass adds the gradients of the copies to those of the master weights, in the master
    dtype, and `refresh` updates the copies after an optimizer step. The results are bit for bit those of `fully_shard`
    on one rank, except with `precision.linear=fp32_sums`, whose layers add gradients themselves. Layers that store
    their weight in fp8 have no such copy: `refresh` casts the master weight for them.
    """

    def __init__(
        self,
        trainable: dict[str, nn.Parameter],
        master: torch.dtype = torch.float32,
        blocks: nn.Module | None = None,
        has_scales: bool = False,
        compiled: bool = False,
    ):
        """Create a master weight for each trainable parameter whose dtype is neither `master` nor fp32, uninitialised,
        and a hook that adds the parameter's gradient to it, unless its layer does.

        Args:
            master: dtype of the master weights, except those of parameters in fp32, which are in fp32.
            blocks: those whose layers may keep their weight in fp8, or add gradients themselves; None: there are none.
            has_scales: whether torchao's layers in `blocks` have fp8 scales that depend on the weights.
            compiled: whether torch.compile makes the kernels that add gradients and that cast weights to fp8.
        """
        self.named: dict[str, nn.Parameter] = {}
        self._sums: list[tuple[nn.Parameter, torch.Tensor]] = []
        """Master weights whose gradients layers add within products, and these gradients."""
        self._copies: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._stored: list[tuple[StoredFp8Linear, nn.Parameter]] = []
        self._store_weight = weight_storer(compiled)
        modules = blocks.modules() if blocks is not None else ()
        layers = {m.weight: m for m in modules if isinstance(m, StoredFp8Linear | SummedLinear)}
        add = gradient_adder(compiled)
        for name, parameter in trainable.items():
            if parameter.dtype in (torch.float32, master):
                self.named[name] = parameter
                continue
            kept = nn.Parameter(torch.empty_like(parameter, dtype=master))
            self.named[name] = kept
            layer = layers.get(parameter)
            if isinstance(layer, StoredFp8Linear):
                self._stored.append((layer, kept))
            else:
                self._copies.append((parameter, kept))
            if isinstance(layer, SummedLinear):
                kept.grad = layer.gradient_sum = torch.zeros_like(kept)
                self._sums.append((kept, kept.grad))
                continue
            parameter.register_post_accumulate_grad_hook(GradientInto(kept, add))
        # layers that keep their weight in fp8 keep its scale too
        self._with_scales = blocks if has_scales and not self._stored else None

    def free_gradients(self) -> None:
        """Free the gradients of all master weights. Those that layers add within products become zeros instead."""
        for parameter in self.named.values():
            parameter.grad = None
        for parameter, total in self._sums:
            parameter.grad = total.zero_()

    @torch.no_grad()
    def refresh(self) -> None:
        """Update what depends on the master weights after they have changed: their copies in the compute dtype, and the
        weights or the scales of fp8 layers. Collective if FSDP gathers weights in fp8."""
        if self._copies:
            torch._foreach_copy_([p for p, _ in self._copies], [m for _, m in self._copies])
        for layer, master in self._stored:
            layer.store(master, self._store_weight)
        if self._with_scales is not None:
            prepare_scales(self._with_scales)


class GradientInto:
    """Gradient hook of a copy in the compute dtype: adds its gradient to the master weight's, and frees it."""

    def __init__(self, master: nn.Parameter, add: Callable[[torch.Tensor, torch.Tensor], None]):
        self.master = master
        self.add = add

    def __call__(self, parameter: torch.Tensor) -> None:
        """Add the gradient of a copy to that of its master weight, in the master dtype, and free it."""
        assert parameter.grad is not None
        if self.master.grad is None:
            self.master.grad = parameter.grad.to(self.master.dtype)
        else:
            self.add(self.master.grad, parameter.grad)
        parameter.grad = None


COLUMNS = 1024
"""Width of the matrices as which gradients are added by a compiled kernel. With it one kernel is enough for all
gradients, and it knows that their sizes are multiples of what a GPU loads at once."""


def gradient_adder(compiled: bool) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Return a function that adds a gradient in 16 bits to a sum in float32, in place. One kernel casts and adds,
    without the memory and the traffic of a cast copy. The result has the same bits as with such a copy.

    torch's own kernel for two dtypes does not use the whole bandwidth of a GPU: the gradients of a 7B model took 25 ms
    on an H200, where 17 ms are possible, and they are added in every micro-batch. If `compiled`, torch.compile makes
    the kernel, for gradients whose size is a multiple of COLUMNS.
    """

    def add(total: torch.Tensor, gradient: torch.Tensor) -> None:
        total.add_(gradient)

    if not compiled:
        return add
    kernel = torch.compile(add)

    def add_whole(total: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add with the compiled kernel if it fits the tensors, else with torch's."""
        if total.numel() % COLUMNS == 0 and total.is_contiguous() and gradient.is_contiguous():
            kernel(total.view(-1, COLUMNS), gradient.view(-1, COLUMNS))
        else:
            add(total, gradient)

    return add_whole
