"""Adapters at the ends of their lives: exports that are not theirs, folders that were moved, older checkpoints."""

import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forged import forge_facts, forge_notes
from reference import EXPORTED
from safetensors.torch import load_file
from small import config_of, conversion, make_config, write_json, write_parts
from weights import same, weights

from llava_fsdp.config import Quantizer
from llava_fsdp.config.paths import check_paths
from llava_fsdp.export.main import export
from llava_fsdp.export.source_model import open_source
from llava_fsdp.model.adapters.lora_files import open_adapter
from llava_fsdp.model.weights.quantization import Packing, quantize
from llava_fsdp.runtime.errors import ConfigError, DamagedModel, ModelError
from llava_fsdp.train import final_export
from llava_fsdp.train import main as train

SMALL = [
    *EXPORTED, "model.lora.r=4", "model.lora.alpha=12", "model.lora.dropout=0", "global_batch_size=4",
    "micro_batch_size=4", "optim.warmup_ratio=0", "optim.lr=0.1", "data.max_length=160", "max_steps=2",
]  # fmt: skip


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_parts(tmp_path_factory.mktemp("parts"))


@pytest.fixture(scope="module")
def made(parts: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with a checkpoint after each."""
    run = tmp_path_factory.mktemp("made") / "run"
    train.train(make_config(parts, dataset, run, *SMALL, "checkpoint.every=1", stage="finetune_lora"))
    return run


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copied"))


def change(file: Path, **values: object) -> None:
    write_json(file, json.loads(file.read_text()) | values)


@pytest.mark.slow
def test_the_path_of_the_base_may_be_corrected(copied: Path, parts: Path) -> None:
    """What adapter_config.json says beside it may not: the weights would mean something else."""
    settings = copied / "adapter" / "adapter_config.json"
    accepted = conversion(copied / "adapter", copied, "to=null", f"accept=[{settings.name}]")
    change(settings, base_model_name_or_path=str(parts / "language"))
    with pytest.raises(DamagedModel):
        open_adapter(copied / "adapter")
    export(accepted)
    assert open_adapter(copied / "adapter").modules
    change(settings, lora_alpha=24)
    export(accepted)
    with pytest.raises(ModelError, match=r"says alpha 24.0, and the adapter was trained with 12.0"):
        open_adapter(copied / "adapter")


@pytest.mark.slow
def test_an_export_of_an_earlier_step_is_not_taken_for_the_adapter(copied: Path, tmp_path: Path) -> None:
    """A run that was continued with export.merge=false, and whose checkpoints are gone."""
    forge_notes(copied / "export", step=1)
    marked = copied / "export" / "model.safetensors"
    marked.write_bytes(b"of an earlier step")
    shutil.rmtree(copied / "checkpoints")
    assert open_source(conversion(copied, tmp_path / "to")).folder == copied / "adapter"
    forge_notes(copied / "export", step=2)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        open_source(conversion(copied, tmp_path / "to"))


@pytest.mark.slow
def test_an_older_export_beside_a_new_adapter_is_said(
    copied: Path, parts: Path, dataset: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("llava_fsdp").propagate = True
    more = ["max_steps=3", "export.merge=false", "checkpoint.every=1"]
    train.train(make_config(parts, dataset, copied, *SMALL, *more, stage="finetune_lora"))
    assert any("export is of an earlier step than its adapter" in text for text in caplog.messages)
    assert json.loads((copied / "adapter" / "llava_fsdp.json").read_text())["step"] == 3


@pytest.mark.parametrize("is_there", [True, False])
def test_an_older_export_is_said_where_there_is_one(
    is_there: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder with the adapter is always there: it has just been written."""
    monkeypatch.setattr(final_export, "export_adapter", lambda *_: object())
    for name in ("adapter", "export") if is_there else ("adapter",):
        (tmp_path / name).mkdir()
    logging.getLogger("llava_fsdp").propagate = True
    cfg: Any = SimpleNamespace(
        output_dir=str(tmp_path), model=SimpleNamespace(lora=SimpleNamespace(enabled=True)),
        export=SimpleNamespace(merge=False),
    )  # fmt: skip
    state: Any = None
    assert final_export.export(state, cfg, True) == tmp_path / "adapter"
    assert any("of an earlier step than its adapter" in text for text in caplog.messages) is is_there


@pytest.mark.slow
def test_tiles_end_with_an_adapter_where_nothing_is_merged(
    made: Path, parts: Path, dataset: Path, tmp_path: Path
) -> None:
    """The vector at the ends of lines was drawn, and is in no file but the adapter's own: what is merged of it later is
    the run's model, in both formats."""
    values = [
        *SMALL, "data.image_aspect_ratio=anyres", "model.patch_merge=spatial_unpad", "data.pixels=exact",
        f"model.checkpoint={made / 'export'}", "model.train=[language]", "model.random_weights=false",
        "data.max_length=512", "max_steps=1",
    ]  # fmt: skip
    run = tmp_path / "run"
    with pytest.raises(ConfigError, match=r"could not be exported at its end; set .* or export\.merge=false"):
        make_config(parts, dataset, run, *values, "model.patch_merge=spatial", stage="finetune_task_lora")
    train.train(make_config(parts, dataset, run, *values, "export.merge=false", stage="finetune_task_lora"))
    assert "base_model.model.model.image_newline" in load_file(run / "adapter" / "non_lora_trainables.safetensors")
    of_run = weights(export(conversion(run, tmp_path / "a", "format=llava", "vision=tower")))
    same_way = ["format=llava", "vision=tower", "verify=false"]
    assert same(weights(export(conversion(run / "adapter", tmp_path / "b", *same_way))), of_run)
    hf = weights(export(conversion(run / "adapter", tmp_path / "c")))
    assert torch.equal(hf["image_newline"], of_run["model.image_newline"])


@pytest.mark.slow
def test_checkpoints_from_before_adapters_continue(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """Their configuration has no keys for what they had not."""
    values = [*SMALL[: len(EXPORTED)], *SMALL[len(EXPORTED) + 3 :], "checkpoint.every=1"]
    run = tmp_path / "run"
    train.train(make_config(parts, dataset, run, *values))

    def older(facts: dict[str, Any]) -> None:
        del facts["config"]["model"]["lora"], facts["config"]["model"]["quantize"]

    forge_facts(run / "checkpoints" / "step-000002", older)
    train.train(make_config(parts, dataset, run, *values, "max_steps=3"))
    assert [json.loads(row)["step"] for row in (run / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]


def test_a_source_that_the_run_would_move_away_is_refused(made: Path, parts: Path, dataset: Path) -> None:
    source = made / "checkpoints" / "step-000001"
    cfg = make_config(parts, dataset, made, *SMALL, f"model.lora.checkpoint={source}", stage="finetune_lora")
    with pytest.raises(ConfigError, match=r"model\.lora\.checkpoint=.*step-000001 is within output_dir="):
        check_paths(cfg)


def test_a_run_knows_its_own_base(made: Path, parts: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"base=.* is for the folder of an adapter, .* source=.* is not one"):
        export(conversion(made, tmp_path / "to", f"base={parts / 'language'}", "dtype=bf16"))


@pytest.mark.parametrize("key", ["r=8", "dropout=0.1", "use_dora=true", "bias=all", "checkpoint=FOLDER"])
def test_keys_of_adapters_need_adapters(key: str) -> None:
    """A run that ignored them would train everything, and nobody would know."""
    with pytest.raises(ConfigError, match=rf"model\.lora\.{key.partition('=')[0]}=.* needs model\.lora\.enabled=true"):
        config_of(["stage=finetune", f"model.lora.{key}"])


def test_int8_refuses_what_fp16_has_not() -> None:
    pytest.importorskip("bitsandbytes")
    weight = torch.ones(64, 64)
    weight[3, 5] = 70000
    with pytest.raises(ModelError, match=r"values up to 70000, .*choose model\.quantize\.mode=nf4"):
        quantize(Packing(Quantizer.int8, False, 64, 64), weight, torch.bfloat16)


@pytest.mark.slow
def test_continuing_on_another_base_is_refused(made: Path, parts: Path, dataset: Path, tmp_path: Path) -> None:
    """Weights drawn with another seed; and the base that the adapter is merged into already."""
    source = f"model.lora.checkpoint={made / 'adapter'}"
    wrong = [["seed=7"], [f"model.checkpoint={made / 'export'}", "model.random_weights=false"]]
    for number, base in enumerate(wrong):
        cfg = make_config(parts, dataset, tmp_path / str(number), *SMALL, source, *base, stage="finetune_lora")
        with pytest.raises(ModelError, match=r"adapter is for another base: .*, to the bit"):
            train.train(cfg)


@pytest.mark.parametrize("mode", ["nf4", pytest.param("int8", marks=pytest.mark.slow)])
def test_a_projector_over_a_quantised_base_is_exported(mode: str, parts: Path, dataset: Path, tmp_path: Path) -> None:
    """It is compared with a base in full, as the export's is: four bits are far from it."""
    pytest.importorskip("bitsandbytes")
    values = [*EXPORTED, f"model.quantize.mode={mode}", "global_batch_size=4", "micro_batch_size=4", "max_steps=1"]
    train.train(make_config(parts, dataset, tmp_path / "pretrain", *values, stage="pretrain"))
    assert (tmp_path / "pretrain" / "export" / "config.json").is_file()


def test_a_checkpoint_is_no_model(made: Path, parts: Path, dataset: Path, tmp_path: Path) -> None:
    source = made / "checkpoints" / "step-000002"
    start = [f"model.checkpoint={source}", "model.random_weights=false", "model.projector=auto"]
    with pytest.raises(ModelError, match=rf"is a checkpoint of a run, [\s\S]*export source={source} to="):
        train.train(make_config(parts, dataset, tmp_path / "run", *EXPORTED, *start))
