"""Run a training. The package can be called: see `train` in python_entry.py."""

import sys


class CallablePackage(type(sys)):
    """A package that can be called, as `llava_fsdp.train(cfg)`: Python puts a package in the place of a function of its
    name."""

    def __call__(self, *given: object, **named: object) -> object:
        from llava_fsdp.train import python_entry

        return python_entry.train(*given, **named)  # pyright: ignore[reportArgumentType]


sys.modules[__name__].__class__ = CallablePackage
