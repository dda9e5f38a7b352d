"""Limit the time that Python code from a model's folder, such as a compiled Jinja template, may take."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def time_limit(seconds: float, error: Exception) -> Iterator[None]:
    """Context manager that raises `error` if the `with` block runs for more than `seconds`. It works in every thread.
    It traces each line, which makes the code several times slower, and does not interrupt a single call of a C
    function."""
    end = time.monotonic() + seconds

    def trace(frame: Any, event: str, arg: Any) -> Any:
        if time.monotonic() > end:
            raise error
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
