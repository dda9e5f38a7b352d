"""Checkpoints changed by somebody who knows the format: what their digests do not show."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xxhash import xxh3_128

from llava_fsdp.checkpoint.manifest import AFTER, BEFORE, MANIFEST_FILE, STATE_FILE, digest_of


def forge_facts(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Other facts, under a manifest that agrees with them."""
    facts = json.loads((folder / STATE_FILE).read_text())
    change(facts)
    content = json.dumps(facts).encode()
    (folder / STATE_FILE).write_bytes(content)
    digest = xxh3_128(content).hexdigest()
    forge_manifest(folder, lambda m: m["files"].update({STATE_FILE: {"bytes": len(content), "xxh128": digest}}))


def forge_manifest(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Another manifest, which agrees with itself."""
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    manifest.pop("digest")
    change(manifest)
    body = json.dumps(manifest).encode()[:-1]
    (folder / MANIFEST_FILE).write_bytes(body + BEFORE + digest_of(body) + AFTER)
