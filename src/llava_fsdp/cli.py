"""From the command line to a typed configuration, and from an error to an exit code. Imports no torch."""

import contextlib
import io
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from typing import TypeVar

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from llava_fsdp.config import config_dir, did_you_mean, load, schema_keys
from llava_fsdp.errors import ConfigError, ExitCode, LlavaFsdpError
from llava_fsdp.log import log, setup_logging

T = TypeVar("T")
NOTHING: Callable[..., None] = lambda config, code, reason: None  # noqa: E731


def run(
    config_name: str,
    schema: type[T],
    task: Callable[[T], object],
    on_exit: Callable[[T, ExitCode, str], None] = NOTHING,
) -> None:
    """Compose `config_name`, hand it to `task` as a `schema`, and end the process with the exit code of the outcome.

    `on_exit(config, code, reason)` is called once a configuration exists, whatever then happens. After a failure the
    process ends at once, without waiting for process groups: a peer may never answer again.
    """
    setup_logging()
    config = None
    try:
        node = compose(config_name, schema)
        if node is None:  # --help, --cfg job and the like: Hydra has answered
            return
        config = load(schema, node)
        task(config)
        code, reason = ExitCode.DONE, ""
    except LlavaFsdpError as error:
        code, reason = error.exit_code, str(error)
        tell_torchrun(f"{type(error).__name__}: {error}")
        say_once(f"{type(error).__name__}: {error}", error.on_every_rank)
    except KeyboardInterrupt:
        code, reason = ExitCode.BUG, "interrupted"
        log().error("interrupted")
    except BaseException as error:
        code, reason = ExitCode.BUG, f"{type(error).__name__}: {error}"
        tell_torchrun(traceback.format_exc())
        traceback.print_exc()
    if config is not None:
        on_exit(config, code, reason)
    if code != ExitCode.DONE:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def tell_torchrun(what: str) -> None:
    """Write the error file from which torchrun prints the root cause.

    torch's own `@record` would put a traceback around a user's mistake.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        info = {"py_callstack": what, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError), open(path, "w") as file:
            json.dump({"message": {"message": what, "extraInfo": info}}, file)


def say_once(message: str, on_every_rank: bool) -> None:
    """Print an error; where every rank has it alike, on rank 0 alone.

    The other ranks then wait a moment: torchrun ends all ranks as soon as one has failed, and rank 0 must have spoken.
    """
    if on_every_rank and int(os.environ.get("RANK", "0")) != 0:
        time.sleep(2)
    else:
        log().error(message)


def compose(config_name: str, schema: type) -> DictConfig | None:
    """What Hydra makes of the command line; None where it was only asked for help or to show the configuration.

    Raises:
        ConfigError: Hydra's own words for a wrong key or choice, shortened, with the nearest key that exists; or
            a multirun, which cannot work under torchrun.
    """
    quiet = int(os.environ.get("RANK", "0")) != 0
    composed: list[DictConfig] = []

    def body(node: DictConfig) -> None:
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            raise ConfigError("multirun")
        composed.append(node)

    refuse_multirun(config_name)
    said = io.StringIO()
    program = hydra.main(version_base="1.3", config_path=str(config_dir()), config_name=config_name)(body)
    try:
        with contextlib.redirect_stderr(said), contextlib.ExitStack() as stack:
            if quiet:
                stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            program()
    except SystemExit as stop:
        if stop.code not in (0, None):
            raise ConfigError(shorten(said.getvalue(), schema)) from None
        raise
    return composed[0] if composed else None


def refuse_multirun(config_name: str) -> None:
    if {"-m", "--multirun"} & set(sys.argv[1:]):
        raise ConfigError(
            f"{config_name} cannot run several jobs in one process group; "
            f"use: python -m llava_fsdp.sweep -m {' '.join(a for a in sys.argv[1:] if a not in ('-m', '--multirun'))}"
        )


def shorten(said: str, schema: type) -> str:
    """Hydra's message without its search path, stack trace advice and advice to add keys with `+`."""
    text = re.split(r"\n\s*(?:Config search path|Set the environment variable|To append to your config)", said)[0]
    text = re.sub(r"\n\s*(?:full_key|object_type)\b.*", "", text).strip()
    if "Traceback" in text:  # Hydra shows its own stack for some mistakes; the last line says which
        text = text.splitlines()[-1]
    key = re.search(r"Could not override '([^']+)'", text)
    if key:
        return f"{key[1]} is not a key of the configuration{did_you_mean(key[1], schema_keys(schema))}"
    return text
