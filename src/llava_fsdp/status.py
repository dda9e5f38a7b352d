"""How a training ended: `python -m llava_fsdp.status` with the training's own arguments.

Prints what its `run_status.json` says and ends with the exit code in it, which torchrun does not hand on: 0 done, 75
stopped (the same command continues), 2 a mistake to mend, 3 a checkpoint, 4 numbers, 5 lost or late ranks, 1 a bug or
no word at all. A run that goes on, and one that was killed, have no word about their end: the lock of the folder tells
them apart. `--this-launch` before the other arguments takes no word that is older than this process: a launch
script becomes it by `exec`, so that what an earlier run said is not taken for this one's. `--this-launch=75` is for a
script that was told to stop: so it ends where there is no word. `--without-word=TEXT` behind it says what that mostly
means, as the last line. `--saved` prints the step of the newest checkpoint instead, 0 without one: a scheduler's script
asks before and after whether a run got on.
"""

import os
import re
import sys
from pathlib import Path
from typing import Any

from llava_fsdp.config import Config, cli
from llava_fsdp.runtime.errors import ConfigError, ExitCode
from llava_fsdp.runtime.launch import started
from llava_fsdp.runtime.log import log, setup_logging
from llava_fsdp.runtime.run_dir import FOLDER, held_by, is_known_free, list_checkpoints, step_of
from llava_fsdp.runtime.small_json import BadJson, MissingJson
from llava_fsdp.runtime.status_file import STATUS_FILE, is_without_end, own_word, status_of
from llava_fsdp.runtime.terminal_text import shown_name


def newest_step(output_dir: Path) -> int:
    """The step of a run's newest checkpoint; 0 where there is none."""
    found = list_checkpoints(output_dir / FOLDER)
    return (step_of(found[-1]) or 0) if found else 0


def take_flag(pattern: str) -> re.Match[str] | None:
    """The first argument, removed, where it is such a flag: Hydra would take it for its own."""
    flag = re.fullmatch(pattern, sys.argv[1], re.DOTALL) if sys.argv[1:2] else None
    if flag is not None:
        del sys.argv[1]
    return flag


def main() -> None:
    setup_logging()
    since, without_word, likely = 0.0, int(ExitCode.BUG), None
    asks_saved = take_flag("--saved") is not None
    if not asks_saved and (flag := take_flag(r"--this-launch(?:=(\d+))?")):
        since, without_word = started(os.getpid()), int(flag[1] or ExitCode.BUG)
        likely = take_flag(r"--without-word=(.+)")
    try:
        node = cli.compose("train", Config)
    except ConfigError as error:  # the training has said it too, without a folder to write it into
        log().error("ConfigError: %s", error)
        sys.exit(ExitCode.USER)
    if node is None:
        return
    path = Path(str(node["output_dir"])) / STATUS_FILE
    if asks_saved:
        print(newest_step(path.parent))
        return
    said = word_of(path, since)
    if said is None:
        if likely is not None:
            log().error("%s", likely[1])
        sys.exit(without_word)
    status = shown_name(said["status"])
    if is_without_end(said) and (holder := held_by(path.parent)) is not None:
        where = shown_name(f"process {holder.get('pid', '?')} on {holder.get('host', '?')}")
        log().info("%s: %s: %s is under way", path, status, where)
    elif said["status"] == "stopping":
        log().error(
            "%s: stopping, without a word about its end: it was asked to stop (%s), and killed before it had; the same "
            "command continues from the last checkpoint", path, said.get("reason"),
        )  # fmt: skip
    elif said.get("exit_code") is None:
        end = "it was killed" if is_known_free(path.parent) else "killed, or going on: its lock cannot be read"
        log().error("%s: %s, without a word about its end: %s", path, status, end)
    else:
        log().info("%s: %s (exit code %d) %s", path, status, said["exit_code"], said.get("reason") or "")
    say_other_start(path, said)
    sys.exit(ExitCode.BUG if said.get("exit_code") is None else said["exit_code"])


def word_of(path: Path, since: float) -> dict[str, Any] | None:
    """What a run has said since then, in seconds since 1970; None: nothing that can be read, which is told."""
    try:
        said = status_of(path.parent)
        said = own_word(said) if since else said  # how this launch ended, not the run that it found finished
        if (said.get("time") or 0.0) >= since:
            return said
    except MissingJson:
        pass
    except BadJson as error:
        log().error("%s", error)
        return None
    log().error("%s: nothing from this run; it ended before it could say why", path)
    return None


def say_other_start(path: Path, said: dict[str, Any]) -> None:
    """Of a start that took no step, what the run was before it; of a finished run, why a later start was refused."""
    if isinstance(refused := said.get("refused"), dict):
        log().info("%s: a later start was refused: %s", path, refused.get("reason") or "")
    elif isinstance(before := said.get("before"), dict) and said["status"] != "done":
        how = f"{shown_name(before.get('status'))} {before.get('reason') or ''}"
        log().info("%s: that start has taken no step; before it, the run was: %s", path, how)


if __name__ == "__main__":
    main()
