"""Translate a training of another system (LLaVA, ms-swift, DeepSpeed, ...) into one llava_fsdp command. Hydra overrides
(`key=value`) that only repeat default values are left out of the command."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from llava_fsdp.config import Config, config_dir, load
from llava_fsdp.config.command_line.cli import taken_literally, with_own_model
from llava_fsdp.migrate.flags.trainer_flags import OTHER_PROGRAM, lacking
from llava_fsdp.migrate.flags.trainer_tables import DIFFERS
from llava_fsdp.migrate.source.source_run import SourceRun
from llava_fsdp.migrate.table import rows_of
from llava_fsdp.migrate.to_keys.keys import REFUSED, RuleContext, TableRow, Verdict, written
from llava_fsdp.migrate.to_keys.overrides import Overrides, decide
from llava_fsdp.runtime.errors import ConfigError

CHOICES = ("stage", "model", "data")
GROUPS = ("sharding", "precision", "activation_checkpointing", "offload")
HOST = "HOST"
"""Placeholder for the first machine's address in the printed command."""


@dataclass(frozen=True)
class Migration:
    run: SourceRun
    all_overrides: Overrides
    printed_overrides: Overrides
    """Overrides that differ from the defaults of the command's stage, model and data."""
    rows: list[TableRow]
    refused: str
    """Error message with which llava_fsdp would refuse the command; empty if it is valid."""

    @property
    def words(self) -> list[str]:
        return [*launcher(self.run), *assignments(self.printed_overrides)]

    @property
    def lacks(self) -> list[str]:
        """What the user must still complete or correct before the command can start."""
        run = self.run
        lacking_parts = [f"{name} was not found: give it as another PATH" for name in run.missing]
        lacking_parts += lacking(run, self.all_overrides)
        if any(HOST in word for word in launcher(run)):
            lacking_parts.append(f"the address of the first machine: write it in place of {HOST}")
        for row in self.rows:
            # flags of the original LLaVA that are not supported are only shown in the table
            if not row.known or (not run.launch.is_original and row.verdict is Verdict.unsupported):
                lacking_parts.append(f"{row.key}: {row.text}")
        return lacking_parts + ([f"llava_fsdp refuses the command: {self.refused}"] if self.refused else [])

    @property
    def cautions(self) -> list[str]:
        """Remarks for the user: where the command trains differently from the original, and where the input files
        contradict each other."""
        run = self.run
        found = [f"{row.key}: {row.text}" for row in self.rows if row.text.startswith(REFUSED)]
        if run.trainer:
            found.append(f"{run.trainer.value}: {DIFFERS[run.trainer]}")
        elif not run.launch.is_original:
            found.append(f"{run.launch.script}: {OTHER_PROGRAM}")
        if run.bits and "model.quantize.mode" not in self.all_overrides:
            found.append(f"{run.bits}-bit weights: this command trains without quantized weights")
        in_files = replace(run, given_gpus=None).gpus  # the number of GPUs by the input files alone
        if run.given_gpus and in_files and in_files != run.given_gpus:
            found.append(f"gpus={run.given_gpus} was given, and the files have {in_files}")
        for file, whose in ((run.deepspeed, "DeepSpeed"), (run.accelerate, "Accelerate")):
            if file and file.values and all(not r.known for r in self.rows if r.source == file.name):
                found.append(f"no key of {file.name} is one of {whose}'s; is it another file?")
        return found


def migrate(run: SourceRun) -> Migration:
    """Translate a training of another system into overrides of llava_fsdp (all, and those that differ from defaults),
    and a table of what each of its settings becomes."""
    overrides = decide(run)
    printed = drop_defaults(overrides)
    # the last argument: keys of overrides that only repeat defaults
    context = RuleContext(run, overrides, frozenset(overrides) - frozenset(printed))
    return Migration(run, overrides, printed, rows_of(context), error_of_overrides(printed))


def drop_defaults(decided: Overrides) -> Overrides:
    """Return those overrides that change something: the others repeat the default values of the stage (pretrain,
    finetune, ...), the model and the data that `decided` also names. These three choices (CHOICES) are always kept."""
    chosen = {key: value for key, value in decided.items() if key in CHOICES}
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        base = compose("train", assignments(chosen))
    # the value of a key in GROUPS, such as sharding=zero3, names a file with several settings
    groups = {key: decided[key] for key in GROUPS if key in decided and not has_choice(base, key, decided[key])}
    values = {k: v for k, v in decided.items() if k not in (*CHOICES, *GROUPS) and not has_value(base, k, v)}
    needed = chosen | groups | values
    # the command line chooses model=own (a model that the user names) by itself if model.checkpoint is given
    return {k: v for k, v in needed.items() if chosen.get("model") != "own" or k not in ("model", "model.language")}


def has_choice(base: DictConfig, group: str, choice: object) -> bool:
    """Return whether a configuration already has the values of a file of a group, such as `sharding=zero3`."""
    return OmegaConf.select(base, group) == OmegaConf.load(config_dir() / group / f"{choice}.yaml")


def has_value(base: DictConfig, key: str, value: object) -> bool:
    """Return whether a configuration already has this value of a key."""
    parent, _, name = key.rpartition(".")
    node = OmegaConf.select(base, parent) if parent else base
    return not OmegaConf.is_missing(node, name) and OmegaConf.select(base, key) == value


def error_of_overrides(overrides: Overrides) -> str:
    """Return the error message with which llava_fsdp would refuse these overrides; empty if their configuration is
    valid. A missing data path is not an error: `Migration.lacks` reports it."""
    # a placeholder path; `with_own_model` adds `model=own`, so that the settings of the default model are not used
    words = with_own_model(assignments({"data.path": "records.json"} | overrides))
    try:
        with initialize_config_dir(str(config_dir()), version_base="1.3"):
            load(Config, compose("train", [taken_literally(word) for word in words]))
    except ConfigError as error:
        return str(error)
    return ""


def assignments(overrides: Mapping[str, object]) -> list[str]:
    """Return overrides as words of a command line, `key=value`."""
    return [f"{key}={written(value)}" for key, value in overrides.items()]


def launcher(run: SourceRun) -> list[str]:
    """Return the words of the command before the overrides: `llava-fsdp train` with the number of ranks and, for
    several machines, the address of the first (`HOST` if no file gives it)."""
    ranks, flags = run.ranks, run.launch.flags
    words = [f"CUDA_VISIBLE_DEVICES={run.devices}"] if run.devices else []
    words += ["llava-fsdp", "train"]
    if ranks.nodes != 1:
        address = flags.get("master_addr", run.accelerate_value("main_process_ip")) or HOST
        port = flags.get("master_port", run.accelerate_value("main_process_port")) or "29500"
        endpoint = str(flags.get("rdzv_endpoint") or f"{address}:{port}")
        words += ["--nnodes", str(ranks.nodes), "--rdzv-endpoint", endpoint]
    return [*words, "--nproc-per-node", str(ranks.per_node)]


def lines(words: list[str], width: int = 100) -> str:
    """Return a shell command as text, quoted, and broken at about `width` characters into lines that end in a
    backslash. Lines are only broken before overrides, which contain `=`."""
    command_lines = [""]
    for word in map(shlex.quote, words):
        if "=" in word and len(command_lines[-1]) + len(word) >= width:
            command_lines.append("   ")
        command_lines[-1] += (" " if command_lines[-1] else "") + word
    return " \\\n".join(command_lines)
