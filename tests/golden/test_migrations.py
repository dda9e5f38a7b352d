"""Every recorded script and JSON of the original: no key is dropped, and what is resolved is what HF resolved."""

import re
from collections import Counter
from pathlib import Path

import pytest
from golden_folder import read_json
from golden_scripts import COMPUTED, ZERO, records, rows, run_of, scripts
from small import config_of
from tiers import slow_after

from llava_fsdp.migrate.command import assignments, migrate
from llava_fsdp.migrate.configs.deepspeed import rule_of
from llava_fsdp.migrate.flags.llava_flags import FLAGS
from llava_fsdp.migrate.reading.settings_files import flat
from llava_fsdp.migrate.to_keys.overrides import decide

RECORDS, SCRIPTS = records(), scripts()
GROUPS = ("model_args", "data_args", "training_args")


def theirs(record: dict) -> dict[str, object]:
    return {name: value for group in GROUPS for name, value in record[group].items()}


def test_table_of_flags_is_the_original_parser() -> None:
    """Every argument, with its default."""
    defaults = theirs(read_json("configs/defaults.json"))
    assert set(FLAGS) == set(defaults)
    assert {n: f.default for n, f in FLAGS.items() if n not in COMPUTED} == {
        n: value for n, value in defaults.items() if n not in COMPUTED
    }


@pytest.mark.parametrize("name", RECORDS)
def test_values_are_what_the_original_parser_made_of_them(name: str, tmp_path: Path) -> None:
    record = RECORDS[name]
    run = run_of(record, tmp_path)
    expected = {n: value for n, value in theirs(record).items() if n not in COMPUTED}
    assert {n: run.trainer_value(n) for n in expected} == expected


@pytest.mark.parametrize("name", RECORDS)
def test_every_key_is_accounted_for_once(name: str, tmp_path: Path) -> None:
    record = RECORDS[name]
    run = run_of(record, tmp_path, gpus=8)
    zero = Path(record["explicit_cli"]["deepspeed"]).name
    expected = {(run.name, key) for key in record["explicit_cli"]}
    expected |= {(zero, key) for key in flat(read_json(f"configs/{zero}"))}
    found = Counter((row.source, row.key) for row in rows(run))
    assert max(found.values()) == 1
    assert expected <= found.keys()
    assert all(row.known and row.text for row in rows(run))


@pytest.mark.parametrize("name", ZERO)
def test_every_key_of_a_json_has_a_rule(name: str) -> None:
    assert [key for key in flat(read_json(f"configs/{name}.json")) if rule_of(key) is None] == []


@pytest.mark.parametrize("name", RECORDS)
def test_auto_is_resolved_as_transformers_does(name: str, tmp_path: Path) -> None:
    """On one GPU, as the golden values were made; sizes of buckets and numbers of steps have no use here."""
    record = RECORDS[name]
    golden = record["deepspeed_resolved"]
    run = run_of(record, tmp_path, gpus=1)
    zero = Path(record["explicit_cli"]["deepspeed"]).name
    of_file = flat(read_json(f"configs/{zero}"))
    unused = re.compile(r".*_(bucket_size|threshold|num_steps|min_lr)")
    autos = [key for key, value in of_file.items() if value == "auto" and not unused.fullmatch(key)]
    expected = flat(golden["config"])
    assert len(autos) >= 4
    assert {row.key: row.outcome.resolved for row in rows(run) if row.source == zero and row.key in autos} == {
        key: expected[key] for key in autos
    }
    clips = golden["config"].get("gradient_clipping")
    assert (decide(run)["optim.clip"], clips is not None) == (
        clips,
        record["deepspeed_resolved"]["gradient_clipping_key_present"],
    )


@pytest.mark.parametrize("name", slow_after(2, SCRIPTS))
def test_command_is_the_script(name: str, tmp_path: Path) -> None:
    """Composed, the command has the values of the script, whichever of them it had to say."""
    record = SCRIPTS[name]
    args = theirs(record)
    done = migrate(run_of(record, tmp_path, gpus=8))
    assert done.refused == ""
    cfg = config_of(assignments(done.printed_overrides))
    assert cfg.optim.lr == args["learning_rate"]
    assert cfg.optim.projector_lr == args["mm_projector_lr"]
    assert cfg.optim.weight_decay == args["weight_decay"]
    assert (cfg.optim.beta1, cfg.optim.beta2, cfg.optim.eps) == (
        args["adam_beta1"], args["adam_beta2"], args["adam_epsilon"],
    )  # fmt: skip
    assert cfg.optim.clip is None
    assert cfg.optim.schedule.value == args["lr_scheduler_type"]
    assert (cfg.optim.warmup_ratio, cfg.optim.warmup_steps) == (args["warmup_ratio"], None)
    batch = args["per_device_train_batch_size"]
    assert isinstance(batch, int)
    assert cfg.micro_batch_size == batch
    assert cfg.global_batch_size == 8 * record["deepspeed_resolved"]["config"]["train_batch_size"]
    assert cfg.epochs == args["num_train_epochs"] and cfg.max_steps is None
    assert cfg.seed == args["seed"]
    assert cfg.precision.param_dtype.value == ("bf16" if args["bf16"] else "fp32")
    assert cfg.activation_checkpointing.mode.value == ("full" if args["gradient_checkpointing"] else "none")
    stage = record["deepspeed_resolved"]["config"]["zero_optimization"]["stage"]
    assert cfg.sharding.strategy.value == {2: "SHARD_GRAD_OP", 3: "FULL_SHARD"}[stage]
    assert [str(part) for part in cfg.model.train] == (
        ["projector"] if args["tune_mm_mlp_adapter"] else ["projector", "language"]
    )
    source = cfg.model.checkpoint or cfg.model.language
    assert source == args["model_name_or_path"]
    assert (cfg.model.checkpoint is not None) == ("finetune_task" in name)
    assert cfg.model.vision == args["vision_tower"]
    assert cfg.model.projector_type == args["mm_projector_type"]
    assert cfg.model.select_layer == args["mm_vision_select_layer"]
    if args["pretrain_mm_mlp_adapter"]:
        assert cfg.model.projector == args["pretrain_mm_mlp_adapter"]
    assert (cfg.data.path, cfg.data.images) == (args["data_path"], args["image_folder"])
    assert cfg.data.template == args["version"]
    assert cfg.data.image_aspect_ratio.value == args["image_aspect_ratio"]
    assert cfg.data.max_length == args["model_max_length"]
    assert cfg.data.workers == args["dataloader_num_workers"]
    assert cfg.output_dir == args["output_dir"]
    assert cfg.checkpoint.every == args["save_steps"]


def test_v1_5_scripts_become_short_commands(tmp_path: Path) -> None:
    """What a stage or a recipe says is not said again."""
    done = migrate(run_of(SCRIPTS["v1_5_finetune"], tmp_path, gpus=8))
    assert set(done.printed_overrides) == {
        "stage", "model", "data", "data.path", "data.images", "model.projector", "output_dir", "checkpoint.every",
        "track.wandb", "activation_checkpointing",
    }  # fmt: skip
