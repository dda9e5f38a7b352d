"""Seeds derived from their purpose, so that no state of a random generator is kept or shared."""

import hashlib
import json


def derive(*purpose: str | int) -> int:
    """A 63-bit seed that depends only on `purpose`, the same on every machine and version."""
    digest = hashlib.sha256(json.dumps(purpose).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
