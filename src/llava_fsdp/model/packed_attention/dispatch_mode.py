"""A base for dispatch modes under which torch.compile works."""

from torch.utils._python_dispatch import TorchDispatchMode


class CompilingMode(TorchDispatchMode):
    """Dispatch mode under which functions of torch.compile are compiled and run. Under a `TorchDispatchMode` that does
    not declare this, torch runs them uncompiled and says nothing (torch/_dynamo/convert_frame.py)."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True
