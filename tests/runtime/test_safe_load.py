"""Files of unknown origin: what a library makes of a damaged one is one error that names it."""

import os
from pathlib import Path

import pytest

from llava_fsdp.runtime.errors import ConfigError, DamagedModel, ModelError
from llava_fsdp.runtime.safe_load import foreign, is_open_to_others, read_json, read_text

PanicException = type("PanicException", (BaseException,), {})
"""As the Rust library of tokenizers raises it: no subclass of Exception."""


@pytest.mark.parametrize(
    "problem", [ValueError("two\n words"), PanicException("two\n words"), AssertionError("two words")]
)
def test_whatever_a_library_raises_names_the_file(problem: BaseException) -> None:
    with pytest.raises((DamagedModel, type(problem))) as caught, foreign("tokenizer.json is damaged", DamagedModel):
        raise problem
    assert isinstance(caught.value, DamagedModel)
    assert str(caught.value) == f"tokenizer.json is damaged ({type(problem).__name__}: two words)"
    assert caught.value.__cause__ is problem


@pytest.mark.parametrize("problem", [KeyboardInterrupt(), SystemExit(3), ConfigError("ours")])
def test_ends_of_the_process_and_own_errors_pass(problem: BaseException) -> None:
    with pytest.raises(type(problem)) as caught, foreign("tokenizer.json is damaged"):
        raise problem
    assert caught.value is problem


def test_what_is_no_json_object_is_refused(tmp_path: Path) -> None:
    for number, content in enumerate(["[1]", "null", '{"a": ', "[" * 100_000, ""]):
        path = tmp_path / f"{number}.json"
        path.write_text(content)
        with pytest.raises(ConfigError, match=f"{number}.json"):
            read_json(path, ConfigError)
    path.write_bytes(b'{"a": "\xff"}')
    for wrong in (path, tmp_path, tmp_path / "absent", Path("a\0b")):
        with pytest.raises(ModelError):
            read_text(wrong)


@pytest.mark.parametrize(("mode", "is_open"), [(0o777, True), (0o1777, True), (0o775, False), (0o702, True)])
def test_folders_where_everybody_may_write(mode: int, is_open: bool, tmp_path: Path) -> None:
    os.chmod(tmp_path, mode)
    assert is_open_to_others(tmp_path) is is_open
    assert not is_open_to_others(tmp_path / "absent")
