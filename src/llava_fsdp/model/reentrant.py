"""What reentrant activation checkpointing needs of a model whose embeddings are frozen.

A reentrant checkpoint gives gradients to the weights inside it only if one of its inputs requires a gradient, and what
frozen embeddings give does not. Ours (`sharding/recompute.py`) is the other kind and needs nothing of this; it is for
models that checkpoint themselves (`gradient_checkpointing_enable` with `use_reentrant=True`), as peft's users let them.
"""

from typing import Any

import torch
from torch import nn


def require_input_gradients(model: nn.Module) -> None:
    """Let what the input embeddings give require a gradient (LLaVA train.py:849-855).

    By the model's own `enable_input_require_grads` where it has one, else by a hook on its input embeddings.
    """
    own: Any = getattr(model, "enable_input_require_grads", None)
    if own is not None:
        own()
        return
    embeddings: Any = getattr(model, "get_input_embeddings", lambda: None)()
    assert isinstance(embeddings, nn.Module), f"{type(model).__name__} does not say what its input embeddings are"
    embeddings.register_forward_hook(require_gradient)


def require_gradient(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
    output.requires_grad_(True)
