"""Add low-rank adapters (LoRA) to a model with peft, and choose which modules get adapters and which parameters train.

The original LLaVA names target modules only by the last part of their names (train.py:169-182), and peft matches that
part anywhere. Therefore the vision tower gets adapters too, which never train, because the vision tower runs without
gradients. Here target modules are named by their full paths, and all of them are in blocks that run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.func import functional_call

from llava_fsdp.config import LoraBias, LoraConfig, Part
from llava_fsdp.model.adapters.lora_names import ADAPTER, is_adapter
from llava_fsdp.model.adapters.sample_dropout import SampleDropout, TokenKeys
from llava_fsdp.model.packed_attention.attention import RowSegments
from llava_fsdp.model.packed_attention.packs import NothingPacked, in_bf16
from llava_fsdp.model.packed_attention.row_mask import attention_arguments
from llava_fsdp.model.vision_tower import hidden_state
from llava_fsdp.runtime.errors import ConfigError


class Adaptable(Protocol):
    """Protocol with those attributes of `Architecture` that are used here. architecture.py imports this folder, which
    cannot import `Architecture`."""

    cfg: Any
    adapted: list[str]
    unused: frozenset[str]

    @property
    def language(self) -> Any: ...
    def modules_of(self, part: Part) -> list[nn.Module]: ...
    def all_blocks(self, part: Part) -> list[nn.Module]: ...
    def get_submodule(self, target: str) -> nn.Module: ...
    def named_modules(self) -> Iterator[tuple[str, nn.Module]]: ...
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...


class Tower(Protocol):
    """Protocol with those attributes of `Llava` that its check of gradients needs."""

    cfg: Any
    parts: Any
    probe: Any
    kernel: Any
    attention: str
    language_model: Any
    vision_tower: Any
    training: bool

    def train(self, mode: bool) -> Any: ...
    def eval(self) -> Any: ...


def target_modules(model: Adaptable) -> list[str]:
    """Return the full paths of the linear layers that get LoRA adapters: all in the blocks of the parts that
    `model.cfg.adapted` lists, except layers that are not used."""
    names = [name for part in model.cfg.adapted for name in linear_layers(model, part)]
    return [name for name in names if f"{name}.weight" not in model.unused]


def linear_layers(model: Adaptable, part: Part) -> list[str]:
    """Return the full paths of the linear layers in the blocks of one part of a model without adapters. Subclasses of
    `nn.Linear` with another forward pass, such as Llama 4's router, are left out."""
    in_blocks = {module for block in model.all_blocks(part) for module in block.modules()}
    return [name for name, module in model.named_modules() if type(module) is nn.Linear and module in in_blocks]


def add_adapters(model: Adaptable, cfg: LoraConfig, keys: TokenKeys) -> list[str]:
    """Add LoRA adapters with peft to the configured layers of a meta-device model, in place. Return their paths.

    Args:
        keys: hashes of the current micro-batch's tokens, from which the adapters compute their dropout masks.

    Raises:
        ConfigError: peft is not installed, or the model has no linear layer to adapt.
    """
    names = target_modules(model)
    if not names:
        raise ConfigError(
            f"model.lora.enabled=true: {type(model.language).__name__} has no linear layers in its blocks, "
            "and adapters need them; set it to false"
        )
    put_adapters(model, cfg, names)
    if cfg.dropout:
        for name in names:
            module: Any = model.get_submodule(name)
            module.lora_dropout[ADAPTER] = SampleDropout(cfg.dropout, name, keys)
    return names


def put_adapters(model: Any, cfg: LoraConfig, names: list[str]) -> None:
    """Add LoRA adapters to the modules with these full paths, in place. Raises ConfigError if peft is not installed."""
    peft = import_peft()
    settings = peft.LoraConfig(
        r=cfg.r,
        lora_alpha=cfg.alpha,
        lora_dropout=cfg.dropout,
        bias="none",  # `freeze` decides what trains
        use_dora=cfg.use_dora,
        use_rslora=cfg.use_rslora,
        target_modules=names,
    )
    peft.inject_adapter_in_model(settings, model, ADAPTER)
    adapted = sorted(n for n, m in model.named_modules() if isinstance(m, peft.tuners.lora.LoraLayer))
    assert adapted == sorted(names), f"wrong or missing adapters: {set(adapted) ^ set(names)}"


@contextmanager
def without_adapters(model: Adaptable) -> Iterator[None]:
    """Context manager in which a model computes without its adapters. peft's own method would also freeze them."""
    layers: list[Any] = [model.get_submodule(name) for name in model.adapted]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def import_peft() -> Any:
    """Import peft, which takes seconds; raise ConfigError if it is not installed."""
    try:
        import peft
    except ImportError as error:
        raise ConfigError(
            f"adapters (model.lora) need peft, which cannot be imported ({error}): pip install 'llava-fsdp[lora]'"
        ) from error
    return peft


def trained_in_adapted_parts(model: Adaptable) -> list[nn.Parameter]:
    """Return the trained parameters of those parts that have LoRA adapters: the parameters of the adapters, and the
    biases that `model.lora.bias` selects."""
    trained = [p for n, p in model.named_parameters() if is_adapter(n)]
    bias = model.cfg.lora.bias
    if bias is LoraBias.lora_only:
        trained += [p for name in model.adapted for n, p in model.get_submodule(name).named_parameters() if "bias" in n]
    elif bias is LoraBias.all:
        modules = [module for part in model.cfg.adapted for module in model.modules_of(part)]
        trained += [p for module in modules for n, p in module.named_parameters() if n.rpartition(".")[2] == "bias"]
    return trained


def check_gradients(model: Tower) -> None:
    """Raise ConfigError if a trainable parameter of the language model or the vision tower can never get a gradient, by
    running a model with LoRA adapters on the meta device."""
    language, vision_tower = model.language_model, model.vision_tower
    size = model.parts.image_size
    was_training = model.training
    model.eval()  # turns off dropout, which would need the seeds of samples
    # NothingPacked answers transformers' check for packed samples, which would read values
    with torch.enable_grad(), torch.device("meta"), NothingPacked(), as_adapter_errors(type(language).__name__):
        embeds = torch.zeros((1, 2, language.config.hidden_size), dtype=torch.bfloat16)
        weights = in_bf16(language)
        # a row that is packed with one sample of two tokens; rows are only packed with an attention kernel
        segments = RowSegments(torch.zeros((1, 2), dtype=torch.int64), torch.tensor([0, 2], dtype=torch.int32), (2,))
        arguments = attention_arguments(embeds, segments if model.kernel is not None else None, model.attention)
        arguments_of_language = {"inputs_embeds": embeds, "use_cache": False, **arguments}
        out = functional_call(language, weights, kwargs=arguments_of_language).last_hidden_state
        unreached = without_gradient("language_model", language, out)
        if Part.vision in model.cfg.trained:
            pixels = torch.zeros((1, 3, size, size))
            out = hidden_state(vision_tower, pixels, model.cfg.select_layer, model.probe.last_layer)
            unreached += without_gradient("vision_tower", vision_tower, out)
    model.train(was_training)
    if unreached:
        raise ConfigError(
            f"{unreached[0]} and {len(unreached) - 1} other parameters are to train and can never receive a gradient: "
            "nothing that the model computes depends on them; take their part out of model.train, or set "
            "model.lora.bias=none if they are biases"
        )


@contextmanager
def as_adapter_errors(model: str) -> Iterator[None]:
    """Context manager for running a model on the meta device: raise ConfigError, which names the model, if it fails
    with adapters, as some mixtures of experts do."""
    try:
        yield
    except (RuntimeError, NotImplementedError, TypeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"model.lora.enabled=true: {model} does not run with adapters ({reason}); train it without them"
        ) from error


def without_gradient(part: str, module: nn.Module, out: torch.Tensor) -> list[str]:
    """Return the names, with the prefix `part`, of a module's trainable parameters on which `out` does not depend."""
    trained = {f"{part}.{name}": p for name, p in module.named_parameters() if p.requires_grad}
    if not trained:
        return []
    gradients = torch.autograd.grad(out.sum(), list(trained.values()), allow_unused=True)
    return [name for name, gradient in zip(trained, gradients, strict=True) if gradient is None]


def bound_of_a(parent: nn.Module) -> float:
    """Return the bound of the uniform distribution from which peft initialises the matrix A of an adapter, the weight
    of `parent` (`kaiming_uniform_` with a = sqrt(5)). Matrix B is initialised with 0."""
    assert isinstance(parent, nn.Linear)
    return parent.in_features**-0.5


def row_lengths(weight: torch.Tensor) -> torch.Tensor:
    """Return the norms of a weight's rows, float32 [rows]. They are the initial magnitudes of DoRA."""
    return torch.linalg.norm(weight.float(), dim=1)
