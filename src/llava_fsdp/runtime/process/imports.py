"""Import large modules faster, and explain packages that are installed but cannot be imported."""

import gc
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from llava_fsdp.runtime.errors import ConfigError


@contextmanager
def importing() -> Iterator[None]:
    """Context manager for the import of torch, transformers and what needs them, without garbage collection.

    Importing creates a million objects that stay. Searching them for garbage again and again takes a fifth of the time.
    Afterwards they are frozen, so that later collections leave them out. Does nothing if torch is imported already.

    Raises:
        ConfigError: an installed package cannot be imported.
    """
    if "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    except ImportError as error:
        if (explained := broken_package(error)) is not None:
            raise explained from error
        raise
    finally:
        gc.freeze()
        gc.enable()


def broken_package(error: ImportError) -> ConfigError | None:
    """Return a ConfigError that names the package which cannot be imported; None if a module of this project raised
    `error`."""
    while isinstance(error.__cause__, ImportError):  # transformers raises errors of its own from the first one
        error = error.__cause__
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    package = next((name.partition(".")[0] for name in reversed(modules) if not name.startswith("importlib")), "")
    if package in ("", "__main__", "llava_fsdp"):
        return None
    return ConfigError(
        f"the package {package} is installed and cannot be imported: {error}; install it again (python -m pip install "
        f"--force-reinstall --no-deps {package}), or remove it if no key of the configuration needs it"
    )
