"""DeepSpeed's configuration as LLaVA's scripts have it."""

from typing import Any


def deepspeed_config(
    zero: int, bf16: bool, hidden: int, rows: int, accumulation: int, clipping: float
) -> dict[str, Any]:
    """LLaVA's scripts/zero2.json and zero3.json, their "auto" filled in as transformers' Trainer does.

    One key differs: overlap_comm is true there, and needs streams that a CPU does not have.

    Args:
        hidden: width of the language model.
        rows: samples of a micro-batch.
    """
    sharding: dict[str, Any] = {
        "stage": zero,
        "overlap_comm": False,
        "contiguous_gradients": True,
        "sub_group_size": 10**9,
        "reduce_bucket_size": hidden * hidden,
    }
    if zero == 3:
        sharding |= {
            "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
            "stage3_param_persistence_threshold": 10 * hidden,
            "stage3_max_live_parameters": 10**9,
            "stage3_max_reuse_distance": 10**9,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    return {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clipping,
        "bf16": {"enabled": bf16},
        "zero_optimization": sharding,
    }
