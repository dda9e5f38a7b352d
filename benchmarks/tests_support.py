"""Lets a benchmark import tests/support, and imports torchvision; imported before everything that imports
transformers."""

import sys

from provenance import REPOSITORY

sys.path.append(str(REPOSITORY / "tests" / "support"))
import torchvision_on_cpu  # noqa: F401
