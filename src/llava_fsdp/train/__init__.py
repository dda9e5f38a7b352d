"""Run a training. The package can be called: see `train` in python_entry.py."""

import sys

from llava_fsdp.runtime.callable_package import CallablePackage

sys.modules[__name__].__class__ = CallablePackage
