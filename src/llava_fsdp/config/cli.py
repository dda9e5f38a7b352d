"""From the command line to a typed configuration, and from an error to an exit code. Imports no torch."""

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
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from llava_fsdp.config import SOURCES, config_dir, did_you_mean, load, schema_keys
from llava_fsdp.config.hydra_guard import FLAGS, check_command_line
from llava_fsdp.runtime.errors import ENDINGS, ConfigError, ExitCode, FolderLost, LlavaFsdpError, Stopped
from llava_fsdp.runtime.heartbeat import read_beat
from llava_fsdp.runtime.launch import attempt, env_rank, is_one_node
from llava_fsdp.runtime.log import leave_noise_out, log, setup_logging
from llava_fsdp.runtime.process_end import end_torchrun, end_with
from llava_fsdp.runtime.redact import redact, secrets_of
from llava_fsdp.runtime.run_dir import is_others
from llava_fsdp.runtime.status_file import PATIENCE, Outcome, is_absent, last_word, settled
from llava_fsdp.runtime.terminal_text import shown_text

T = TypeVar("T")
# Keys whose values are text or paths: taken as they are typed, without Hydra's grammar for lists and functions.
LITERAL = frozenset({
    "question", "image", "output_dir", "checkpoint.resume", "data.path", "data.images", "data.root",
    "data.index", "report", "model.language", "model.vision", "model.checkpoint", "model.projector", "source", "to",
    "language", "vision", "offload.folder", "questions", "annotations", "answers", "submission",
    "val.path", "val.images", "val.index",
    "track.name", "track.project",
})  # fmt: skip
PLACE_OF = {"chat": "model.checkpoint", "evaluate": "model.checkpoint", "export": "source"}
"""The key that a path alone is most likely meant for, by program; of the others it is output_dir."""
WITH_VALUES = frozenset({
    *FLAGS, "--config-name", "-cn", "--cfg", "-c", "--package", "-p", "--info", "-i", "--experimental-rerun",
})  # fmt: skip
"""Hydra's flags whose value may be the next word."""
Status = Callable[[Path, Outcome], dict[str, Any] | None]


def no_status(folder: Path, outcome: Outcome) -> None:
    """For entries that leave no `run_status.json`."""


@contextlib.contextmanager
def until_reader_leaves() -> Iterator[None]:
    """Ends what is done within it, quietly, once nobody reads what it prints: `| head` has read enough."""
    try:
        yield
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit) as error:
        is_exit = isinstance(error, SystemExit)
        # rich has looked itself, and exits; a BrokenPipeError may be another pipe's
        if not (isinstance(error.__context__, BrokenPipeError) if is_exit else reader_has_left()):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is in the buffer is written at exit


def reader_has_left() -> bool:
    try:
        asked = select.poll()
        asked.register(sys.stdout.fileno(), 0)
        return any(event & select.POLLERR for _, event in asked.poll(0))
    except (OSError, ValueError):  # not a file
        return False


def begin(config_name: str, schema: type) -> None:
    """What a training does before anything else: end with torchrun, and not start again where that cannot help.

    torchrun restarts its workers whatever they ended with; these end at once with the code of those before them, and
    say nothing. Signals that come while libraries are loaded end the process as later ones do before the first step;
    there is nothing to save yet, and nothing to look at.
    """
    signal.signal(signal.SIGTERM, lambda *_: os._exit(ExitCode.STOPPED))
    signal.signal(signal.SIGINT, lambda *_: os._exit(ExitCode.INTERRUPTED))
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    leave_noise_out()
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    end_with(os.getppid())
    if attempt() == 0 and is_one_node():
        return
    with contextlib.suppress(ConfigError, OmegaConfBaseException):  # said later, as in a first start
        node = compose(config_name, schema)
        said = settled(Path(str(node["output_dir"]))) if node is not None else None
        if said is not None:
            os._exit(said["exit_code"])


def run(config_name: str, schema: type[T], task: Callable[[T], object], on_exit: Status = no_status) -> None:
    """Compose `config_name`, hand it to `task` as a `schema`, and end the process with the exit code of the outcome.

    `on_exit(output_dir, outcome)` is called as soon as the outcome is known; where another rank failed before, it
    returns what that rank said, and this one adds nothing. After a failure the process ends at once, without waiting
    for process groups: a peer may never answer again.
    """
    setup_logging()
    folder = typed_output_dir()
    everywhere, ends_torchrun = False, False
    try:
        with until_reader_leaves():
            node = compose(config_name, schema)
        if node is None:  # --help, --cfg job and the like: Hydra has answered
            return
        folder = None if node.get("dry_run") is not None else Path(str(node.get("output_dir", ".")))
        # a training that ends because its reader has left must not count as done
        is_training = on_exit is not no_status and folder is not None
        with contextlib.nullcontext() if is_training else until_reader_leaves():
            task(load(schema, node))
        outcome, said = Outcome(ENDINGS["done"]), ""
    except LlavaFsdpError as error:
        outcome = Outcome(ENDINGS[error.ending], str(error), error.culprit)
        said, everywhere = f"{type(error).__name__}: {error}", error.on_every_rank
        ends_torchrun = isinstance(error, Stopped) and not error.asked_here
        if not error.leaves_word:
            folder = None
            # restarts could not know why this one ended, and would begin in whatever is there now
            ends_torchrun |= isinstance(error, FolderLost)
    except KeyboardInterrupt:
        outcome, said = Outcome(ENDINGS["interrupted"], "interrupted"), "interrupted"
    except BaseException as error:
        outcome, said = Outcome(ENDINGS["bug"], f"{type(error).__name__}: {error}"), traceback.format_exc()
    silent = everywhere and is_later_rank()
    if silent:
        time.sleep(PATIENCE)  # rank 0 says it, writes it, and ends first
    if folder is not None and (beat := read_beat(folder, env_rank())) is not None and beat.pid == os.getpid():
        outcome = replace(outcome, step=beat.step)
    first = leave_word(folder, outcome, on_exit)
    code = outcome.ending.exit_code
    if code == ExitCode.DONE:
        return
    # rank 0 did not meet the error after all, or later: this rank is the first then
    is_first = on_exit is not no_status and folder is not None and not is_absent(folder)
    if first is None and (is_first or not silent):
        log().log(logging.INFO if code == ExitCode.STOPPED else logging.ERROR, said)
        tell_torchrun(said)
    elif not silent:
        time.sleep(PATIENCE)
        code = first["exit_code"] if first is not None else code
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
        sys.stderr.flush()
    if ends_torchrun:
        time.sleep(PATIENCE)  # torchrun stops ranks as well to start them again with more machines
        end_torchrun()
    os._exit(code)


def leave_word(folder: Path | None, outcome: Outcome, on_exit: Status) -> dict[str, Any] | None:
    """What `on_exit` gives, unless there is no folder or another launch's run is in it. Raises nothing."""
    if folder is not None and not is_others(folder):
        with last_word(folder):
            return on_exit(folder, outcome)
    return None


def is_later_rank() -> bool:
    return env_rank() != 0


def typed_output_dir() -> Path | None:
    """The `output_dir` of the command line, for a run whose configuration does not compose; a dry run's stays alone."""
    if any(a.startswith("dry_run=") for a in sys.argv[1:]):
        return None
    given = [a.partition("=")[2] for a in sys.argv[1:] if a.startswith("output_dir=")]
    return Path(given[-1]) if given else None


def tell_torchrun(what: str) -> None:
    """Write the error file from which torchrun prints the root cause.

    torch's own `@record` would put a traceback around a user's mistake.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    what = shown_text(redact(what, secrets_of()))
    if path:
        info = {"py_callstack": what, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError), open(path, "w") as file:
            json.dump({"message": {"message": what, "extraInfo": info}}, file)


def compose(config_name: str, schema: type) -> DictConfig | None:
    """What Hydra makes of the command line; None where it was only asked for help or to show the configuration.

    Raises:
        ConfigError: Hydra's own words for a wrong key or choice, shortened, with the nearest key that exists; or
            a multirun, which cannot work under torchrun.
    """
    composed: list[DictConfig] = []

    def body(node: DictConfig) -> None:
        assert HydraConfig.get().mode == RunMode.RUN
        composed.append(node)

    refuse_multirun(config_name)
    check_command_line(sys.argv[1:])
    refuse_bare_words(sys.argv[1:], config_name)
    refuse_no_choice(sys.argv[1:])
    sys.argv[1:] = [taken_literally(argument) for argument in sys.argv[1:]]
    said = io.StringIO()
    program = hydra.main(version_base="1.3", config_path=str(config_dir()), config_name=config_name)(body)
    try:
        with contextlib.redirect_stderr(said), contextlib.ExitStack() as stack:
            if is_later_rank():
                stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            program()
    except SystemExit as stop:
        if stop.code not in (0, None):
            if reader_has_left():
                return None
            raise ConfigError(shorten(said.getvalue(), schema)) from None
    return composed[0] if composed else None


def taken_literally(argument: str) -> str:
    """`key=value` with the value quoted for Hydra, where the key holds text or a path and the user has not quoted."""
    key, equals, value = argument.partition("=")
    if key.startswith(SOURCES):  # a name that the user chooses is new to Hydra
        name, literal = f"++{key}", key.endswith((".path", ".images"))
        return f"{name}={quoted(value)}" if equals and literal and value[:1] not in ("'", '"') else f"{name}={value}"
    if not equals or key not in LITERAL or value == "null" or value[:1] in ("'", '"'):
        return argument
    return f"{key}={quoted(value)}"


def quoted(text: str) -> str:
    """A value as Hydra's override grammar takes it, whatever characters it has."""
    if re.fullmatch(r"[\w/.:-]*", text, re.ASCII):
        return text
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", text)
    return f"'{escaped}'"


def refuse_multirun(config_name: str) -> None:
    flags = ("-m", "--multirun", "hydra.mode=MULTIRUN")
    if set(flags) & set(sys.argv[1:]):
        raise ConfigError(
            f"{config_name} cannot run several jobs in one process group; "
            f"use: python -m llava_fsdp.sweep -m {' '.join(a for a in sys.argv[1:] if a not in flags)}"
        )


def refuse_bare_words(words: list[str], config_name: str) -> None:
    """Raises ConfigError for a value without its key: Hydra's own error speaks of quotes."""
    flag = ""
    for word in words:
        if not word.startswith(("-", "~")) and "=" not in word and flag not in WITH_VALUES:
            key = PLACE_OF.get(config_name, "output_dir")
            meant = f"did you mean {key}={word}?" if os.path.exists(word) else f"as in {key}=outputs/mine"
            raise ConfigError(f"{word} has no key; arguments are written key=value, {meant}")
        flag = word


def refuse_no_choice(arguments: list[str]) -> None:
    """Raises ConfigError for a group of which none is chosen: Hydra's own error does not name it."""
    for argument in arguments:
        key, _, value = argument.partition("=")
        if value == "null" and re.fullmatch(r"\w+", key) and (config_dir() / key).is_dir():
            choices = sorted(path.stem for path in (config_dir() / key).glob("*.yaml"))
            raise ConfigError(f"{argument}: one must be chosen of {', '.join(choices)}")


def shorten(said: str, schema: type) -> str:
    """Hydra's message without its search path, stack trace advice and advice to add keys with `+`."""
    text = re.split(r"\n\s*(?:Config search path|Set the environment variable|To append to your config)", said)[0]
    text = re.sub(r"\n\s*(?:full_key|object_type)\b.*", "", text).strip()
    if "Traceback" in text:  # Hydra shows its own stack for some mistakes; the last line says which
        text = text.splitlines()[-1]
    key = re.search(r"Could not override '([^']+)'", text)
    if key:
        return f"{key[1]} is not a key of the configuration{did_you_mean(key[1], schema_keys(schema))}"
    if "advanced/override_grammar" in text or "LexerNoViableAlt" in text:
        return f"{text.splitlines()[0]}; put quotes around a value with such characters: 'key=\"...\"'"
    return text
