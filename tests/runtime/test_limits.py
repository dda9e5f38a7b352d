"""A file of exactly as many bytes as a reader takes is read, and one with a byte more is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llava_fsdp.checkpoint.verify import read_small
from llava_fsdp.data.images import check
from llava_fsdp.migrate.reading import settings_files
from llava_fsdp.runtime.errors import CheckpointError, ConfigError, DamagedModel, ImageError, ModelError
from llava_fsdp.runtime.files import provenance
from llava_fsdp.runtime.files.safe_load import read_json, read_text, refuse_yaml_bombs
from llava_fsdp.runtime.files.small_json import BadJson, read_bytes, read_object

SIZE = 16
READERS: dict[str, tuple[type[Exception], Callable[[Path], Any]]] = {
    "text": (ModelError, lambda path: read_text(path, largest=SIZE)),
    "json of a model": (ModelError, lambda path: read_json(path, largest=SIZE)),
    "yaml": (ConfigError, lambda path: refuse_yaml_bombs(path, SIZE)),
    "small json": (BadJson, lambda path: read_bytes(path, SIZE)),
    "object": (BadJson, lambda path: read_object(path, largest=SIZE)),
    "file of a checkpoint": (CheckpointError, lambda path: read_small(path, SIZE)),
    "notes": (DamagedModel, provenance.read_bytes),
    "settings": (ConfigError, lambda path: settings_files.input_file(str(path))),
    "picture": (ImageError, lambda path: check.read_file(path, "a record")),
}


@pytest.mark.parametrize("name", READERS)
def test_the_largest_file_is_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "SMALL", SIZE)
    monkeypatch.setattr(settings_files, "LARGEST", SIZE)
    monkeypatch.setattr(check, "MAX_BYTES", SIZE)
    error, read = READERS[name]
    path = tmp_path / "file.json"
    path.write_text('{"a": "1234567"}')
    assert path.stat().st_size == SIZE and not is_refused(path, read, error)
    path.write_text('{"a": "12345678"}')
    assert is_refused(path, read, error)


def is_refused(path: Path, read: Callable[[Path], Any], error: type[Exception]) -> bool:
    try:
        read(path)
    except error:
        return True
    return False
