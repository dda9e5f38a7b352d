"""Frozen embeddings and the two kinds of activation checkpointing."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from llava_fsdp.config import RecomputeConfig, RecomputeMode
from llava_fsdp.model.llava import find_stack
from llava_fsdp.model.reentrant import require_input_gradients
from llava_fsdp.sharding.recompute import apply_recompute

KINDS = {
    "llama": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2},
    "mistral": {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    "mpt": {"d_model": 16, "n_layers": 2, "n_heads": 2, "expansion_ratio": 2, "max_seq_len": 32},
}  # fmt: skip


class Plain(nn.Module):
    """A model as other libraries have it: embeddings, but no `enable_input_require_grads`."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.inner = model

    def get_input_embeddings(self) -> nn.Module:
        return self.inner.get_input_embeddings()

    def forward(self, **shown: torch.Tensor):  # type: ignore[no-untyped-def]
        return self.inner(**shown)


def built(kind: str) -> PreTrainedModel:
    """Frozen but for one matrix in its first layer, as an adapter would be."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, vocab_size=31, use_cache=False, **KINDS[kind])
    model = AutoModelForCausalLM.from_config(config).train()
    model.requires_grad_(False)
    trained(model).requires_grad_(True)
    return model


def trained(model: nn.Module) -> nn.Parameter:
    return next(p for n, p in model.named_parameters() if p.ndim == 2 and ("layers.0." in n or "blocks.0." in n))


def gradient(model: nn.Module) -> torch.Tensor:
    ids = torch.arange(12)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    found = trained(model).grad
    assert found is not None and found.any()
    return found


def checkpoint_itself(model: PreTrainedModel, reentrant: bool) -> None:
    enable = getattr(
        model, "activation_checkpointing_enable", model.gradient_checkpointing_enable
    )  # named so before v6
    enable({"use_reentrant": reentrant})
    # newer transformers sees to the hook itself: what is tested here is ours
    model.disable_input_require_grads()


@pytest.mark.parametrize("lacks_method", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_reentrant_checkpoint_needs_the_hook(kind: str, lacks_method: bool) -> None:
    expected = gradient(built(kind))
    inner = built(kind)
    checkpoint_itself(inner, reentrant=True)
    model = Plain(inner) if lacks_method else inner
    assert hasattr(model, "enable_input_require_grads") != lacks_method
    with pytest.raises(RuntimeError, match="does not require grad"):
        gradient(model)
    require_input_gradients(model)
    assert torch.equal(gradient(model), expected)


@pytest.mark.parametrize("mode", [RecomputeMode.full, RecomputeMode.selective, RecomputeMode.offload])
@pytest.mark.parametrize("kind", KINDS)
def test_ours_needs_none(kind: str, mode: RecomputeMode) -> None:
    expected = gradient(built(kind))
    model = built(kind)
    apply_recompute([find_stack(model)], RecomputeConfig(mode=mode, budget=None), torch.device("cpu"))
    assert not model.get_input_embeddings()._forward_hooks
    assert torch.equal(gradient(model), expected)
