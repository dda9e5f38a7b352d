"""Packages that can be called: Python puts a package in the place of a function of its name."""

import sys


class CallablePackage(type(sys)):
    """A package that can be called, as `llava_fsdp.train(cfg)`. Its `python_entry.py` has a function of its name.

    A package takes this class by `sys.modules[__name__].__class__ = CallablePackage`. The function is imported only
    when it is called.
    """

    def __call__(self, *given: object, **named: object) -> object:
        """Import this package's module `python_entry`, and call the function in it that has the package's name."""
        import importlib

        entry = importlib.import_module(f"{self.__name__}.python_entry")
        return getattr(entry, self.__name__.rpartition(".")[2])(*given, **named)
