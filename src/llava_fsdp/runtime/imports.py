"""Import large modules faster."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Context manager for the import of torch, transformers and what needs them: garbage is not collected meanwhile.

    Importing creates a million objects that stay, and Python would search them for garbage again and again: a fifth of
    the seconds that importing takes. Afterwards they are frozen, so that later collections leave them out. Nothing
    happens if torch is imported already.
    """
    if "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
