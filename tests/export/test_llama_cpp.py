"""Exported chat templates in the Jinja of llama.cpp, which knows less than Jinja itself."""

import json
import re
from pathlib import Path
from typing import Any

import llama_cpp_reader
import pytest
from chat_templates import NO_LAYOUT, published
from chat_templates import write_tokenizer as write_model
from jinja2 import Environment
from test_chat_template import exported, write_source
from tiers import slow_after
from transformers import AutoTokenizer
from unpacked import run_with, unpacked

from llava_fsdp.data.text.chat_template.jinja_template import own_name
from llava_fsdp.data.text.chat_template.template_file import BEGIN, END, OLDER_END, find_code
from llava_fsdp.data.text.templates import TEMPLATES
from llava_fsdp.export.write.chat_template import GapRule, as_parts, as_text, chat_template, quoted

UNKNOWN = re.compile(r"\\u|\\x|\{%\+|\+%\}|\{%-?\s*(?:break|continue|do|trans)\b|startswith\(\(")
"""What the Jinja of llama.cpp refuses."""
MARKER = "<__media_3f9a__>"
"""What the server of llama.cpp puts in the place of an image, here of its draw of a name."""


@pytest.mark.parametrize("video", [False, True])
@pytest.mark.parametrize("gap", [GapRule(False), GapRule(True), GapRule(True, ("<s>", "▁", " "))])
def test_no_template_of_llava_has_what_llama_cpp_refuses(gap: GapRule, video: bool) -> None:
    for template in TEMPLATES.values():
        for start_end in (False, True):
            assert not UNKNOWN.search(chat_template(template, start_end, True, gap, video))


@pytest.mark.parametrize("name", slow_after(2, sorted(published().keys() - NO_LAYOUT)))
def test_nothing_around_a_model_s_own_template_has_it(name: str, tmp_path: Path) -> None:
    """Also where its texts are not in ASCII, as DeepSeek's; and what stands inside is found again, to the letter."""
    code = published()[name]
    source = write_model(code, tmp_path / "source")
    own = own_name(source)
    assert own is not None
    exported(source, tmp_path / "export", own)
    written = (tmp_path / "export" / "chat_template.jinja").read_text()
    before, _, rest = written.partition(BEGIN)
    inside, _, after = rest.rpartition(END)
    assert not UNKNOWN.search(before) and not UNKNOWN.search(after)
    assert inside and own_name(tmp_path / "export") == own


@pytest.mark.parametrize("tail", ["", "\n", "\n\n", "  ", "\n  ", "{% if true %}\n  {% endif %}\n", "{{ '' -}}\n "])
def test_white_space_at_the_end_of_a_model_s_template_is_kept(tail: str, tmp_path: Path) -> None:
    """It is text of the template; and the form that earlier versions exported is read, too."""
    code = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}" + tail
    )
    source = write_model(code, tmp_path / "source")
    own = own_name(source)
    assert own is not None
    exported(source, tmp_path / "export", own)
    theirs, ours = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("export", "source"))
    for messages in (as_text(["a"]), as_text(["a", "b", "c", "d"])):
        assert theirs.apply_chat_template(messages, tokenize=False) == ours.apply_chat_template(
            messages, tokenize=False
        )
    path = tmp_path / "export" / "chat_template.jinja"
    path.write_text(path.read_text().replace(END, OLDER_END))
    assert own_name(tmp_path / "export") == own and find_code(tmp_path / "export") is not None


@pytest.mark.parametrize("text", ["a\\b", 'say "x"', "a\nb\r\tc", "\ue000 中文 🙂", "\\u0041", "\\n", "\x0b\x00\x7f"])
def test_a_text_as_a_literal_is_that_text(text: str, tmp_path: Path) -> None:
    assert Environment().from_string("{{ " + quoted(text) + " }}").render() == text
    assert text.startswith("\\u") or not UNKNOWN.search(quoted(text))


@pytest.mark.parametrize("video", [False, True])
@pytest.mark.parametrize("kind", ["v1", "qwen3"])
def test_markers_of_images_are_treated_as_images(kind: str, video: bool, tmp_path: Path) -> None:
    """A single one moves to the front on a line of its own, several stay, and each keeps its name."""
    source = write_source("tiny", tmp_path / "source") if kind == "v1" else None
    source = source or write_model(published()[kind], tmp_path / "source")
    form = "v1" if kind == "v1" else own_name(source)
    assert form is not None
    exported(source, tmp_path / "export", form, video=video)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "export")
    for texts in (
        ["what <image> is it?"], ["<image>"], ["a <image> b<image>", "c", "<image>d"], ["a", "b", "x > y <image>z"],
        ["a<b", "c"], *([["<video> x", "a", "<image> y <video>"]] if video else []),
    ):  # fmt: skip
        for as_messages in (as_text, as_parts):
            plain = theirs.apply_chat_template(as_messages(texts), tokenize=False)
            marked = as_text([text.replace("<image>", MARKER) for text in texts])
            if as_messages is as_parts:
                marked = [{**own, "content": [{"type": "text", "text": own["content"]}]} for own in marked]
            assert theirs.apply_chat_template(marked, tokenize=False) == plain.replace("<image>", MARKER), texts


PACKAGES = ["xllamacpp==2026.10.11549", "gguf==0.19.0"]
ASKED = (
    ["what is it?"], ["a", "b", "c  d"], ["<image>"], ["is <image> it"], ["<image> or <image>", "a", "and\n<image>?"],
)  # fmt: skip
SET_BY_LLAMA_CPP = re.compile("strftime_now|enable_thinking")
"""What llama.cpp sets, and training leaves out: today's date, and whether the model thinks."""
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True, "tokenize": False}


@pytest.mark.slow
@pytest.mark.consumers
def test_llama_cpp_makes_the_same_text(tmp_path: Path) -> None:
    """With every template of LLaVA, and with every model's own of which llama.cpp itself makes what transformers makes;
    its markers stand where transformers has image tags.
    """
    packages = unpacked("xllamacpp-2026.10.11549", PACKAGES)
    asked: list[dict[str, Any]] = []
    alone: dict[str, str] = {}
    expected: dict[str, list[str]] = {}
    marked = [as_text([text.replace("<image>", MARKER) for text in texts]) for texts in ASKED]
    whole = [*marked, [{"role": "system", "content": "be kind"}, *marked[1]]]
    own = {n: code for n, code in published().items() if not (n in NO_LAYOUT or SET_BY_LLAMA_CPP.search(code))}
    for name in (*TEMPLATES, *own):
        code = own.get(name, "")
        source = write_model(code, tmp_path / "source" / name)
        exported(source, tmp_path / "export" / name, name if name in TEMPLATES else str(own_name(source)))
        theirs = AutoTokenizer.from_pretrained(tmp_path / "export" / name)
        takes_system = name in TEMPLATES or not name.startswith("gemma")
        messages = whole if takes_system else marked
        alone[name] = AutoTokenizer.from_pretrained(source).apply_chat_template(as_text(["a"]), **NAMES) if code else ""
        expected[name] = [theirs.apply_chat_template(own_messages, **NAMES) for own_messages in messages]
        asked += [{"template": code, "messages": messages if n else [as_text(["a"])]}
                  for n, code in enumerate((code, theirs.chat_template))]  # fmt: skip
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    run_with(packages, llama_cpp_reader.__file__, str(tmp_path / "asked.json"), str(tmp_path / "found.json"))
    found = json.loads((tmp_path / "found.json").read_text())
    comparable = [name for name, of_own in zip(expected, found[::2], strict=True) if of_own == [alone[name]]]
    assert len(comparable) > len(own) // 2
    wrong = {
        name: (of_export, expected[name])
        for name, of_export in zip(expected, found[1::2], strict=True)
        if of_export != expected[name] and (name in TEMPLATES or name in comparable)
    }
    assert not wrong, json.dumps(wrong)[:4000]
