"""Who digests which file, and which files of a model's folder count."""

from pathlib import Path

import pytest
from xxhash import xxh3_128

from llava_fsdp.export.check_folders import check_artifacts
from llava_fsdp.runtime.errors import DamagedModel
from llava_fsdp.runtime.files import digests
from llava_fsdp.runtime.files.digests import Digest, digest_of, digest_of_file, files_of_rank
from llava_fsdp.runtime.files.provenance import (
    files_of,
    is_older,
    read_digest,
    refuse_added_files,
    require_relative,
    write_sealed_notes,
)


def test_every_file_is_digested_once_and_bytes_are_even() -> None:
    """The largest first, each to the rank with the fewest bytes; of equal ones the first by name."""
    files = {name: Digest(size, "") for name, size in {"e": 5, "a": 9, "d": 5, "b": 7, "c": 5, "f": 1}.items()}
    assert [files_of_rank(files, rank, 3) for rank in range(3)] == [["a", "f"], ["b", "e"], ["c", "d"]]
    assert files_of_rank(files, 0, 1) == ["a", "b", "c", "d", "e", "f"]
    assert [files_of_rank(files, rank, 8) for rank in (6, 7)] == [[], []]


@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_a_file_is_digested_in_pieces_as_in_one(chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that fill their pieces, and others."""
    monkeypatch.setattr(digests, "CHUNK", chunk)
    path = tmp_path / "file"
    for size in (0, 1, 3, 6, 7, 8, 20, 21):
        content = bytes(range(1, size + 1))
        path.write_bytes(content)
        assert digest_of_file(path) == Digest(size, xxh3_128(content).hexdigest())
    with path.open("rb", buffering=0) as file:
        file.seek(5)
        assert digest_of(file) == Digest(16, xxh3_128(content[5:]).hexdigest())


WOULD_BE_LOADED = """
    config.json generation_config.json model.safetensors model.safetensors.index.json pytorch_model.bin
    pytorch_model.bin.index.json mm_projector.bin mm_projector.safetensors adapter_config.json adapter_model.safetensors
    adapter_model.bin non_lora_trainables.safetensors non_lora_trainables.bin tokenizer.json tokenizer.model
    tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json merges.txt chat_template.jinja
    chat_template.json preprocessor_config.json processor_config.json
"""


@pytest.mark.parametrize("name", WOULD_BE_LOADED.split())
def test_a_file_that_programs_would_load_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").touch()
    (tmp_path / name).touch()
    refuse_added_files(tmp_path, {name: Digest(0, "")})
    with pytest.raises(DamagedModel):
        refuse_added_files(tmp_path, {"other.json": Digest(0, "")})


@pytest.mark.parametrize("name", ["../a", "a/../b", "/a", "a//b", "a/", ".hidden", "a/.b", "", "a\nb", "a\n"])
def test_a_listed_file_lies_in_the_folder(name: str) -> None:
    assert require_relative("a.b/c d-1+2=3.bin") and require_relative("-x")
    with pytest.raises(ValueError):
        require_relative(name)


@pytest.mark.parametrize("entry", [
    {"bytes": -1, "xxh128": "0" * 32}, {"bytes": True, "xxh128": "0" * 32}, {"bytes": 1.0, "xxh128": "0" * 32},
    {"bytes": 1, "xxh128": "0" * 31}, {"bytes": 1, "xxh128": "0" * 33}, {"bytes": 1, "xxh128": "A" * 32},
    {"bytes": 1}, {"xxh128": "0" * 32}, 7,
], ids=str)  # fmt: skip
def test_an_entry_is_a_size_and_a_digest(entry: object, tmp_path: Path) -> None:
    good = {"bytes": 0, "xxh128": "0123456789abcdef" * 2}
    assert files_of({"files": {"a": good}}, tmp_path) == {"a": Digest(0, good["xxh128"])}
    with pytest.raises(DamagedModel):
        files_of({"files": {"a": entry}}, tmp_path)


def test_notes_of_an_earlier_version(tmp_path: Path) -> None:
    """They have no digest of themselves, and of a file its digest alone."""
    (tmp_path / "a").write_bytes(b"123")
    assert read_digest(tmp_path / "a", "0" * 32) == Digest(3, "0" * 32)
    assert read_digest(tmp_path / "gone", "0" * 32) == Digest(0, "0" * 32)
    older, entry = {"files": {"a": "0" * 32}}, {"bytes": 3, "xxh128": "0" * 32}
    assert is_older(older) and is_older({}) and not is_older({**older, "digest": "0"})
    assert not is_older({"files": {"b": "0" * 32, "a": entry}}), "its digest of itself was taken out"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "mm_projector.bin"):
        (folder / name).write_text(name)
    write_sealed_notes(folder, {"step": 3})
    return folder


def is_whole(*paths: Path, rank: int = 0, size: int = 1) -> bool:
    try:
        check_artifacts(paths, rank, size)
    except DamagedModel:
        return False
    return True


def test_what_is_compared_of_a_model(model: Path) -> None:
    """Of a file that alone is given that one; of a folder each file, and that none is missing or was added."""
    one, other = model / "model.safetensors", model / "mm_projector.bin"
    assert is_whole(model) and is_whole(one, other)
    one.write_text("Model.safetensors")
    assert not is_whole(one) and not is_whole(model) and not is_whole(other, one) and is_whole(other)
    one.unlink()
    assert not is_whole(model) and is_whole(other)
    one.write_text("model.safetensors")
    assert is_whole(model)
    (model / "model.safetensors.index.json").write_text("{}")
    assert not is_whole(model) and is_whole(one, other)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "mm_projector.bin"])
def test_ranks_of_a_machine_compare_each_file_once(name: str, model: Path) -> None:
    assert [is_whole(model, rank=rank, size=2) for rank in range(2)] == [True, True]
    content = (model / name).read_bytes()
    (model / name).write_bytes(content.swapcase())
    assert sorted(is_whole(model, rank=rank, size=2) for rank in range(2)) == [False, True]
