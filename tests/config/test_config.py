"""Every choice of `conf/` makes a configuration, and every mistake is refused with the key and the cure."""

import re
import sys
from itertools import product
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from small import config_of
from tiers import slow_after
from torch.distributed.fsdp import ShardingStrategy

from llava_fsdp.config import (
    ChatConfig,
    Config,
    ConversionConfig,
    DoctorConfig,
    DType,
    EvaluateConfig,
    Normalize,
    Parity,
    Pixels,
    PlanConfig,
    PrepareConfig,
    SamplerName,
    Strategy,
    SweepConfig,
    config_dir,
    load,
    schema_keys,
)
from llava_fsdp.config.command_line import cli
from llava_fsdp.config.command_line.tree import dotted
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.train.setup.summary import unlike_original

CHOICES = sorted((p.parent.name, p.stem) for p in config_dir().glob("*/*.yaml") if p.parent.name != "recipe")
RECIPES = sorted(p.stem for p in config_dir().glob("recipe/*.yaml"))
STAGES = [name for group, name in CHOICES if group == "stage"]
MODELS = [name for group, name in CHOICES if group == "model"]
SCHEMAS = {
    "train": Config,
    "sweep": SweepConfig,
    "evaluate": EvaluateConfig,
    "chat": ChatConfig,
    "export": ConversionConfig,
    "prepare": PrepareConfig,
    "doctor": DoctorConfig,
    "plan": PlanConfig,
}
FILL = ["data.path=records.json", "model.language=lm"]  # the values that choices leave open


def composed(*overrides: str, name: str = "train") -> DictConfig:
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return compose(name, overrides=list(overrides))


def keys(node: DictConfig, prefix: str = "") -> set[str]:
    names = set()
    for key in node:
        names.add(f"{prefix}{key}")
        child = node._get_node(key)
        if isinstance(child, DictConfig):
            names |= keys(child, f"{prefix}{key}.")
    return names


def leaves(path: Path) -> dict[str, object]:
    """What a YAML file and the files of its folder that it is based on set, by dotted key."""
    whole = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(whole, dict)
    made: dict[str, object] = {}
    for base in whole.pop("defaults", []):
        if isinstance(base, str) and base != "_self_":
            made |= leaves(path.with_name(f"{base}.yaml"))
    return made | dotted({str(key): value for key, value in whole.items()})


@pytest.mark.parametrize(("group", "choice"), slow_after(12, CHOICES))
def test_every_choice_composes(group: str, choice: str) -> None:
    node = composed(f"{group}={choice}", *FILL)
    load(Config, node)
    assert keys(node) == set(schema_keys(Config))


def test_choices_are_found() -> None:
    groups = {group for group, _ in CHOICES}
    assert {"stage", "model", "data", "sharding", "precision", "activation_checkpointing", "optim"} <= groups
    assert {"pretrain", "finetune"} <= set(STAGES)


@pytest.mark.parametrize("name", SCHEMAS)
def test_yaml_has_exactly_the_keys_of_the_schema(name: str) -> None:
    assert {p.stem for p in config_dir().glob("*.yaml")} == set(SCHEMAS)
    assert keys(composed(name=name)) == set(schema_keys(SCHEMAS[name]))
    load(SCHEMAS[name], composed(*(["source=a", "to=b"] if name == "export" else []), name=name))


@pytest.mark.parametrize(("stage", "model"), slow_after(8, list(product(STAGES, MODELS))))
def test_recipe_wins_over_stage_and_command_line_over_recipe(stage: str, model: str) -> None:
    recipe = f"{stage}_{model}"
    expected = leaves(config_dir() / "stage" / f"{stage}.yaml")
    if recipe in RECIPES:
        expected |= leaves(config_dir() / "recipe" / f"{recipe}.yaml")
    node = composed(f"stage={stage}", f"model={model}")
    assert {key: OmegaConf.select(node, key) for key in expected} == expected
    assert composed(f"stage={stage}", f"model={model}", "global_batch_size=6").global_batch_size == 6


def test_every_recipe_belongs_to_a_stage_and_a_model() -> None:
    assert set(RECIPES) <= {f"{stage}_{model}" for stage, model in product(STAGES, MODELS)}


def test_stage_chooses_the_sharding_and_the_command_line_wins() -> None:
    assert composed("stage=pretrain").sharding.strategy == "SHARD_GRAD_OP"
    assert composed("stage=finetune").sharding.strategy == "FULL_SHARD"
    assert composed("stage=pretrain", "sharding=zero3").sharding.strategy == "FULL_SHARD"


def test_strategies_have_the_names_of_torch() -> None:
    assert {s.value for s in Strategy} - {"SHARD_OPTIMIZER", "auto"} == {s.name for s in ShardingStrategy}
    assert all(s.name == s.value for s in Strategy)


WRONG = [
    # unknown keys and choices
    ("optim.lrr=1", "optim.lrr is not a key of the configuration; did you mean optim.lr?"),
    ("optm.lr=1", "optm.lr is not a key of the configuration; did you mean optim.lr?"),
    ("+x=1", "x is not a key of the configuration"),
    ("+optim.betta1=1", "optim.betta1 is not a key of the configuration; did you mean optim.beta1?"),
    ("~optim.lr", "optim.lr is not set; give it on the command line: optim.lr=VALUE"),
    ("data=llava_json", "data.path is not set; give it on the command line: data.path=VALUE"),
    (
        "stage=nope",
        "stage=nope: choose one of finetune, finetune_lora, finetune_qlora, finetune_task, finetune_task_lora, "
        "finetune_task_qlora, onevision_1_5, onevision_2, onevision_2_single_image, "
        "prefer, prefer_lora, pretrain",
    ),
    (
        "sharding=zero4",
        "sharding=zero4: choose one of auto, hybrid, hybrid2, zero0, zero1, zero2, zero3; did you mean zero3?",
    ),
    ("precision=int8", "precision=int8: choose one of auto, bf16, bf16_pure, fp16, fp32, fp8, int8_mixed"),
    # wrong types
    ("optim.lr=fast", "optim.lr=fast must be a number"),
    ("epochs=1.5", "epochs=1.5 must be a whole number"),
    ("deterministic=maybe", "deterministic=maybe must be true or false"),
    ("optim.lr=null", "optim.lr=null must be a number"),
    ("model.train=[all]", "model.train[0]=all must be one of [projector, language, vision]"),
    ("data.too_long=drop", "data.too_long=drop must be one of [truncate, skip, fail]"),
    ("optim=null", "optim=null: choose one of adamw"),
    ("data.sources.a.epochs=x data.sources.a.path=y", "data.sources.a.epochs=x must be a number or null"),
    ("+data.sources.a=3", "data.sources.a=3 must be a source with keys of its own: data.sources.a.path=FILE"),
    ("model.quantize=nf4", "model.quantize=nf4 is a group of keys, which are set one by one: model.quantize.mode="),
    ("model.lora=true", "model.lora=True is a group of keys, which are set one by one: model.lora.enabled=VALUE"),
    ("model.quantize.double=false", "model.quantize.double=false needs model.quantize.mode=nf4 or fp4"),
    ("compile=null", "compile=null must be true, false or auto"),
    ("compile=yes", "compile=yes must be true, false or auto"),
    ("optim.clip=much", "optim.clip=much must be a number or null"),
    ("profile_steps=abc", "profile_steps=abc must be the first and the last step to profile, as [10, 12], or null"),
    ("profile_steps=[1.5,2]", "profile_steps[0]=1.5 must be a whole number"),
    ("model.train=null", "model.train=null must be a list of texts"),
    ("data.grid_pinpoints=[[1,a]]", "data.grid_pinpoints[0]=[1, 'a'] must be a list of whole numbers"),
    ("gc_every=0", "gc_every=0 must be at least 1: null leaves it to Python"),
    ("sharding.strategy=ZERO", "must be one of [NO_SHARD, SHARD_OPTIMIZER, SHARD_GRAD_OP, FULL_SHARD, HYBRID_SHARD"),
    # values that a check refuses; test_config_bounds.py has all of them
    ("model.train=[]", "model.train=[] trains nothing; name parts of [projector, language, vision]"),
    ("model.train=[vision,vision]", "model.train=['vision', 'vision'] names a part twice"),
    ("model.projector_type=mlp", "model.projector_type=mlp is not a projector; choose linear, mlp2x_gelu"),
    ("max_steps=0", "max_steps=0 must be at least 1: null trains every epoch to its end"),
    ("optim.clip=0", "optim.clip=0.0 must be a finite number above 0; null turns clipping off"),
    # several jobs in one process group
    ("-m optim.lr=1,2", "use: llava-fsdp sweep -m optim.lr=1,2"),
    ("optim.lr=1,2", "Ambiguous value for argument 'optim.lr=1,2'"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[arguments for arguments, _ in WRONG])
def test_a_mistake_is_refused_with_its_cure(
    arguments: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # Hydra makes output_dir
    with pytest.raises(ConfigError) as caught:
        loaded(monkeypatch, *arguments.split())
    assert message in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_a_value_without_its_key(tmp_path: Path) -> None:
    """A path is told the key that it is most likely meant for; words behind a flag of Hydra's are the flag's."""
    here = str(tmp_path)
    programs = {"train": "output_dir", "chat": "model.checkpoint", "evaluate": "model.checkpoint", "export": "source"}
    for program, key in programs.items():
        with pytest.raises(ConfigError, match=f"did you mean {key}={here}") as caught:
            cli.refuse_bare_words(["seed=1", here], program)
        assert "quotes" not in str(caught.value)
    with pytest.raises(ConfigError, match="gone has no key; arguments are written key=value"):
        cli.refuse_bare_words(["gone"], "train")
    cli.refuse_bare_words(["--config-dir", here, "-cn", "train", "--cfg", "job", "~val", "seed=1", "--help"], "train")


def test_compat_sets_what_the_original_does() -> None:
    """One word sets them all, whatever the stage; a key on the command line still wins, and the screen says so."""
    cfg = config_of(["compat=llava_v1_5", "stage=pretrain"])
    assert (cfg.labels, cfg.data.pixels) == (Parity.llava_v1_5, Pixels.llava_v1_5)
    assert (cfg.sampler.name, cfg.sampler.group_by_modality_length) == (SamplerName.llava_v1_5, False)
    assert cfg.loss.normalize is Normalize.micro_batch
    assert cfg.precision.reduce_dtype is cfg.precision.norm_dtype is cfg.precision.param_dtype is DType.bf16
    assert unlike_original(cfg).startswith("nothing of labels, order")
    cfg = config_of(["compat=llava_v1_5", "labels=exact", "precision=fp32"])
    assert cfg.sampler.group_by_modality_length and cfg.precision.reduce_dtype is DType.fp32
    assert unlike_original(cfg).startswith("labels=exact (")
    assert unlike_original(config_of(["compat=llava_v1_5", "data.pixels=fast"])).startswith("data.pixels=fast (")
    ours = unlike_original(config_of([]))
    for key in ("labels=exact", "sampler=shuffle", "loss.normalize=step", "data.pixels=exact", "reduce_dtype=fp32"):
        assert key in ours
    assert "precision.norm_dtype=fp32" in ours and "compile" not in ours
    assert "compiled blocks (compile=false" in unlike_original(cfg, compiles=True)


def loaded(monkeypatch: pytest.MonkeyPatch, *words: str) -> Config:
    monkeypatch.setattr(sys, "argv", ["train", *words])
    node = cli.compose("train", Config)
    assert node is not None
    return load(Config, node)


def test_names_of_sources_are_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are typed without Hydra's `++`, and their paths without quotes."""
    first = ["data.sources.a.path=my file (1).json", "data.sources.a.epochs=0.5"]
    cfg = loaded(monkeypatch, "data=llava_json", *first, "data.sources.b.path=b")
    files = {name: (source.path, source.epochs) for name, source in cfg.data.sources.items()}
    assert files == {"a": ("my file (1).json", 0.5), "b": ("b", None)}


WRONG_SOURCES = {
    "data.sources.a.pth=x": "data.sources.a.pth is not a key of the configuration; did you mean data.sources.a.path",
    "data.sources.a.weight=1": "data.sources.a.path is not set",
    "data.sources.a.path=x data.path=y": "data.path=y and data.sources=['a'] are both set",
    "data.sources.a.path=x data.sources.b.path=y data.sources.b.weight=1": "give every source a weight, or none",
    "data.sources.a.path=x data.sources.a.epochs=0": "source of x: epochs=0.0 must be a finite number above 0",
    "data.sources.a.path=x data.sources.a.epochs=1e18": "epochs=1e+18 of x is more than 1,000 in one epoch",
    "data.path=x data.max_bad_records=100.5%": "data.max_bad_records=100.5% is more than all records",
    "data.path=x data.max_bad_records=lots": "data.max_bad_records=lots is neither a share of the records",
}


@pytest.mark.parametrize("words", WRONG_SOURCES)
def test_wrong_sources_are_refused(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=re.escape(WRONG_SOURCES[words])):
        loaded(monkeypatch, "data=llava_json", *words.split())


def test_budget_of_bad_records() -> None:
    cfg = config_of(["data=llava_json", *FILL])
    assert [cfg.data.budget(n) for n in (999, 1000, 665_298)] == [0, 1, 665]
    assert config_of(["data=llava_json", *FILL, "data.max_bad_records=20"]).data.budget(10) == 20
