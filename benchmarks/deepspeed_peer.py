"""DeepSpeed's side of deepspeed_curves.py, which starts it: one training under ZeRO-2 or ZeRO-3 on two CPU ranks.

    torchrun --standalone --nproc-per-node 2 benchmarks/deepspeed_peer.py PLAN.json OUT.json

It is LLaVA's training as its recipe runs it: transformers' model, torch's AdamW, transformers' cosine schedule and
DeepSpeed. It imports nothing of llava_fsdp; weights come from a folder that transformers loads, and each rank's
micro-batches from a safetensors file.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import LlavaForConditionalGeneration, get_cosine_schedule_with_warmup


def main() -> None:
    plan_file, out_file = map(Path, sys.argv[1:])
    plan = json.loads(plan_file.read_text())
    torch.set_num_threads(plan["threads"])
    deepspeed.init_distributed(dist_backend="gloo", timeout=timedelta(seconds=plan["timeout"]))
    batches = load_file(Path(plan["samples"]) / f"rank{dist.get_rank()}.safetensors")
    engine = build_engine(plan)
    rows = [run_step(engine, batches, number, plan) for number in range(plan["steps"])]
    if dist.get_rank() == 0:
        out_file.write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.2)  # gloo's thread may abort the interpreter otherwise (pytorch#179291)


def build_engine(plan: dict[str, Any]) -> Any:
    """The model in fp32, of which DeepSpeed makes what its configuration says."""
    model = LlavaForConditionalGeneration.from_pretrained(
        plan["weights"], dtype=torch.float32, attn_implementation="sdpa"
    )
    trained = {
        "projector": [model.model.multi_modal_projector],
        "language": [model.model.language_model, model.lm_head],
    }
    model.requires_grad_(False)
    for part in plan["train"]:
        for module in trained[part]:
            module.requires_grad_(True)
    model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=plan["lr"], betas=plan["betas"], eps=plan["eps"], weight_decay=plan["weight_decay"]
    )
    schedule = get_cosine_schedule_with_warmup(optimizer, plan["warmup_steps"], plan["steps"])
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=plan["deepspeed"])
    return engine


def run_step(engine: Any, batches: dict[str, torch.Tensor], number: int, plan: dict[str, Any]) -> dict[str, float]:
    """One optimizer step: the loss is the mean over micro-batches and ranks of their means, as the original logs it."""
    started = time.perf_counter()
    lr = engine.get_lr()[0]
    loss_sum = torch.zeros((), dtype=torch.float64)
    for micro in range(plan["accumulation"]):
        fields = ("input_ids", "attention_mask", "labels", "pixel_values")
        inputs = {name: batches[f"{number}.{micro}.{name}"] for name in fields}
        # transformers' Trainer casts what floats to the dtype of the engine
        inputs["pixel_values"] = inputs["pixel_values"].to(torch.bfloat16 if plan["bf16"] else torch.float32)
        loss = engine(**inputs).loss
        engine.backward(loss)
        engine.step()
        loss_sum += loss.detach().double()
    dist.all_reduce(loss_sum)
    return {
        "loss": float(loss_sum) / plan["accumulation"] / dist.get_world_size(),
        "grad_norm": float(engine.get_global_grad_norm()),
        "lr": lr,
        "seconds": time.perf_counter() - started,
    }


if __name__ == "__main__":
    main()
