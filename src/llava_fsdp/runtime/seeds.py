"""Random seeds computed from what they are used for, so that states of generators need not be stored or shared."""

import hashlib
import json


def derive(*purpose: str | int) -> int:
    """Return a 63-bit seed that depends only on the arguments, which say what it is for: the same on every machine and
    in every version of this package."""
    digest = hashlib.sha256(json.dumps(purpose).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
