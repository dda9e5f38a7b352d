"""The original's training scripts, made anew from what the golden configurations record of them."""

import shlex
from pathlib import Path

from golden_folder import golden_folder, read_json

from llava_fsdp.migrate.reading.inputs import read_runs
from llava_fsdp.migrate.source.source_run import SourceRun
from llava_fsdp.migrate.table import rows_of
from llava_fsdp.migrate.to_keys.keys import RuleContext, TableRow
from llava_fsdp.migrate.to_keys.overrides import decide

ZERO = ("zero2", "zero3", "zero3_offload")
# What transformers works out from the machine or from other flags.
COMPUTED = frozenset({
    "output_dir", "logging_dir", "run_name", "disable_tqdm", "local_rank", "hub_token", "push_to_hub_token",
    "debug", "fsdp", "fsdp_config", "report_to",
})  # fmt: skip


def records() -> dict[str, dict]:
    """By name, every recorded script; also the ones that only fill in a DeepSpeed JSON."""
    names = sorted(path.stem for path in (golden_folder() / "configs").glob("*.json"))
    found = {name: read_json(f"configs/{name}.json") for name in names if name not in (*ZERO, "index", "defaults")}
    assert len(found) >= 18
    return found


def scripts() -> dict[str, dict]:
    return {name: record for name, record in records().items() if record["entry_point"].endswith(".py")}


def write_script(record: dict, folder: Path) -> Path:
    """`scripts/NAME.sh` with the flags of the record, and the ZeRO files beside it, as in the original's tree."""
    scripts = folder / "scripts"
    scripts.mkdir(exist_ok=True)
    for name in ZERO:
        (scripts / f"{name}.json").write_text((golden_folder() / "configs" / f"{name}.json").read_text())
    flags = [f"--{name} {shlex.quote(value)}" for name, value in record["explicit_cli"].items()]
    program = record["entry_point"] if record["entry_point"].endswith(".py") else "llava/train/train_mem.py"
    path = scripts / f"{Path(record['script']).stem}.sh"
    path.write_text("#!/bin/bash\n\n" + " \\\n    ".join([f"deepspeed {program}", *flags]) + "\n")
    return path


def run_of(record: dict, folder: Path, gpus: int = 8) -> SourceRun:
    (run,) = read_runs([str(write_script(record, folder))], {}, gpus)
    return run


def rows(run: SourceRun) -> list[TableRow]:
    return rows_of(RuleContext(run, decide(run)))
