"""A run with a language model's own chat template: what it records, and that all that comes of it asks with it."""

import json
import shutil
from pathlib import Path

import pytest
from reference import EXPORTED
from small import conversion, make_config
from transformers import AutoProcessor, AutoTokenizer

from llava_fsdp.chat.assistant import Assistant
from llava_fsdp.config import AUTO, AspectRatio
from llava_fsdp.data.records.record import Turn
from llava_fsdp.data.text.chat_template.jinja_template import open_template, own_name
from llava_fsdp.data.text.tokens.tokenizer import open_tokenizer
from llava_fsdp.evaluate.main import same_template
from llava_fsdp.export.main import export
from llava_fsdp.runtime.errors import ConfigError, LlavaFsdpError
from llava_fsdp.train import main as train

CODE = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content | trim }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}\n"
)
TURNS = [Turn("system", "be kind"), Turn("human", "what  is it? ")]


@pytest.fixture(scope="module")
def language(parts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Parts whose language model has a chat template without BOS."""
    folder = tmp_path_factory.mktemp("own") / "parts"
    shutil.copytree(parts, folder)
    (folder / "language" / "chat_template.jinja").write_text(CODE)
    return folder


@pytest.fixture(scope="module")
def run(language: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step with validation, a checkpoint and an export."""
    folder = tmp_path_factory.mktemp("run")
    val = ["val.every=1", f"val.path={dataset / 'mixed.json'}", "val.limit=3", "val.answers=2", "val.max_new_tokens=2"]
    words = ["data.template=auto", "max_steps=1", "checkpoint.every=1", f"data.index={folder / 'index'}", *val]
    train.train(make_config(language, dataset, folder, *words, *EXPORTED))
    return folder


@pytest.mark.slow
def test_a_run_records_which_template_it_was(run: Path, language: Path) -> None:
    name = own_name(language / "language")
    assert name is not None and f"template: {name}" in (run / "config.yaml").read_text()
    assert json.loads((run / "export" / "llava_fsdp.json").read_text())["template"] == name
    assert CODE.removesuffix("\n") in (run / "export" / "chat_template.jinja").read_text()
    assert own_name(run / "export") == name
    assert same_template("chat_template", name) and same_template(name, name) and not same_template("v1", name)


def test_run_export_and_transformers_ask_alike(run: Path, language: Path, tmp_path: Path) -> None:
    """The export, the checkpoint, and the export for the original's programs; in transformers also the processor."""
    [checkpoint] = (run / "checkpoints").glob("step-*")
    export(conversion(checkpoint, tmp_path / "original", "format=llava", "verify=false"))
    name = own_name(language / "language")
    assert name == own_name(tmp_path / "original")
    tokenizer = open_tokenizer(language / "language")
    text = "<|system|>\nbe kind</s>\n<|user|>\nwhat  is it?</s>\n<|assistant|>\n"
    ids = [token.id for token in tokenizer.encode(text)]
    for folder in (run / "export", checkpoint, tmp_path / "original"):
        asked = Assistant(str(folder), AUTO, AspectRatio.pad)
        assert asked.encode(TURNS, [], "here").tolist() == ids
        assert (asked.template_name, asked.template.stop) == (name, "</s>")
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "what  is it? "}]
    theirs = AutoTokenizer.from_pretrained(run / "export")
    assert theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False) == ids
    processor = AutoProcessor.from_pretrained(run / "export")
    made = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    assert list(made["input_ids"][0]) == ids, "the processor adds no BOS token either"


@pytest.mark.slow
def test_a_run_continues_with_the_same_template_alone(run: Path, language: Path, dataset: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    shutil.copytree(language, tmp_path / "parts")
    name = own_name(language / "language")
    words = ["max_steps=2", f"data.index={tmp_path / 'index'}"]
    for value in (AUTO, name):
        train.train(make_config(language, dataset, tmp_path / "run", *words, f"data.template={value}"))
    file = tmp_path / "parts" / "language" / "chat_template.jinja"
    file.write_text(CODE.replace("<|", "<<"))
    for value in (AUTO, "chat_template", name):
        cfg = make_config(
            language, dataset, tmp_path / "run", *words, "max_steps=3", f"data.template={value}",
            f"model.language={tmp_path / 'parts' / 'language'}",
        )  # fmt: skip
        with pytest.raises(LlavaFsdpError, match="template"):
            train.train(cfg)


@pytest.mark.slow
def test_the_next_stage_begins_with_it(run: Path, dataset: Path, tmp_path: Path) -> None:
    """A training from the export has its template, and the index of another template's is not used."""
    words = [f"model.checkpoint={run / 'export'}", "model.random_weights=false", "model.projector=auto", "max_steps=1"]
    cfg = make_config(Path(""), dataset, tmp_path / "next", *words, "data.template=auto", *EXPORTED)
    train.train(cfg)
    assert own_name(tmp_path / "next" / "export") == own_name(run / "export")
    assert f"template: {own_name(run / 'export')}" in (tmp_path / "next" / "config.yaml").read_text()


def test_labels_of_the_original_have_no_such_template(language: Path, dataset: Path, tmp_path: Path) -> None:
    words = ["labels=llava_v1_5", "data.template=chat_template", f"data.index={tmp_path / 'index'}"]
    with pytest.raises(ConfigError, match="labels=llava_v1_5"):
        train.train(make_config(language, dataset, tmp_path / "out", *words))


def test_a_damaged_recorded_name_is_refused(language: Path) -> None:
    folder = language / "language"
    with pytest.raises(ConfigError, match="another chat template"):
        open_template("chat_template-000000000000", folder, open_tokenizer(folder))
