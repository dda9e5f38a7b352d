"""Read the trainings of ms-swift, LLaMA-Factory and TRL: a command, the file of its flags, and the files that they
name."""

from dataclasses import replace
from pathlib import Path

from llava_fsdp.migrate.flags.trainer_tables import TABLES
from llava_fsdp.migrate.reading.command_flags import read_flags
from llava_fsdp.migrate.reading.settings_files import Files, choose, read_json, read_yaml
from llava_fsdp.migrate.source.launch_command import TrainingCommand
from llava_fsdp.migrate.source.source_run import Settings, SourceRun
from llava_fsdp.migrate.source.trainer_records import DATASET_INFO
from llava_fsdp.migrate.source.trainers import (
    ACCELERATE_FLAGS,
    ENTRIES,
    LAUNCH_VARIABLES,
    PROGRAM_VARIABLES,
    SWIFT_ZERO,
    TRL_ACCELERATE,
    Trainer,
    has_config,
    trainer_of_config,
)
from llava_fsdp.runtime.errors import ConfigError


def launch_of_config(path: Path, trainer: Trainer) -> TrainingCommand:
    """Return a command that starts `trainer` with a YAML file of its flags, for a file that no given script uses. The
    command has the launcher `yaml`, because the real launcher is not known."""
    words = next(words for words, entry in ENTRIES.items() if entry is trainer)
    arguments = ["--config", str(path)] if trainer is Trainer.trl else [str(path)]
    return TrainingCommand("yaml", {}, " ".join(words), arguments, 1, None, trainer=trainer)


def read_trainer_run(
    name: str, script: Path, launch: TrainingCommand, jsons: Files, yamls: Files, gpus: int | None
) -> tuple[SourceRun, set[Path]]:
    """Return the training that a command of ms-swift, LLaMA-Factory or TRL starts, and the paths of the JSON and YAML
    files that it uses. `name` is the training's name in the output. `jsons` and `yamls` are the files that the user
    named; `gpus` is the user's number of GPUs. Raise ConfigError if neither the user nor a file gives this number."""
    missing: list[str] = []
    used: list[Path | None] = []
    configs = {path: found for path, found in yamls.items() if trainer_of_config(found.values) is launch.trainer}
    launch, config = with_config(launch, script, configs | jsons, missing)
    assert launch.trainer
    table = TABLES[launch.trainer]
    flags, notes = read_flags(launch, table)
    if launch.script == "trl sft":  # TRL passes some of its flags on to `accelerate launch`
        launch = pass_on(launch, flags)
    run = SourceRun(name, launch, table, flags, gpus, notes=(*launch.notes, *notes))
    # LLaMA-Factory looks its datasets up in dataset_info.json
    infos = {path: found for path, found in jsons.items() if path.name == DATASET_INFO}
    if launch.trainer is Trainer.factory and run.words("dataset"):
        info = choose(str(Path(str(run.trainer_value("dataset_dir"))) / DATASET_INFO), script, infos, [])
        run = replace(run, datasets=read_json(info) if info else None)
        used.append(info)
    if launch.launcher == "accelerate":
        others = {path: found for path, found in yamls.items() if path not in configs}
        run, file = with_accelerate(run, script, others, missing)
        used.append(file)
    # the remaining JSON files may be DeepSpeed's
    zeros = {path: found for path, found in jsons.items() if path not in infos and path != config}
    run, file = with_deepspeed(run, script, zeros, missing)
    if run.gpus is None:
        raise ConfigError(f"{script}, line {launch.line}: the number of GPUs is not known; give gpus=N")
    return replace(run, missing=tuple(missing)), {path for path in (*used, config, file) if path}


def pass_on(launch: TrainingCommand, flags: dict[str, object]) -> TrainingCommand:
    """Return a `trl sft` command in which the flags that TRL passes on to `accelerate launch` are flags of the
    launcher; they are removed from `flags`, those of the command. TRL's --accelerate_config is Accelerate's
    --config_file."""
    passed = {key: flags.pop(key) for key in list(flags) if key in ACCELERATE_FLAGS}
    if (file := flags.pop("accelerate_config", None)) is not None:
        passed["config_file"] = file
    words: dict[str, str | bool] = {key: value if value is True else str(value) for key, value in passed.items()}
    launcher = "accelerate" if words else launch.launcher
    return replace(launch, launcher=launcher, flags=launch.flags | words)


def with_accelerate(run: SourceRun, script: Path, given: Files, missing: list[str]) -> tuple[SourceRun, Path | None]:
    """Return a run with the settings of its Accelerate file, and the path of that file: None for one of TRL's own, or
    if it is not found. The name of a file that is not found is added to `missing`. `given`: files that the user named.
    """
    named = run.launch.flags.get("config_file")
    if run.launch.script == "trl sft" and named in TRL_ACCELERATE:
        return replace(run, accelerate=Settings(f"TRL's {named}.yaml", TRL_ACCELERATE[str(named)])), None
    file = choose(named, script, given, missing)
    return replace(run, accelerate=read_yaml(file) if file else None), file


def with_deepspeed(run: SourceRun, script: Path, given: Files, missing: list[str]) -> tuple[SourceRun, Path | None]:
    """Return a run with the settings of its DeepSpeed file, and that file's path: None without such a file, for one of
    ms-swift's own, or if it is not found (then added to `missing`). `given`: files that the user named."""
    inner = run.accelerate.values.get("deepspeed_config.deepspeed_config_file") if run.accelerate else None
    named = run.flags.get("deepspeed") or run.launch.flags.get("deepspeed_config_file") or inner
    if not named:
        return run, None
    if run.trainer is Trainer.swift and named in SWIFT_ZERO:
        return replace(run, deepspeed=Settings(f"ms-swift's {named}.json", SWIFT_ZERO[str(named)])), None
    file = choose(named, script, given, missing)
    return replace(run, deepspeed=read_json(file) if file else None), file


def with_config(
    launch: TrainingCommand, script: Path, given: Files, missing: list[str]
) -> tuple[TrainingCommand, Path | None]:
    """Return a trainer's command in which the YAML or JSON file of its flags is replaced by these flags, and the path
    of that file; None without one. The flags of the file come first, so that those of the command win. Environment
    variables in the file are read like those that a script sets. If the file is not found, its name is added to
    `missing`. `given`: files that the user named."""
    rest = list(launch.arguments)
    named = None
    if launch.trainer is Trainer.trl:
        if "--config" in rest[:-1]:
            place = rest.index("--config")
            named, rest = rest[place + 1], rest[:place] + rest[place + 2 :]
    elif has_config(rest):
        named, *rest = rest
        if launch.trainer is Trainer.factory:  # behind the file it takes KEY=VALUE
            rest = [part for word in rest for part in (f"--{word}".split("=", 1) if "=" in word else [word])]
    if named is None:
        return launch, None
    # with `yaml` the user named the file itself, and there is no launch command
    path = Path(named) if launch.launcher == "yaml" else choose(named, script, given, missing)
    if path is None:
        return replace(launch, arguments=rest), None
    words, variables = [], {}
    for key, value in (read_json(path) if path.suffix == ".json" else read_yaml(path)).values.items():
        prefix, _, variable = key.partition(".")
        if prefix in ("ENV", "env") and variable:
            variables[variable] = str(value)
        elif value is not None and value != []:
            words += [f"--{key}", *map(str, value if isinstance(value, list) else [value])]
    # LAUNCH_VARIABLES stand for torchrun's flags; PROGRAM_VARIABLES, such as MAX_PIXELS, are settings of the program
    flags = launch.flags | {key.lower(): value for key, value in variables.items() if key in LAUNCH_VARIABLES}
    flags |= {key: value for key, value in variables.items() if key in PROGRAM_VARIABLES}
    devices = launch.devices or variables.get("CUDA_VISIBLE_DEVICES")
    return replace(launch, arguments=[*words, *rest], flags=flags, devices=devices), path
