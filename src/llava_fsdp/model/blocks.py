"""Find the blocks (layers) of one of transformers' models, and refuse models that leave out some at random."""

from torch import nn
from transformers import PretrainedConfig

from llava_fsdp.runtime.errors import ModelError


def find_blocks(model: nn.Module) -> nn.ModuleList:
    """Return the blocks of a model: its first ModuleList with as many modules as its configuration has layers."""
    config = model.config
    assert isinstance(config, PretrainedConfig)
    layers = config.num_hidden_layers
    stack = next((m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == layers), None)
    assert stack is not None, f"{type(model).__name__} has no list of {layers} layers"
    return stack


def find_stacks(model: nn.Module) -> dict[str, nn.ModuleList]:
    """Return the topmost lists of at least two blocks in any model, by their names: ModuleLists whose modules have
    parameters and submodules, and are of one class. Lists inside of blocks, as of experts, are left out."""
    found: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") for outer in found):
            continue
        if isinstance(module, nn.ModuleList) and len(module) > 1 and len({type(block) for block in module}) == 1:
            first = module[0]
            if any(True for _ in first.children()) and any(True for _ in first.parameters()):
                found[name] = module
    return found


def refuse_layerdrop(config: PretrainedConfig) -> None:
    """Raise ModelError if a part of the model leaves out whole layers at random in training: each rank would leave out
    other layers, and wait for ever for the weights of the others' layers."""
    for key, value in config.to_dict().items():
        if key.endswith("layerdrop") and value:
            raise ModelError(
                f"{key}={value} in the config.json of the {config.model_type}: in training it leaves out layers at "
                "random, other ones on each rank, which is not supported; set it to 0"
            )
