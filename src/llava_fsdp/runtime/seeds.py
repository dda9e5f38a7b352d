"""Random seeds computed from what they are for, so that no random generator's state has to be kept or shared."""

import hashlib
import json


def derive(*purpose: str | int) -> int:
    """A 63-bit random seed that depends only on the arguments: the same on every machine and in every version."""
    digest = hashlib.sha256(json.dumps(purpose).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
