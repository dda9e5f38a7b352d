"""Train LLaVA-style vision-language models with PyTorch FSDP2. Importing this package does nothing."""

__version__ = "0.2.0"
