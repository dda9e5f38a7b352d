"""Lets whole models use a torchvision that is built for CUDA."""

import torchvision_on_cpu  # noqa: F401  (before transformers)
