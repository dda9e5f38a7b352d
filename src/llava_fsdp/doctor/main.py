"""Check this machine before a training: `python -m llava_fsdp.doctor stage=finetune model=llava_v1_5_7b ...`.

The configuration keys are those of `train`. The command checks software, GPUs, memory, disks and network, predicts the
training's memory, and starts ranks that exchange data. The exit code is 0 if no check fails, and else 2; the printed
table gives advice for each failed check.
"""

import json
import sys
from collections import Counter
from dataclasses import asdict

from rich.table import Table

from llava_fsdp.config import DoctorConfig, Format
from llava_fsdp.doctor.checks import CHECKS, run_check
from llava_fsdp.doctor.context import DoctorContext
from llava_fsdp.doctor.findings import Finding, Level
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.runtime.text.console import TextConsole

STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}


def doctor(cfg: DoctorConfig) -> None:
    """Check this machine for a training, and print the results. Raise ConfigError if at least one check fails."""
    context = DoctorContext(cfg)
    rows: list[tuple[str, Finding]] = []
    with TextConsole(on_stderr=True).status("checking") as status:  # prints nothing if stderr is not a terminal
        for check in CHECKS:
            status.update(f"checking {check.name}")
            rows += [(check.group, finding) for finding in run_check(check, context)]
    failed = [finding.name for _, finding in rows if finding.level is Level.FAIL]
    if cfg.format is Format.json:
        print(json.dumps(as_object(rows)))
    else:
        show(rows)
    if failed:
        raise ConfigError(f"{len(failed)} of {len(rows)} checks fail: {', '.join(failed)}")


def as_object(rows: list[tuple[str, Finding]]) -> dict:
    count = Counter(finding.level for _, finding in rows)
    checks = [{"group": group, **asdict(finding), "level": finding.level.value} for group, finding in rows]
    return {**{level.value: count[level] for level in Level}, "checks": checks}


def show(rows: list[tuple[str, Finding]]) -> None:
    """Print the findings, each with its group of checks, as a table, with advice below a result."""
    console = TextConsole(width=None if sys.stdout.isatty() else 140)
    table = Table("", "what", "result", title="this machine, for this training", title_justify="left")
    for column in table.columns:
        column.overflow = "fold"
    last = None
    for group, finding in rows:
        if group != last:
            table.add_section()
        last = group
        result = finding.result + (f"\n-> {finding.cure}" if finding.cure else "")
        table.add_row(finding.level.value, finding.name, result, style=STYLES[finding.level])
    console.print(table)
    count = Counter(finding.level for _, finding in rows)
    console.print(", ".join(f"{count[level]} {level.value}" for level in Level))
