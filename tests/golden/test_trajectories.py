"""Whole runs are the original Trainer's: samples, losses, learning rates, gradient norms and final weights."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from golden_folder import golden_folder, read_json
from harness import RankPool, single_world
from reference import run_ranks
from safetensors.torch import load_file, save_file
from small import config_of
from tiers import slow_after

from llava_fsdp.checkpoint.reader import saved_weights
from llava_fsdp.checkpoint.verify import newest_alone
from llava_fsdp.config import Config
from llava_fsdp.model.weights.weight_names import ours, ours_in_adapter
from llava_fsdp.parallel.parallelism import Parallelism
from llava_fsdp.parallel.sharding_strategies import SHARD_PLANS
from llava_fsdp.runtime.files.run_dir import FOLDER
from llava_fsdp.train import main as train

TOLERANCE = 1e-5
FLAGS = {
    "--learning_rate": "optim.lr",
    "--mm_projector_lr": "optim.projector_lr",
    "--weight_decay": "optim.weight_decay",
    "--warmup_ratio": "optim.warmup_ratio",
    "--num_train_epochs": "epochs",
    "--per_device_train_batch_size": "micro_batch_size",
    "--image_aspect_ratio": "data.image_aspect_ratio",
    "--version": "data.template",
    "--model_max_length": "data.max_length",
    "--lr_scheduler_type": "optim.schedule",
    "--adam_beta1": "optim.beta1",
    "--adam_beta2": "optim.beta2",
    "--adam_epsilon": "optim.eps",
    "--max_steps": "max_steps",
    "--seed": "seed",
    "--lora_r": "model.lora.r",
    "--lora_alpha": "model.lora.alpha",
    "--lora_dropout": "model.lora.dropout",
    "--lora_bias": "model.lora.bias",
}


def not_run(record: dict) -> str | None:
    """Why a run of the original's is not repeated."""
    if any("float16" in dtype and "bfloat16" not in dtype for dtype in record["dtypes_before_trainer"]):
        return "the tower is computed in the run's own dtype, never in fp16"
    return None


FAST = ("ws2_s1_b4_2ep",)
"""Cases of the fast tier."""


def cases() -> list[str]:
    folder = golden_folder() / "training"
    return sorted(
        p.parent.name for p in folder.glob("*/record*.json") if p.name in ("record.json", "record.rank0.json")
    )


def in_order() -> list[str]:
    """All cases, those of FAST first."""
    return [*FAST, *(case for case in cases() if case not in FAST)]


def records(case: str) -> list[dict]:
    """What each rank of the original recorded."""
    folder = golden_folder() / "training" / case
    single = folder / "record.json"
    files = [single] if single.is_file() else sorted(folder.glob("record.rank*.json"))
    return [json.loads(f.read_text()) for f in files]


def config_for(case: str, record: dict, language: Path, output: Path) -> Config:
    """The original's command line as ours; what it leaves open, `compat=llava_v1_5` alone decides."""
    said = dict(zip(record["cli"][::2], record["cli"][1::2], strict=True))
    training, model = golden_folder() / "training", golden_folder() / "model"
    captions = said["--data_path"] == "train_stage1.json"
    rows = int(said["--per_device_train_batch_size"]) * int(said["--gradient_accumulation_steps"])
    clip = float(said.get("--max_grad_norm", 1.0))  # without DeepSpeed the Trainer's own default
    grouped = said.get("--group_by_modality_length", "False").lower()
    start = training / case / "initial_trainables.safetensors" if captions else training / "s1_b4" / "mm_projector.bin"
    if captions and not start.is_file():
        start = training / "s1_b4" / "initial_trainables.safetensors"
    adapts = said.get("--lora_enable") == "True"
    return config_of([
        f"stage={'pretrain' if captions else 'finetune_lora' if adapts else 'finetune'}",
        "compat=llava_v1_5",
        "data=llava_json",
        f"data.path={training / 'data' / said['--data_path']}",
        f"data.images={training / 'data' / 'images'}",
        f"data.index={language.parent / said['--data_path']}.index",
        "data.workers=0",
        f"model.language={language}",
        f"model.vision={next(model.glob('clip-*'))}",
        f"model.projector={start}",
        *([f"model.lora.checkpoint={initial_adapter(case, record, output)}"] if adapts else []),
        "model.random_weights=false",
        "precision=fp32",
        f"activation_checkpointing={'full' if said.get('--gradient_checkpointing') == 'True' else 'none'}",
        "optim.projector_lr=null",  # the tiny model's recipe has one
        *(f"{key}={said[flag]}" for flag, key in FLAGS.items() if flag in said),
        f"sampler.group_by_modality_length={grouped}",
        f"global_batch_size={rows * record['world_size']}",
        f"optim.clip={clip or 'null'}",
        f"output_dir={output}",
        "export.dtype=fp32",
        "export.verify=false",
        "log_every=1000",
    ])  # fmt: skip


def initial_adapter(case: str, record: dict, output: Path) -> Path:
    """The adapters that the original drew, as a folder to go on from; its projector is the one of stage 1."""
    folder = golden_folder() / "training" / case
    adapter = output.parent / "drawn"
    adapter.mkdir(exist_ok=True)
    drawn = load_file(folder / "initial_trainables.safetensors")
    saved = {n.replace(".default.", "."): t for n, t in drawn.items() if "lora_" in n}
    save_file(saved, adapter / "adapter_model.safetensors")
    shutil.copyfile(folder / "adapter_config.json", adapter / "adapter_config.json")
    return adapter


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy language model with its tokenizer."""
    folder = tmp_path_factory.mktemp("language") / "llm"
    shutil.copytree(golden_folder() / "model" / "llm-mha32", folder)
    for file in (golden_folder() / "tokenizer" / "hf4_legacy_false").iterdir():
        shutil.copyfile(file, folder / file.name)
    return folder


def training_loader(cfg: Config, rank: int, world_size: int):
    world = single_world()
    world = type(world)(rank, world_size, rank, world_size, world.device)
    return train.build_state(cfg, Parallelism(world, cfg.parallel, SHARD_PLANS[cfg.sharding.strategy])).loader


@pytest.mark.slow
@pytest.mark.parametrize("case", in_order())
def test_samples_of_every_micro_batch(case: str, language: Path, tmp_path: Path, count: Callable) -> None:
    """Each rank gets the original's rows in the original's micro-batches, as long and with as many labels."""
    for rank, record in enumerate(records(case)):
        cfg = config_for(case, record, language, tmp_path / "run")
        loader = training_loader(cfg, rank, record["world_size"])
        assert loader.total_steps == record["max_steps"]
        expected = record["micro_batches"]
        made = []
        for number in range(loader.total_steps):
            rows = loader.steps.sampler.assignment(number)[rank]
            step = loader.steps.prepare(number)
            made += [
                {
                    "step": number + 1,
                    "indices": indices,
                    "n_loss_tokens": len(micro.label_ids),
                    "merged_shape": list(micro.input_ids.shape),
                }
                for indices, micro in zip(rows, step.micro_batches, strict=True)
            ]
        keys = ("step", "indices", "n_loss_tokens", "merged_shape")
        assert made == [{k: e[k] for k in keys} for e in expected[: len(made)]]
        assert len(made) == len(expected)
        count("micro-batches", "equal", len(made))


@pytest.mark.ranks
@pytest.mark.parametrize("case", slow_after(len(FAST), in_order()))
def test_trajectory(case: str, language: Path, pools: dict[int, RankPool], tmp_path: Path, count: Callable) -> None:
    """Loss, learning rate and gradient norm of every step, and the final weights, within 1e-5."""
    by_rank = records(case)
    first = by_rank[0]
    reason = not_run(first)
    if reason is not None:
        count("trajectories", f"not run: {reason}")
        return
    cfg = config_for(case, first, language, tmp_path / "run")
    train_on(pools, first["world_size"], cfg)
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == first["max_steps"] == len(first["steps"])
    for number, (made, golden) in enumerate(zip(metrics, first["steps"], strict=True)):
        losses = [r["steps"][number]["mean_micro_loss"] for r in by_rank]
        norm = golden.get("grad_norm_before_clip", golden["grad_norm_at_step"])
        assert made["loss"] == pytest.approx(sum(losses) / len(losses), rel=TOLERANCE)
        assert made["grad_norm"] == pytest.approx(norm, rel=TOLERANCE)
        assert made["lr"] == pytest.approx(golden["lr"][0], rel=1e-12)
    if cfg.model.lora.enabled:
        compare_adapter(case, tmp_path / "run", count)
    else:
        compare_weights(case, first, tmp_path / "run" / "export", count)
    count("trajectories", "equal")


def train_on(pools: dict[int, RankPool], size: int, cfg: Config) -> None:
    if size == 1:
        train.train(cfg)
    else:
        pools[size].run(run_ranks, cfg)


def compare_adapter(case: str, run: Path, count: Callable) -> None:
    """Every adapter and what else was trained, as the original saved them."""
    folder = golden_folder() / "training" / case
    wanted = load_file(folder / "adapter_model.safetensors")
    wanted |= torch.load(folder / "non_lora_trainables.bin", weights_only=True)
    newest = newest_alone(run / FOLDER)
    assert newest is not None
    made = {name: saved.rows(0, saved.shape[0]).double() for name, saved in saved_weights(newest).items()}
    assert made.keys() == {ours_in_adapter(name) for name in wanted}
    pairs = [(made[ours_in_adapter(name)], tensor.double()) for name, tensor in wanted.items()]
    distance = math.sqrt(sum(float((a - b).square().sum()) for a, b in pairs))
    assert distance <= TOLERANCE * math.sqrt(sum(float(b.square().sum()) for _, b in pairs))
    count("final weights", "equal")


def compare_weights(case: str, record: dict, export: Path, count: Callable) -> None:
    made = {ours(n): t.double() for n, t in load_file(export / "model.safetensors").items()}
    final = golden_folder() / "training" / case / "final_weights.safetensors"
    if final.is_file():
        wanted = {ours(n): t.double() for n, t in load_file(final).items()}
        pairs = [(made[n][: len(t)], t) for n, t in wanted.items()]
        distance = math.sqrt(sum(float((a - b).square().sum()) for a, b in pairs))
        size = math.sqrt(sum(float(b.square().sum()) for _, b in pairs))
        assert distance <= TOLERANCE * size
        count("final weights", "equal")
        return
    rows = read_json("training/param_groups.json")["stage2"]["vocab_size"]
    for name, facts in record["final"].items():
        tensor = made[ours(name)]
        tensor = tensor[:rows] if "embed_tokens" in name or "lm_head" in name else tensor
        assert float(torch.linalg.vector_norm(tensor)) == pytest.approx(facts["l2"], rel=TOLERANCE)
    count("final weights", "norms equal")
