"""What all command-line programs share: read a typed configuration, and convert an error to an exit code. Imports no
torch.

In all functions, `config_name` is the command, which is also the name of its top-level YAML file, such as `train`, and
`schema` is the dataclass with the keys of its configuration.
"""

import contextlib
import io
import json
import logging
import os
import re
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import hydra
from hydra import initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from llava_fsdp.config.command_line.foreign_names import called_here
from llava_fsdp.config.command_line.help import asked_help, render_help
from llava_fsdp.config.command_line.hydra_guard import FLAGS, check_command_line
from llava_fsdp.config.command_line.load import SOURCES, config_dir, did_you_mean, load, nearest, schema_keys
from llava_fsdp.runtime.errors import ConfigError, FolderLost, LlavaFsdpError, Stopped
from llava_fsdp.runtime.exit_codes import ENDINGS, ExitCode
from llava_fsdp.runtime.files.heartbeat import read_beat
from llava_fsdp.runtime.files.run_dir import is_locked_by_other_launch, make_run_folder
from llava_fsdp.runtime.files.status_file import PATIENCE_SECONDS, Outcome, final_status, is_absent, log_write_errors
from llava_fsdp.runtime.launch import attempt, env_rank, is_one_node
from llava_fsdp.runtime.process.process_end import end_agent, end_torchrun, end_with
from llava_fsdp.runtime.text.log import leave_noise_out, log, setup_logging
from llava_fsdp.runtime.text.redact import redact, secrets_of
from llava_fsdp.runtime.text.terminal_text import shown_text

T = TypeVar("T")
# Keys whose values are text or paths. The values are taken as typed, without Hydra's grammar for lists and functions.
LITERAL = frozenset({
    "question", "image", "output_dir", "checkpoint.resume", "data.path", "data.images", "data.root",
    "data.index", "report", "model.language", "model.vision", "model.checkpoint", "model.projector", "source", "to",
    "language", "vision", "offload.folder", "questions", "annotations", "answers", "submission",
    "val.path", "val.images", "val.index",
    "track.name", "track.project",
})  # fmt: skip
PATH_KEYS = {"chat": "model.checkpoint", "evaluate": "model.checkpoint", "export": "source"}
"""Command -> key that its first argument sets if this is a path without `key=`."""
BACKBONES = ("model.language", "model.vision", "model.checkpoint")
WITH_VALUES = frozenset({
    *FLAGS, "--config-name", "-cn", "--cfg", "-c", "--package", "-p", "--info", "-i", "--experimental-rerun",
})  # fmt: skip
"""Hydra's flags whose value may be the next argument."""
FOLDER_SECONDS = 30
"""Seconds that a later rank waits for rank 0 to create the run's folder."""
WriteStatus = Callable[[Path, Outcome], dict[str, Any] | None]
"""Records in a run's folder how this rank ended. Returns the status of the rank that failed first; None if no other
rank failed before."""


def no_status(folder: Path, outcome: Outcome) -> None:
    """Do nothing: for programs that do not record in a file how they ended."""


@contextlib.contextmanager
def until_reader_leaves() -> Iterator[None]:
    """Context manager that ends without an error if the program that reads stdout (`| head`) has exited."""
    try:
        yield
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit) as error:
        is_exit = isinstance(error, SystemExit)
        # rich detects this itself and exits; a BrokenPipeError may also come from another pipe
        if not (isinstance(error.__context__, BrokenPipeError) if is_exit else reader_has_left()):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes its buffer to stdout at exit


def reader_has_left() -> bool:
    """Return whether stdout is a pipe whose reader has exited."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    except (OSError, ValueError):  # stdout is not a file, or is closed
        return False


def start_process(config_name: str, schema: type) -> None:
    """Prepare the process of a rank for the command `config_name`, whose configuration is the dataclass `schema`. From
    now on it ends when torchrun ends, and at once after a signal to stop: before the first step nothing is to be saved.

    torchrun restarts its workers after any exit code. If this process may be such a restart, and `run_status.json` says
    that an earlier attempt ended with an error that a restart cannot fix, it ends at once with the same exit code.
    """
    signal.signal(signal.SIGTERM, lambda *_: os._exit(ExitCode.STOPPED))
    signal.signal(signal.SIGINT, lambda *_: os._exit(ExitCode.INTERRUPTED))
    # these request a checkpoint and stack traces during training; before it, they would end the process
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    leave_noise_out()
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    end_with(os.getppid())
    if attempt() == 0 and is_one_node():  # with several nodes, this count does not tell whether it is a restart
        return
    with contextlib.suppress(ConfigError, OmegaConfBaseException):  # `run` reports these errors
        node = compose(config_name, schema)
        status = final_status(Path(str(node["output_dir"]))) if node is not None else None
        if status is not None:
            os._exit(status["exit_code"])


def run(config_name: str, schema: type[T], task: Callable[[T], object], on_exit: WriteStatus = no_status) -> None:
    """Run a command: read its configuration from YAML files and the command line, call `task` with it, and end the
    process with the exit code of the outcome.

    After a failure the process ends at once, without waiting for process groups: other ranks may not respond anymore.

    Args:
        config_name: the command, which is also the name of its top-level YAML file.
        schema: dataclass with the keys of its configuration.
        on_exit: called as soon as the outcome is known. If it returns the status of a rank that failed earlier, this
            rank does not report its own error.
    """
    setup_logging()
    folder, is_training = typed_output_dir(), on_exit is not no_status  # only trainings record how they ended
    on_every_rank, ends_torchrun, is_private = False, False, None
    node = None
    try:
        with until_reader_leaves():
            node = compose(config_name, schema)
        if node is None:  # Hydra has answered --help, --cfg job and the like, or their reader has left
            return
        folder = None if node.get("dry_run") is not None else Path(str(node.get("output_dir", ".")))
        # a training that ends because the reader of stdout has exited must not count as done
        with contextlib.nullcontext() if is_training and folder is not None else until_reader_leaves():
            config = load(schema, node)
            is_private = bool(node.get("private", True))
            task(config)
        outcome, message = Outcome(ENDINGS["done"]), ""
    except LlavaFsdpError as error:
        outcome = Outcome(ENDINGS[error.ending], str(error), error.culprit)
        message, on_every_rank = f"{type(error).__name__}: {error}", error.on_every_rank
        # another rank was asked to stop: torchrun on this machine may not know of it
        ends_torchrun = isinstance(error, Stopped) and not error.asked_here
        if not error.may_be_recorded:  # output_dir may belong to another run
            folder = None
            # nothing is written for a restarted worker to read, so it would start again in the folder that is there now
            ends_torchrun |= isinstance(error, FolderLost)
    except KeyboardInterrupt:
        outcome, message = Outcome(ENDINGS["interrupted"], "interrupted"), "interrupted"
    except BaseException as error:
        outcome, message = Outcome(ENDINGS["bug"], f"{type(error).__name__}: {error}"), traceback.format_exc()
    silent = on_every_rank and is_later_rank()
    if silent:
        time.sleep(PATIENCE_SECONDS)  # rank 0 reports the error, writes the status, and ends first
    # without a valid configuration (`is_private` is None), it is not known who may read the folder
    if folder is not None and is_training and not is_later_rank() and is_private is not None:
        make_folder_of_status(folder, outcome, is_private)
    if folder is not None and is_later_rank() and not is_one_node():
        await_folder(folder)  # through this folder, rank 0 on another machine learns why this rank has ended
    if folder is not None and (beat := read_beat(folder, env_rank())) is not None and beat.pid == os.getpid():
        outcome = replace(outcome, step=beat.step)
    end_process(folder, outcome, message, silent, ends_torchrun, on_exit)


def end_process(
    folder: Path | None, outcome: Outcome, message: str, silent: bool, ends_torchrun: bool, on_exit: WriteStatus
) -> None:
    """Record and print how this rank ended, and end the process with the exit code; return if nothing failed.

    Args:
        folder: the run's output folder; None: nothing is recorded.
        message: the error for the user; empty if nothing failed.
        silent: whether rank 0 prints the message of this failure, because every rank has it.
        ends_torchrun: whether to end torchrun on this machine in any case.
        on_exit: records the outcome in the folder; returns the status of a rank that failed earlier, or None.
    """
    earlier = write_outcome(folder, outcome, on_exit)  # the status of a rank that failed earlier, if there is one
    code = outcome.ending.exit_code
    if code == ExitCode.DONE:
        return
    is_training = on_exit is not no_status
    has_folder = is_training and folder is not None and not is_absent(folder)
    # `earlier` would be the status of rank 0 if rank 0 had met this error, too; if not, this rank must report it
    if earlier is None and (has_folder or not silent):
        log().log(logging.INFO if code == ExitCode.STOPPED else logging.ERROR, message)
        write_torchrun_error(message)
    elif not silent:  # another rank failed first, and must end first: torchrun reports the first to end as the cause
        time.sleep(PATIENCE_SECONDS)
        code = earlier["exit_code"] if earlier is not None else code
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
        sys.stderr.flush()
    ending = outcome.ending if earlier is None else ENDINGS.get(earlier["class"], outcome.ending)
    # the failure is in the folder's status, or rank 0 is here to report it: only then may the agent end
    is_reported = has_folder or (is_training and not is_later_rank())
    report = {"reason": message.partition("\n")[0], "code": int(code)} if earlier is None else None
    stop_restarts(ends_torchrun, is_reported and ending.is_permanent and not ending.is_stop, report)
    os._exit(code)


def make_folder_of_status(folder: Path, outcome: Outcome, is_private: bool) -> None:
    """Create the run's output folder, so that an error from before the run has created it is recorded there. Otherwise
    restarted ranks would meet the same error again. Where `output_dir` itself is the mistake, nothing is created."""
    ending = outcome.ending
    is_mistake = ending.is_permanent and not ending.is_stop and ending.exit_code != ExitCode.DONE
    if is_mistake and not outcome.reason.startswith("output_dir="):
        with contextlib.suppress(OSError):
            make_run_folder(folder, is_private)


def await_folder(folder: Path) -> None:
    """Wait up to `FOLDER_SECONDS` for rank 0 to create the run's folder, in which this rank records its failure."""
    until = time.monotonic() + FOLDER_SECONDS
    while is_absent(folder) and time.monotonic() < until:
        time.sleep(0.2)


def stop_restarts(ends_torchrun: bool, is_permanent: bool, report: dict[str, Any] | None) -> None:
    """End what would restart this rank although a restart cannot help: torchrun or, with `llava-fsdp train`, this
    package's version of torchrun's agent (train/launch/agent.py).

    Args:
        ends_torchrun: whether to end torchrun on this machine in any case. It is not ended in a run on one machine.
        is_permanent: whether the failure would happen again; if so, the agent is ended.
        report: reason and exit code, which `llava-fsdp train` prints if no status could be written; None if another
            rank has failed.
    """
    if ends_torchrun or (is_permanent and is_later_rank()):
        time.sleep(PATIENCE_SECONDS)  # the other ranks of this machine report the error and end first
    if ends_torchrun:
        end_torchrun()
    # on several machines, `end_torchrun` has ended the agent already, because the agent is their torchrun
    if is_permanent and (is_one_node() or not ends_torchrun):
        end_agent(report)


def write_outcome(folder: Path | None, outcome: Outcome, on_exit: WriteStatus) -> dict[str, Any] | None:
    """Record how this rank ended by a call of `on_exit`, and return its result: the status of a rank that failed
    earlier, or None. Errors are logged and not raised. Nothing is called without a folder, or if a run that was
    launched separately has locked it."""
    if folder is not None and not is_locked_by_other_launch(folder):
        with log_write_errors(folder):
            return on_exit(folder, outcome)
    return None


def is_later_rank() -> bool:
    """Return whether this process is another rank than rank 0."""
    return env_rank() != 0


def typed_output_dir() -> Path | None:
    """Return the folder that the command line names by `output_dir=`, where an error can be recorded even if the
    configuration cannot be read; None without this argument, or for a dry run, which records nothing."""
    if any(a.startswith("dry_run=") for a in sys.argv[1:]):
        return None
    folders = [a.partition("=")[2] for a in sys.argv[1:] if a.startswith("output_dir=")]
    return Path(folders[-1]) if folders else None


def write_torchrun_error(message: str) -> None:
    """Write an error message into the file from which torchrun prints the root cause of a failure. torch's own
    decorator `@record` adds a traceback even to the message about a user's mistake."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        message = shown_text(redact(message, secrets_of()))
        info = {"py_callstack": message, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError), open(path, "w") as file:
            json.dump({"message": {"message": message, "extraInfo": info}}, file)


def compose(config_name: str, schema: type) -> DictConfig | None:
    """Build a command's configuration from YAML files and `sys.argv` with Hydra; None if only help or the configuration
    was printed. `sys.argv` is replaced by the words in the form that Hydra takes.

    Args:
        config_name: the command.
        schema: dataclass with the keys of its configuration.

    Raises:
        ConfigError: a key or choice does not exist (Hydra's message, shortened, with the nearest key that exists), or a
            multirun was requested, which cannot work under torchrun.
    """
    refuse_multirun(config_name)
    check_command_line(sys.argv[1:], LITERAL)
    words = name_folder(sys.argv[1:], PATH_KEYS.get(config_name))  # `chat FOLDER` -> `model.checkpoint=FOLDER`
    if (group := asked_help(words)) is not None:
        words = [word for word in words if "=" in word and not word.startswith("-")]
    words = checked_words(words, config_name, schema)
    if group is not None:
        if not is_later_rank():
            print(render_help(config_name, schema, words, group))
        return None
    sys.argv[1:] = words
    if any(word.startswith("-") or "hydra" in word.partition("=")[0] for word in words):
        return compose_with_flags(config_name, schema)
    return compose_words(words, config_name, schema)


def checked_words(words: list[str], config_name: str, schema: type) -> list[str]:
    """Check words of the form `key=value`, and return them as Hydra takes them, with `model=own` added if they name a
    model of the user's. Raises ConfigError if a word has no key, or a key or a choice does not exist."""
    refuse_bare_words(words, config_name)
    refuse_unknown(words, schema)
    if "optim" in schema_keys(schema):  # for commands that have the keys of a training
        words = with_own_model(words)
    return [taken_literally(word) for word in words]


def compose_words(words: list[str], config_name: str, schema: type) -> DictConfig:
    """Build a command's configuration with Hydra from YAML files and words `key=value` that `checked_words` has
    returned. Raises ConfigError with Hydra's message, shortened."""
    try:
        with initialize_config_dir(str(config_dir()), version_base="1.3"):
            return hydra.compose(config_name, words)
    except HydraException as error:
        raise ConfigError(shorten(str(error), schema)) from None


def configure(words: list[str], config_name: str, schema: type[T]) -> T:
    """Return a command's configuration from words of the form `key=value`, with the same checks and errors as from a
    command line. Raises ConfigError if a key, a choice or a value is wrong, or a word is one of Hydra's flags."""
    for word in words:
        if word.startswith("-") or "hydra" in word.partition("=")[0]:
            raise ConfigError(f"{word} is a flag of the command line; give keys of the configuration, as key=value")
    check_command_line(words, LITERAL)
    return load(schema, compose_words(checked_words(words, config_name, schema), config_name, schema))


def compose_with_flags(config_name: str, schema: type) -> DictConfig | None:
    """Build a command's configuration from YAML files and `sys.argv` by Hydra's own program (`hydra.main`), which
    supports Hydra's flags such as `--cfg job` but takes longer than `compose_words`. None if a flag only prints."""
    composed: list[DictConfig] = []

    def body(node: DictConfig) -> None:
        assert HydraConfig.get().mode == RunMode.RUN
        composed.append(node)

    stderr = io.StringIO()
    program = hydra.main(version_base="1.3", config_path=str(config_dir()), config_name=config_name)(body)
    try:
        with contextlib.redirect_stderr(stderr), contextlib.ExitStack() as stack:
            if is_later_rank():
                stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            program()
    except SystemExit as stop:
        if stop.code not in (0, None):
            if reader_has_left():  # stdout is a closed pipe, as behind `| head`: no error of the user
                return None
            raise ConfigError(shorten(stderr.getvalue(), schema)) from None
    return composed[0] if composed else None


def name_folder(arguments: list[str], key: str | None) -> list[str]:
    """Return arguments with `key=` put in front of the first one if it is a bare path, as in `llava-fsdp chat FOLDER`.
    What looks like an override of Hydra (`KEY=VALUE`) is a path only if it exists. With key=None nothing changes."""
    if key is None or not arguments or arguments[0].startswith(("-", "~")):  # options; `~KEY` deletes a key in Hydra
        return arguments
    name, equals, _ = arguments[0].partition("=")
    if equals and re.fullmatch(r"\+{0,2}[\w.@]+", name) and not os.path.exists(arguments[0]):
        return arguments
    return [f"{key}={arguments[0]}", *arguments[1:]]


def with_own_model(arguments: list[str]) -> list[str]:
    """Return arguments with `model=own` (settings for a model that the user names) appended if they set model.language,
    model.vision or model.checkpoint, but not `model=`. Otherwise the default `model=tiny` would apply, whose learning
    rate is for two million parameters. Raise ConfigError if only model.vision of these keys is set."""
    given = {word.partition("=")[0].lstrip("+"): word.partition("=")[2] for word in arguments if "=" in word}
    # `package:NAME` is a model in this package, and not the user's
    named = {key for key in BACKBONES if given.get(key, "null") != "null" and not given[key].startswith("package:")}
    if not named or "model" in given:
        return arguments
    if named == {"model.vision"}:
        raise ConfigError(
            f"model.vision={given['model.vision']} is named without a language model: name model.language=DIR too, or "
            "choose the other parts by model="
        )
    # model=own has no default for model.language, which a checkpoint contains
    checkpoint = [f"model.language={given['model.checkpoint']}"] if "model.language" not in given else []
    return [*arguments, "model=own", *checkpoint]


def refuse_unknown(arguments: list[str], schema: type) -> None:
    """Raise ConfigError for an unknown key or choice of a config group (`group=choice`), with the nearest known one.
    Hydra would find it seconds later. With `--config-dir` only Hydra checks, as the choices are not known here."""
    if any(word.startswith("--config-dir") or word == "-cd" for word in arguments):
        return
    keys = schema_keys(schema)
    flag = ""  # the word before, which may be a flag that takes the present word as its value
    for word in arguments:
        name, equals, value = word.partition("=")
        if word.startswith("--") and flag not in WITH_VALUES and (here := called_here(name, keys)):
            raise ConfigError(f"{name} is not a flag; {here}, and keys are written key=value")
        is_plain = equals and re.fullmatch(r"\w+(\.\w+)*", name) and flag not in WITH_VALUES
        flag = word
        # the user chooses the names of data sources (SOURCES), so that Hydra's result must be checked
        if not is_plain or name.startswith("hydra.") or name.startswith(SOURCES):
            continue
        folder = config_dir() / name
        if "." not in name and folder.is_dir():
            choices = sorted(path.stem for path in folder.glob("*.yaml"))
            if value not in choices and not value.startswith(("[", "${")) and "," not in value:
                raise ConfigError(f"{word}: choose one of {', '.join(choices)}{nearest(value, choices)}")
        elif name not in keys:
            raise ConfigError(f"{name} is not a key of the configuration{did_you_mean(name, keys)}")


def taken_literally(argument: str) -> str:
    """Return an argument `key=value` in the form in which Hydra takes its value literally: quoted, if values of this
    key are texts or paths. A key of a data source, which the user names, gets Hydra's `++`, which allows new keys."""
    key, equals, value = argument.partition("=")
    if key.startswith(SOURCES):  # the user chose the source's name, and Hydra adds a new key only with ++
        name, literal = f"++{key}", key.endswith((".path", ".images"))
        return f"{name}={quoted(value)}" if equals and literal and value[:1] not in ("'", '"') else f"{name}={value}"
    if not equals or key not in LITERAL or value == "null" or value[:1] in ("'", '"'):
        return argument
    return f"{key}={quoted(value)}"


def quoted(text: str) -> str:
    """Quote a text, which may contain any characters, for Hydra's command-line grammar, if it needs quotes."""
    if re.fullmatch(r"[\w/.:-]*", text, re.ASCII):
        return text
    # a quote is escaped by a backslash, and backslashes before it are doubled
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", text)
    return f"'{escaped}'"


def refuse_multirun(config_name: str) -> None:
    """Raise ConfigError, with the command to use instead, if the command line asks for Hydra's multirun."""
    flags = ("-m", "--multirun", "hydra.mode=MULTIRUN")
    if set(flags) & set(sys.argv[1:]):
        raise ConfigError(
            f"{config_name} cannot run several jobs in one process group; "
            f"use: llava-fsdp sweep -m {' '.join(a for a in sys.argv[1:] if a not in flags)}"
        )


def refuse_bare_words(arguments: list[str], config_name: str) -> None:
    """Raise ConfigError for an argument without `key=`. Hydra's own message would speak of quotes instead."""
    flag = ""  # the word before, which may be a flag that takes the present word as its value
    for word in arguments:
        if not word.startswith(("-", "~")) and "=" not in word and flag not in WITH_VALUES:
            key = PATH_KEYS.get(config_name, "output_dir")
            hint = f"did you mean {key}={word}?" if os.path.exists(word) else f"as in {key}=outputs/mine"
            raise ConfigError(f"{word} has no key; arguments are written key=value, {hint}")
        flag = word


def shorten(message: str, schema: type) -> str:
    """Return an error message of Hydra without search path and advice; with the nearest key if a key is unknown."""
    text = re.split(r"\n\s*(?:Config search path|Set the environment variable|To append to your config)", message)[0]
    text = re.sub(r"\n\s*(?:full_key|object_type)\b.*", "", text).strip()
    if "Traceback" in text:  # for some mistakes Hydra prints its own stack trace; the message is its last line
        text = text.splitlines()[-1]
    key = re.search(r"Could not override '([^']+)'", text)
    if key:
        return f"{key[1]} is not a key of the configuration{did_you_mean(key[1], schema_keys(schema))}"
    if "advanced/override_grammar" in text or "LexerNoViableAlt" in text:
        word = next(filter(is_unreadable, sys.argv[1:]), "")
        where = f"{word}: " if word else ""
        return f"{where}{text.splitlines()[0]}; put quotes around a value with such characters: 'key=\"...\"'"
    return text


def is_unreadable(argument: str) -> bool:
    """Return whether an argument that is not a flag cannot be parsed by Hydra's grammar for `key=value`."""
    try:
        OverridesParser.create().parse_overrides([argument])
    except HydraException:
        return not argument.startswith("-")
    return False
