"""The command `llava-fsdp`, also `python -m llava_fsdp`: lists all commands, and runs one of them."""

from llava_fsdp.runtime.process.safe_path import prepare_python

if __name__ == "__main__":
    prepare_python()  # before other imports, which files there might hide

import difflib
import os
import runpy
import signal
import sys

from llava_fsdp import __version__
from llava_fsdp.runtime.exit_codes import ExitCode

COMMANDS = {
    "train": "train a model under torchrun, on all GPUs of this machine or, with --nnodes, of several",
    "prepare": "check a dataset before training: bad records, lengths, truncated samples",
    "plan": "predict which ways to train a model fit into which GPUs, and how fast; needs no GPU",
    "doctor": "check whether this machine has what a training needs",
    "status": "print how the training in a folder ended, and exit with its exit code",
    "report": "write a web page about one training, or a comparison of several",
    "evaluate": "answer questions of benchmarks with a trained model, and score the answers",
    "chat": "ask a trained model about images, in the terminal or on a web page",
    "export": "write a trained model for transformers or for the original LLaVA",
    "sweep": "run several trainings with different settings, one after the other or side by side",
    "migrate": "turn LLaVA's scripts, DeepSpeed's JSON or Accelerate's YAML into one command",
    "completion": "print the code with which a shell completes commands and keys: completion bash, or zsh",
}


def main() -> None:
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
    module = name
    if name == "train":  # starts torchrun; `python -m llava_fsdp.train`, which torchrun runs, is one rank
        module = "train.launch.launcher"
        signal.signal(signal.SIGTERM, lambda *_: os._exit(ExitCode.STOPPED))
        signal.signal(signal.SIGINT, lambda *_: os._exit(ExitCode.INTERRUPTED))
    try:
        runpy.run_module(f"llava_fsdp.{module}", run_name="__main__", alter_sys=False)
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)


def usage() -> str:
    lines = [f"  {name:12}{meaning}" for name, meaning in COMMANDS.items()]
    return "\n".join([
        "usage: llava-fsdp COMMAND ARGUMENTS...", "", *lines, "",
        "llava-fsdp COMMAND --help lists the arguments of a command.",
    ])  # fmt: skip


if __name__ == "__main__":
    main()
