"""A training of one step as other trainers run it, for first_step.py: `first_step_peer.py imports|trainer|deepspeed`.

The model has the sizes of the embedded tiny model and random weights; the step has 16 samples of one image.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration
from transformers.models.clip import modeling_clip
from transformers.models.llama import modeling_llama

ASSETS = Path(__file__).parents[1] / "src" / "llava_fsdp" / "assets"
IMAGE_TOKENS = 9
SAMPLES, LENGTH = 16, 83


def main(how: str) -> None:
    assert modeling_clip and modeling_llama
    if how == "imports":
        return
    text, vision = (json.loads((ASSETS / name / "config.json").read_text()) for name in ("tiny-llama", "tiny-clip"))
    model = LlavaForConditionalGeneration(
        LlavaConfig(
            text_config=LlamaConfig(**text),
            vision_config=CLIPVisionConfig(**vision),
            image_token_index=text["vocab_size"] - 1,
        )
    )
    model.model.vision_tower.requires_grad_(False)
    if how == "trainer":
        with_trainer(model)
    else:
        with_deepspeed(model)


def samples() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 600, (SAMPLES, LENGTH))
    labels = ids.clone()
    labels[:, : LENGTH // 2] = -100
    ids[:, :IMAGE_TOKENS] = 607
    return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids),
            "pixel_values": torch.rand(SAMPLES, 3, 42, 42)}  # fmt: skip


def with_trainer(model: Any) -> None:
    from transformers import Trainer, TrainingArguments

    class Once(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return SAMPLES

        def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
            return {name: value[number] for name, value in found.items()}

    found = samples()
    arguments = TrainingArguments(
        output_dir="trainer", use_cpu=True, bf16=True, max_steps=1, per_device_train_batch_size=SAMPLES,
        save_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    Trainer(model, arguments, train_dataset=Once()).train()


def with_deepspeed(model: Any) -> None:
    import os

    import deepspeed

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    deepspeed.init_distributed(dist_backend="gloo", rank=0, world_size=1)
    trained = [p for p in model.parameters() if p.requires_grad]
    config = {"train_micro_batch_size_per_gpu": SAMPLES, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(trained), config=config)
    inputs = {n: v.bfloat16() if v.is_floating_point() else v for n, v in samples().items()}
    engine.backward(engine(**inputs).loss)
    engine.step()


if __name__ == "__main__":
    main(sys.argv[1])
