"""Routers of a mixture of experts: find them in a language model, keep what they return in a forward pass, count the
load of each expert, and compute a loss that balances the loads."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from llava_fsdp.runtime.errors import ConfigError, ModelError


@dataclass
class Router:
    """A module of a language model that chooses the experts of each token."""

    name: str
    module: nn.Module
    index: int
    """Index of the logits in the tuple that the module returns."""
    experts: int
    choices: int
    """Number of experts that a token is sent to."""
    returns_choices: bool
    """Whether the module's last output holds the chosen experts. If not, these are the experts with the largest
    logits."""


@dataclass
class RouterOutput:
    """What a router returned in one forward pass."""

    router: Router
    logits: torch.Tensor
    """[tokens, experts]"""
    last: torch.Tensor
    """The last output of the module."""

    @property
    def chosen(self) -> torch.Tensor:
        """Numbers of the experts that each token is sent to, int64 [tokens, choices]: the router's last output or, if
        that is something else, the experts with the largest logits."""
        return self.last if self.router.returns_choices else self.logits.topk(self.router.choices, dim=-1).indices


@dataclass(frozen=True)
class RankPositions:
    """The positions of a micro-batch's rows whose tokens the routers of this rank get, if several ranks compute each
    layer together (`parallel.tensor`): ceil(length / ranks) of each row; the last ranks may have fewer, or none."""

    index: int
    """Number of this rank among them."""
    ranks: int
    summed: Callable[[torch.Tensor], torch.Tensor]
    """Sums a tensor over these ranks; a collective."""

    def of(self, whole: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Select from `whole`, a value for each token, those at the positions that this rank computes: [rows * length]
        -> [rows * this rank's positions]. `shape`: [rows, length]. Ranks divide each row evenly, in order."""
        each = math.ceil(shape[1] / self.ranks)
        return whole.view(shape)[:, each * self.index : each * (self.index + 1)].flatten()


def find_routers(model: nn.Module) -> list[Router]:
    """Return the routers of a meta-device language model, in the order of its layers; an empty list if it has none, or
    routers with unlike numbers of experts.

    transformers' models declare which modules return router logits (`_can_record_outputs`): by class and, where
    `layer_name` is set, by a part of the module's name. Each is tried on two tokens, because their outputs differ.
    """
    declared = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits", ())
    recorders = declared if isinstance(declared, (list, tuple)) else [declared]
    routers = [
        router
        for name, module in model.named_modules()
        for recorder in recorders
        if recorder.target_class is not None
        and isinstance(module, recorder.target_class)
        and f".{recorder.layer_name or ''}".rstrip(".") in f".{name}"
        and (router := probe(name, module, recorder.index, model.config)) is not None
    ]
    return routers if len({router.experts for router in routers}) == 1 else []


def probe(name: str, module: nn.Module, index: int, config: Any) -> Router | None:
    """Call a module on the meta device with two tokens, and return a Router if its outputs are those of one; None if
    they are not, or the number of experts of a token is not known.

    Args:
        name: the module's name in the language model.
        index: index of the logits in the tuple that the module should return.
    """
    weight = next(module.parameters(), None)
    if weight is None or not weight.is_meta:
        return None
    try:
        with torch.no_grad():
            outputs = module(torch.empty(2, config.hidden_size, device="meta", dtype=weight.dtype))
        logits, last = outputs[index], outputs[-1]
    except Exception:  # a module of another kind, such as a whole block with other arguments
        return None
    if logits.ndim != 2 or len(logits) != 2 or not logits.is_floating_point():
        return None
    returns_choices = last.dtype is torch.int64 and last.ndim == 2 and len(last) == 2
    choices = last.shape[1] if returns_choices else getattr(config, "num_experts_per_tok", None)
    return Router(name, module, index, logits.shape[1], choices, returns_choices) if choices else None


class RouterOutputs:
    """Keeps what the routers of a language model return in a forward pass, by hooks on the routers."""

    def __init__(
        self,
        routers: list[Router],
        with_gradients: bool,
        inside: nn.Module | None = None,
        compiled: bool = False,
        positions: RankPositions | None = None,
    ):
        """Install forward hooks that keep what the routers of a language model return.

        Args:
            routers: all routers of the language model; at least one.
            with_gradients: whether a loss of the outputs will be trained. Then blocks must not be compiled.
            inside: the part of the language model that this rank has, whose routers alone are watched; None: all.
            compiled: whether the blocks that contain the routers are compiled.
            positions: the positions whose tokens these routers get; None: all.
        """
        assert not (compiled and with_gradients), "checked by the configuration"
        self.count, self.experts = len(routers), routers[0].experts
        """Number of routers of the whole language model, and number of experts of each."""
        self.places = {router.name: place for place, router in enumerate(routers)}
        """Name of a router -> its place among all routers."""
        if inside is not None:
            present = set(inside.modules())
            routers = [router for router in routers if router.module in present]
        self.routers = routers
        self.with_gradients = with_gradients
        self.positions = positions
        self.hooks = [RouterHook(router, with_gradients, compiled) for router in routers]

    @contextmanager
    def keep(self) -> Iterator[list[RouterOutput]]:
        """Context manager for one forward pass; yields a list to which the routers' outputs are added at its end."""
        outputs: list[RouterOutput] = []
        for hook in self.hooks:
            hook.open()
        try:
            yield outputs
        finally:
            outputs += [output for hook in self.hooks if (output := hook.close()) is not None]


class RouterHook:
    """Forward hook of one router, which stores the router's latest output."""

    def __init__(self, router: Router, with_gradients: bool, compiled: bool):
        """Register a forward hook that stores what a router returns. `with_gradients`: whether a loss of these outputs
        is trained; if not, they are detached. `compiled`: whether the block that contains the router is compiled."""
        self.router = router
        self.with_gradients = with_gradients
        self.stays_on = self.is_on = compiled
        """Whether outputs are kept. Activation checkpointing runs a block again in the backward pass, in which outputs
        need not be kept: they take memory, and with gradients they would hold the block's activations. If
        blocks are compiled, they always are: otherwise the recomputation would compile another graph."""
        self.outputs: tuple[torch.Tensor, ...] | None = None
        router.module.register_forward_hook(self.hook)

    def open(self) -> None:
        """Begin to keep outputs, and forget those of other forward passes."""
        self.outputs = None
        self.is_on = True

    def close(self) -> RouterOutput | None:
        """Stop keeping the router's outputs, which `open` has begun; with compiled blocks they are always kept
        (`stays_on`). Return the logits and the last output of its last forward pass; None if it had none."""
        outputs, self.outputs = self.outputs, None
        self.is_on = self.stays_on
        if outputs is None:
            return None
        return RouterOutput(self.router, logits=outputs[self.router.index], last=outputs[-1])

    def hook(self, module: nn.Module, args: Any, outputs: tuple[torch.Tensor, ...]) -> None:
        if self.is_on:
            self.outputs = outputs if self.with_gradients else tuple(output.detach() for output in outputs)


def find_experts(model: nn.Module) -> dict[str, Any]:
    """Return the modules of a model that hold the experts of one layer each, by name: those with the attributes of
    classes that transformers' `use_experts_implementation` decorates, so that a registered function can run them."""
    marks = ("num_experts", "has_gate", "has_bias", "is_transposed")
    return {name: m for name, m in model.named_modules() if all(hasattr(m, mark) for mark in marks)}


def check_widths(model: nn.Module) -> None:
    """Raise ModelError if torch cannot multiply the experts of a language model: its grouped product (`_grouped_mm`)
    needs rows of a multiple of 16 bytes, which are 8 numbers in bf16."""
    for name, module in find_experts(model).items():
        for leaf, weight in module.named_parameters(recurse=False):
            if weight.ndim == 3 and any(size % 8 for size in weight.shape[1:]):
                raise ModelError(
                    f"{type(model).__name__}: the experts' weight {name}.{leaf} has the shape {list(weight.shape)}; "
                    "torch multiplies experts only if their hidden and intermediate sizes are multiples of 8"
                )


def check_routers(model: nn.Module, balance_loss: float) -> None:
    """Raise ConfigError if `model.balance_loss` is above 0, and a meta-device language model has no routers."""
    if balance_loss and not find_routers(model):
        raise ConfigError(
            f"model.balance_loss={balance_loss}: {type(model).__name__} has no router that chooses experts, whose "
            "loads this loss balances; set model.balance_loss=0"
        )


def check_shared_experts(model: nn.Module, size: int, tensor: int) -> None:
    """Raise ConfigError if `size` ranks (`parallel.expert`) cannot divide the experts of a meta-device language model
    among them, or if `tensor` ranks (`parallel.tensor`) cannot compute its layers together."""
    kind, experts = type(model).__name__, find_experts(model)
    if size == 1:
        if experts and tensor > 1:
            raise ConfigError(
                f"parallel.tensor={tensor} does not divide the experts of {kind}; let ranks share them "
                "(parallel.expert above 1), or set parallel.tensor=1"
            )
        return
    asked = f"parallel.expert={size}"
    if not experts:
        reason = "runs its experts in a way that cannot be replaced" if find_routers(model) else "has no experts"
        raise ConfigError(f"{asked}: {kind} {reason}; set parallel.expert=1")
    for name, module in experts.items():
        # a weight of a child module, or one whose first dimension is not the expert, is not of one expert alone
        common = [n for n, p in module.named_parameters() if "." in n or p.shape[:1] != (module.num_experts,)]
        if common:
            raise ConfigError(
                f"{asked}: the experts of {kind} have a weight in common ({name}.{common[0]}), which is not supported; "
                "set parallel.expert=1"
            )
        if module.num_experts % size:
            divisors = [n for n in range(1, module.num_experts + 1) if module.num_experts % n == 0]
            raise ConfigError(
                f"{asked} does not divide the {module.num_experts} experts of {kind} ({name}); set it to one of "
                f"{divisors} that also divides the number of ranks"
            )


def samples_of_tokens(lengths: torch.Tensor, shape: torch.Size, is_packed: bool) -> torch.Tensor:
    """Return for each token of a micro-batch the index of its sample, int64 [rows * length]; for padding, the number
    of samples.

    Args:
        lengths: the samples' lengths in tokens, int64 [samples].
        shape: [rows, length] of the micro-batch.
        is_packed: whether all samples follow one another in one row. If not, each has a row of its own.
    """
    rows, length = shape
    if is_packed:
        return torch.bucketize(torch.arange(length, device=lengths.device), lengths.cumsum(0), right=True)
    numbers = torch.arange(rows, device=lengths.device)[:, None].expand(rows, length)
    is_token = torch.arange(length, device=lengths.device) < lengths[:, None]
    return torch.where(is_token, numbers, len(lengths)).flatten()


def count_choices(output: RouterOutput, samples: torch.Tensor, num_samples: int) -> torch.Tensor:
    """Count how often the tokens of each sample chose each expert, float32 [samples + 1, experts]; the last row counts
    the padding. `samples` comes from `samples_of_tokens`."""
    experts = output.router.experts
    pairs = (samples[:, None] * experts + output.chosen).flatten()
    counts = output.logits.new_zeros((num_samples + 1) * experts, dtype=torch.float32)
    # float32 adds ones exactly and in any order up to 2**24
    return counts.scatter_add_(0, pairs, torch.ones_like(pairs, dtype=torch.float32)).view(-1, experts)


def balance_loss(
    output: RouterOutput, samples: torch.Tensor, lengths: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """Return a router's load-balance loss, summed over the samples of a micro-batch, float32 scalar. With
    `parallel.tensor` it has the terms of this rank's tokens; the ranks' results add up to the loss.

    For a sample of n tokens it is n * E * sum over experts e of f_e * P_e: E is the number of experts, f_e the share of
    the (token, choice) pairs that chose e, and P_e the mean probability of e (softmax of the logits). It is n if the
    loads are equal. Only the probabilities have a gradient.

    Args:
        samples: index of each token's sample, int64 [tokens]; that of padding comes after the last sample.
        lengths: the samples' lengths in tokens, int64 [samples].
        counts: how often the tokens of each sample, on all ranks, chose each expert, float32 [samples + 1, experts];
            the last row counts padding.
    """
    pairs = output.router.choices * lengths.clamp(min=1)
    shares = counts[:-1] / pairs[:, None]  # f, float32 [samples, experts]
    of_tokens = torch.cat([shares, torch.zeros_like(counts[-1:])]).index_select(0, samples)  # 0 for padding
    # n * P_e is the sum of a sample's probabilities, so that no mean over a sample is needed
    return output.router.experts * (output.logits.float().softmax(-1) * of_tokens).sum()
