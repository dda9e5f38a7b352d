"""Exports in GGUF, in llama.cpp: token ids, log-probabilities and greedy answers of transformers, for text and
images."""

import re
from pathlib import Path

import pytest
from gguf_models import KINDS, write_model
from small import conversion
from unpacked import unpacked

from llava_fsdp.config import KeptDType
from llava_fsdp.export.gguf import language_file
from llava_fsdp.export.gguf.gguf_folder import prove_gguf_folder, write_gguf_folder
from llava_fsdp.export.gguf.run_llama_cpp import TOKENS, prove_by_llama_cpp
from llava_fsdp.export.main import export
from llava_fsdp.runtime.errors import ModelError

pytestmark = pytest.mark.consumers
VERSION = "2026.10.11549"


@pytest.fixture(autouse=True)
def llama_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts xllamacpp into the path."""
    folder = unpacked(f"xllamacpp-{VERSION}", [f"xllamacpp=={VERSION}"])
    monkeypatch.syspath_prepend(str(folder))


@pytest.mark.parametrize("asked", ["keep", "fp16", "bf16", "q8_0"])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_as_transformers(kind: str, asked: str, tmp_path: Path) -> None:
    """In F32 all tokens of three answers, one of them about an image."""
    source, keys = write_model(tmp_path / "parts", kind)
    folder = export(conversion(source, tmp_path / "hf", "verify=false", *keys))
    (tmp_path / "made").mkdir()
    write_gguf_folder(folder, tmp_path / "made", KeptDType(asked), "mine")
    said = prove_gguf_folder(folder, tmp_path / "made")
    print(kind, asked, said)
    assert said.startswith("llama.cpp answers as transformers") and "with an image" in said
    if asked == "keep":
        counts = re.findall(r"(\d+) of (\d+) tokens", said)
        assert len(counts) == 3 and all(same == of for same, of in counts) and str(TOKENS) in counts[1]


def test_command_says_that_it_ran(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source, keys = write_model(tmp_path / "parts", "qwen3")
    with caplog.at_level("INFO"):
        export(conversion(source, tmp_path / "made", "format=gguf", *keys))
    assert "llama.cpp answers as transformers" in caplog.text


def test_wrong_rows_are_seen_by_llama_cpp_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the files are not read back."""
    source, keys = write_model(tmp_path / "parts", "llama")
    folder = export(conversion(source, tmp_path / "hf", "verify=false", *keys))
    with monkeypatch.context() as patch:
        patch.setitem(language_file.KINDS, "llama", language_file.LanguageKind("llama"))
        (tmp_path / "made").mkdir()
        write_gguf_folder(folder, tmp_path / "made", KeptDType.keep, "mine")
    with pytest.raises(ModelError, match=r"answers|log-probability"):
        prove_by_llama_cpp(folder, tmp_path / "made", with_images=False)


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    source, keys = write_model(tmp_path / "parts", "qwen2")
    folder = export(conversion(source, tmp_path / "hf", "verify=false", *keys))
    (tmp_path / "made").mkdir()
    write_gguf_folder(folder, tmp_path / "made", KeptDType.keep, "mine")
    path = tmp_path / "made" / "model.gguf"
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(ModelError, match="ended with"):
        prove_by_llama_cpp(folder, tmp_path / "made", with_images=False)
