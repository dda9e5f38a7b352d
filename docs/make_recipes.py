"""Writes docs/recipes.md: `python docs/make_recipes.py`. Every value of the recipes beside the original's script.

The scripts are those that the golden configurations record (tests/golden/open/configs), read through the tables of
`llava_fsdp.migrate`; the composed configurations are compared key by key, and a difference must be explained here.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from pages import table

from llava_fsdp.config import config_dir
from llava_fsdp.migrate.command import assignments
from llava_fsdp.migrate.flags.llava_flags import FLAGS
from llava_fsdp.migrate.reading.settings_files import flat, read_json
from llava_fsdp.migrate.source.launch_command import TrainingCommand
from llava_fsdp.migrate.source.source_run import SourceRun
from llava_fsdp.migrate.to_keys.keys import RuleContext, outcome, written
from llava_fsdp.migrate.to_keys.overrides import decide

DOCS = Path(__file__).parent
GOLDEN = DOCS.parent / "tests" / "golden" / "open"
STAGES = ("pretrain", "finetune", "finetune_lora", "finetune_task", "finetune_task_lora")
MODELS = ("llava_v1_5_7b", "llava_v1_5_13b")
GPUS = 8
SIZE = "the script is for 13B; LLaVA's docs/MODEL_ZOO.md gives 7B the same schedule"
# Why a recipe has another value than the script: by key, for every stage and model that differs.
EXPLAINED = {
    "data.path": "set it to your data",
    "data.images": "set it to your data",
    "output_dir": "`outputs/STAGE`; `stage=finetune` finds the projector of `stage=pretrain` beside it",
    "model.projector": "`auto` is the projector of the `stage=pretrain` run beside `output_dir`",
    "activation_checkpointing.mode": "`auto` recomputes least of what fits into memory; weights stay the same",
    "checkpoint.every": "the script's number is beyond its last step, so it saves only at the end",
    "track.wandb": "off by default: it needs a package and an account ([report](report.md)); `migrate` keeps it",
    "model.name": SIZE,
    "model.language": SIZE,
    "model.checkpoint": SIZE,
}
# Values of the script that a configuration key cannot hold, or that mean something else here.
ALSO = [
    "`--save_total_limit 1` is `checkpoint.keep=2`: the newest may be the one that a crash interrupted.",
    "Gradients are accumulated and reduced in fp32 and divided by the label tokens of the step; the original does so "
    "in bf16 and takes the mean of the micro-batches' means. `compat=llava_v1_5` does the same as the original.",
    "Norms compute in fp32; the original casts them to bf16 with the rest of the model, and so does "
    "`compat=llava_v1_5`.",
    "The projector of `stage=pretrain` is initialized from `seed`; the original initializes it before it sets "
    "the seed.",
]


def original(stage: str, golden: Path) -> SourceRun:
    """The script of a stage, started on the 8 GPUs that it was made for."""
    record = json.loads((golden / "configs" / f"v1_5_{stage}.json").read_text())
    flags = record["explicit_cli"]
    launch = TrainingCommand("deepspeed", {"num_gpus": str(GPUS)}, record["entry_point"], [], 1, None)
    zero = read_json(golden / "configs" / Path(flags["deepspeed"]).name)
    return SourceRun(record["script"], launch, FLAGS, flags, deepspeed=zero)


def composed(overrides: list[str]) -> dict[str, object]:
    """Every key of a configuration, dotted."""
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        node = compose("train", overrides)
    assert isinstance(node, DictConfig)
    whole = OmegaConf.to_container(node, resolve=True)
    assert isinstance(whole, dict)
    return flat(whole)


def theirs(stage: str, golden: Path) -> dict[str, object]:
    """The configuration that the script alone makes, whatever the recipe says."""
    decided = decide(original(stage, golden))
    return composed(assignments(decided))


def ours(stage: str, model: str) -> dict[str, object]:
    return composed([f"stage={stage}", f"model={model}", "data=llava_json"])


def difference(stage: str, model: str, golden: Path) -> dict[str, tuple[object, object]]:
    """Keys whose values differ: the script's, the recipe's."""
    left, right = theirs(stage, golden), ours(stage, model)
    assert left.keys() == right.keys()
    return {key: (left[key], right[key]) for key in left if left[key] != right[key]}


def sources(stage: str, golden: Path) -> dict[str, list[str]]:
    """Which flags said a key."""
    run = original(stage, golden)
    context = RuleContext(run, decide(run))
    found: dict[str, list[str]] = {}
    for name, flag in FLAGS.items():
        mentioned: set[str] = set()
        outcome(flag.rule, replace(context, key=name, mentioned=mentioned), run.trainer_value(name))
        given = run.flags.get(name)
        text = f"`--{name} {given}`" if name in run.flags else f"no `--{name}`: {written(flag.default)}"
        for key in mentioned & context.decided.keys():
            found.setdefault(key, []).append(text)
    name = run.deepspeed.name if run.deepspeed else ""
    found["sharding"] = [f"`zero_optimization.stage` {run.ds('zero_optimization.stage')} in `{name}`"]
    found["precision"] = [f"`--bf16 {run.flags['bf16']}`"]
    found["optim.clip"] = [f"no `gradient_clipping` in `{name}`; `max_grad_norm` is not used"]
    found["global_batch_size"] = [
        f"`--per_device_train_batch_size {run.trainer_value('per_device_train_batch_size')}` x "
        f"`--gradient_accumulation_steps {run.trainer_value('gradient_accumulation_steps')}` x {GPUS} GPUs"
    ]
    return found


def page(golden: Path = GOLDEN) -> str:
    """The whole document.

    Raises:
        SystemExit: a recipe differs from its script and nothing here says why.
    """
    parts = [
        "# Recipes",
        "The values of the stages of `model=llava_v1_5_7b` and `model=llava_v1_5_13b`, beside the original's scripts. "
        "To see all values of a training:",
        "```bash\nllava-fsdp train stage=finetune model=llava_v1_5_7b --cfg job\n```",
        "The scripts are `scripts/v1_5/STAGE.sh` of haotian-liu/LLaVA at c121f04, and the GPUs are 8. `finetune_qlora` "
        "has no script of version 1.5: it is `finetune_lora` over a base in 4 bits. This page is written by "
        "`python docs/make_recipes.py` from `conf/`, and a test compares it.",
        *values(golden),
        "## Where a recipe differs from its script",
        differences(golden),
        "## Differences that no key shows",
        "\n".join(f"- {line}" for line in ALSO),
    ]
    return "\n\n".join(parts) + "\n"


def values(golden: Path) -> list[str]:
    """The tables of values: those of all stages alike, and those that differ between stages."""
    decided = {stage: decide(original(stage, golden)) for stage in STAGES}
    origins = {stage: sources(stage, golden) for stage in STAGES}
    left_out = {"stage", *EXPLAINED, *(key.rpartition(".")[0] for key in EXPLAINED)}
    same, others = [], []
    for key in sorted({key for found in decided.values() for key in found} - left_out):
        cells = [f"`{written(found[key])}`" if key in found else "" for found in decided.values()]
        told = dict.fromkeys(
            "; ".join(own.get(key, [])) for own, cell in zip(origins.values(), cells, strict=True) if cell
        )
        if len(set(cells)) == 1:
            same.append([f"`{key}`", cells[0], "; ".join(told)])
        else:
            others.append([f"`{key}`", *cells, "; ".join(told)])
    return [
        "## Values of every stage",
        table(("key", "value", "in the original"), same),
        "## Values that differ between stages",
        table(("key", *(f"`{stage}`" for stage in STAGES), "in the original"), others),
    ]


def differences(golden: Path) -> str:
    """The table of keys whose recipe has another value than the script; values are in the order of the stages."""
    scripts: dict[str, dict[str, None]] = {}
    recipes: dict[str, dict[str, None]] = {}
    places: dict[str, list[tuple[str, str]]] = {}
    for stage in STAGES:
        for model in MODELS:
            found = difference(stage, model, golden)
            missing = sorted(found.keys() - EXPLAINED.keys())
            if missing:
                raise SystemExit(
                    f"stage={stage} model={model}: no reason is given why {missing} differ from the script"
                )
            for key, (script, recipe) in found.items():
                scripts.setdefault(key, {})[f"`{written(script)}`"] = None
                recipes.setdefault(key, {})[f"`{written(recipe)}`"] = None
                places.setdefault(key, []).append((stage, model))
    rows = [
        [f"`{key}`", where(places[key]), ", ".join(scripts[key]), ", ".join(recipes[key]), EXPLAINED[key]]
        for key in sorted(places)
    ]
    return table(("key", "where", "script", "recipe", "why"), rows)


def where(places: list[tuple[str, str]]) -> str:
    """The stages and models of a row, in words."""
    stages = list(dict.fromkeys(stage for stage, _ in places))
    models = list(dict.fromkeys(model for _, model in places))
    told = "all stages" if len(stages) == len(STAGES) else ", ".join(f"`{stage}`" for stage in stages)
    return told if len(models) == len(MODELS) else f"{told} of {', '.join(f'`{model}`' for model in models)}"


if __name__ == "__main__":
    (DOCS / "recipes.md").write_text(page())
    sys.stdout.write(f"{DOCS / 'recipes.md'}\n")
