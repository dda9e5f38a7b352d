import gc
import subprocess
import sys

from llava_fsdp.runtime.imports import importing

ALONE = """
import gc
from llava_fsdp.runtime.imports import importing
with importing():
    assert not gc.isenabled()
    import json
print(gc.isenabled(), gc.get_freeze_count() > 0)
"""


def test_no_garbage_is_collected_while_torch_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], check=True, stdout=subprocess.PIPE, text=True)
    assert done.stdout.split() == ["True", "True"]


def test_where_torch_is_imported_nothing_changes() -> None:
    """The tests import torch first; what a test leaves must not be kept for good."""
    frozen = gc.get_freeze_count()
    with importing():
        assert gc.isenabled()
    assert gc.get_freeze_count() == frozen
