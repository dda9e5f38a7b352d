"""Read the files of trainings that are to be migrated: find the training commands in the shell scripts, and the
JSON and YAML files that each command uses. A YAML file of a trainer's flags is a training by itself.

`variables` are values of shell variables that a script reads and does not set.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from llava_fsdp.migrate.flags.llava_flags import FLAGS
from llava_fsdp.migrate.flags.next_flags import NEXT_FLAGS, is_next
from llava_fsdp.migrate.flags.trainer_flags import OTHER_FLAGS
from llava_fsdp.migrate.reading.command_flags import read_flags
from llava_fsdp.migrate.reading.settings_files import Files, choose, input_file, read_json, read_text, read_yaml
from llava_fsdp.migrate.reading.trainer_inputs import launch_of_config, read_trainer_run
from llava_fsdp.migrate.source.launch_command import TrainingCommand, find_launch
from llava_fsdp.migrate.source.shell import commands
from llava_fsdp.migrate.source.source_run import SourceRun
from llava_fsdp.migrate.source.trainer_records import DATASET_INFO
from llava_fsdp.migrate.source.trainers import trainer_of_config
from llava_fsdp.runtime.errors import ConfigError


def read_runs(names: Iterable[str], variables: Mapping[str, str], gpus: int | None = None) -> list[SourceRun]:
    """Read training scripts, and the JSON and YAML files that they use. Return one training for each training command
    in the scripts, and for each YAML file of a trainer's flags that none of them uses.

    Args:
        names: paths of all these files.
        variables: values of shell variables that the scripts read and do not set.
        gpus: number of GPUs; None: the launcher's flags or the YAML file give it.

    Raises:
        ConfigError: a file cannot be read, is no script or settings in JSON or YAML, or no training command uses it.
    """
    scripts: list[Path] = []
    jsons: Files = {}
    yamls: Files = {}
    for path in map(input_file, names):
        kind = path.suffix.lower()
        if kind == ".json":
            jsons[path] = read_json(path)
        elif kind in (".yaml", ".yml"):
            yamls[path] = read_yaml(path)
        else:
            scripts.append(path)
    runs = []
    used: set[Path] = set()
    for script in scripts:
        found = launches(script, variables)
        for launch in found:
            name = script.name if len(found) == 1 else f"{script.name}:{launch.line}"
            run, files = read_training_command(name, script, launch, jsons, yamls, gpus)
            runs.append(run)
            used |= files
    for path in (*jsons, *yamls):
        if path in used:
            continue
        trainer = trainer_of_config(yamls[path].values) if path in yamls else None
        if trainer is None and path.name != DATASET_INFO:  # LLaMA-Factory's list of datasets may be left unused
            raise ConfigError(
                f"{path} is not used by a training command; give the script that starts the training as another PATH "
                "(docs/from_deepspeed.md and docs/from_accelerate.md have every key)"
            )
        if trainer is not None:
            runs.append(read_training_command(path.name, path, launch_of_config(path, trainer), jsons, yamls, gpus)[0])
    return runs


def launches(script: Path, variables: Mapping[str, str]) -> list[TrainingCommand]:
    """Return the training commands in a shell script. `variables`: values of shell variables that the script does not
    set. Raise ConfigError if the script has no such command, or if bash would have to run to understand one of them."""
    all_commands = commands(read_text(script), variables, str(script))
    found = [(command, launch) for command in all_commands if (launch := find_launch(command))]
    if not found:
        # such as `srun bash train.sh`: the program is among the first three words, later ones are arguments
        others = sorted({word for command in all_commands for word in command.words[:3] if word.endswith(".sh")})
        raise ConfigError(
            f"{script} has no training command: none that starts with deepspeed, torchrun, accelerate launch, swift "
            "sft, llamafactory-cli train, trl sft, or python with a training program"
            + (f"; it starts {', '.join(others)}: give that" if others else "")
        )
    for command, _ in found:
        if command.problems:
            raise ConfigError(
                f"{script}, line {command.line}: {'; '.join(command.problems)}; or give the plain training command"
            )
    # `cd` changes what relative paths mean in all commands of the script
    moves = [f"the script starts from another folder: {' '.join(c.words)}" for c in all_commands if c.words[0] == "cd"]
    return [replace(launch, notes=(*launch.notes, *moves)) for _, launch in found]


def read_training_command(
    name: str, script: Path, launch: TrainingCommand, jsons: Files, yamls: Files, gpus: int | None
) -> tuple[SourceRun, set[Path]]:
    """Return the training that a script's command starts, and the paths of the JSON and YAML files that it uses. `name`
    is the training's name in the output. `jsons` and `yamls` are the files that the user named; `gpus` is the user's
    number of GPUs. Raise ConfigError if neither the user nor a file gives this number."""
    if launch.trainer:
        return read_trainer_run(name, script, launch, jsons, yamls, gpus)
    # the flags of LLaVA's own program, of LLaVA-NeXT's (told from LLaVA's by the flags that are given), or of others
    table = FLAGS if launch.is_original else OTHER_FLAGS
    if launch.is_original and is_next(read_flags(launch, NEXT_FLAGS)[0]):
        table = NEXT_FLAGS
    flags, notes = read_flags(launch, table)
    run = SourceRun(name, launch, table, flags, gpus, notes=(*launch.notes, *notes))
    missing: list[str] = []  # files that the script names and `choose` does not find
    accelerate_file = deepspeed_file = datasets_file = None
    # files with the flags of a trainer such as ms-swift are for other commands
    yamls = {path: found for path, found in yamls.items() if trainer_of_config(found.values) is None}
    dataset_yamls = {path: found for path, found in yamls.items() if "datasets" in found.values}
    yamls = {path: found for path, found in yamls.items() if path not in dataset_yamls}
    records = run.trainer_value("data_path") if run.given("data_path") else None
    if isinstance(records, str) and records.endswith((".yaml", ".yml")):
        datasets_file = choose(records, script, dataset_yamls, [])
        run = replace(run, datasets=read_yaml(datasets_file) if datasets_file else None)
    if launch.launcher == "accelerate":
        accelerate_file = choose(launch.flags.get("config_file"), script, yamls, missing)
        run = replace(run, accelerate=read_yaml(accelerate_file) if accelerate_file else None)
    name_in_accelerate = run.accelerate.values.get("deepspeed_config.deepspeed_config_file") if run.accelerate else None
    deepspeed_name = flags.get("deepspeed") or launch.flags.get("deepspeed_config_file") or name_in_accelerate
    if deepspeed_name or run.distributed_type == "DEEPSPEED":
        deepspeed_file = choose(deepspeed_name, script, jsons, missing)
        run = replace(run, deepspeed=read_json(deepspeed_file) if deepspeed_file else None)
    if run.gpus is None:
        raise ConfigError(f"{script}, line {launch.line}: the number of GPUs is not known; give gpus=N")
    return replace(run, missing=tuple(missing)), {
        path for path in (accelerate_file, deepspeed_file, datasets_file) if path
    }
