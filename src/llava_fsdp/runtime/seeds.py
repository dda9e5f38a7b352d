"""Compute random seeds from their purpose, so that the state of random generators need not be stored or shared."""

import hashlib
import json


def derive(*purpose: str | int) -> int:
    """Return a 63-bit random seed that depends only on the arguments, and is the same on every machine and in every
    version."""
    digest = hashlib.sha256(json.dumps(purpose).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
