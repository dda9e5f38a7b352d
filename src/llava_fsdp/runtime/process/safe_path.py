"""Keep files in the current folder from hiding Python's own modules. Must run before other imports, and imports
little."""

import os
import sys


def prepare_python() -> None:
    """Refuse `python -OO`, which removes texts that programs print, and leave the current folder out of Python's search
    path, here and in child processes, as `python -P` does.

    With `python -m` and `torchrun -m` the current folder is searched first, so that a user's `random.py` would hide
    Python's module `random`. If Python has already imported such a file, end the process with a message that names it.
    Nothing is changed if this package itself is imported from the current folder.
    """
    if sys.flags.optimize > 1:
        print("ConfigError: PYTHONOPTIMIZE=2 or python -OO removes texts that are printed: unset it", file=sys.stderr)
        sys.exit(2)
    try:
        here = os.path.realpath(os.getcwd())
    except FileNotFoundError:  # the current folder was deleted
        return
    package = os.path.realpath(os.path.join(os.path.realpath(__file__), "../../../.."))
    if here == package:
        return
    os.environ["PYTHONSAFEPATH"] = "1"
    is_searched = not sys.flags.safe_path and bool(sys.path) and os.path.realpath(sys.path[0]) == here
    if is_searched:
        del sys.path[0]
    for name in sys.stdlib_module_names & sys.modules.keys():
        file = getattr(sys.modules[name], "__file__", None)
        if is_searched and file is not None and os.path.dirname(os.path.realpath(file)) == here:
            from llava_fsdp.runtime.exit_codes import ExitCode  # imports modules of Python's

            print(
                f"ConfigError: {file} has the name of Python's module {name}, and Python has imported it instead; "
                "rename the file, or start the command in another folder",
                file=sys.stderr,
            )
            sys.exit(ExitCode.USER)
