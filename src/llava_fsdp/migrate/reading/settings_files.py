"""Read files of settings: DeepSpeed's JSON, Accelerate's YAML, and the files of flags and datasets of trainers."""

import json
from collections.abc import Mapping
from pathlib import Path

import yaml

from llava_fsdp.migrate.source.source_run import Settings
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.runtime.files.safe_load import refuse_yaml_bombs

LARGEST = 1 << 20
"""Maximum size in bytes of an input file."""
Files = dict[Path, Settings]
"""Settings by the path of the file."""


def input_file(name: str) -> Path:
    """Return the path of an input file. Raise ConfigError if the file cannot be a script or a file of settings."""
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"{name} is {'a folder' if path.is_dir() else 'not found'}; give a script, a JSON or a YAML")
    if path.stat().st_size > LARGEST:
        raise ConfigError(f"{name} is {path.stat().st_size / 2**20:.1f} MiB large; files of settings are smaller")
    if path.suffix == ".py":
        raise ConfigError(f"{name} is a Python program; give the script or the command that starts it")
    return path


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file, without the byte order mark of Windows. Raise ConfigError if it cannot be
    read."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def choose(name_in_script: object, script: Path, given: Files, missing: list[str]) -> Path | None:
    """Return the path of the settings file that a training script names (`name_in_script`), such as its DeepSpeed JSON.

    It is the file of `given` (the command line) with the same file name, or else the only file given there. If neither
    exists, it is the file at the path `name_in_script`, relative to the current folder, the script's folder or one of
    the next two folders above it. If that is not found either, `name_in_script` is added to `missing`. If the script
    names no file, it is the only file of `given`; None if there is not exactly one.
    """
    if not isinstance(name_in_script, str) or not name_in_script:
        return next(iter(given)) if len(given) == 1 else None
    wanted = Path(name_in_script)
    of_same_name = [path for path in given if path.name == wanted.name]
    if of_same_name or len(given) == 1:
        return [*of_same_name, *given][0]
    folder = script.resolve().parent
    for base in (Path(), folder, folder.parent, folder.parent.parent):
        if (base / wanted).is_file():
            return base / wanted
    missing.append(name_in_script)
    return None


def read_json(path: Path) -> Settings:
    """Return the settings of a DeepSpeed file. Raise ConfigError if it is not a JSON object, or has a key twice."""

    def refuse_repeated(pairs: list[tuple[str, object]]) -> dict[str, object]:
        """Return the pairs of one JSON object as a dict; raise ConfigError if a name occurs twice."""
        found: dict[str, object] = {}
        for name, value in pairs:
            if name in found:
                raise ConfigError(f"{path} has {name} twice")
            found[name] = value
        return found

    try:
        content = json.loads(read_text(path), object_pairs_hook=refuse_repeated)
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply for a file of settings") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}, not an object of settings; is it a dataset?")
    return settings_of(path, content)


def read_yaml(path: Path) -> Settings:
    """Return the settings of a YAML file: one that `accelerate config` wrote, a trainer's flags, or LLaVA-NeXT's list
    of files of records. Raise ConfigError if it is not a YAML mapping of names to values."""
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
    """Return the content of a JSON or YAML file as settings, whose keys are nested names joined with dots. Raise
    ConfigError if two of these keys are equal, or if the content cannot be written as JSON: YAML anchors can make a
    value that contains itself."""
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
