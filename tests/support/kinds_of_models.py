"""Small configurations of the language models and vision towers in the table of docs/models.md."""

from typing import Any

TEXT: dict[str, Any] = {
    "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 5, "num_local_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
IMAGE: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 30, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
UNEXPORTED = ("gemma2",)
"""Language models that cap their logits, which transformers' LLaVA classes do not."""
LANGUAGE: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": [0]},
    "gemma2": {"sliding_window": 9}, "gpt_oss": {**EXPERTS, "sliding_window": 9},
    "mistral": {"sliding_window": 9}, "gemma3_text": {"sliding_window": 9, "sliding_window_pattern": 2},
    "llama": {}, "qwen2": {}, "qwen3": {"tie_word_embeddings": True}, "gemma": {}, "phi3": {}, "smollm3": {},
    "olmo2": {}, "granite": {}, "glm4": {}, "starcoder2": {}, "cohere2": {"sliding_window": 9}, "exaone4": {},
    "mixtral": EXPERTS, "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 24},
    "deepseek_v3": {"num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "q_lora_rank": 8,
                    "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
                    "moe_intermediate_size": 24, "first_k_dense_replace": 1, "head_dim": 8, "num_experts_per_tok": 2},
    "stablelm": {}, "nemotron": {}, "llama4_text": EXPERTS, "lfm2": {"full_attn_idxs": [1]}, "doge": {}, "biogpt": {},
}  # fmt: skip
VISION: dict[str, dict[str, Any]] = {
    "dinov2": {"use_swiglu_ffn": True}, "aimv2_vision_model": {},
    "internvl_vision": {"image_size": [28, 28], "patch_size": [14, 14]}, "clip_vision_model": {},
    "siglip_vision_model": {}, "dinov2_with_registers": {}, "dinov3_vit": {}, "vit": {}, "pixtral": {},
}  # fmt: skip
