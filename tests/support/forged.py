"""Checkpoints and exports changed by somebody who knows the format: what their digests do not show."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from xxhash import xxh3_128

from llava_fsdp.checkpoint.manifest import MANIFEST_FILE, STATE_FILE
from llava_fsdp.export.write import formats
from llava_fsdp.runtime.files.digests import with_digest
from llava_fsdp.runtime.files.provenance import NOTES, write_sealed_notes


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
    (folder / MANIFEST_FILE).write_bytes(with_digest(body))


def forge_notes(folder: Path, **said: object) -> None:
    """Other notes in an export or an adapter's folder, which agree with all of its files as they are."""
    write_sealed_notes(folder, json.loads((folder / NOTES).read_text()) | said)


def swap_in_exports(monkeypatch: pytest.MonkeyPatch, first: str, second: str) -> None:
    """Exports for transformers put the values of two parameters in each other's place."""
    plan = formats.plan_save

    def swapped(*arguments: Any) -> dict[str, Any]:
        outputs = plan(*arguments)
        one, other = (next(n for n, x in outputs.items() if x.sources == (name,)) for name in (first, second))
        return {**outputs, one: outputs[other], other: outputs[one]}

    monkeypatch.setattr(formats, "plan_save", swapped)
