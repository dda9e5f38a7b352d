"""In which dtype weights are stored, computed with and updated."""

import torch
from torch import nn

from llava_fsdp.config import DType, PrecisionConfig

DTYPES = {DType.bf16: torch.bfloat16, DType.fp32: torch.float32}


def store_weights(model: nn.Module, cfg: PrecisionConfig, sharded: bool) -> None:
    """Give every parameter of a meta-device model the dtype it is stored in.

    FSDP casts what it shards for the computation and leaves alone what it ignores, so frozen weights are stored in
    the compute dtype; trainable ones are fp32 masters under FSDP, and working copies in the compute dtype without
    it (`MasterWeights` then holds the masters). Buffers keep their dtype: rotary frequencies are fp32.
    """
    compute = DTYPES[cfg.param_dtype]
    kept = norm_weights(model, cfg)
    for parameter in model.parameters():
        is_fp32 = parameter in kept or (parameter.requires_grad and sharded)
        parameter.data = parameter.data.to(torch.float32 if is_fp32 else compute)


def norms_kept_in_fp32(model: nn.Module, cfg: PrecisionConfig) -> list[nn.Module]:
    """The norms that compute in another dtype than the rest of the model.

    A norm's weight scales a whole channel and lies around 1, where bf16 has steps of 1/128: an update below half
    of that would not be seen by the forward pass.
    """
    if cfg.norm_dtype is cfg.param_dtype:
        return []
    return [m for m in model.modules() if is_norm(m)]


def is_norm(module: nn.Module) -> bool:
    """Models bring norms of their own, with nothing in common but the name and a value for each channel."""
    alone = not any(True for _ in module.children()) and all(p.ndim <= 1 for p in module.parameters())
    return alone and "Norm" in type(module).__name__


def norm_weights(model: nn.Module, cfg: PrecisionConfig) -> set[nn.Parameter]:
    return {p for norm in norms_kept_in_fp32(model, cfg) for p in norm.parameters()}


def compute_norms_in_fp32(model: nn.Module, cfg: PrecisionConfig) -> None:
    """Cast what goes into these norms, and back what comes out: the layers between them stay in the compute dtype."""
    for norm in norms_kept_in_fp32(model, cfg):
        norm.register_forward_pre_hook(lambda _, inputs: (inputs[0].float(), *inputs[1:]))
        norm.register_forward_hook(lambda _, inputs, output: output.to(DTYPES[cfg.param_dtype]))


class MasterWeights:
    """The fp32 tensors that the optimizer steps and that checkpoints hold, by parameter name.

    Under FSDP, and in fp32, they are the model's own parameters. At world size 1 in bf16 the model computes with
    bf16 working copies: each backward adds its gradients to the masters' in fp32, and `refresh` copies the
    masters back after an optimizer step. The arithmetic is that of `fully_shard` on one rank, bit for bit.
    """

    def __init__(self, trainable: dict[str, nn.Parameter]):
        self.named: dict[str, nn.Parameter] = {}
        self._copies: list[tuple[nn.Parameter, nn.Parameter]] = []
        for name, parameter in trainable.items():
            if parameter.dtype == torch.float32:
                self.named[name] = parameter
                continue
            master = nn.Parameter(torch.empty_like(parameter, dtype=torch.float32))
            self.named[name] = master
            self._copies.append((parameter, master))
            parameter.register_post_accumulate_grad_hook(GradientInto(master))

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the masters into the working copies."""
        if self._copies:
            torch._foreach_copy_([p for p, _ in self._copies], [m for _, m in self._copies])


class GradientInto:
    """Moves a working copy's gradient to its master, in the master's dtype, and frees it."""

    def __init__(self, master: nn.Parameter):
        self.master = master

    def __call__(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        gradient = parameter.grad.to(self.master.dtype)
        if self.master.grad is None:
            self.master.grad = gradient
        else:
            self.master.grad.add_(gradient)
        parameter.grad = None
