"""`chat messages=FILE` and programs that ask alike: a conversation with tools, calls and their results is asked as
transformers' chat template writes it, and a file that holds none is refused by name."""

from pathlib import Path
from typing import Any

import pytest
from commands import command
from small import command_config, write_json
from tool_learning import TOOLS, Example, Labels, train_with, write_examples
from transformers import PreTrainedTokenizerFast

from llava_fsdp.chat import main as chat
from llava_fsdp.chat.assistant import Assistant
from llava_fsdp.chat.messages_file import read_messages_file
from llava_fsdp.chat.open_assistant import open_assistant
from llava_fsdp.config import AspectRatio, ChatConfig
from llava_fsdp.data.problems import Kind
from llava_fsdp.data.text.tokens.constants import IMAGE_ID
from llava_fsdp.runtime.errors import ConfigError, DataError

LEAST = ("max_steps=1", "global_batch_size=3", "log_every=1")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Example]:
    folder = tmp_path_factory.mktemp("tools")
    return folder, write_examples(folder, 5, held_out=1)[0]


@pytest.fixture(scope="module")
def run(data: tuple[Path, Example], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step with a chat template that has thoughts and tools."""
    output = tmp_path_factory.mktemp("run") / "run"
    train_with(Labels.exact, data[0], output, *LEAST)
    return output


@pytest.fixture(scope="module")
def assistant(run: Path) -> Assistant:
    made = open_assistant(str(run))
    assert isinstance(made, Assistant)
    return made


def written(data: tuple[Path, Example], record: object) -> Path:
    path = data[0] / "images" / "talk.json"
    write_json(path, record)
    return path


def of_template(folder: Path, count: int, record: dict[str, Any]) -> list[int]:
    """transformers' ids of a conversation, with `count` of the image in place of its tag."""
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    messages = [
        {
            **own,
            "content": own["content"] if isinstance(own["content"], str) else f"<image>\n{own['content'][1]['text']}",
        }
        for own in record["messages"]
    ]
    text = theirs.apply_chat_template(messages, tools=record["tools"], add_generation_prompt=True, tokenize=False)
    before, behind = text.split("<image>")
    own = [theirs.encode(part, add_special_tokens=False) for part in (before, behind)]
    return [*own[0], *[IMAGE_ID] * count, *own[1]]


@pytest.mark.parametrize("turns", [1, 3])
def test_a_conversation_with_tools_is_asked_as_its_template_writes_it(
    turns: int, data: tuple[Path, Example], assistant: Assistant
) -> None:
    """Before the call, and behind its result; with the language model's own files, and with those of the export."""
    record = {**data[1].record, "messages": data[1].record["messages"][:turns]}
    question = read_messages_file(written(data, record))
    images = [assistant.load_image(image, "") for image in question.images]
    ids, _ = assistant.encode_question(question.turns, images, question.where, question.tools)
    for folder in (data[0] / "language", Path(assistant.checkpoint) / "export"):
        assert ids.tolist() == of_template(folder, assistant.reader.tokens.features, record), folder
    assert all(name in assistant.tokenizer.decode(ids[ids != IMAGE_ID].tolist()) for name in TOOLS.values())


def test_what_is_printed_is_the_answer(
    data: tuple[Path, Example], assistant: Assistant, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing but the answer to the file's last turn, which is asked with its result."""
    asked = []
    for result in ("five", "ten"):
        messages = [*data[1].record["messages"][:2], {**data[1].record["messages"][2], "content": result}]
        path = written(data, {**data[1].record, "messages": messages})
        words = (f"model.checkpoint={assistant.checkpoint}", f"messages={path}", "max_new_tokens=9", "thoughts=hide")
        chat.chat(command_config(ChatConfig, "chat", *words))
        own = read_messages_file(path)
        assert capsys.readouterr().out.strip() == assistant.answers([own], 9)[0].strip()
        images = [assistant.load_image(image, "") for image in own.images]
        ids, _ = assistant.encode_question(own.turns, images, "", own.tools)
        asked.append(assistant.tokenizer.decode(ids[ids != IMAGE_ID].tolist()))
    assert asked[0].replace("five", "ten") == asked[1] != asked[0]


ANSWERED = {"role": "assistant", "content": "red"}
WRONG = {
    "ends with an answer": ({"messages": [{"role": "user", "content": "a"}, ANSWERED]}, Kind.odd_turns),
    "has no turns": ({"messages": []}, Kind.odd_turns),
    "a call without its result": ({"messages": [
        {"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{"name": "price", "arguments": {}}]},
        {"role": "user", "content": "b"}]}, Kind.wrong_roles),
    "a result without a call": ({"messages": [{"role": "tool", "content": "a"}]}, Kind.wrong_roles),
    "two questions": ({"messages": [{"role": "user", "content": "a"}] * 2}, Kind.wrong_roles),
    "a tag too many": ({"image": "0.png", "messages": [{"role": "user", "content": "<image> <image>"}]},
                       Kind.image_count),
    "no such image": ({"image": "none.png", "messages": [{"role": "user", "content": "<image>"}]}, Kind.image_missing),
    "an address": ({"image": "http://a.b/c.png", "messages": [{"role": "user", "content": "a"}]}, Kind.url),
    "another folder": ({"image": "../0.png", "messages": [{"role": "user", "content": "a"}]}, Kind.path_outside),
    "sound": ({"audio": "a.wav", "messages": [{"role": "user", "content": "a"}]}, Kind.media_not_read),
    "no conversation": ({"text": "a"}, Kind.bad_form),
    "a list": ([], Kind.bad_form),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_file_without_a_question_is_refused(name: str, tmp_path: Path) -> None:
    record, kind = WRONG[name]
    write_json(tmp_path / "talk.json", record)
    with pytest.raises(DataError, match=r"talk\.json") as caught:
        read_messages_file(tmp_path / "talk.json")
    assert caught.value.kind is kind


def test_a_text_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "talk.json").write_text("{")
    with pytest.raises(DataError, match=r"talk\.json") as caught:
        read_messages_file(tmp_path / "talk.json")
    assert caught.value.kind is Kind.not_json
    with pytest.raises(ConfigError, match="messages="):
        read_messages_file(tmp_path)


def test_a_template_of_llava_shows_no_tools(noise: Path, data: tuple[Path, Example], tmp_path: Path) -> None:
    """The command ends with the exit code of data that cannot be used."""
    path = written(data, {**data[1].record, "messages": data[1].record["messages"][:1]})
    own = Assistant(str(noise), "v1", AspectRatio.pad)
    question = read_messages_file(path)
    images = [own.load_image(image, "") for image in question.images]
    with pytest.raises(DataError, match=r"talk\.json") as caught:
        own.encode_question(question.turns, images, question.where, question.tools)
    assert caught.value.kind is Kind.wrong_roles
    ran = command("llava_fsdp.chat", f"model.checkpoint={noise}", f"messages={path}", cwd=tmp_path)
    assert ran.returncode == 2 and "the conversation has tools" in ran.stderr
