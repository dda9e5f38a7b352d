"""Compute each random seed from what it is used for, so that the states of random generators need not be stored or
shared."""

import hashlib
import json


def derive(*purpose: str | int) -> int:
    """Return a 63-bit random seed that depends only on the arguments, which say what the seed is used for. The same
    arguments give the same seed on every machine and in every version of this package."""
    digest = hashlib.sha256(json.dumps(purpose).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
