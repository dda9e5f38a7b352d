"""The recipes of LLaVA 1.5 are the original's scripts, value by value, and docs/recipes.md says so."""

import importlib
import math
from pathlib import Path
from types import ModuleType

import pytest
from golden_folder import golden_folder, read_json
from small import config_of
from tiers import slow_after

from llava_fsdp.config import Config
from llava_fsdp.train.optimizer import SCHEDULES

ROOT = Path(__file__).parents[2]
STAGES = ("pretrain", "finetune", "finetune_lora", "finetune_task", "finetune_task_lora")
GPUS = 8
# The values of a recipe, and the arguments of the original's script that they are.
SAME = {
    "seed": "seed",
    "epochs": "num_train_epochs",
    "micro_batch_size": "per_device_train_batch_size",
    "log_every": "logging_steps",
    "comm.timeout": "ddp_timeout",
    "data.max_length": "model_max_length",
    "data.template": "version",
    "data.image_aspect_ratio": "image_aspect_ratio",
    "data.workers": "dataloader_num_workers",
    "model.vision": "vision_tower",
    "model.projector_type": "mm_projector_type",
    "model.select_layer": "mm_vision_select_layer",
    "model.select_feature": "mm_vision_select_feature",
    "model.lora.enabled": "lora_enable",
    "optim.lr": "learning_rate",
    "optim.projector_lr": "mm_projector_lr",
    "optim.weight_decay": "weight_decay",
    "optim.beta1": "adam_beta1",
    "optim.beta2": "adam_beta2",
    "optim.eps": "adam_epsilon",
    "optim.schedule": "lr_scheduler_type",
    "optim.warmup_ratio": "warmup_ratio",
}
LANGUAGE = {"llava_v1_5_7b": "lmsys/vicuna-7b-v1.5", "llava_v1_5_13b": "lmsys/vicuna-13b-v1.5"}
PUBLISHED = {"llava_v1_5_7b": "liuhaotian/llava-v1.5-7b", "llava_v1_5_13b": "liuhaotian/llava-v1.5-13b"}
LORA = ("r", "alpha", "dropout", "bias")
STRATEGIES = {2: "SHARD_GRAD_OP", 3: "FULL_SHARD"}


def recipe(stage: str, model: str) -> Config:
    return config_of([f"stage={stage}", f"model={model}", "data=llava_json", "data.path=records.json"])


def value(cfg: Config, key: str) -> object:
    found: object = cfg
    for name in key.split("."):
        found = getattr(found, name)
    return getattr(found, "value", found)


@pytest.mark.parametrize("model", slow_after(1, LANGUAGE))
@pytest.mark.parametrize("stage", STAGES)
def test_recipe_is_the_script(stage: str, model: str) -> None:
    record, cfg = read_json(f"configs/v1_5_{stage}.json"), recipe(stage, model)
    args = record["training_args"] | record["model_args"] | record["data_args"]
    assert {key: value(cfg, key) for key in SAME} == {key: args[name] for key, name in SAME.items()}

    resolved = record["deepspeed_resolved"]["config"]
    assert cfg.global_batch_size == GPUS * resolved["train_batch_size"]
    assert cfg.sharding.strategy.value == STRATEGIES[resolved["zero_optimization"]["stage"]]
    assert (cfg.optim.clip is not None) == record["deepspeed_resolved"]["gradient_clipping_key_present"] is False
    assert cfg.precision.param_dtype.value == "bf16" and resolved["bf16"]["enabled"]
    assert cfg.activation_checkpointing.mode.value == "auto" and args["gradient_checkpointing"]
    if cfg.model.lora.enabled:
        assert {key: value(cfg, f"model.lora.{key}") for key in LORA} == {key: args[f"lora_{key}"] for key in LORA}
    trains = ["projector"] if args["tune_mm_mlp_adapter"] else ["projector", "language"]
    assert [str(part) for part in cfg.model.train] == trains
    assert (cfg.max_steps, args["max_steps"]) == (None, -1)
    assert (cfg.optim.warmup_steps, args["warmup_steps"]) == (None, 0)

    names = {"language": LANGUAGE[model], "checkpoint": PUBLISHED[model] if "task" in stage else None}
    assert {key: getattr(cfg.model, key) for key in names} == names
    if model == "llava_v1_5_13b":
        assert (cfg.model.checkpoint or cfg.model.language) == args["model_name_or_path"]


def test_warm_up_is_rounded_up() -> None:
    """The golden number of warm-up steps for 1000, and the schedule's peak at that step."""
    cfg = recipe("finetune", "llava_v1_5_13b")
    warmup = read_json("configs/v1_5_finetune.json")["derived"]["warmup_steps_for_1000_total"]
    assert math.ceil(cfg.optim.warmup_ratio * 1000) == warmup
    factors = [SCHEDULES[cfg.optim.schedule](step, 1000, warmup) for step in range(1000)]
    assert factors.index(1.0) == warmup and factors[0] == 0.0


def make_recipes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script of the document, which finds its neighbours as it does when it is run."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("make_recipes")


def test_document_is_current_and_every_difference_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (ROOT / "docs" / "recipes.md").read_text() == make_recipes(monkeypatch).page(golden_folder()), (
        "run: python docs/make_recipes.py"
    )


def test_a_difference_without_a_reason_stops_the_document(monkeypatch: pytest.MonkeyPatch) -> None:
    module = make_recipes(monkeypatch)
    monkeypatch.setitem(module.__dict__, "EXPLAINED", {})
    with pytest.raises(SystemExit, match="no reason is given why"):
        module.page(golden_folder())
