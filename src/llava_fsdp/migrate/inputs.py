"""Files to runs: which script names which JSON, where that lies, and what was not found."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from llava_fsdp.migrate.bash_script import Command, commands, is_open, open_mark, open_names, shown
from llava_fsdp.migrate.launch_command import Launch, find_launch
from llava_fsdp.migrate.llava_flags import FLAGS, canonical
from llava_fsdp.migrate.source_run import Block, Options, Run
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.runtime.safe_load import refuse_yaml_bombs

LARGEST = 1 << 20  # bytes; a file of settings is smaller
LISTS = frozenset({"report_to", "label_names"})  # flags of the original that take several words


@dataclass(frozen=True)
class Given:
    """The files that were named on the command line."""

    scripts: list[Path]
    jsons: list[Path]
    yamls: list[Path]


def sort_paths(paths: Iterable[str]) -> Given:
    """By what their names say they are.

    Raises:
        ConfigError: a path is no file, or of a kind that holds no settings.
    """
    given = Given([], [], [])
    for name in paths:
        path = Path(name)
        if not path.is_file():
            raise ConfigError(
                f"{name} is {'a folder' if path.is_dir() else 'not here'}; give a script, a JSON or a YAML"
            )
        if path.stat().st_size > LARGEST:
            raise ConfigError(f"{name} is {path.stat().st_size / 2**20:.1f} MiB large; files of settings are smaller")
        if path.suffix == ".py":
            raise ConfigError(f"{name} is a Python program; give the script or the command that starts it")
        kinds = {".json": given.jsons, ".yaml": given.yamls, ".yml": given.yamls}
        kinds.get(path.suffix.lower(), given.scripts).append(path)
    return given


def read_runs(given: Given, variables: Mapping[str, str], options: Options) -> list[Run]:
    """One run for every training command of the scripts, and one for each file that no script uses."""
    jsons = {path: read_json(path) for path in given.jsons}
    yamls = {path: read_yaml(path) for path in given.yamls}
    runs, used = [], set()
    for script in given.scripts:
        found = launches(script, variables)
        for launch in found:
            name = script.name if len(found) == 1 else f"{script.name}:{launch.line}"
            run, files = read_run(name, script, launch, jsons, yamls, options)
            runs.append(run)
            used |= files
    for path, block in yamls.items():
        if path not in used:
            run = Run(str(path.name), FLAGS, options, accelerate=block)
            run, files = with_deepspeed(run, block.values.get("deepspeed_config.deepspeed_config_file"), path, jsons)
            runs.append(run)
            used |= files
    runs += [Run(str(p.name), FLAGS, options, deepspeed=block) for p, block in jsons.items() if p not in used]
    return runs


def launches(script: Path, variables: Mapping[str, str]) -> list[Launch]:
    seen, notes = all_commands(read_text(script), variables, str(script))
    found = [launch for command in seen if (launch := find_launch(command))]
    if not found:
        others = sorted({word for command in seen for word in command.words[:3] if word.endswith(".sh")})
        raise ConfigError(
            f"{script} has no training command: none that starts with deepspeed, torchrun, accelerate launch, or "
            "python with a script of training" + (f"; it starts {', '.join(others)}: give that" if others else "")
        )
    return [replace(launch, notes=(*launch.notes, *notes)) for launch in found]


def all_commands(text: str, variables: Mapping[str, str], where: str) -> tuple[list[Command], list[str]]:
    """Also those inside `bash -c '...'` and `eval`."""
    found = []
    outer, notes = commands(text, variables, where)
    for command in outer:
        inner = nested(command)
        if inner is None:
            found.append(command)
            continue
        more, also = all_commands(inner, command.variables, where)
        found += [replace(c, line=command.line, environment=command.environment | c.environment) for c in more]
        notes += also
    return found, notes


def nested(command: Command) -> str | None:
    """The text that a command gives to another shell."""
    words = command.words
    if words[0] == "eval":
        return shown(" ".join(words[1:]))
    for place, word in enumerate(words[:-1]):
        if re.fullmatch(r"-[a-z]*c", word) and {"bash", "sh"} & {Path(w).name for w in words[:place]}:
            return shown(words[place + 1])
    return None


def read_text(path: Path) -> str:
    """Without the mark that Windows puts before UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def read_run(
    name: str, script: Path, launch: Launch, jsons: Mapping[Path, Block], yamls: Mapping[Path, Block], options: Options
) -> tuple[Run, set[Path]]:
    flags, notes = read_flags(launch)
    run = Run(name, FLAGS, options, launch, flags, notes=(*launch.notes, *notes))
    used: set[Path] = set()
    if launch.launcher == "accelerate":
        named = launch.flags.get("config_file")
        path, note = choose(named, script, yamls)
        block = read_yaml(path) if path else None
        run = replace(run, accelerate=block, notes=(*run.notes, *note))
        used |= {path} if path else set()
    inner = run.accelerate.values.get("deepspeed_config.deepspeed_config_file") if run.accelerate else None
    named = flags.get("deepspeed") or launch.flags.get("deepspeed_config_file") or inner
    run, files = with_deepspeed(run, named, script, jsons)
    return run, used | files


def with_deepspeed(run: Run, named: object, beside: Path, jsons: Mapping[Path, Block]) -> tuple[Run, set[Path]]:
    if run.launch and not named and run.distributed_type != "DEEPSPEED":
        note = [f"the script has no --deepspeed: {path} is not of it" for path in jsons]
        return replace(run, notes=(*run.notes, *note)), set()
    path, note = choose(named, beside, jsons if named or run.launch else {})
    block = read_json(path) if path else None
    return replace(run, deepspeed=block, notes=(*run.notes, *note)), {path} if path else set()


def choose(named: object, beside: Path, given: Mapping[Path, Block]) -> tuple[Path | None, list[str]]:
    """The file that a script names: one that was given wins, else the one that lies where the script says.

    A relative name is looked for from here, from the script's folder, and from the two folders around that
    (LLaVA's scripts are started from the folder around theirs).
    """
    if not isinstance(named, str) or not named:
        return (next(iter(given)), []) if len(given) == 1 else (None, [])
    wanted = Path(shown(named))
    same = [path for path in given if path.name == wanted.name]
    if same:
        return same[0], []
    if len(given) == 1:
        only = next(iter(given))
        return only, [f"{only} was given, and stands for {shown(named)}"]
    folder = beside.resolve().parent
    for place in (Path(), folder, folder.parent, folder.parent.parent):
        if not is_open(named) and (place / wanted).is_file():
            return place / wanted, []
    return None, [f"{shown(named)} was not found: give it as another PATH"]


def read_flags(launch: Launch) -> tuple[dict[str, object], list[str]]:
    """`--flag value`, `--flag=value`, `--flag` alone and lists, as the original's parser reads them; the last wins."""
    flags: dict[str, object] = {}
    notes = []
    current: str | None = None
    for word in launch.arguments:
        is_flag = word.startswith("--") and len(word) > 2
        if not is_flag:
            if word in (open_mark("$@"), open_mark("$*")):
                notes.append(f"{shown(word)}: what the script is called with may add flags or change them")
            elif current is None or (current in FLAGS and current not in LISTS and flags[current] is not True):
                notes.append(f"{shown(word)} belongs to no flag")
                flags[f"({shown(word)})"] = shown(word)
            elif flags[current] is True:
                flags[current] = word
            else:
                before = flags[current]
                flags[current] = [*before, word] if isinstance(before, list) else [str(before), word]
            continue
        given, equals, value = word[2:].partition("=")
        current = canonical(given) or given
        if current != given.replace("-", "_") and not given.startswith("no_"):
            notes.append(f"--{given} is short for --{current}")
        if current in flags:
            notes.append(f"--{current} is given twice; the last one counts")
        flags[current] = value if equals else True
        if given.replace("-", "_") == f"no_{current}":
            flags[current] = "False"
    notes += [f"{left} is not set in the script" for left in sorted(unset(launch, flags))]
    return flags, notes


def unset(launch: Launch, flags: Mapping[str, object]) -> set[str]:
    found: set[str] = set()
    for value in [*flags.values(), *launch.flags.values()]:
        for word in value if isinstance(value, list) else [value]:
            found |= set(open_names(word))
    return found


def read_json(path: Path) -> Block:
    """A DeepSpeed configuration.

    Raises:
        ConfigError: the file is no JSON object, or has a key twice, which DeepSpeed refuses too.
    """

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found: dict[str, object] = {}
        for name, value in pairs:
            if name in found:
                raise ConfigError(f"{path} has {name} twice")
            found[name] = value
        return found

    def number(text: str) -> object:
        raise ValueError(f"{text} is no number of JSON")

    text = read_text(path)
    if not text.strip():
        raise ConfigError(f"{path} is empty")
    try:
        content = json.loads(text, object_pairs_hook=unique, parse_constant=number)
    except ValueError as error:
        hint = "; transformers takes no comments either" if re.search(r"(^|[\s{,])(//|#|/\*)", text) else ""
        raise ConfigError(f"{path} is not JSON: {error}{hint}") from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply for a file of settings") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}, not an object of settings; is it a dataset?")
    return block(path, content)


def read_yaml(path: Path) -> Block:
    """A file of `accelerate config`.

    Raises:
        ConfigError: it is no YAML, or no mapping of names.
    """
    refuse_yaml_bombs(path)
    try:
        content = yaml.safe_load(read_text(path))
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no settings; Accelerate's file is a mapping of names to values")
    # YAML takes a bare no for False
    words = {"mixed_precision": "no", "distributed_type": "NO"}
    return block(path, {k: words[k] if k in words and v is False else v for k, v in content.items()})


def block(path: Path, content: Mapping) -> Block:
    try:
        values = flat(content)
        json.dumps(list(values.values()), default=str, skipkeys=True)
    except ConfigError as error:
        raise ConfigError(f"{path} {error}") from None
    except (RecursionError, ValueError):
        raise ConfigError(f"{path} is nested too deeply for a file of settings, or holds itself") from None
    return Block(path.name, values)


def flat(node: Mapping, prefix: str = "") -> dict[str, object]:
    """Nested names joined with dots; an empty block is a value.

    Raises:
        ConfigError: a name with a dot in it is that of another key.
    """
    found: dict[str, object] = {}
    for key, value in node.items():
        inner = flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
        if both := inner.keys() & found.keys():
            raise ConfigError(f"has {min(both)} twice, once with a dot in a name")
        found |= inner
    return found
