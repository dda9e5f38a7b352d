"""Names of the parameters of adapters, and of adapted modules."""

ADAPTER = "default"
"""peft's name of the single adapter of a model."""
BASE = ".base_layer."
"""What peft inserts between an adapted module's name and the names of its own parameters."""
LORA_A, LORA_B = f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight"
MAGNITUDE = f".lora_magnitude_vector.{ADAPTER}.weight"
"""DoRA's magnitudes: the norms of a weight's rows."""
ENDINGS = (LORA_A, LORA_B, MAGNITUDE)
"""Endings of the names of an adapter's parameters."""


def is_adapter(name: str) -> bool:
    """Whether a parameter's name is that of an adapter's parameter."""
    return name.endswith(ENDINGS)


def without_base(name: str) -> str:
    """Name of an adapted module's own parameter in a model without adapters."""
    return name.replace(BASE, ".")


def module_of(name: str) -> str:
    """Name of the adapted module of an adapter's parameter."""
    return next(name.removesuffix(end) for end in ENDINGS if name.endswith(end))
