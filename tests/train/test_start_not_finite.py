"""What a run starts from has no NaN and no infinite value: the file and the tensor are named, on every rank."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness import RankPool, RanksFailed
from reference import run_ranks
from safetensors.torch import load_file, save_file
from small import make_config
from tiers import slow_after
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from llava_fsdp.config import Config
from llava_fsdp.runtime.errors import CheckpointError, ModelError
from llava_fsdp.train import main as train
from llava_fsdp.train.checkpoints import resume as resumed
from llava_fsdp.train.checkpoints.resume import check_finite

READ = "model.random_weights=false"
LORA = ["model.train=[projector,language]", "model.lora.enabled=true", "model.lora.r=3"]


@pytest.fixture(scope="module")
def saved(parts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Parts with weights, as transformers saves them, in several files, and a projector in LLaVA's form."""
    folder = tmp_path_factory.mktemp("saved")
    torch.manual_seed(0)
    for part, auto in (("language", AutoModelForCausalLM), ("vision", AutoModel)):
        shutil.copytree(parts / part, folder / part)
        config = AutoConfig.from_pretrained(folder / part)
        auto.from_config(config, dtype=torch.float32).save_pretrained(folder / part, max_shard_size="60KB")
    shapes = {"0.weight": (36, 20), "0.bias": (36,), "2.weight": (36, 36), "2.bias": (36,)}
    tensors = {f"model.mm_projector.{name}": torch.randn(shape) for name, shape in shapes.items()}
    torch.save(tensors, folder / "mm_projector.bin")
    return folder


def poison(path: Path, name: str, value: float) -> None:
    """Set the last value of a tensor in a file."""
    if path.suffix == ".safetensors":
        tensors = load_file(path)
        tensors[name].view(-1)[-1] = value
        save_file(tensors, path, metadata={"format": "pt"})
    else:
        tensors = torch.load(path)
        tensors[name].view(-1)[-1] = value
        torch.save(tensors, path)


def file_of(folder: Path, name: str) -> Path:
    """The file that holds a tensor."""
    index = folder / "model.safetensors.index.json"
    file = json.loads(index.read_text())["weight_map"][name] if index.is_file() else "model.safetensors"
    return folder / file


PARTS = {
    "language": ("language", "model.layers.1.mlp.up_proj.weight", torch.nan, []),
    "projector": ("", "model.mm_projector.2.bias", torch.nan, []),
    "vision": ("vision", "vision_model.encoder.layers.0.layer_norm1.weight", torch.inf, []),
    "head": ("language", "lm_head.weight", -torch.inf, []),
    "packed": ("language", "model.layers.1.self_attn.q_proj.weight", torch.nan, [*LORA, "model.quantize.mode=nf4"]),
    "rows of DoRA": ("language", "model.layers.0.mlp.down_proj.weight", torch.inf, [*LORA, "model.lora.use_dora=true"]),
    "trained": ("language", "model.norm.weight", torch.nan, ["model.train=[projector,language,vision]"]),
}


@pytest.mark.parametrize("name", slow_after(1, PARTS))
def test_a_part_is_named(name: str, saved: Path, dataset: Path, tmp_path: Path) -> None:
    """The file and the tensor in it, before the first step."""
    where, tensor, value, keys = PARTS[name]
    shutil.copytree(saved, tmp_path / "parts")
    folder = tmp_path / "parts" / where
    if where == "vision" and tensor not in load_file(file_of_any(folder)):
        tensor = tensor.removeprefix("vision_model.")
    file = file_of(folder, tensor) if where else folder / "mm_projector.bin"
    poison(file, tensor, value)
    projector = f"model.projector={tmp_path / 'parts' / 'mm_projector.bin'}"
    cfg = make_config(tmp_path / "parts", dataset, tmp_path / "run", READ, projector, *keys, "max_steps=1")
    with pytest.raises(ModelError, match=rf"{re.escape(str(file))}: {re.escape(tensor)} has values that are NaN"):
        train.train(cfg)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def file_of_any(folder: Path) -> Path:
    return next(iter(sorted(folder.glob("*.safetensors"))))


def test_the_expert_that_is_not_finite_is_named(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """A layer's experts are one parameter, which is read from many tensors."""
    folder = tmp_path / "parts"
    shutil.copytree(parts, folder)
    vocabulary = AutoConfig.from_pretrained(parts / "language").vocab_size
    config = AutoConfig.for_model(
        "mixtral", vocab_size=vocabulary, hidden_size=40, intermediate_size=24, num_hidden_layers=2, pad_token_id=0,
        num_attention_heads=4, head_dim=6, num_key_value_heads=2, num_local_experts=5, max_position_embeddings=512,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / "language")
    AutoModel.from_config(AutoConfig.from_pretrained(folder / "vision")).save_pretrained(folder / "vision")
    tensor = "model.layers.1.block_sparse_moe.experts.3.w3.weight"
    poison(folder / "language" / "model.safetensors", tensor, torch.nan)
    with pytest.raises(ModelError, match=rf"model\.safetensors: {re.escape(tensor)} has values"):
        train.train(make_config(folder, dataset, tmp_path / "run", READ, "max_steps=1"))


def test_a_value_too_large_for_fp16_is_named(saved: Path, dataset: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "parts")
    tensor = "model.layers.1.mlp.up_proj.weight"
    poison(file_of(tmp_path / "parts" / "language", tensor), tensor, 7e4)
    cfg = make_config(tmp_path / "parts", dataset, tmp_path / "run", READ, "precision=fp16", "max_steps=1")
    with pytest.raises(ModelError, match=rf"{re.escape(tensor)} has a value of 7e\+04.*precision=bf16"):
        train.train(cfg)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["zero3", "zero2"])
def test_all_ranks_end_alike(
    sharding: str, saved: Path, dataset: Path, pools: dict[int, RankPool], tmp_path: Path
) -> None:
    """With zero3 the value is in rows that the last rank alone reads."""
    shutil.copytree(saved, tmp_path / "parts")
    tensor = "model.layers.1.mlp.up_proj.weight"
    poison(file_of(tmp_path / "parts" / "language", tensor), tensor, torch.nan)
    keys = [READ, f"sharding={sharding}", "model.train=[projector,language]", "max_steps=1"]
    with pytest.raises(RanksFailed) as caught:
        pools[2].run(run_ranks, make_config(tmp_path / "parts", dataset, tmp_path / "run", *keys))
    assert [kinds[0] for kinds in caught.value.kinds] == ["ModelError"] * 2


@pytest.fixture(scope="module")
def run(saved: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Config]:
    """A configuration of a finished run with an export, or with adapters, and its folder's name."""
    made: dict[str, Path] = {}

    def configure(kind: str, *keys: str) -> Config:
        folder = made.get(kind)
        own = [READ, "checkpoint.every=1", "max_steps=3", "export.dtype=fp32", *keys]
        if folder is None:
            folder = made[kind] = tmp_path_factory.mktemp(kind)
            train.train(make_config(saved, dataset, folder / "run", *own, "export.enabled=true"))
        return make_config(saved, dataset, folder / "run", *own)

    return configure


@pytest.mark.slow
@pytest.mark.parametrize("form", ["checkpoint", "projector"])
def test_an_export_is_named(form: str, run: Callable[..., Config], saved: Path, dataset: Path, tmp_path: Path) -> None:
    """As a checkpoint, or for its projector; and by the commands that answer with it."""
    shutil.copytree(Path(run("export").output_dir) / "export", tmp_path / "export")
    (tmp_path / "export" / "llava_fsdp.json").unlink()  # the digests
    file = tmp_path / "export" / "model.safetensors"
    tensor = next(name for name in load_file(file) if "linear_2.bias" in name)
    poison(file, tensor, torch.nan)
    keys = {"checkpoint": [f"model.checkpoint={tmp_path / 'export'}", "model.projector=auto"],
        "projector": [READ, f"model.projector={tmp_path / 'export'}"]}  # fmt: skip
    with pytest.raises(ModelError, match=rf"{re.escape(str(file))}: {re.escape(tensor)} has values"):
        train.train(make_config(saved, dataset, tmp_path / "run", "max_steps=1", READ, *keys[form]))


@pytest.mark.slow
def test_an_adapter_is_named(run: Callable[..., Config], saved: Path, dataset: Path, tmp_path: Path) -> None:
    shutil.copytree(Path(run("adapter", *LORA).output_dir) / "adapter", tmp_path / "adapter")
    (tmp_path / "adapter" / "llava_fsdp.json").unlink()
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensor = next(name for name in load_file(file) if "lora_B" in name)
    poison(file, tensor, torch.inf)
    keys = [READ, *LORA, f"model.lora.checkpoint={tmp_path / 'adapter'}", "model.projector=random", "max_steps=1"]
    with pytest.raises(ModelError, match=rf"{re.escape(str(file))}: {re.escape(tensor)} has values"):
        train.train(make_config(saved, dataset, tmp_path / "run", *keys))


def test_a_tensor_of_a_checkpoint_is_named(tmp_path: Path) -> None:
    """A run that continues. Integers and 8 bits have other values than these for what they hold."""
    good = {"a": torch.ones(3), "b": torch.ones(2, dtype=torch.int64), "c": torch.ones(0), "d": torch.ones(())}
    check_finite({**good, "e": torch.full((2,), torch.nan).to(torch.float8_e4m3fn)}, tmp_path)
    for value in (torch.nan, torch.inf, -torch.inf):
        for dtype in (torch.float32, torch.bfloat16):
            with pytest.raises(CheckpointError, match=rf"{re.escape(str(tmp_path))}: bad has values that are NaN"):
                check_finite({**good, "bad": torch.tensor([[1.0, value]], dtype=dtype)}, tmp_path)


@pytest.mark.slow
def test_a_run_does_not_continue_from_values_that_are_not_finite(
    run: Callable[..., Config], dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = run("export")
    shutil.copytree(cfg.output_dir, tmp_path / "run")

    def fill(checkpoint: object, into: dict[str, torch.Tensor], elsewhere: object) -> None:
        into[min(into)].detach().view(-1)[-1] = torch.nan

    monkeypatch.setattr(resumed, "load", fill)
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        train.train(replace(cfg, output_dir=str(tmp_path / "run"), max_steps=4))
