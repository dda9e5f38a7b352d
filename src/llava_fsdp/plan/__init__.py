"""Predict memory and time of a training. The package can be called: see `plan` in python_entry.py."""

import sys


class CallablePackage(type(sys)):
    """A package that can be called, as `llava_fsdp.plan(cfg)`: Python puts a package in the place of a function of its
    name."""

    def __call__(self, *given: object, **named: object) -> object:
        from llava_fsdp.plan import python_entry

        return python_entry.plan(*given, **named)  # pyright: ignore[reportArgumentType]


sys.modules[__name__].__class__ = CallablePackage
