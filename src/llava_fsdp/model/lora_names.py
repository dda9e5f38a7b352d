"""Names of the weights of adapters, and of what they adapt."""

ADAPTER = "default"
"""peft's name for the one adapter that a model has here."""
BASE = ".base_layer."
"""What peft puts between an adapted module's name and its own parameters'."""
LORA_A, LORA_B = f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight"
MAGNITUDE = f".lora_magnitude_vector.{ADAPTER}.weight"
"""DoRA's lengths of a weight's rows."""
OWN = (LORA_A, LORA_B, MAGNITUDE)
"""How the names of an adapter's parameters end."""


def is_adapter(name: str) -> bool:
    """Whether a parameter, by name, is an adapter's own."""
    return name.endswith(OWN)


def without_base(name: str) -> str:
    """The name that an adapted module's own parameter has in a model without adapters."""
    return name.replace(BASE, ".")


def module_of(name: str) -> str:
    """The adapted module of an adapter's parameter."""
    return next(name.removesuffix(end) for end in OWN if name.endswith(end))
