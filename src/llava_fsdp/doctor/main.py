"""What this machine lacks for a training: `python -m llava_fsdp.doctor stage=finetune model=llava_v1_5_7b ...`.

Takes the keys of `train`. Looks at software, GPUs, memory, disks and network, plans the training's memory, and lets
ranks really talk to each other. Exit code 0: nothing fails; 2: something does, and its row says what to do.
"""

import json
import sys
from collections import Counter
from dataclasses import asdict

from rich.table import Table

from llava_fsdp.config import DoctorConfig, Format, cli
from llava_fsdp.doctor.checks import CHECKS, run_check
from llava_fsdp.doctor.context import Subject
from llava_fsdp.doctor.findings import Finding, Level
from llava_fsdp.runtime.console import TextConsole
from llava_fsdp.runtime.errors import ConfigError

STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}


def main() -> None:
    cli.run("doctor", DoctorConfig, doctor)


def doctor(cfg: DoctorConfig) -> None:
    """Run every check and print what was found.

    Raises:
        ConfigError: something fails; the table has said what.
    """
    subject = Subject(cfg)
    found: list[tuple[str, Finding]] = []
    with TextConsole(on_stderr=True).status("looking") as status:  # silent where there is no terminal
        for check in CHECKS:
            status.update(f"looking at {check.name}")
            found += [(check.group, finding) for finding in run_check(check, subject)]
    failed = [finding.name for _, finding in found if finding.level is Level.FAIL]
    if cfg.format is Format.json:
        print(json.dumps(as_object(found)))
    else:
        show(found)
    if failed:
        raise ConfigError(f"{len(failed)} of {len(found)} checks fail: {', '.join(failed)}")


def as_object(found: list[tuple[str, Finding]]) -> dict:
    count = Counter(finding.level for _, finding in found)
    rows = [{"group": group, **asdict(finding), "level": finding.level.value} for group, finding in found]
    return {**{level.value: count[level] for level in Level}, "checks": rows}


def show(found: list[tuple[str, Finding]]) -> None:
    """A table, with the cure below what it cures."""
    console = TextConsole(width=None if sys.stdout.isatty() else 140)
    table = Table("", "what", "found", title="this machine, for this training", title_justify="left")
    for column in table.columns:
        column.overflow = "fold"
    group = None
    for own, finding in found:
        if own != group:
            table.add_section()
        group = own
        said = finding.said + (f"\n-> {finding.cure}" if finding.cure else "")
        table.add_row(finding.level.value, finding.name, said, style=STYLES[finding.level])
    console.print(table)
    count = Counter(finding.level for _, finding in found)
    console.print(", ".join(f"{count[level]} {level.value}" for level in Level))
