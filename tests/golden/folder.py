"""Where the golden data lies: the cut that ships with the tests, or the fuller folder of LLAVA_FSDP_GOLDEN."""

import os
from pathlib import Path


def golden_folder() -> Path:
    return Path(os.environ.get("LLAVA_FSDP_GOLDEN") or Path(__file__).parent / "open")
