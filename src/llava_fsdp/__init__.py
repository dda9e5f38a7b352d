"""Train LLaVA-style vision-language models with PyTorch FSDP2.

The public names below are imported when they are first used, so that importing this package imports nothing else.
`train` and `plan` are packages that can also be called.
"""

# Not imported from typing: a file of this name in the user's folder could hide it (runtime/process/safe_path.py).
TYPE_CHECKING = False

if TYPE_CHECKING:
    from llava_fsdp.plan.python_entry import plan
    from llava_fsdp.train.events.run_events import RunEvents, RunStart
    from llava_fsdp.train.python_entry import TrainResult, compose, train
    from llava_fsdp.train.state import StepResult
    from llava_fsdp.version import __version__

__all__ = ["RunEvents", "RunStart", "StepResult", "TrainResult", "__version__", "compose", "plan", "train"]

PLACES = {
    "RunEvents": "train.events.run_events",
    "RunStart": "train.events.run_events",
    "StepResult": "train.state",
    "TrainResult": "train.python_entry",
    "__version__": "version",
    "compose": "train.python_entry",
}
"""Public name -> module that has it."""


def __getattr__(name: str) -> object:
    """Import the public object `name` of this package, from the module in `PLACES`, and return it. Once the packages
    `train` and `plan` are imported, Python finds them as attributes, and does not call this function for them."""
    import importlib

    if name in ("train", "plan"):
        return importlib.import_module(f"llava_fsdp.{name}")
    if name not in PLACES:
        raise AttributeError(f"module 'llava_fsdp' has no attribute {name!r}")
    return getattr(importlib.import_module(f"llava_fsdp.{PLACES[name]}"), name)
