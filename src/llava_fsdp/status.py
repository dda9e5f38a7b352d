"""Print how a training ended: `llava-fsdp status FOLDER`, or with the training's own arguments.

Prints the status in `run_status.json` and exits with the training's exit code, which torchrun hides: 0 done, 75 stopped
(the same command continues it), 2 a mistake that the user can fix, 3 a checkpoint that cannot be written or read, 4
wrong numbers such as a NaN loss, 5 lost or late ranks, 1 a bug or no status at all. If the status says nothing about an
end, the run is still active or was killed: it is active if its folder is locked.

`--saved` before the other arguments prints the step of the run's newest checkpoint instead (0 if there is none): a
scheduler's script can compare this step before and after a run.
"""

from llava_fsdp.runtime.process.safe_path import prepare_python

if __name__ == "__main__":
    prepare_python()  # before other imports, which files there might hide

import sys
from pathlib import Path
from typing import Any

from llava_fsdp.config import Config
from llava_fsdp.config.command_line import cli
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.runtime.exit_codes import ExitCode
from llava_fsdp.runtime.files.run_dir import FOLDER, held_by, is_known_free, list_checkpoints, step_of
from llava_fsdp.runtime.files.small_json import BadJson, MissingJson
from llava_fsdp.runtime.files.status_file import STATUS_FILE, is_without_end, status_of
from llava_fsdp.runtime.text.log import log, setup_logging
from llava_fsdp.runtime.text.terminal_text import shown_name


def newest_step(output_dir: Path) -> int:
    """Return the step of a run's newest checkpoint; 0 if it has none."""
    checkpoints = list_checkpoints(output_dir / FOLDER)
    return (step_of(checkpoints[-1]) or 0) if checkpoints else 0


def main() -> None:
    """Print how a run ended, and exit with its exit code; with --saved, print the step of its newest checkpoint. The
    command line names the run's folder, or has the arguments with which the run was started."""
    setup_logging()
    if sys.argv[1:2] in (["--help"], ["-h"]):
        print(__doc__)
        return
    prints_step = sys.argv[1:2] == ["--saved"]
    words = sys.argv[2:] if prints_step else sys.argv[1:]
    sys.argv[1:] = cli.name_folder(words, "output_dir")
    try:
        node = cli.compose("train", Config)
    except ConfigError as error:  # the training reported this error too, but had no folder to record it in
        log().error("ConfigError: %s", error)
        sys.exit(ExitCode.USER)
    if node is None:
        return
    path = Path(str(node["output_dir"])) / STATUS_FILE
    if prints_step:
        print(newest_step(path.parent))
        return
    try:
        record = status_of(path.parent)
    except MissingJson:
        log().error("%s is missing: no run has recorded its status there", path)
        sys.exit(ExitCode.BUG)
    except BadJson as error:
        log().error("%s", error)
        sys.exit(ExitCode.BUG)
    status, code, reason = shown_name(record["status"]), record.get("exit_code"), record.get("reason")
    if is_without_end(record) and (holder := held_by(path.parent)) is not None:
        where = shown_name(f"process {holder.get('pid', '?')} on {holder.get('host', '?')}")
        log().info("%s: %s: %s still runs", path, status, where)
    elif record["status"] == "stopping":
        log().error(
            "%s: the run was asked to stop (%s), and was killed before it had stopped; the same command continues from "
            "the last checkpoint", path, reason,
        )  # fmt: skip
    elif code is None:
        end = "it was killed" if is_known_free(path.parent) else "killed, or still running: its lock cannot be read"
        log().error("%s: %s, and no end was recorded: %s", path, status, end)
    else:
        log().info("%s: %s (exit code %d) %s", path, status, code, reason or "")
    log_other_start(path, record)
    sys.exit(ExitCode.BUG if code is None else code)


def log_other_start(path: Path, record: dict[str, Any]) -> None:
    """Log what a run's status says about a start of the run other than the one that it describes.

    That is why a later start was refused, because the run was finished; or how the previous start ended, if the latest
    one has not completed a step. The status of a finished run needs no previous start. `record` is the content of the
    status file `path`.
    """
    if isinstance(refused := record.get("refused"), dict):
        log().info("%s: a later start was refused: %s", path, refused.get("reason") or "")
    elif isinstance(before := record.get("before"), dict) and record["status"] != "done":
        how = f"{shown_name(before.get('status'))} {before.get('reason') or ''}"
        log().info("%s: that start has taken no step; before it, the run was: %s", path, how)


if __name__ == "__main__":
    main()
