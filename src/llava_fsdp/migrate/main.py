"""Translate a training of another program (LLaVA, ms-swift, LLaMA-Factory, TRL, others with DeepSpeed or Accelerate):
`llava-fsdp migrate finetune.sh zero3.json gpus=8`.

The llava_fsdp command that does the same training is printed, with a table of what every key in the files became. No
training is run, and neither torch nor transformers is imported.
"""

import json
import math
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from rich.table import Table

from llava_fsdp.config.command_line.cli import until_reader_leaves
from llava_fsdp.migrate.command import Migration, lines, migrate
from llava_fsdp.migrate.reading.inputs import read_runs
from llava_fsdp.migrate.to_keys.keys import TableRow, Verdict, written
from llava_fsdp.runtime.errors import ConfigError, LlavaFsdpError
from llava_fsdp.runtime.exit_codes import ExitCode
from llava_fsdp.runtime.text.console import TextConsole
from llava_fsdp.runtime.text.log import log, setup_logging
from llava_fsdp.runtime.text.redact import HIDDEN, is_secret_name, redact

USAGE = """\
usage: llava-fsdp migrate PATH... [gpus=N] [format=json] [NAME=VALUE...]

PATH         a training script (finetune.sh), a YAML of flags of ms-swift, LLaMA-Factory or TRL, a DeepSpeed JSON
             (zero3.json), an Accelerate YAML or LLaMA-Factory's dataset_info.json, in any number
gpus=N       GPUs of the whole training, where the launcher's flags do not give it
NAME=VALUE   a variable that the script reads and does not set
format=json  print one JSON object

The exit code is 2 where a printed command is not complete; lines that begin with "# incomplete" say why.
"""
PARITY = "add compat=llava_v1_5 for the original's numbers exactly (its labels, order, pixels and mean of means)"
COMPILE_NOTE = (
    "compile=auto compiles blocks on CUDA, and the script does not say whether to; compile=false does not compile"
)


@dataclass
class Request:
    """Parsed command line of `migrate`."""

    paths: list[str] = field(default_factory=list)
    gpus: int | None = None
    variables: dict[str, str] = field(default_factory=dict)
    format: str = "text"


def main() -> None:
    """Print the llava-fsdp command for each training in the files that the command line names. Exits with the code of
    an error if there is one, and with `USER` if a command is not complete."""
    setup_logging()
    if not sys.argv[1:] or {"-h", "--help"} & set(sys.argv[1:]):
        print(USAGE, end="")
        sys.exit(ExitCode.DONE if sys.argv[1:] else ExitCode.USER)
    try:
        request = parse(sys.argv[1:])
        check_variables(request)
        found = [migrate(run) for run in read_runs(request.paths, request.variables, request.gpus)]
    except LlavaFsdpError as error:
        log().error("%s: %s", type(error).__name__, error)
        sys.exit(error.exit_code)
    with until_reader_leaves():
        if request.format == "json":
            print(json.dumps({"runs": [as_json(migration) for migration in found]}, indent=1))
        else:
            for migration in found:
                print_migration(migration)
    if any(migration.lacks for migration in found):
        sys.exit(ExitCode.USER)


def parse(arguments: list[str]) -> Request:
    """Parse paths of files, options (`gpus=N`, `format=json`), and values of shell variables that the scripts read
    (`NAME=VALUE`). Raise ConfigError for a wrong value, or without a path."""
    request = Request()
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if argument.startswith("-"):
            raise ConfigError(f"{argument} is not an option; options are written key=value, and -h lists them")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name):
            request.paths.append(argument)
        elif name == "gpus":
            if not re.fullmatch(r"[1-9]\d*", value):
                raise ConfigError(f"{argument}: gpus is a number of at least 1")
            request.gpus = int(value)
        elif name == "format":
            if value not in ("text", "json"):
                raise ConfigError(f"{argument}: choose text or json")
            request.format = value
        else:
            request.variables[name] = value
    if not request.paths:
        raise ConfigError("no PATH was given: a training script, or a YAML of a trainer's flags")
    return request


def check_variables(request: Request) -> None:
    """Raise ConfigError if the command line sets a shell variable that no script uses: it is probably misspelled."""
    paths = [Path(path) for path in request.paths]
    text = "".join(path.read_text(errors="replace") for path in paths if path.is_file())
    for name, value in request.variables.items():
        if not re.search(rf"\$\{{?{name}\b", text):
            raise ConfigError(f"{name}={value}: no script reads ${name}, and it is not an option; -h lists them")


def as_json(migration: Migration) -> dict[str, object]:
    """Return a migration as the object that format=json prints. Secrets in texts are blacked out. `overrides` are those
    that differ from defaults; `keys` has a row for each setting of the original: what it becomes, and whether it is
    known."""
    return {
        "name": migration.run.name,
        "command": lines(migration.words, width=sys.maxsize),
        "overrides": {key: json_value(value) for key, value in migration.printed_overrides.items()},
        "gpus": migration.run.gpus,
        "notes": list(migration.run.notes),
        "incomplete": migration.lacks,
        "cautions": migration.cautions,
        "keys": [
            {
                "source": row.source, "key": row.key, "value": shown(row, row.value), "verdict": row.verdict.value,
                "resolved": shown(row, row.outcome.resolved), "text": redact(row.text), "known": row.known,
            }
            for row in migration.rows
        ],
    }  # fmt: skip


def json_value(value: object) -> object:
    """Return a value as JSON can represent it: other types, and numbers that are not finite, become text."""
    if isinstance(value, list):
        return [json_value(v) for v in value]
    known = value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value))
    return value if known else str(value)


def shown(row: TableRow, value: object) -> object:
    """Return a value as JSON for the table; hidden if the setting is a secret, such as a token."""
    if value is not None and is_secret_name(row.key.rpartition(".")[2]):
        return HIDDEN
    json_text = json_value(value)
    return redact(json_text) if isinstance(json_text, str) else json_text


def comment(text: str) -> str:
    """Return text for a shell comment: on one line, with control characters escaped and secrets hidden. Users paste the
    output into shells."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in redact(text))


def print_migration(migration: Migration) -> None:
    """Print the command, remarks about it, and the table."""
    rows = migration.rows
    print(f"# {comment(migration.run.name)}")
    remarks = {"note": migration.run.notes, "caution": migration.cautions, "incomplete": migration.lacks}
    for kind, texts in remarks.items():
        for text in texts:
            print(f"# {kind}: {comment(text)}")
    without = [row.key for row in rows if row.verdict is Verdict.unsupported]
    if without:
        print(f"# without: {comment(', '.join(without))} (see the table)")
    print(lines(migration.words))
    if migration.run.launch.is_original:
        print(f"# {PARITY}")
    if "compile" not in migration.all_overrides:
        print(f"# {COMPILE_NOTE}")
    print()
    TextConsole(width=None if sys.stdout.isatty() else 140).print(table(rows))
    count = Counter(row.verdict for row in rows)
    print(
        f"{len(rows)} keys: {', '.join(f'{count[verdict]} {verdict.value}' for verdict in Verdict if count[verdict])}"
    )
    print()


def table(rows: list[TableRow]) -> Table:
    """Return a table with a row for every key, grouped by the file that sets it. Long words are wrapped, and no text is
    cut off."""
    result = Table()
    for name, max_width in {
        "key": 60,
        "value": 22,
        "verdict": 13,
        "what it becomes, or why nothing does": None,
    }.items():
        result.add_column(name, max_width=max_width, overflow="fold")
    source = ""
    for row in rows:
        if row.source != source:
            result.add_section()
            result.add_row(comment(row.source), style="bold")
            source = row.source
        value, resolved = (written(shown(row, v)) for v in (row.value, row.outcome.resolved))
        value = value if row.outcome.resolved is None else f"{value} = {resolved}"
        result.add_row(comment(row.key), comment(value), row.verdict.value, comment(row.text))
    return result
