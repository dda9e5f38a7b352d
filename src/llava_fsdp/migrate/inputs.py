"""Read the files of trainings that are to be migrated: find the training commands in the shell scripts, and the
DeepSpeed JSON and Accelerate YAML files that each command uses.

`variables` are values of shell variables that a script reads and does not set.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import yaml

from llava_fsdp.migrate.flags.llava_flags import FLAGS, canonical
from llava_fsdp.migrate.flags.next_flags import NEXT_FLAGS, is_next
from llava_fsdp.migrate.flags.trainer_flags import OTHER_FLAGS
from llava_fsdp.migrate.launch_command import TrainingCommand, find_launch
from llava_fsdp.migrate.shell import commands
from llava_fsdp.migrate.source_run import Flag, Settings, SourceRun
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.runtime.files.safe_load import refuse_yaml_bombs

LARGEST = 1 << 20
"""Maximum size in bytes of an input file."""
LISTS = frozenset({"report_to", "label_names", "lora_target_modules"})
"""Flags that take several values."""
Files = dict[Path, Settings]
"""Settings by the path of the file."""


def read_runs(names: Iterable[str], variables: Mapping[str, str], gpus: int | None = None) -> list[SourceRun]:
    """Read training scripts, and the DeepSpeed JSON and Accelerate YAML files that they use. Return one training for
    each training command in the scripts.

    Args:
        names: paths of all these files.
        variables: values of shell variables that the scripts read and do not set.
        gpus: number of GPUs; None: the launcher's flags or the YAML file give it.

    Raises:
        ConfigError: a file cannot be read, is neither a script nor settings in JSON or YAML, or is used by no training
            command.
    """
    scripts: list[Path] = []
    jsons: Files = {}
    yamls: Files = {}
    for path in map(checked, names):
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
            run, files = read_run(name, script, launch, jsons, yamls, gpus)
            runs.append(run)
            used |= files
    for path in (*jsons, *yamls):
        if path not in used:
            raise ConfigError(
                f"{path} is not used by a training command; give the script that starts the training as another PATH "
                "(docs/from_deepspeed.md and docs/from_accelerate.md have every key)"
            )
    return runs


def checked(name: str) -> Path:
    """Return the path of an input file. Raise ConfigError if the file cannot be a script or a file of settings."""
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"{name} is {'a folder' if path.is_dir() else 'not found'}; give a script, a JSON or a YAML")
    if path.stat().st_size > LARGEST:
        raise ConfigError(f"{name} is {path.stat().st_size / 2**20:.1f} MiB large; files of settings are smaller")
    if path.suffix == ".py":
        raise ConfigError(f"{name} is a Python program; give the script or the command that starts it")
    return path


def launches(script: Path, variables: Mapping[str, str]) -> list[TrainingCommand]:
    """Return the training commands in a shell script. `variables`: values of shell variables that the script does not
    set. Raise ConfigError if the script has no such command, or if bash would have to run to understand one of them."""
    seen = commands(read_text(script), variables, str(script))
    found = [(command, launch) for command in seen if (launch := find_launch(command))]
    if not found:
        others = sorted({word for command in seen for word in command.words[:3] if word.endswith(".sh")})
        raise ConfigError(
            f"{script} has no training command: none that starts with deepspeed, torchrun, accelerate launch, or "
            "python with a training program" + (f"; it starts {', '.join(others)}: give that" if others else "")
        )
    for command, _ in found:
        if command.problems:
            raise ConfigError(
                f"{script}, line {command.line}: {'; '.join(command.problems)}; or give the plain training command"
            )
    # `cd` changes what relative paths mean in all commands of the script
    moves = [f"the script starts from another folder: {' '.join(c.words)}" for c in seen if c.words[0] == "cd"]
    return [replace(launch, notes=(*launch.notes, *moves)) for _, launch in found]


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file, without the byte order mark that Windows programs write. Raise ConfigError if it
    cannot be read."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def read_run(
    name: str, script: Path, launch: TrainingCommand, jsons: Files, yamls: Files, gpus: int | None
) -> tuple[SourceRun, set[Path]]:
    """Return the training that a script's command starts, and the paths of the JSON and YAML files that it uses.
    `jsons` and `yamls` are those given on the command line; `gpus` is the user's number of GPUs. Raise ConfigError if
    neither the user nor a file gives this number."""
    table = FLAGS if launch.is_original else OTHER_FLAGS
    if launch.is_original and is_next(read_flags(launch, NEXT_FLAGS)[0]):
        table = NEXT_FLAGS
    flags, notes = read_flags(launch, table)
    run = SourceRun(name, launch, table, flags, gpus, notes=(*launch.notes, *notes))
    missing: list[str] = []
    settings = zero = listed = None
    lists = {path: found for path, found in yamls.items() if "datasets" in found.values}
    yamls = {path: found for path, found in yamls.items() if path not in lists}
    records = run.trainer_value("data_path") if run.given("data_path") else None
    if isinstance(records, str) and records.endswith((".yaml", ".yml")):
        listed = choose(records, script, lists, [])
        run = replace(run, datasets=read_yaml(listed) if listed else None)
    if launch.launcher == "accelerate":
        settings = choose(launch.flags.get("config_file"), script, yamls, missing)
        run = replace(run, accelerate=read_yaml(settings) if settings else None)
    inner = run.accelerate.values.get("deepspeed_config.deepspeed_config_file") if run.accelerate else None
    named = flags.get("deepspeed") or launch.flags.get("deepspeed_config_file") or inner
    if named or run.distributed_type == "DEEPSPEED":
        zero = choose(named, script, jsons, missing)
        run = replace(run, deepspeed=read_json(zero) if zero else None)
    if run.gpus is None:
        raise ConfigError(f"{script}, line {launch.line}: the number of GPUs is not known; give gpus=N")
    return replace(run, missing=tuple(missing)), {path for path in (settings, zero, listed) if path}


def choose(named: object, script: Path, given: Files, missing: list[str]) -> Path | None:
    """Return the path of the settings file that a training script names (`named`), such as its DeepSpeed JSON.

    It is the file of `given` (the command line) with the same file name, or else the only file given there. If neither
    exists, it is the file at the path `named`, relative to the current folder, the script's folder or one of the next
    two folders above it. If that is not found either, `named` is added to `missing`. If the script names no file, it is
    the only file of `given`; None if there is not exactly one.
    """
    if not isinstance(named, str) or not named:
        return next(iter(given)) if len(given) == 1 else None
    wanted = Path(named)
    same = [path for path in given if path.name == wanted.name]
    if same or len(given) == 1:
        return [*same, *given][0]
    folder = script.resolve().parent
    for base in (Path(), folder, folder.parent, folder.parent.parent):
        if (base / wanted).is_file():
            return base / wanted
    missing.append(named)
    return None


def read_flags(launch: TrainingCommand, table: Mapping[str, Flag]) -> tuple[dict[str, object], list[str]]:
    """Return the flags of a training program: value by name, separated as argparse would do it, but not converted; and
    a remark about each flag that is given twice. `table` has the flags that the program accepts."""
    flags: dict[str, object] = {}
    notes = []
    current: str | None = None
    for word in launch.arguments:
        if not word.startswith("--") or len(word) == 2:
            if current is None or (current in table and current not in LISTS and flags[current] is not True):
                flags[f"({word})"] = word  # belongs to no flag; reported as an unknown key
            elif flags[current] is True:
                flags[current] = word
            else:
                before = flags[current]
                flags[current] = [*before, word] if isinstance(before, list) else [str(before), word]
            continue
        given, equals, value = word[2:].partition("=")
        current = canonical(given, table) or given
        if current in flags:
            notes.append(f"--{current} is given twice; the last one counts")
        flags[current] = value if equals else True
        if given.replace("-", "_") == f"no_{current}":
            flags[current] = "False"
    return flags, notes


def read_json(path: Path) -> Settings:
    """Return the settings of a DeepSpeed file. Raise ConfigError if it is not a JSON object, or contains a key
    twice."""

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found: dict[str, object] = {}
        for name, value in pairs:
            if name in found:
                raise ConfigError(f"{path} has {name} twice")
            found[name] = value
        return found

    try:
        content = json.loads(read_text(path), object_pairs_hook=unique)
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply for a file of settings") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}, not an object of settings; is it a dataset?")
    return settings_of(path, content)


def read_yaml(path: Path) -> Settings:
    """Return the settings of a file that `accelerate config` wrote, or LLaVA-NeXT's list of files of records. Raise
    ConfigError if it is not a YAML mapping of names to values."""
    refuse_yaml_bombs(path)
    try:
        content = yaml.safe_load(read_text(path))
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no settings; Accelerate's file is a mapping of names to values")
    # the YAML parser reads an unquoted no as False
    words = {"mixed_precision": "no", "distributed_type": "NO"}
    return settings_of(path, {k: words[k] if k in words and v is False else v for k, v in content.items()})


def settings_of(path: Path, content: Mapping) -> Settings:
    """Return the content of a JSON or YAML file as settings. Raise ConfigError if `flat` refuses it, or if it cannot be
    written as JSON: YAML anchors can make a value that contains itself."""
    try:
        values = flat(content)
        json.dumps(list(values.values()), default=str, skipkeys=True)  # only to raise these errors: no result is needed
    except ConfigError as error:
        raise ConfigError(f"{path} {error}") from None
    except (RecursionError, ValueError):
        raise ConfigError(f"{path} is nested too deeply for a file of settings, or holds itself") from None
    return Settings(path.name, values)


def flat(node: Mapping, prefix: str = "") -> dict[str, object]:
    """Return nested mappings as one dict, whose keys are the nested names joined with dots. An empty mapping is kept as
    a value. Raise ConfigError if two of these keys would be equal."""
    found: dict[str, object] = {}
    for key, value in node.items():
        inner = flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
        if both := inner.keys() & found.keys():
            raise ConfigError(f"has {min(both)} twice, once with a dot in a name")
        found |= inner
    return found
