"""Format and parse a checkpoint's `state.json`, which contains all state of a run except the tensors."""

import json
from enum import Enum
from typing import Any

from llava_fsdp.checkpoint.manifest import STATE_FILE, Manifest
from llava_fsdp.runtime.errors import CheckpointError
from llava_fsdp.runtime.files.small_json import parse_object

TYPES: dict[str, tuple[type, ...]] = {
    "format": (int,), "run": (str,), "step": (int,), "samples": (int,), "skipped": (int,),
    "consecutive": (int,), "seed": (int,),
    "scaler": (dict, type(None)), "dynamic": (dict, type(None)),
    "broken": (list,), "fingerprints": (dict,), "trainable": (list,),
    "versions": (dict,), "written_by": (dict,), "config": (dict,),
}  # fmt: skip
"""Allowed types of the values in `state.json`, by key."""
SCALER: dict[str, tuple[type, ...]] = {
    "scale": (float,), "hysteresis": (int,), "steps": (int,), "last_overflow": (int,),
}  # fmt: skip
"""Allowed types of the values in the entry `scaler` (the loss scale of fp16), by key."""
COUNTERS = ("step", "samples", "skipped", "consecutive")
FINGERPRINTS = ("dataset", "encoding", "order", "model")
OWN_PARTS = ("loss", "projector")
"""Further entries of `fingerprints`, in runs of a program that gives such a part: its name."""


def render_facts(facts: dict[str, Any]) -> bytes:
    """Return the content of `state.json`."""
    return json.dumps(facts, indent=1).encode() + b"\n"


def parse_facts(content: bytes, manifest: Manifest) -> dict[str, Any]:
    """Parse a checkpoint's `state.json`. Check its types, and that its step is that of the manifest. Raises
    CheckpointError, and no other error, for any invalid content."""
    try:
        missing_in_older = {"consecutive": 0, "dynamic": None}
        facts: dict[str, Any] = missing_in_older | parse_object(content)
        require_types(facts, TYPES)
        if facts["scaler"] is not None:
            require_types(facts["scaler"], SCALER)
        if facts["dynamic"] is not None:  # what activation_checkpointing=dynamic has found: limits of the blocks
            require_types(facts["dynamic"], {"device": (str,), "limits": (list,)})
            for limit in facts["dynamic"]["limits"]:
                if type(limit) is not list or [type(number) for number in limit] != [int] * 3:
                    raise TypeError("dynamic has a limit that is not a block's number, a size and a length")
        # a loss or a projector of the user's own has a fingerprint only in runs that have such a part
        own_parts = [name for name in OWN_PARTS if name in facts["fingerprints"]]
        require_types(facts["fingerprints"], dict.fromkeys([*FINGERPRINTS, *own_parts], (str,)))
        if not all(type(name) is str for name in facts["trainable"]):
            raise TypeError("trainable has an item that is not a name")
        if not all(type(number) is int for number in facts["broken"]):
            raise TypeError("broken has an item that is not the number of a record")
        if min(facts[name] for name in COUNTERS) < 0 or facts["step"] != manifest.step:
            raise ValueError(f"it is of step {facts['step']}, and the manifest of step {manifest.step}")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{STATE_FILE} cannot be understood: {type(error).__name__}: {error}") from error
    return facts


def require_types(values: dict[str, Any], types: dict[str, tuple[type, ...]]) -> None:
    """Raise KeyError or TypeError unless `values` has exactly the keys of `types`, with values of these types."""
    of_wrong_type = [key for key, allowed in types.items() if type(values[key]) not in allowed]
    unknown = values.keys() - types.keys()
    if of_wrong_type or unknown:
        raise TypeError(f"{(of_wrong_type or sorted(unknown))[0]} is unknown or has the wrong type")


def without_enums(value: Any) -> Any:
    """Return a copy, to write as JSON, in which enums in nested dicts and lists are replaced by their values."""
    if isinstance(value, dict):
        return {k: without_enums(v) for k, v in value.items()}
    if isinstance(value, list):
        return [without_enums(v) for v in value]
    return value.value if isinstance(value, Enum) else value
