"""The table of all commands, and how one is started: by `llava-fsdp NAME` or `python -m llava_fsdp.NAME`.

Nothing of Python's is imported here before `prepare_python` has run: a file in the user's folder could hide it.
"""

from llava_fsdp.runtime.process.safe_path import prepare_python


class Command:
    """A command. Functions are named `package.module:function`, so that they are imported only if the command runs.

    Args:
        meaning: what the command does, for the list of commands.
        keys: name of the class of the command's configuration; empty: it has none.
        task: function that gets the configuration, after it has been read and checked.
        main: function that does everything by itself, if there is no `task`.
        module: function that `python -m llava_fsdp.NAME` calls, if it is not `main`.
    """

    def __init__(self, meaning: str, keys: str = "", task: str = "", main: str = "", module: str = "") -> None:
        self.meaning, self.keys, self.task, self.main, self.module = meaning, keys, task, main, module or main


COMMANDS = {
    "train": Command(
        "train a model under torchrun, on all GPUs of this machine or, with --nnodes, of several",
        "Config", main="train.launch.launcher:main", module="train.run:run",
    ),
    "prepare": Command(
        "check a dataset before training: bad records, lengths, truncated samples",
        "PrepareConfig", task="prepare.main:prepare",
    ),
    "plan": Command(
        "predict which ways to train a model fit into which GPUs, and how fast; needs no GPU",
        "PlanConfig", main="plan.command:main",
    ),
    "doctor": Command(
        "check whether this machine has what a training needs", "DoctorConfig", task="doctor.main:doctor"
    ),
    "status": Command(
        "print how the training in a folder ended, and exit with its exit code", "Config", main="status:main"
    ),
    "report": Command("write a web page about one training, or a comparison of several", main="report.main:main"),
    "evaluate": Command(
        "answer questions of benchmarks with a trained model, and score the answers",
        "EvaluateConfig", task="evaluate.main:evaluate",
    ),
    "chat": Command(
        "ask a trained model about images, in the terminal or on a web page", "ChatConfig", task="chat.main:chat"
    ),
    "export": Command(
        "write a trained model for transformers or for the original LLaVA",
        "ConversionConfig", task="export.main:export",
    ),
    "sweep": Command(
        "run several trainings with different settings, one after the other or side by side",
        "SweepConfig", main="sweep.main:main",
    ),
    "migrate": Command(
        "turn scripts of LLaVA, ms-swift, LLaMA-Factory, TRL and others into one command", main="migrate.main:main"
    ),
    "completion": Command(
        "print the code with which a shell completes commands and keys: completion bash, or zsh",
        main="completion:main",
    ),
}  # fmt: skip


def imported(place: str):
    """Import and return the function `package.module:function` (`place`, without `llava_fsdp.`) of this package."""
    import importlib  # only after `prepare_python`, which takes the current folder out of the search path

    module, _, name = place.partition(":")
    return getattr(importlib.import_module(f"llava_fsdp.{module}"), name)


def start(name: str, is_module: bool = False) -> None:
    """Run a command with the arguments in `sys.argv`. `is_module`: it was started as `python -m llava_fsdp.NAME`;
    `train` is then one rank of a training."""
    prepare_python()
    command = COMMANDS[name]
    if not command.task:
        imported(command.module if is_module else command.main)()
        return

    from llava_fsdp import config
    from llava_fsdp.config.command_line import cli
    from llava_fsdp.runtime.process.imports import importing
    from llava_fsdp.runtime.text.log import leave_noise_out, log

    def task(cfg: object) -> None:
        """Import the function that does the command's work, and call it with the configuration."""
        model = getattr(cfg, "model", None)
        if isinstance(model, config.TrainedModelConfig):
            log().info("opening model.checkpoint=%s; to load a large model takes minutes", model.checkpoint)
        with importing():  # after the command line is checked, as torch takes seconds
            run = imported(command.task)
        run(cfg)

    leave_noise_out()
    cli.run(name, getattr(config, command.keys), task)
