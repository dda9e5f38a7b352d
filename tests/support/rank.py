"""What a rank of a test's run does: set the trap that the test names, then train as `python -m llava_fsdp.train` does.

Under torchrun: `rank.py WORDS...`, with the trap in LLAVA_FSDP_TRAP as `module:function:JSON`, where the module is one
of this folder's and JSON its keyword arguments. A trap runs in the rank before anything else and may replace what it
likes there: it is how a test makes a rank fail at a moment of its choice.
"""

import importlib
import json
import os
import sys

TRAP = "LLAVA_FSDP_TRAP"


def main() -> None:
    set_trap()

    from llava_fsdp.train import run as entry

    entry.run()


def set_trap() -> None:
    said = os.environ.get(TRAP)
    if said:
        module, function, arguments = said.split(":", 2)
        getattr(importlib.import_module(module), function)(**json.loads(arguments))


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    main()
