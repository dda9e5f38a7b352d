"""Files of unknown origin: what a library makes of a damaged one is one error that names it."""

import os
from pathlib import Path

import pytest

from llava_fsdp.runtime.errors import ConfigError, DamagedModel, ModelError
from llava_fsdp.runtime.files.safe_load import (
    file_beside,
    is_open_to_others,
    library_errors,
    read_json,
    read_text,
    refuse_model_code,
)

PanicException = type("PanicException", (BaseException,), {})
"""As the Rust library of tokenizers raises it: no subclass of Exception."""


@pytest.mark.parametrize(
    "problem", [ValueError("two\n words"), PanicException("two\n words"), AssertionError("two words")]
)
def test_whatever_a_library_raises_names_the_file(problem: BaseException) -> None:
    with (
        pytest.raises((DamagedModel, type(problem))) as caught,
        library_errors("tokenizer.json is damaged", DamagedModel),
    ):
        raise problem
    assert isinstance(caught.value, DamagedModel)
    assert str(caught.value) == f"tokenizer.json is damaged ({type(problem).__name__}: two words)"
    assert caught.value.__cause__ is problem


@pytest.mark.parametrize("problem", [KeyboardInterrupt(), SystemExit(3), ConfigError("ours")])
def test_ends_of_the_process_and_own_errors_pass(problem: BaseException) -> None:
    with pytest.raises(type(problem)) as caught, library_errors("tokenizer.json is damaged"):
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


def test_a_byte_order_mark_is_no_part_of_json(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_json(path) == {"a": 1}


@pytest.mark.parametrize("value", ["0", "{}", "[]", "1.5", '"x"'])
def test_a_file_of_millions_of_values_is_refused_before_it_is_parsed(value: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(f'{{"a": [{value}{f", {value}" * 4_000_000}]}}')
    with pytest.raises(ModelError, match=r"a\.json has [45678],\d{3},\d{3} values"):
        read_json(path)


@pytest.mark.parametrize(("mode", "is_open"), [(0o777, True), (0o1777, True), (0o775, False), (0o702, True)])
def test_folders_where_everybody_may_write(mode: int, is_open: bool, tmp_path: Path) -> None:
    os.chmod(tmp_path, mode)
    assert is_open_to_others(tmp_path) is is_open
    assert not is_open_to_others(tmp_path / "absent")


@pytest.mark.parametrize("key", ["auto_map", "custom_pipelines", "custom_generate"])
def test_code_of_a_model_is_never_run(key: str, tmp_path: Path) -> None:
    refuse_model_code({"model_type": "llama", key: {}}, tmp_path / "config.json")
    with pytest.raises(ModelError):
        refuse_model_code({"model_type": "llama", key: {"AutoModel": "modeling.Model"}}, tmp_path / "config.json")


@pytest.mark.parametrize(
    "name", ["../a.bin", "inner/a.bin", "/a.bin", "..", ".", "", "a\0.bin", "a.bin\n", 7, None, ["a"]]
)
def test_a_file_that_another_one_names_lies_beside_it(name: object, tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    for plain in ("model-00001-of-00002.safetensors", "a b+c=d.bin", ".hidden"):
        assert file_beside(index, plain) == tmp_path / plain
    with pytest.raises(ModelError):
        file_beside(index, name)
