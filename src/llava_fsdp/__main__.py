"""The command `llava-fsdp`, also `python -m llava_fsdp`: lists all commands, and runs one of them."""

from llava_fsdp.runtime.process.safe_path import prepare_python

if __name__ == "__main__":
    prepare_python()  # before other imports, which files there might hide

import difflib
import os
import signal
import sys

from llava_fsdp.commands import COMMANDS, start
from llava_fsdp.runtime.exit_codes import ExitCode
from llava_fsdp.version import __version__


def main() -> None:
    """Run the command of llava_fsdp that the command line names, or print the help or the version."""
    prepare_python()
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        sys.exit(ExitCode.DONE if words else ExitCode.USER)
    name, *rest = words
    if name in ("--version", "version"):
        print(f"llava-fsdp {__version__}")
        return
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(COMMANDS)}"
        print(f"{name} is not a command of llava-fsdp{hint}", file=sys.stderr)
        sys.exit(ExitCode.USER)
    sys.argv = [f"llava-fsdp {name}", *rest]
    if name == "train":  # before the launcher handles signals
        signal.signal(signal.SIGTERM, lambda *_: os._exit(ExitCode.STOPPED))
        signal.signal(signal.SIGINT, lambda *_: os._exit(ExitCode.INTERRUPTED))
    try:
        start(name)
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)


def usage() -> str:
    """Return the help of `llava-fsdp`: how it is called, and each command with its meaning."""
    lines = [f"  {name:12}{command.meaning}" for name, command in COMMANDS.items()]
    return "\n".join([
        "usage: llava-fsdp COMMAND ARGUMENTS...", "", *lines, "",
        "llava-fsdp COMMAND --help lists the arguments of a command.",
    ])  # fmt: skip


if __name__ == "__main__":
    main()
