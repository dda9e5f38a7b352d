"""Tokens that were added to a tokenizer, and got no row in the model's embeddings."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small import conversion, make_config, write_json
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from llava_fsdp.chat.assistant import Assistant
from llava_fsdp.config import AspectRatio
from llava_fsdp.data.text.tokens.tokenizer import open_tokenizer
from llava_fsdp.export.main import export
from llava_fsdp.runtime.errors import ModelError
from llava_fsdp.train import main as train

Change = Callable[[PreTrainedTokenizerFast], Any]
ADDED: dict[str, tuple[Change, list[str]]] = {
    "special": (lambda own: own.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True),
        ["<|im_start|>", "<|im_end|>"]),
    "plain": (lambda own: own.add_tokens(["kilogramme"]), ["kilogramme"]),
    "the end of texts": (lambda own: own.add_special_tokens({"eos_token": "<|stop|>", "pad_token": "<|stop|>"}),
        ["<|stop|>"]),
    "padding that the template writes": (lambda own: (own.add_special_tokens({"pad_token": "[P]"}),
        setattr(own, "chat_template", "{% for m in messages %}{{ m.content }}[P]{% endfor %}")), ["[P]"]),
    "beside placeholders": (lambda own: own.add_tokens(["<image>", "<pause>"], special_tokens=True), ["<pause>"]),
    "padding": (lambda own: own.add_special_tokens({"pad_token": "[P]"}), []),
    "images": (lambda own: own.add_tokens(["<image>", "<video>"], special_tokens=True), []),
    "none": (lambda own: None, []),
}  # fmt: skip


def with_tokens(parts: Path, folder: Path, change: Change, rows: int = 0) -> Path:
    """Parts with weights and as many rows as the tokenizer has tokens, and a tokenizer that transformers changed and
    saved; with `rows`, the embeddings get more rows."""
    shutil.copytree(parts, folder)
    language = folder / "language"
    tokenizer = AutoTokenizer.from_pretrained(language)
    size = len(tokenizer)
    for part, auto in (("language", AutoModelForCausalLM), ("vision", AutoModel)):
        config = AutoConfig.from_pretrained(folder / part)
        if part == "language":
            config.vocab_size = size + rows
        torch.manual_seed(0)
        auto.from_config(config, dtype=torch.float32).save_pretrained(folder / part)
    change(tokenizer)
    tokenizer.save_pretrained(language)
    return folder


@pytest.mark.parametrize("name", ADDED)
def test_tokens_without_rows_are_named(name: str, parts: Path, dataset: Path, tmp_path: Path) -> None:
    """And a training ends before its first step. With rows for them it begins."""
    change, lost = ADDED[name]
    folder = with_tokens(parts, tmp_path / "parts", change)
    size = AutoConfig.from_pretrained(folder / "language").vocab_size
    if not lost:
        assert open_tokenizer(folder / "language", size).size == size
        return
    with pytest.raises(ModelError, match=rf"{len(lost)} added tokens .* which have {size}: .*resize") as caught:
        train.train(make_config(folder, dataset, tmp_path / "run", "model.random_weights=false", "max_steps=1"))
    assert all(f"{text} (" in str(caught.value) for text in lost) and "<image> (" not in str(caught.value)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert open_tokenizer(folder / "language", size + 2).size > size


@pytest.mark.parametrize("form", ["added_tokens.json", "tokenizer_config.json", "tokenizer.json"])
def test_wherever_the_token_is_listed(form: str, parts: Path, tmp_path: Path) -> None:
    """transformers adds the tokens of each of these files."""
    folder = shutil.copytree(parts / "language", tmp_path / "language")
    size = open_tokenizer(folder).size
    path = folder / form
    found = json.loads(path.read_text()) if path.is_file() else {}
    token = {"id": size, "content": "<x>", "special": True, "single_word": False, "lstrip": False, "rstrip": False,
        "normalized": False}  # fmt: skip
    if form == "added_tokens.json":
        found["<x>"] = size
    elif form == "tokenizer_config.json":
        found["added_tokens_decoder"] = {str(size): token}
    else:
        found["added_tokens"].append(token)
    write_json(path, found)
    with pytest.raises(ModelError, match=rf"<x> \({size}\)"):
        open_tokenizer(folder, size)
    open_tokenizer(folder, size + 1)


@pytest.mark.parametrize("place", ["pad_token", "image_token", "extra_special_tokens", "an object"])
def test_placeholders_need_no_row(place: str, parts: Path, tmp_path: Path) -> None:
    """Gemma 3's text models have `<image_soft_token>` behind the last row."""
    folder = shutil.copytree(parts / "language", tmp_path / "language")
    size = open_tokenizer(folder).size
    config = json.loads((folder / "tokenizer_config.json").read_text())
    values = {"extra_special_tokens": {"audio_token": "<x>"}, "an object": {"content": "<x>"}}
    key = "video_token" if place == "an object" else place
    write_json(folder / "added_tokens.json", {"<x>": size})
    with pytest.raises(ModelError, match="<x>"):
        open_tokenizer(folder, size)
    write_json(folder / "tokenizer_config.json", {**config, key: values.get(place, "<x>")})
    assert open_tokenizer(folder, size).special("<x>") is None


@pytest.mark.slow
def test_every_command_that_reads_a_whole_model(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """An export, to whose tokenizer somebody adds a token: it is neither trained, converted nor asked."""
    folder = with_tokens(parts, tmp_path / "parts", lambda own: None)
    values = ["model.random_weights=false", "export.enabled=true", "export.verify=false", "max_steps=1"]
    train.train(make_config(folder, dataset, tmp_path / "run", *values))
    whole = shutil.copytree(tmp_path / "run" / "export", tmp_path / "whole")
    (whole / "llava_fsdp.json").unlink()
    tokenizer = AutoTokenizer.from_pretrained(whole)
    tokenizer.add_tokens(["<pause>"], special_tokens=True)
    tokenizer.save_pretrained(whole)
    own = [f"model.checkpoint={whole}", "model.projector=auto", "model.random_weights=false", "max_steps=1"]
    actions: dict[str, Callable[[], Any]] = {
        "train": lambda: train.train(make_config(folder, dataset, tmp_path / "other", *own)),
        "chat": lambda: Assistant(str(whole), "v1", AspectRatio.square),
        "export": lambda: export(conversion(whole, tmp_path / "made", "format=hf")),
    }
    for name, action in actions.items():
        with pytest.raises(ModelError, match="<pause>"):
            action()
        assert name
