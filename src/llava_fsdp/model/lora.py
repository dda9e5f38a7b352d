"""Low-rank adapters, by peft: which modules get them, by full path, and what of them trains.

LLaVA names its targets by their last word (train.py:169-182), which peft matches anywhere: a tower that is loaded gets
adapters too, and because it runs without gradients they never learn. Here a target is a module of a block that runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from llava_fsdp.config import LoraBias, LoraConfig, Part
from llava_fsdp.model.attention import told
from llava_fsdp.model.lora_names import ADAPTER, is_adapter
from llava_fsdp.model.sample_dropout import SampleDropout, TokenKeys
from llava_fsdp.model.vision_tower import hidden_state
from llava_fsdp.runtime.errors import ConfigError


class Adaptable(Protocol):
    """What this module needs of a `Llava`, whose module imports this one."""

    cfg: Any
    parts: Any
    probe: Any
    kernel: Any
    adapted: Any
    language_model: Any
    lm_head: Any
    vision_tower: Any
    training: bool

    def stack_of(self, module: nn.Module) -> Any: ...
    def get_submodule(self, target: str) -> nn.Module: ...
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...
    def train(self, mode: bool) -> Any: ...
    def eval(self) -> Any: ...


def targets(model: Adaptable) -> list[str]:
    """The linear layers that get adapters, by full path: those of the blocks of each adapted part that a gradient
    reaches. Heads, embeddings and the tower's layers behind `model.select_layer` are none.
    """
    leftovers = {f"vision_tower.{name}" for name in model.probe.leftovers}
    found = [name for part in model.cfg.adapted for name in linear_layers(model, part)]
    return [name for name in found if f"{name}.weight" not in leftovers]


def linear_layers(model: Adaptable, part: Part) -> list[str]:
    """Those of a part's blocks, by full path, of a model without adapters."""
    root_name = {Part.language: "language_model", Part.vision: "vision_tower"}[part]
    root = model.get_submodule(root_name)
    in_blocks = {module for block in model.stack_of(root) for module in block.modules()}
    found = [name for name, module in root.named_modules() if isinstance(module, nn.Linear) and module in in_blocks]
    return [f"{root_name}.{name}" for name in found]


def add_adapters(model: Adaptable, cfg: LoraConfig, keys: TokenKeys) -> list[str]:
    """Put adapters into a meta-device model, in place.

    Args:
        keys: what dropout's masks are made of.

    Returns:
        The modules that have one.

    Raises:
        ConfigError: peft is not installed, or there is nothing to put one into.
    """
    names = targets(model)
    if not names:
        raise ConfigError(
            f"model.lora.enabled=true: {type(model.language_model).__name__} has no linear layers in its blocks; "
            "adapters are for those alone"
        )
    put_adapters(model, cfg, names)
    if cfg.dropout:
        for name in names:
            module: Any = model.get_submodule(name)
            module.lora_dropout[ADAPTER] = SampleDropout(cfg.dropout, name, keys)
    return names


def put_adapters(model: Any, cfg: LoraConfig, names: list[str]) -> None:
    """Put adapters into modules of a model, in place.

    Args:
        names: of the modules, in full.

    Raises:
        ConfigError: peft is not installed.
    """
    peft = import_peft()
    settings = peft.LoraConfig(
        r=cfg.r,
        lora_alpha=cfg.alpha,
        lora_dropout=cfg.dropout,
        bias="none",  # what trains is `Llava.freeze`'s matter
        use_dora=cfg.use_dora,
        use_rslora=cfg.use_rslora,
        target_modules=names,
    )
    peft.inject_adapter_in_model(settings, model, ADAPTER)
    found = sorted(n for n, m in model.named_modules() if isinstance(m, peft.tuners.lora.LoraLayer))
    assert found == sorted(names), f"adapters in {set(found) ^ set(names)} that were not asked for, or missing"


def import_peft() -> Any:
    """Raises ConfigError where it is not installed. It takes seconds, so only those who adapt import it."""
    try:
        import peft
    except ImportError as error:
        raise ConfigError(
            f"adapters (model.lora) need peft, which cannot be imported ({error}): pip install 'llava-fsdp[lora]'"
        ) from error
    return peft


def trained_with_adapters(model: Adaptable) -> list[nn.Parameter]:
    """Of the parts that have adapters: these, and the biases that `model.lora.bias` names."""
    roots = {Part.language: (model.language_model, model.lm_head), Part.vision: (model.vision_tower,)}
    found = [p for n, p in model.named_parameters() if is_adapter(n)]
    bias = model.cfg.lora.bias
    if bias is LoraBias.lora_only:
        found += [p for name in model.adapted for n, p in model.get_submodule(name).named_parameters() if "bias" in n]
    elif bias is LoraBias.all:
        modules = [module for part in model.cfg.adapted for module in roots[part]]
        found += [p for module in modules for n, p in module.named_parameters() if n.rpartition(".")[2] == "bias"]
    return found


def check_gradients(model: Adaptable) -> None:
    """Run both parts on the meta device: whatever is to train must have a part in what comes out.

    Raises:
        ConfigError: naming what never gets a gradient.
    """
    language, tower = model.language_model, model.vision_tower
    size = model.parts.vision.image_size
    was_training = model.training
    model.eval()  # without dropout, which is drawn for samples
    with torch.enable_grad(), torch.device("meta"), tried(type(language).__name__):
        shown: Any = {"inputs_embeds": torch.zeros((1, 2, language.config.hidden_size)), "use_cache": False}
        segments = torch.zeros((1, 2), dtype=torch.int64), torch.tensor([0, 2], dtype=torch.int32), (2,)
        out = language(**shown, **told(segments if model.kernel is not None else None)).last_hidden_state
        unreached = without_gradient("language_model", language, out)
        if Part.vision in model.cfg.train:
            pixels = torch.zeros((1, 3, size, size))
            out = hidden_state(tower, pixels, model.cfg.select_layer, model.probe.last_layer)
            unreached += without_gradient("vision_tower", tower, out)
    model.train(was_training)
    if unreached:
        raise ConfigError(
            f"{unreached[0]} and {len(unreached) - 1} other parameters are to train and can never receive a gradient: "
            "nothing that the model computes depends on them; take their part out of model.train, or set "
            "model.lora.bias=none if they are biases"
        )


@contextmanager
def tried(model: str) -> Iterator[None]:
    """Raises ConfigError where a model does not run on the meta device, as some mixtures of experts do not."""
    try:
        yield
    except (RuntimeError, NotImplementedError, TypeError) as error:
        why = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"model.lora.enabled=true: {model} could not be tried with adapters ({why}); train it without them"
        ) from error


def without_gradient(part: str, module: nn.Module, out: torch.Tensor) -> list[str]:
    trained = {f"{part}.{name}": p for name, p in module.named_parameters() if p.requires_grad}
    if not trained:
        return []
    found = torch.autograd.grad(out.sum(), list(trained.values()), allow_unused=True)
    return [name for name, gradient in zip(trained, found, strict=True) if gradient is None]


def start_of_a(parent: nn.Module) -> float:
    """The bound of the uniform distribution that peft draws A from (`kaiming_uniform_` with a = sqrt(5)); B is 0."""
    assert isinstance(parent, nn.Linear)
    return parent.in_features**-0.5


def row_lengths(weight: torch.Tensor) -> torch.Tensor:
    """float [rows]: what DoRA begins with, as long as the adapter itself adds nothing."""
    return torch.linalg.norm(weight.float(), dim=1)
