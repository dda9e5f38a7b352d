"""Import large modules faster, and explain packages that are installed but cannot be imported."""

import gc
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version

from llava_fsdp.runtime.errors import ConfigError

BUILT_WITH_TORCH = ("torchvision", "torchaudio")
"""Packages with a build for each build of torch (CPU, CUDA). The Python package index has one of them."""


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
        if (explanation := broken_package(error)) is not None:
            raise explanation from error
        raise
    finally:
        gc.freeze()
        gc.enable()


def broken_package(error: ImportError) -> ConfigError | None:
    """Return a ConfigError that names the installed package because of which an import failed with `error`; None if the
    cause is in this package itself or in the main program."""
    first_error: BaseException = error
    while isinstance(first_error.__cause__, Exception):  # transformers raises errors of its own from the first one
        first_error = first_error.__cause__
    frames = [frame for frame, _ in traceback.walk_tb(first_error.__traceback__)]
    # another error may come from a function that the broken module has called: only modules being imported count
    if not isinstance(first_error, ImportError):
        frames = [frame for frame in frames if frame.f_code.co_name == "<module>"]
    modules = [frame.f_globals.get("__name__", "") for frame in frames]
    package = next((name.partition(".")[0] for name in reversed(modules) if not name.startswith("importlib")), "")
    if package in ("", "__main__", "llava_fsdp"):
        return None
    return ConfigError(
        f"the package {package} is installed and cannot be imported: {first_error}; install it again (python -m pip "
        f"install --force-reinstall --no-deps {package}), or remove it if no key of the configuration needs it"
        + build_of(package)
    )


def build_of(package: str) -> str:
    """Return the end of an error message, where to find a package's build for this torch; empty if it has one build."""
    if package not in BUILT_WITH_TORCH:
        return ""
    return (
        f". Its build must be that of torch, which is {version('torch')} here: add the --index-url of the command in "
        f'"Get started" on pytorch.org'
    )
