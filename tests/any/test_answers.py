"""Answers of whole models of transformers, in chat and in validations, against the class's generate and its processor,
one question at a time."""

import inspect
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import RankPool
from PIL import Image
from small import write_json
from steps import begin
from tiers import any_but
from tool_learning import SCHEMAS
from transformers import AutoModelForImageTextToText, AutoProcessor, GenerationConfig
from whole_models import WHOLE, WholeModel, messages_of

from llava_fsdp.chat.answerer import Question
from llava_fsdp.chat.class_assistant import ClassAssistant
from llava_fsdp.chat.conversation import Conversation
from llava_fsdp.chat.messages_file import read_messages_file
from llava_fsdp.chat.open_assistant import open_assistant
from llava_fsdp.config import Config
from llava_fsdp.data.records.record import Turn
from llava_fsdp.model.generation import Sampling
from llava_fsdp.parallel.eval_mode import evaluating
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.runtime.errors import DataError
from llava_fsdp.train.events.held_out.validation_answers import AnswerGenerator
from llava_fsdp.train.main import settle_auto
from llava_fsdp.train.setup.build_state import open_held_out_data

Whole = Callable[[str], WholeModel]
LENGTH = 6


def first_exchange(record: dict[str, Any]) -> dict[str, Any]:
    turns = record["conversations"]
    question = turns[: 1 + (turns[0]["from"] == "system")]
    return {
        **record,
        "conversations": question,
        "image": record.get("image", [])[: question[-1]["value"].count("<image>")],
    }


def assistant_of(model: WholeModel) -> ClassAssistant:
    found = open_assistant(str(model.folder))
    assert isinstance(found, ClassAssistant)
    return found


def questions_of(model: WholeModel) -> list[Question]:
    asked = map(first_exchange, model.records("few"))
    return [
        Question(
            [Turn({"human": "human", "system": "system"}[t["from"]], t["value"]) for t in record["conversations"]],
            [model.images / name for name in record["image"]],
            record["id"],
        )
        for record in asked
    ]  # fmt: skip


def answers_of_transformers(model: WholeModel, read: Callable[[list[int]], str]) -> list[str]:
    kind: Any = AutoModelForImageTextToText
    peer = kind.from_pretrained(model.folder, dtype=torch.float32).eval()
    peer.generation_config = GenerationConfig()
    taken = inspect.signature(peer.forward).parameters
    found = []
    for record in map(first_exchange, model.records("few")):
        inputs = model.processor.apply_chat_template(
            messages_of(record, model.images),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        floats = {name: v.float() if v.is_floating_point() else v for name, v in inputs.items()}
        given = {name: value for name, value in floats.items() if name in taken}
        made = peer.generate(**given, max_new_tokens=LENGTH, do_sample=False)
        found.append(read(made[0, inputs["input_ids"].shape[1] :].tolist()))
    return found


def reader(assistant: ClassAssistant) -> Callable[[list[int]], str]:
    """Returns a function that makes the text of an answer of its tokens."""

    def read(tokens: list[int]) -> str:
        text = assistant.new_text()
        for token in tokens:
            text.push(token)
        text.close()
        return text.text

    return read


@pytest.mark.parametrize("name", any_but(["aya_vision"], WHOLE))
def test_answers_are_those_of_transformers(name: str, whole: Whole) -> None:
    model = whole(name)
    assistant, questions = assistant_of(model), questions_of(model)
    expected = answers_of_transformers(model, reader(assistant))
    assert [assistant.answers([question], LENGTH)[0] for question in questions] == expected
    assert assistant.answers(questions, LENGTH) == expected, "in one batch, padded on the left"
    assert assistant.thoughts_cut == [False] * len(questions)
    conversation = Conversation(assistant, seed=0)
    for question, answer in zip(questions[:2], expected, strict=False):
        conversation.reset()
        for path in question.images:
            assert isinstance(path, Path)
            conversation.add(path, "")
        assert "".join(conversation.ask(question.turns[-1].text, Sampling(LENGTH))) == answer
        assert assistant.text is not None and assistant.text.text == answer, "of which a conversation reads the thought"


def test_an_answer_that_is_stopped_leaves_the_model_usable(whole: Whole) -> None:
    model = whole("aya_vision")
    assistant, question = assistant_of(model), questions_of(model)[0]
    expected = assistant.answers([question], LENGTH)
    conversation = Conversation(assistant, seed=0)
    pieces = conversation.ask(question.turns[-1].text, Sampling(LENGTH))
    next(pieces)
    pieces.close()
    assert len(conversation.turns) == 2
    assert assistant.answers([question], LENGTH) == expected


def test_blank_images_change_answers_and_not_their_number_of_tokens(whole: Whole) -> None:
    model = whole("aya_vision")
    assistant, question = assistant_of(model), questions_of(model)[1]
    images = [assistant.load_image(path, "") for path in question.images]
    blank = [assistant.blank_image(image) for image in images]
    assert all(one.pixels.shape == other.pixels.shape for one, other in zip(images, blank, strict=True))
    assert all(len(set(map(tuple, one.pixels.reshape(-1, 3).tolist()))) == 1 for one in blank)
    lengths = [len(assistant.encode_question(question.turns, own, "")[0].input_ids) for own in (images, blank)]
    assert lengths[0] == lengths[1]


def test_tags_and_images_must_match(whole: Whole) -> None:
    model = whole("aya_vision")
    assistant, question = assistant_of(model), questions_of(model)[1]
    with pytest.raises(DataError, match="here: 1 <image> tags for 2 images"):
        assistant.encode_question(question.turns, [assistant.load_image(question.images[0], "")] * 2, "here")


def answers_on_a_rank(world: World, cfg: Config) -> list[str]:
    """Answers of a validation, before the first step."""
    state = begin(world, settle_auto(cfg, world))
    held_out = open_held_out_data(cfg, world, state.model)
    made = AnswerGenerator(state.model, held_out, cfg, lambda: False, lambda: None)
    with evaluating(state.model, world.device, state.roots):
        return [answered.text for answered in made.answers()]


@pytest.mark.ranks
@pytest.mark.parametrize("name", any_but(["aya_vision"], WHOLE))
def test_answers_of_validations_are_those_of_transformers(
    name: str, whole: Whole, tmp_path: Path, pools: dict[int, RankPool]
) -> None:
    """Three ranks with four questions, one of which has no image: in the second batch two ranks have no question."""
    model = whole(name)
    records = model.images.parent / "few.json"
    val = [f"val.path={records}", f"val.images={model.images}", "val.every=1", "val.answers=4", "val.batch_size=1"]
    cfg = model.config(
        tmp_path,
        "data.template=chat_template",
        *val,
        f"val.max_new_tokens={LENGTH}",
        "sharding=zero3",
        "micro_batch_size=1",
        "global_batch_size=3",
    )
    expected = answers_of_transformers(model, reader(assistant_of(model)))
    for found in pools[3].run(answers_on_a_rank, cfg):
        assert found == expected


WITH_TOOLS = (
    "{% if tools %}<|im_start|>system\\n{{ tools | tojson }}<|im_end|>\\n{% endif %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\\n{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|im_end|>\\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\\n{% endif %}"
)
"""A chat template with images and tools."""


def test_a_conversation_with_tools_is_asked_as_the_processor_writes_it(whole: Whole, tmp_path: Path) -> None:
    """Before the call, and behind its result, with an image in the question."""
    model = whole("aya_vision")
    shutil.copytree(model.folder, tmp_path / "model")
    code = tmp_path / "model" / "chat_template.jinja"
    code.write_text(WITH_TOOLS)
    image = next(own["image"][0] for own in model.records("few") if own.get("image"))
    shutil.copy(model.images / image, tmp_path)
    record = {"image": image, "tools": SCHEMAS}
    call = {"id": "call_0", "type": "function", "function": {"name": "price", "arguments": {"colour": "red"}}}
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it?"}]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "seven", "tool_call_id": "call_0"},
    ]
    assistant = open_assistant(str(tmp_path / "model"))
    assert isinstance(assistant, ClassAssistant)
    processor = AutoProcessor.from_pretrained(tmp_path / "model")
    for count in (1, 3):
        write_json(tmp_path / "talk.json", {**record, "messages": messages[:count]})
        question = read_messages_file(tmp_path / "talk.json")
        sample, _ = assistant.encode_question(
            question.turns, [assistant.load_image(question.images[0], "")], "", question.tools
        )
        text = processor.apply_chat_template(messages[:count], tools=SCHEMAS, add_generation_prompt=True)
        made = processor(text=text, images=[Image.open(model.images / image).convert("RGB")])
        assert sample.input_ids.tolist() == list(made["input_ids"][0])
