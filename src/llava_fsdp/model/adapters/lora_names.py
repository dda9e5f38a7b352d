"""Names of the parameters of LoRA adapters, and of the modules that have adapters."""

ADAPTER = "default"
"""Name under which peft stores the only adapter of a model."""
BASE = ".base_layer."
"""Text that peft inserts between the name of an adapted module and that of the module's own parameter."""
LORA_A, LORA_B = f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight"
MAGNITUDE = f".lora_magnitude_vector.{ADAPTER}.weight"
"""Ending of the names of DoRA's magnitude parameters, which are initialised as the norms of a weight's rows."""
ENDINGS = (LORA_A, LORA_B, MAGNITUDE)
"""Endings of the names of an adapter's parameters."""


def is_adapter(name: str) -> bool:
    """Return whether a parameter belongs to a LoRA adapter, by its name."""
    return name.endswith(ENDINGS)


def without_base(name: str) -> str:
    """Return a parameter's name without peft's `.base_layer`, as it is in the model without LoRA adapters."""
    return name.replace(BASE, ".")


def module_of(name: str) -> str:
    """Return the name of the module to which a LoRA adapter belongs, given the name of one of its parameters."""
    return next(name.removesuffix(end) for end in ENDINGS if name.endswith(end))
