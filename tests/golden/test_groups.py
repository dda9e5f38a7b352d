"""What trains, and with which weight decay and learning rate, is the original's for every flag."""

from collections.abc import Callable
from pathlib import Path

import pytest
from golden_folder import golden_folder, read_json
from harness import alone
from small import config_of
from tiers import slow_after

from llava_fsdp.model.weights.weight_names import ours_in_adapter
from llava_fsdp.train import main as train

NOT_RUN = {
    "freeze_backbone": "debug only: it trains the projector and the head (LLaVA#736); model.train has whole parts",
    "stage1_im_start_end": "the original's forward stops here (NotImplementedError)",
    "stage1_im_patch_token": "adds a row that nothing uses; never done here",
}
LORA = {"lora_enable": "enabled", "lora_r": "r", "lora_alpha": "alpha", "lora_dropout": "dropout", "lora_bias": "bias"}
FLAGS = {"learning_rate": "optim.lr", "mm_projector_lr": "optim.projector_lr", "weight_decay": "optim.weight_decay"}


@pytest.mark.parametrize("case", slow_after(2, sorted(read_json("training/param_groups.json"))))
def test_groups(case: str, tmp_path: Path, count: Callable) -> None:
    golden = read_json("training/param_groups.json")[case]
    said = golden["cli_overrides"]
    if case in NOT_RUN:
        count("parameter groups", f"not run: {NOT_RUN[case]}")
        return
    model, data = golden_folder() / "model", golden_folder() / "training" / "data"
    trains = ["projector"] if said.get("tune_mm_mlp_adapter") else ["projector", "language"]
    if said.get("freeze_mm_mlp_adapter"):
        trains.remove("projector")
    whole = "llava" in str(said["model_name_or_path"])
    start = f"model.checkpoint={model / 'llava-mha32'}" if whole else f"model.language={model / 'llm-mha32'}"
    cfg = config_of([
        f"stage={'pretrain' if said['version'] == 'plain' else 'finetune'}", f"data.path={data / said['data_path']}",
        "data=llava_json", f"data.images={data / 'images'}", f"model.vision={next(model.glob('clip-*'))}", start,
        f"model.projector={'auto' if whole else 'random'}", "model.random_weights=false", f"model.train={trains}",
        "precision=fp32", f"output_dir={tmp_path}", f"data.index={tmp_path / 'index'}", "optim.projector_lr=null",
        *(f"{key}={said[flag]}" for flag, key in FLAGS.items() if said.get(flag) is not None),
        *(f"model.lora.{key}={said[flag]}" for flag, key in LORA.items() if said.get(flag) is not None),
    ])  # fmt: skip
    state = train.build_state(cfg, alone(cfg))
    names = {p: n for n, p in state.masters.named.items()}
    made = {(g["weight_decay"], g["base_lr"]): {names[p] for p in g["params"]} for g in state.optimizer.param_groups}
    wanted = {
        (g["weight_decay"], g["lr"]): {ours_in_adapter(n) for n in g["names"]} for g in golden["groups"] if g["names"]
    }
    assert made == wanted
    assert set(names.values()) == {ours_in_adapter(n) for n in golden["trainable"]}
    count("parameter groups", "equal")
