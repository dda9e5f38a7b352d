"""Small mixtures of experts, as configurations for `small.make_config`."""

from pathlib import Path
from typing import Any

from small import changed_parts

SIZES = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"decoder_sparse_step": 1, "mlp_only_layers": [0], "norm_topk_prob": True},
    "mixtral": {},
    "qwen2_moe": {"decoder_sparse_step": 1, "shared_expert_intermediate_size": 24},
    "olmoe": {"head_dim": 10},
    "glm4_moe": {
        "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    },
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1},
    "gpt_oss": {"sliding_window": 9, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "llama4_text": {"intermediate_size_mlp": 50},
    "deepseek_v3": {
        "n_routed_experts": 4, "num_local_experts": 4, "n_group": 2, "topk_group": 1, "q_lora_rank": 8,
        "kv_lora_rank": 8, "head_dim": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
        "first_k_dense_replace": 1, "num_key_value_heads": 4,
    },
}  # fmt: skip
"""Language models by transformers' `model_type`, with the values in which they differ from the tests' small Llama."""


def mixture_parts(kind: str, parts: Path, folder: Path, experts: int = 5, width: int | None = None) -> Path:
    """A copy of the small model's parts whose language model is a mixture, of whose experts a token gets two.
    `width` is the intermediate size of dense layers and experts."""
    values = {
        "model_type": kind, "architectures": None, "hidden_size": 40, "intermediate_size": 56, "head_dim": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3,
    }  # fmt: skip
    counts = {"num_experts": experts, "num_local_experts": experts}
    widths = {} if width is None else {"intermediate_size": width, "moe_intermediate_size": width}
    return changed_parts(parts, folder, language={**values, **counts, **SIZES, **MIXTURES[kind], **widths})
