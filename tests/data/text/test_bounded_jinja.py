"""Chat templates that take any time or memory are refused by name, in the time of one rendering."""

import os
import time
from pathlib import Path

import pytest
from chat_templates import write_tokenizer

from llava_fsdp.data.problems import Kind
from llava_fsdp.data.records.record import Turn
from llava_fsdp.data.text.chat_template.bounded_jinja import BREAKS, MEMORY, SECONDS, make_work, process, render
from llava_fsdp.data.text.chat_template.jinja_template import OWN, open_template
from llava_fsdp.data.text.tokens.tokenizer import open_tokenizer
from llava_fsdp.export.write.chat_template import template_ids
from llava_fsdp.runtime.errors import ConfigError, DataError
from llava_fsdp.runtime.process.limited_process import LimitedProcess

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GROWN = "{{% set ns = namespace(x='a', y='a') %}}{{% for i in range(60) %}}{} {{% endfor %}}{}"
MACRO = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
HOSTILE = {
    "power": "{% set x = 9**(9**9) %}",
    "width": "{{ 'a' | center(20000000000) }}",
    "format": "{{ '{:>20000000000}'.format(1) }}",
    "percent": "{{ '%020000000000d' % 1 }}",
    "times": "{{ [1] * 10000000000 }}",
    "doubled": GROWN.format("{% set ns.x = ns.x ~ ns.x %}", ""),
    "joined": "{{ range(100000) | map('string') | join('a' * 100000000) }}",
    "indented": "{{ 'x\nx' | indent(99999999999) }}",
    "written": "{{ 'a' * 40000000 }}",
    "nested lists": GROWN.format("{% set ns.x = [ns.x, ns.x] %}", "{{ ns.x }}"),
    "compared": GROWN.format("{% set ns.x, ns.y = [ns.x, ns.x], [ns.y, ns.y] %}", "{{ ns.x == ns.y }}"),
    "as json": GROWN.format("{% set ns.x = [ns.x, ns.x] %}", "{{ ns.x | tojson(indent=9) }}"),
    "key": GROWN.format("{% set ns.x = (ns.x, ns.x) %}", "{{ {ns.x: 1} }}"),
    "round": "{{ 5 | round(-9999999999) }}",
    "slice": "{{ [1] | slice(99999999999) | list }}",
    "macro": MACRO,
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
}
FAST = ("width",)


@pytest.mark.parametrize(
    "case", [case if case in FAST else pytest.param(case, marks=pytest.mark.slow) for case in HOSTILE]
)
def test_templates_without_end_are_refused(case: str, tmp_path: Path) -> None:
    write_tokenizer(HOSTILE[case] + CHATML, tmp_path / "lm")
    began, tokenizer = time.monotonic(), open_tokenizer(tmp_path / "lm")
    with pytest.raises(ConfigError, match=rf"lm.chat_template\.jinja {BREAKS}"):
        open_template(OWN, tmp_path / "lm", tokenizer)
    assert time.monotonic() - began < 30, "on a machine that is busy with other tests"


def test_a_record_that_makes_a_template_endless_is_refused(tmp_path: Path) -> None:
    """Short conversations say nothing of it; the next record is read as ever."""
    code = (
        "{% if 'bomb' in messages[0].content %}{% set n = messages | length + 7 %}{% set x = n**(n**n) %}{% endif %}"
        + CHATML
    )
    write_tokenizer(code, tmp_path / "lm")
    template = open_template(OWN, tmp_path / "lm", open_tokenizer(tmp_path / "lm"))
    good = [Turn("human", "a"), Turn("gpt", "b")]
    before = template.write(good, "x")  # type: ignore[union-attr]
    with pytest.raises(DataError, match=BREAKS) as caught:
        template.write([Turn("human", "bomb"), Turn("gpt", "b")], "x")  # type: ignore[union-attr]
    assert caught.value.kind is Kind.chat_template
    assert template.write(good, "x") == before  # type: ignore[union-attr]


def test_ids_are_those_of_apply_chat_template(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    write_tokenizer(CHATML + "{{ eos_token }}", tmp_path / "lm")
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path / "lm")
    for text in ("é 中文 \ue000 🙂", "a\r\n\u2028</s>", ""):
        messages = [{"role": "user", "content": text}]
        for asks in (False, True):
            ids = theirs.apply_chat_template(messages, add_generation_prompt=asks, return_dict=False)
            assert template_ids(theirs, messages, asks) == ids


def test_a_rendering_takes_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured in the process that renders, started as ever: lists that are kept at once, up to the limit."""
    monkeypatch.setenv("COLD", "1")  # not forked from a process that has imported torch
    code = "{% for i in range(400) %}{% set x = ['a' * 1000000] %}{% endfor %}" + CHATML
    messages = [{"role": "user", "content": "a"}]
    limited = LimitedProcess(make_work, SECONDS, MEMORY)
    assert limited({"code": code, "messages": messages, "variables": {}})[1] == b"<|im_start|>user\na<|im_end|>\n"
    renderer = limited._process
    assert renderer is not None and renderer.poll() is None
    peak = next(line for line in Path(f"/proc/{renderer.pid}/status").read_text().splitlines() if "VmHWM" in line)
    assert int(peak.split()[1]) < (MEMORY + 150) * 1024


def test_a_forked_copy_renders_in_a_process_of_its_own() -> None:
    """As data workers do; the parent's process still answers afterwards."""
    messages = [{"role": "user", "content": "a"}]
    expected, _ = render(CHATML, messages, {})
    ours = process()._process
    assert ours is not None
    child = os.fork()
    if child == 0:
        right = render(CHATML, messages, {})[0] == expected and process()._process is not ours
        os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert render(CHATML, messages, {})[0] == expected and process()._process is ours
