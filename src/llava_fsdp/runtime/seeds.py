"""Random seeds computed from what they are used for, so that states of generators need not be stored or shared."""

import hashlib
import json


def derive(*purpose: str | int) -> int:
    """Return a 63-bit seed that depends only on what it is for (`purpose`), not on machine or package version."""
    digest = hashlib.sha256(json.dumps(purpose).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
