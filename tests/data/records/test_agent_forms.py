"""Published forms of records with thoughts, calls of tools and results: one conversation in each is the same record,
and gives the same ids and labels."""

import json
from pathlib import Path
from typing import Any

import pytest
from chat_templates import published
from conversations import open_form, rows_of
from documents import ROOT
from tiers import slow_after

from llava_fsdp.config import Thoughts, TooLong
from llava_fsdp.data.problems import Kind
from llava_fsdp.data.records.forms.parse_record import parse_record
from llava_fsdp.data.records.record import Call, Record, Turn
from llava_fsdp.data.text.encode import UNLIMITED, ExactEncoder
from llava_fsdp.data.text.teaching import Teaching
from llava_fsdp.runtime.errors import DataError

ARGUMENTS = '{"box": [1, 2], "a": "é"}'
TOOL: dict[str, Any] = {
    "name": "zoom",
    "description": "Zooms.",
    "parameters": {"type": "object", "properties": {"box": {"type": "array", "items": {"type": "number"}}}},
}
WRAPPED = {"type": "function", "function": TOOL}
ASK, SAY = {"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "A cat."}
CALL = {"name": "zoom", "arguments": json.loads(ARGUMENTS)}
TEXT_CALL = {"id": "c1", "type": "function", "function": {"name": "zoom", "arguments": ARGUMENTS}}
CALLS: dict[str, dict[str, Any]] = {
    "OpenAI, text": {
        "tools": [WRAPPED],
        "messages": [ASK, {"role": "assistant", "content": None, "tool_calls": [TEXT_CALL]},
                     {"role": "tool", "tool_call_id": "c1", "content": "done"}, SAY],
    },
    "OpenAI, object": {
        "tools": [WRAPPED],
        "messages": [ASK, {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "function": CALL}]},
                     {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "done"}]}, SAY],
    },
    "OpenAI, old": {
        "functions": [TOOL],
        "messages": [ASK, {"role": "assistant", "content": None, "function_call": CALL | {"arguments": ARGUMENTS}},
                     {"role": "function", "name": "zoom", "content": "done"}, SAY],
    },
    "ShareGPT": {
        "tools": json.dumps([TOOL]),
        "conversations": [{"from": "human", "value": "What is it?"},
                          {"from": "function_call", "value": json.dumps(CALL)},
                          {"from": "observation", "value": "done"}, {"from": "gpt", "value": "A cat."}],
    },
    "ms-swift": {
        "tools": json.dumps([WRAPPED]),
        "messages": [ASK, {"role": "tool_call", "content": json.dumps(CALL)},
                     {"role": "tool_response", "content": "done"}, SAY],
    },
    "Anthropic": {
        "tools": [{"name": "zoom", "description": "Zooms.", "input_schema": TOOL["parameters"]}],
        "messages": [ASK, {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "zoom",
                                                             "input": json.loads(ARGUMENTS)}]},
                     {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "done"}]},
                     SAY],
    },
}  # fmt: skip
THOUGHTS: dict[str, dict[str, Any]] = {
    **{key: {"messages": [ASK, SAY | {key: "Fur."}]} for key in ("reasoning_content", "reasoning", "thinking")},
    "R1": {"messages": [ASK, SAY | {"content": "<think>\nFur.\n</think>\n\nA cat."}]},
    "R1-Onevision": {"conversations": [{"from": "user", "value": "What is it?"},
                                       {"from": "assistant", "value": "<think>Fur.</think>\n\nA cat."}]},
    "R1, tight": {"messages": [ASK, SAY | {"content": "<think>Fur.</think>A cat."}]},
    "OpenThoughts": {"conversations": [{"from": "user", "value": "What is it?"}, {"from": "assistant", "value":
        "<|begin_of_thought|>\n\nFur.\n\n<|end_of_thought|>\n\n<|begin_of_solution|>A cat.<|end_of_solution|>"}]},
    "Anthropic": {"messages": [ASK, SAY | {"content": [{"type": "thinking", "thinking": "Fur.", "signature": "x"},
                                                       {"type": "text", "text": "A cat."}]}]},
    "a column": {"conversations": [{"from": "human", "value": "What is it?"}, {"from": "gpt", "value": "A cat."}],
                 "reasoning_content": "Fur."},
}  # fmt: skip
WEIGHTS: dict[str, dict[str, Any]] = {
    name: {"messages": [ASK, {"role": "assistant", "content": "No.", **keys}, ASK, SAY]}
    for name, keys in (("OpenAI", {"weight": 0}), ("ms-swift", {"loss": False}), ("axolotl", {"train": False}))
}
SYSTEM: dict[str, dict[str, Any]] = {
    "OpenAI": {"messages": [{"role": "system", "content": "Be brief."}, ASK, SAY]},
    "LLaVA": {"conversations": [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "What is it?"},
                                {"from": "gpt", "value": "A cat."}]},
    "ShareGPT": {"system": "Be brief.", "conversations": [{"from": "human", "value": "What is it?"},
                                                          {"from": "gpt", "value": "A cat."}]},
    "Anthropic": {"system": "Be brief.", "messages": [ASK, SAY]},
}  # fmt: skip
GROUPS = {"calls": CALLS, "thoughts": THOUGHTS, "weights": WEIGHTS, "system": SYSTEM}
CROP = {"name": "zoom", "arguments": {"box": [3]}}
PARALLEL: dict[str, dict[str, Any]] = {
    "OpenAI": {"messages": [
        ASK, {"role": "assistant", "content": "", "reasoning_content": "Both.", "tool_calls": [
            {"id": "c1", "function": CALL}, {"id": "c2", "function": CROP}]},
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": "two"}, SAY]},
    "ShareGPT": {"conversations": [
        {"from": "human", "value": "What is it?"},
        {"from": "function_call", "value": json.dumps(CALL), "reasoning_content": "Both."},
        {"from": "function_call", "value": json.dumps(CROP)},
        {"from": "observation", "value": "one"}, {"from": "observation", "value": "two"},
        {"from": "gpt", "value": "A cat."}]},
    "ms-swift": {"messages": [
        ASK, {"role": "assistant", "content": "<think>Both.</think>"},
        {"role": "tool_call", "content": json.dumps([CALL, CROP])},
        {"role": "tool_response", "content": "one"}, {"role": "tool_response", "content": "two"}, SAY]},
    "Anthropic": {"messages": [
        ASK, {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Both.", "signature": "x"},
            {"type": "tool_use", "id": "c1", "name": "zoom", "input": CALL["arguments"]},
            {"type": "tool_use", "id": "c2", "name": "zoom", "input": CROP["arguments"]}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": "one"},
            {"type": "tool_result", "tool_use_id": "c2", "content": "two"}]}, SAY]},
    "Gemini's key": {"messages": [
        ASK, {"role": "assistant", "thinking": "Both.", "tool_calls": [
            {"id": 1, "name": "zoom", "args": CALL["arguments"]},
            {"id": 2, "name": "zoom", "args": CROP["arguments"]}]},
        {"role": "tool", "tool_call_id": 1, "content": "one"},
        {"role": "tool", "tool_call_id": 2, "content": "two"}, SAY]},
}  # fmt: skip
TEMPLATES = ("qwen3_5_think", "gptoss", "gemma4_v5", "qwen3", "glm4moe")


def parse(raw: dict[str, Any]) -> Record:
    return parse_record("a.json", 0, raw)


def coder(name: str, folder: Path, teaching: Teaching) -> ExactEncoder:
    form = teaching.template(open_form(published()[name], folder))
    return ExactEncoder(form.tokenizer, form, rows_of, UNLIMITED, TooLong.fail, teaching=teaching)


@pytest.mark.parametrize("name", slow_after(2, TEMPLATES))
def test_one_conversation_in_each_form_gives_the_same_ids_and_labels(name: str, tmp_path: Path) -> None:
    encode = coder(name, tmp_path, Teaching(Thoughts.train))
    for group, forms in GROUPS.items():
        found = {}
        for form, raw in forms.items():
            samples = encode.samples(parse(raw), UNLIMITED)
            found[form] = [(own.input_ids.tolist(), own.labels.tolist()) for own in samples]
        first, *others = found.values()
        assert len(others) >= 2 and first[0][1] and max(first[-1][1]) > 0
        for form, own in found.items():
            assert own == first, (group, form)


def test_parallel_calls_in_each_form_give_the_same_ids_and_labels(tmp_path: Path) -> None:
    encode = coder("qwen3", tmp_path, Teaching(Thoughts.train))
    found = {}
    for form, raw in PARALLEL.items():
        samples = encode.samples(parse(raw | {"tools": [TOOL]}), UNLIMITED)
        found[form] = [(own.input_ids.tolist(), own.labels.tolist()) for own in samples]
    assert all(own == found["OpenAI"] for own in found.values()), found.keys()


def test_what_is_no_thought_stays_text(tmp_path: Path) -> None:
    """LLaVA-CoT's stages are learnt as they are written."""
    encode = coder("qwen3", tmp_path, Teaching(Thoughts.train))
    text = "<SUMMARY> a </SUMMARY>\n\n<REASONING> b </REASONING>\n\n<CONCLUSION> c </CONCLUSION>"
    (sample,) = encode.samples(parse({"messages": [ASK, {"role": "assistant", "content": text}]}), UNLIMITED)
    assert text in encode.tokenizer.decode(sample.labels[sample.labels >= 0].tolist())


def test_what_the_forms_say() -> None:
    call = Call("zoom", {"box": [1, 2], "a": "é"}, "c1")
    for raw in CALLS.values():
        record = parse(raw)
        assert record.tools == (WRAPPED,) and [turn.role for turn in record.turns] == ["human", "gpt", "tool", "gpt"]
        own, of_result = record.turns[1].calls, record.turns[2].calls
        assert own == of_result and (own[0].name, own[0].arguments) == (call.name, call.arguments)
        assert list(own[0].arguments) == ["box", "a"], "in the order of the record"


def test_neighbouring_calls_are_parallel() -> None:
    turns = [ASK, {"role": "assistant", "content": "Both.", "weight": 0}]
    calls = [{"role": "tool_call", "content": json.dumps(CALL), "weight": 0}] * 2
    record = parse({"messages": [*turns, *calls, *[{"role": "tool_response", "content": "x"}] * 2, SAY]})
    assert [turn.role for turn in record.turns] == ["human", "gpt", "tool", "tool", "gpt"]
    assert len(record.turns[1].calls) == 2 and record.turns[1].text == "Both." and not record.turns[1].learnt
    assert record.weights_not_obeyed is None
    for weight in (1, 0.5):
        other = [*turns, calls[0] | {"weight": weight}, {"role": "tool_response", "content": "x"}, SAY]
        assert "different weights" in str(parse({"messages": other}).weights_not_obeyed)


def test_results_with_images_and_the_order_of_images() -> None:
    """Images of a result are parts of it, in Anthropic's form of a question, too."""
    image = {"type": "image", "image": "b.png"}
    asked = {"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image", "image": "a.png"}]}
    calls = {"role": "assistant", "content": "", "tool_calls": [TEXT_CALL]}
    result = {"role": "tool", "content": [image, {"type": "text", "text": "done"}]}
    block = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [image, {
        "type": "text", "text": "done"}]}, {"type": "text", "text": "So?"}]}  # fmt: skip
    record = parse({"messages": [asked, calls, result, SAY]})
    assert record.images == ("a.png", "b.png") and record.turns[2].text == "<image>done"
    other = parse({"messages": [asked, calls, block, SAY]})
    assert other.images == record.images and other.turns[2] == record.turns[2]
    assert other.turns[3] == Turn("human", "So?")


REFUSED: dict[str, tuple[dict[str, Any], Kind]] = {
    "arguments that are no JSON": ({"messages": [ASK, {"role": "assistant", "tool_calls": [
        {"function": {"name": "zoom", "arguments": "box=1"}}]}]}, Kind.bad_form),
    "arguments with NaN": ({"messages": [ASK, {"role": "assistant", "function_call": {
        "name": "zoom", "arguments": '{"a": NaN}'}}]}, Kind.bad_form),
    "arguments in a list": ({"messages": [ASK, {"role": "assistant", "function_call": {
        "name": "zoom", "arguments": "[1]"}}]}, Kind.bad_form),
    "a call without a name": ({"messages": [ASK, {"role": "assistant", "tool_calls": [{"id": "a"}]}]}, Kind.bad_form),
    "two kinds of calls": ({"messages": [ASK, {"role": "assistant", "tool_calls": [TEXT_CALL],
                                               "function_call": CALL}]}, Kind.bad_form),
    "arguments under another key": ({"messages": [ASK, {"role": "assistant", "function_call": {
        "name": "zoom", "kwargs": {"box": 1}}}]}, Kind.bad_form),
    "arguments twice": ({"messages": [ASK, {"role": "assistant", "function_call": {
        "name": "zoom", "arguments": {"box": 1}, "input": {"box": 2}}}]}, Kind.bad_form),
    "an id in a list": ({"messages": [ASK, {"role": "assistant", "tool_calls": [TEXT_CALL | {"id": ["c1"]}]}]},
                        Kind.bad_form),
    "an empty call": ({"messages": [ASK, {"role": "assistant", "content": "", "tool_calls": [{}, TEXT_CALL]}]},
                      Kind.bad_form),
    "a list of no calls": ({"messages": [ASK, {"role": "tool_call", "content": "[]"}]}, Kind.bad_form),
    "a thought of an answer and another of its call": ({"messages": [
        ASK, {"role": "assistant", "content": "", "thinking": "a"},
        {"role": "tool_call", "content": json.dumps(CALL), "thinking": "b"}]}, Kind.bad_form),
    "two thoughts": ({"messages": [ASK, SAY | {"thinking": "a", "reasoning": "b"}]}, Kind.bad_form),
    "an encrypted thought": ({"messages": [ASK, SAY | {"content": [
        {"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "A cat."}]}]}, Kind.bad_form),
    "a result without a call": ({"messages": [ASK, {"role": "tool", "content": "x"}, SAY]}, Kind.wrong_roles),
    "a result of another call": ({"messages": [ASK, {"role": "assistant", "tool_calls": [TEXT_CALL]},
                                               {"role": "tool", "tool_call_id": "c2", "content": "x"}, SAY]},
                                 Kind.wrong_roles),
    "a result of another tool": ({"messages": [ASK, {"role": "assistant", "tool_calls": [TEXT_CALL]},
                                               {"role": "tool", "name": "crop", "content": "x"}, SAY]},
                                 Kind.wrong_roles),
    "a call without a result": ({"messages": [ASK, {"role": "assistant", "tool_calls": [TEXT_CALL]}, SAY]},
                                Kind.wrong_roles),
    "a call of a question": ({"messages": [ASK | {"tool_calls": [TEXT_CALL]}, SAY]}, Kind.wrong_roles),
    "two calls of one id": ({"messages": [ASK, {"role": "assistant", "tool_calls": [TEXT_CALL] * 2}, SAY]},
                            Kind.wrong_roles),
    "a text before a result": ({"messages": [ASK, {"role": "assistant", "tool_calls": [TEXT_CALL]}, {
        "role": "user", "content": [{"type": "text", "text": "a"}, {"type": "tool_result", "content": "b"}]}, SAY]},
        Kind.bad_form),
    "tools without names": ({"tools": [{"description": "x"}], "messages": [ASK, SAY]}, Kind.bad_form),
    "tools that are no JSON": ({"tools": "zoom", "messages": [ASK, SAY]}, Kind.bad_form),
    "tools twice": ({"tools": [TOOL], "functions": [TOOL], "messages": [ASK, SAY]}, Kind.bad_form),
    "two system texts": ({"system": "a", "messages": [{"role": "system", "content": "b"}, ASK, SAY]}, Kind.bad_form),
    "half a pair in a thought": ({"messages": [ASK, SAY | {"thinking": "\ud83d"}]}, Kind.bad_form),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    raw, kind = REFUSED[case]
    with pytest.raises(DataError) as caught:
        parse(raw)
    assert caught.value.kind is kind and str(caught.value).startswith("a.json, record 0 ")


def test_the_documents_name_each_form() -> None:
    text = (ROOT / "docs" / "data.md").read_text()
    for name in ("tool_calls", "function_call", "tool_call", "tool_use", "thinking", "reasoning_content", "<think>",
                 "begin_of_thought", "observation", "tool_result"):  # fmt: skip
        assert name in text, name
