"""The numbers on a training's first screen, and what is refused while it is built."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small import config_of

from llava_fsdp.config import (
    FULL_WEIGHT,
    Config,
    DType,
    LoraBias,
    LoraConfig,
    QuantizeConfig,
    Quantizer,
    ScalerConfig,
    Schedule,
)
from llava_fsdp.model.adapters.lora_names import LORA_A, LORA_B
from llava_fsdp.model.llava.llava import Llava
from llava_fsdp.parallel.memory.memory import Weight
from llava_fsdp.runtime.errors import ConfigError, DataError
from llava_fsdp.train.checkpoints import resume
from llava_fsdp.train.checkpoints.resume import continues, refuse_changes
from llava_fsdp.train.setup import build_state, run_info, summary


@pytest.fixture(scope="module")
def cfg(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Its output folder is new: the default's may have checkpoints of a training in this folder."""
    output = tmp_path_factory.mktemp("run")
    return config_of(["precision=bf16", "model.random_weights=false", "data.path=a.json", f"output_dir={output}"])


def changed(cfg: Any, **values: Any) -> Any:
    """The configuration with other values of some keys, whose dots are written `__`; nothing is checked."""
    for key, value in values.items():
        group, _, rest = key.partition("__")
        own = changed(getattr(cfg, group), **{rest: value}) if rest else value
        cfg = replace(cfg, **{group: own})
    return cfg


WORLD: Any = SimpleNamespace(size=3, device=torch.device("cpu"))
TRAINED, FROZEN, PACKED = (
    Weight((5, 3), True, False, False), Weight((7, 3), False, False, False),
    Weight((4, 8), False, False, False, per_element=2, statistics=12),
)  # fmt: skip


def test_trained_and_all_parameters_are_counted_by_part(cfg: Config) -> None:
    weights = {
        "language_model.a.weight": PACKED, "lm_head.weight": TRAINED, "vision_tower.a": FROZEN,
        "multi_modal_projector.a": TRAINED, "multi_modal_projector.b": FROZEN,
    }  # fmt: skip
    counts = {
        "vision_tower": (0, 21), "multi_modal_projector": (15, 21), "language_model": (0, 64), "lm_head": (15, 0),
    }  # fmt: skip
    assert summary.trained_counts(weights, Llava.named_parts) == counts
    said = summary.describe_trained(weights, Llava.named_parts)
    assert said == "30 of 136 parameters (22.1%): projector 15, output layer 15"
    adapted = replace(
        cfg.model, lora=replace(cfg.model.lora, enabled=True), quantize=QuantizeConfig(mode=Quantizer.nf4)
    )
    cfg = changed(cfg, model=adapted)
    assert summary.describe_quantized(cfg, weights.values()) == (
        "1 linear layers of the language model in nf4, scales quantised again: 9.5 bits a weight"
    ), "32 elements of two bytes and 12 bytes of scales hold 64 weights"


def test_steps_batches_and_rates(cfg: Config) -> None:
    sampler = SimpleNamespace(per_epoch=400, samples=lambda step: [*range(32)])
    loader: Any = SimpleNamespace(steps=SimpleNamespace(sampler=sampler), total_steps=1000, num_micro_batches=5)
    cfg = changed(cfg, global_batch_size=32, micro_batch_size=2, pack=False, optim__lr=1e-3)
    assert summary.describe_steps(cfg, loader, 100.4) == (
        "1,000, 2.5 epochs of 400; a step has 32 samples, about 3,213 tokens"
    )
    sampler.samples = lambda step: [0]  # a dataset of one record
    assert summary.describe_steps(cfg, loader, 100.4).endswith("a step has 1 sample, about 100 tokens")
    assert summary.describe_batch(cfg, WORLD, loader) == (
        "micro-batch 2 x accumulation 5 x ranks 3 = 30 rows for a global batch of 32"
    )
    parts = Llava.named_parts
    weights = {"language_model.a": TRAINED, "multi_modal_projector.a": TRAINED, "vision_tower.a": TRAINED}
    optim = replace(cfg.optim, warmup_ratio=0.03, warmup_steps=None, projector_lr=None, vision_lr=0.0)
    assert (
        summary.describe_learning(optim, weights, parts)
        == "rate 0.001 (vision tower 0), cosine after a warm-up of 0.03 of the steps"
    )
    optim = replace(optim, warmup_steps=0, projector_lr=2e-3)
    assert "0.001 (vision tower 0, projector 0.002), cosine after a warm-up of 0 steps" in summary.describe_learning(
        optim, weights, parts
    )
    optim = replace(optim, warmup_steps=3, schedule=Schedule.linear, decay_ratio=0.1, min_lr_ratio=0.25)
    said = summary.describe_learning(optim, weights, parts)
    assert said.endswith(", linear in the last 0.1 of the steps, to 0.25 of the peak, after a warm-up of 3 steps")
    for frozen, said in (
        ("vision_tower multi_modal_projector", "rate 0.001, "), ("vision_tower language_model", "rate 0.002, "),
        ("language_model", "rate vision tower 0, projector 0.002, "),
    ):  # fmt: skip
        some = {name: FROZEN if name.partition(".")[0] in frozen.split() else TRAINED for name in weights}
        assert summary.describe_learning(optim, some, parts).startswith(said), "only rates of parts that train"
    assert summary.describe_sharding(cfg, WORLD).startswith(f"{cfg.sharding.strategy.value} over 3 cpu ranks, ")
    one: Any = SimpleNamespace(size=1, device=torch.device("cpu"))
    assert " over 1 cpu rank, " in summary.describe_sharding(cfg, one)


def test_rows_that_several_ranks_share(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg: Any = SimpleNamespace(
        sampler=SimpleNamespace(name="shuffle"), packs=True, parallel=SimpleNamespace(ranks_per_row=1),
        global_batch_size=32, row_tokens=4096,
    )  # fmt: skip
    loader: Any = None
    said = "32 samples packed into rows of at most 4,096 tokens, as few as they need on each "
    assert summary.describe_batch(cfg, WORLD, loader) == f"{said}rank"
    cfg.parallel.ranks_per_row = 2
    assert summary.describe_batch(cfg, WORLD, loader) == f"{said}2 ranks, which process a row together"


def test_precision_in_words(cfg: Config) -> None:
    assert summary.describe_precision(cfg.precision) == (
        "weights fp32, moments fp32, norms fp32, gradients added in fp32"
    )
    for scaler, said in ((ScalerConfig(initial_power=5), "2**5, dynamic"), (ScalerConfig(scale=8.0), "8")):
        half = changed(cfg, precision__param_dtype=DType.fp16, precision__scaler=scaler).precision
        assert summary.describe_precision(half).endswith(f"in fp32; loss scale {said}")


def test_adapters_in_words() -> None:
    modules = [f"language_model.layers.{n}.mlp.{kind}" for n in range(2) for kind in ("up", "down")]
    names = [module + ending for module in modules for ending in (LORA_A, LORA_B)] + ["lm_head.weight"]
    lora = LoraConfig(enabled=True, r=16, alpha=24, dropout=0.05)
    assert summary.describe_adapters(lora, names) == (
        "rank 16, scale 1.5, dropout 0.05; 4 linear layers: up (2), down (2)"
    )
    more = replace(lora, use_dora=True, bias=LoraBias.all, checkpoint="a", use_rslora=True)
    assert summary.describe_adapters(more, names).startswith(
        "rank 16, scale 6, dropout 0.05, DoRA, biases all, from a;"
    )


def test_saves_and_data_in_words(cfg: Config) -> None:
    cfg = changed(cfg, checkpoint__every=1500)
    assert summary.describe_saves(cfg, None) == "every 1,500 steps and at the end; validates never"
    last = changed(cfg, checkpoint__every=None)
    assert summary.describe_saves(last, None) == "at the end; validates never"

    class Kept(list):
        num_wrong, num_too_long, num_records, index = 3, 2, 1234, SimpleNamespace(examined=None)
        repeated, weights, labels = 77, None, np.full(1234, 3)

    records: Any = Kept(range(1234))
    assert summary.describe_data(cfg, records) == ("a.json: 1,234 records, 3 skipped as wrong, 2 skipped as too long")
    records.num_wrong = records.num_too_long = 0
    records.index = SimpleNamespace(examined=SimpleNamespace(summary="all images are there"))
    assert summary.describe_data(cfg, records) == "a.json: 1,234 records; all images are there"
    records.num_records = 1000
    several = "1,000 records, 1,234 samples (77 tokens are read repeatedly)"
    assert summary.describe_data(cfg, records) == f"a.json: {several}; all images are there"
    records.weights, records.weight_of = (
        records.labels,
        lambda block: int(records.labels[block].sum()) * FULL_WEIGHT // 2,
    )
    mean = "mean weight of a label 0.5"
    assert summary.describe_data(cfg, records) == f"a.json: {several}, {mean}; all images are there"


@pytest.mark.parametrize(
    ("path", "values", "expected"),
    [
        ("a/b", {}, "a/b"),
        (None, {}, "random (no stage=pretrain run beside output_dir)"),
        (None, {"model__projector": "random"}, "random"),
        (None, {"model__checkpoint": "c"}, "of the checkpoint"),
        ("a/b", {"model__checkpoint": "c"}, "of the checkpoint"),
        (None, {"model__lora": LoraConfig(enabled=True, checkpoint="d")}, "of the adapter d"),
        (None, {"model__lora": LoraConfig(enabled=True)}, "random (no stage=pretrain run beside output_dir)"),
        ("a/b", {"model__lora": LoraConfig(enabled=True, checkpoint="d")}, "a/b"),
    ],
)
def test_the_projector_in_words(path: str | None, values: dict[str, Any], expected: str, cfg: Config) -> None:
    cfg = changed(cfg, **{"model__projector": "auto", **values})
    projector = None if path is None else Path(path)
    assert build_state.describe_projector(cfg, projector) == expected


def test_a_run_that_continues_has_the_projector_of_its_own_checkpoint(cfg: Config, tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-000007").mkdir(parents=True)
    continued = changed(cfg, output_dir=str(tmp_path))
    frozen = changed(continued, model__train=["language"])
    assert build_state.describe_projector(continued, Path("a/b")) == "of the run's own checkpoint"
    assert build_state.describe_projector(frozen, Path("a/b")) == "a/b"
    assert build_state.describe_projector(changed(continued, checkpoint__resume="never"), Path("a/b")) == "a/b"


def test_ranks_with_other_records_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    same = {"dataset": "a", "encoding": "b", "order": "c"}
    loader: Any = SimpleNamespace(steps=SimpleNamespace(fingerprints=lambda: dict(same)))
    monkeypatch.setattr(build_state, "gather_lists", lambda own: [*own, same, same])
    build_state.check_same_records(loader)
    for name in same:
        other = {**same, name: "other"}
        gathered = [same, other, same, other]
        monkeypatch.setattr(build_state, "gather_lists", lambda own, gathered=gathered: [*own, *gathered])
        with pytest.raises(DataError, match=r"ranks \[2, 4\] have other .* than rank 0: are val\.path and"):
            build_state.check_same_records(loader, "val.path")


@pytest.mark.parametrize("rank", [0, 1])
def test_held_out_records_are_compared_between_ranks(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of the training are; the first rank also looks for records that are trained on."""
    told: list[Any] = []
    held_out = SimpleNamespace(loader="held-out")
    monkeypatch.setattr(build_state, "open_held_out", lambda cfg, open_loader, longest: held_out)
    monkeypatch.setattr(build_state, "check_same_records", lambda loader, keys: told.append((loader, keys)))
    monkeypatch.setattr(build_state, "warn_of_trained", told.append)
    language = SimpleNamespace(max_position_embeddings=8)
    model: Any = SimpleNamespace(language_config=language)
    cfg: Any = "cfg"
    world: Any = SimpleNamespace(is_first=rank == 0)
    assert build_state.open_held_out_data(cfg, world, model) is held_out
    assert told == [("held-out", "val.path, val.images"), *(["cfg"] if rank == 0 else [])]


def test_the_command_of_a_rank_is_torchruns(monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many ranks; the nodes where there are several, and no secret."""
    monkeypatch.setattr(run_info.sys, "argv", ["x", "a=b c", "hub_token=hf_1"])
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert run_info.command_line() == "python -m llava_fsdp.train 'a=b c' hub_token=***"
    for name, value in (("TORCHELASTIC_RUN_ID", "x"), ("LOCAL_WORLD_SIZE", "4"), ("GROUP_WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    assert run_info.command_line().startswith("torchrun --nproc-per-node 4 -m llava_fsdp.train 'a=b c'")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert run_info.command_line().startswith("torchrun --nnodes 2 --nproc-per-node 4 -m ")


FINGERPRINTS = {"dataset": "data.path", "encoding": "model.language", "order": "sampler", "model": "model"}


def run_of(cfg: Any) -> tuple[dict[str, Any], Any]:
    """What a checkpoint of a run says, and the run as it is now."""
    facts = {
        "config": resume.without_enums(resume.asdict(cfg)), "fingerprints": dict.fromkeys(FINGERPRINTS, "same"),
        "trainable": ["a", "b"],
    }  # fmt: skip
    return facts, SimpleNamespace(fingerprints=dict(facts["fingerprints"]), trained=["a", "b"])


@pytest.mark.parametrize("name", FINGERPRINTS)
def test_what_is_another_than_in_the_checkpoint_is_named(name: str, cfg: Config, tmp_path: Path) -> None:
    facts, state = run_of(cfg)
    refuse_changes(facts, cfg, state, tmp_path)
    state.fingerprints[name] = "other"
    with pytest.raises(resume.CheckpointError) as caught:
        refuse_changes(facts, cfg, state, tmp_path)
    (line,) = [line for line in str(caught.value).splitlines() if line.startswith("  ")]
    assert line.startswith(f"  {FINGERPRINTS[name]}") and str(tmp_path) in str(caught.value)
    assert ("it was" in line) is False
    facts["config"]["data"]["path"] = "there.json"
    with pytest.raises(resume.CheckpointError) as caught:
        refuse_changes(facts, cfg, state, tmp_path)
    assert (f"; it was there.json, and is {cfg.data.path}" in str(caught.value)) is (name == "dataset")


def test_other_parameters_and_another_seed_are_named_once(cfg: Config, tmp_path: Path) -> None:
    cfg = changed(cfg, model__random_weights=True, seed=3)
    facts, state = run_of(cfg)
    state.trained = ["b", "d", "c"]
    with pytest.raises(resume.CheckpointError, match=r"model\.train: 3 parameters were added or removed, such as a\n"):
        refuse_changes(facts, cfg, state, tmp_path)
    state.trained = ["a", "b"]
    state.fingerprints["model"] = "other"
    for seed, lines in ((3, ["model: "]), (4, ["seed: 4 -> 3"])):
        facts["config"]["seed"] = seed
        with pytest.raises(resume.CheckpointError) as caught:
            refuse_changes(facts, cfg, state, tmp_path)
        found = [line.strip() for line in str(caught.value).splitlines() if line.startswith("  ")]
        assert len(found) == 1 and found[0].startswith(lines[0]), "drawn weights are others with another seed"
    cfg = changed(cfg, model__random_weights=False)
    facts["config"]["model"]["random_weights"] = False
    with pytest.raises(resume.CheckpointError) as caught:
        refuse_changes(facts, cfg, state, tmp_path)
    found = [line.strip().partition(":")[0] for line in str(caught.value).splitlines() if line.startswith("  ")]
    assert found == ["seed", "model"], "weights that were read from files do not depend on the seed"


def test_settings_are_compared_with_the_checkpoint_that_a_run_continues_from(cfg: Config, tmp_path: Path) -> None:
    """With the newest one, or with the one that is named; with none if the run starts over."""
    tree = resume.without_enums(resume.asdict(cfg))
    run, newest, other = tmp_path / "run", tmp_path / "run/checkpoints/step-000004", tmp_path / "other/step-000003"
    for folder, seed in ((run / "checkpoints/step-000002", 7), (newest, cfg.seed), (other, 8)):
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(json.dumps({"config": {**tree, "seed": seed}}))

    def check(value: str) -> None:
        resume.check_settings(changed(cfg, output_dir=str(run), checkpoint__resume=value))

    check("auto")
    check(str(newest))
    with pytest.raises(ConfigError) as caught:
        check(str(other))
    assert caught.value.culprit["keys"] == ["seed"]
    (newest / "state.json").write_text(json.dumps({"config": {**tree, "seed": 9, "global_batch_size": 1}}))
    with pytest.raises(ConfigError) as caught:
        check("auto")
    assert caught.value.culprit["keys"] == ["global_batch_size", "seed"]
    check("never")


@pytest.mark.parametrize(
    ("value", "saved", "expected"),
    [("auto", False, False), ("auto", True, True), ("never", True, False), ("some/step-000004", False, True)],
)
def test_whether_a_training_continues(value: str, saved: bool, expected: bool, tmp_path: Path) -> None:
    if saved:
        (tmp_path / "checkpoints" / "step-000003").mkdir(parents=True)
    cfg: Any = SimpleNamespace(output_dir=str(tmp_path), checkpoint=SimpleNamespace(resume=value))
    assert continues(cfg) is expected
