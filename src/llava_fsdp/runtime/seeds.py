"""Seeds from what they are for, so that no generator's state need be kept or shared. Imports nothing of ours."""

import hashlib
import json


def derive(*purpose: str | int) -> int:
    """A 63-bit seed that depends on `purpose` alone, on every machine and version alike."""
    digest = hashlib.sha256(json.dumps(purpose).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
