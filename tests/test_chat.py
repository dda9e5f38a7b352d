"""Talking to a model: what is streamed is what is answered, a conversation reads only what is new, and every folder
that can be exported can be asked."""

import io
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import command
from hydra import compose, initialize_config_dir
from PIL import Image
from reference import EXPORTED
from small import ASSETS, conversion, make_config
from transformers import LlavaForConditionalGeneration

from llava_fsdp import chat, train
from llava_fsdp.answer import Assistant, Question
from llava_fsdp.config import AspectRatio, ChatConfig, config_dir, load
from llava_fsdp.data.source import Turn
from llava_fsdp.data.templates import IMAGE_TAG
from llava_fsdp.data.tokenizer import open_tokenizer
from llava_fsdp.data.vocabulary import IMAGE_ID
from llava_fsdp.errors import ConfigError, DataError
from llava_fsdp.export import export
from llava_fsdp.generate import AnswerText, Memory, Sampling, choose
from llava_fsdp.talk import Conversation

GREEDY = Sampling(max_new_tokens=12)


@pytest.fixture(scope="module")
def run(parts: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One step of stage 2, exported in fp32: its answers are noise, and all the more telling for it."""
    folder = tmp_path_factory.mktemp("run")
    train.train(make_config(parts, dataset, folder, "max_steps=1", "checkpoint.every=1", *EXPORTED))
    return folder


@pytest.fixture(scope="module")
def assistant(run: Path) -> Assistant:
    return Assistant(str(run), "v1", AspectRatio.pad)


@pytest.fixture
def talk(assistant: Assistant) -> Conversation:
    return Conversation(assistant)


@pytest.fixture
def pictures(dataset: Path) -> list[Path]:
    return [dataset / "images" / name for name in ("0.jpg", "1.png", "2.jpg")]


def configured(*overrides: str) -> ChatConfig:
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return load(ChatConfig, compose("chat", list(overrides)))


def said(talk: Conversation, text: str, how: Sampling = GREEDY) -> str:
    return "".join(talk.ask(text, how))


def at_once(talk: Conversation, images: list[Path]) -> str:
    """The last answer of a conversation, asked for by a question of its own."""
    return talk.assistant.answers([Question(talk.turns[:-1], images, "here")], GREEDY.max_new_tokens)[0]


def test_several_turns_are_one_question(talk: Conversation, pictures: list[Path]) -> None:
    """Streamed over turns, with a picture more on the way, each answer is that of the whole conversation at once."""
    talk.add(pictures[0], "here")
    said(talk, "what colour is the circle")
    assert talk.turns[-1].text == at_once(talk, pictures[:1]) != ""
    said(talk, "is it large")
    assert talk.turns[-1].text == at_once(talk, pictures[:1])
    talk.add(pictures[1], "here")
    talk.add(pictures[2], "here")
    said(talk, "what of the square")
    assert talk.turns[-1].text == at_once(talk, pictures)
    assert [t.text.count(IMAGE_TAG) for t in talk.turns] == [1, 0, 0, 0, 2, 0]
    assert len({t.text for t in talk.turns[1::2]}) == 3, "three answers that differ, or nothing is shown by this"


def test_only_what_is_new_is_read(talk: Conversation, pictures: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn by turn the model reads the tail of the conversation, and the tower no picture twice."""
    model, read, seen = talk.assistant.model, [], []
    forward, features = model.language_model.forward, model.image_features
    monkeypatch.setattr(
        model.language_model, "forward", lambda **k: (read.append(k["inputs_embeds"].shape[1]), forward(**k))[1]
    )
    monkeypatch.setattr(model, "image_features", lambda images: (seen.append(len(images)), features(images))[1])
    talk.assistant.memory = Memory()

    def positions() -> int:
        """Of the conversation without its last answer."""
        return len(talk.assistant.ids(talk.turns[:-1], talk.pictures, ""))

    talk.add(pictures[0], "here")
    said(talk, "what is it")
    first = read.pop(0)
    assert first == positions() and set(read) == {1}
    read.clear()
    said(talk, "and how large")
    assert read[0] <= positions() - first and seen == [1, 0]
    talk.undo()
    read.clear()
    said(talk, "and how small")
    assert read[0] <= positions() - first, "what was before the question that was taken back is still there"
    said(Conversation(talk.assistant), "something else")
    read.clear()
    said(talk, "and where")
    assert read[0] > positions() - first, "another conversation has taken the place"
    assert talk.turns[-1].text == at_once(talk, pictures[:1])


def test_undo_and_reset(talk: Conversation, pictures: list[Path]) -> None:
    assert not talk.undo()
    talk.add(pictures[0], "here")
    first = said(talk, "what is it")
    talk.undo()
    assert not talk.turns and not talk.pictures and len(talk.waiting) == 1
    assert said(talk, "what is it") == first
    talk.reset()
    assert said(talk, "what is it") == talk.assistant.answers([Question(talk.turns[:1], [], "")], 12)[0]


def test_a_stopped_answer_stays_as_far_as_it_came(talk: Conversation, pictures: list[Path]) -> None:
    talk.add(pictures[0], "here")
    whole = said(talk, "what is it")
    talk.reset()
    talk.add(pictures[0], "here")
    asked = iter([False, False, True])
    part = "".join(talk.ask("what is it", GREEDY, None, lambda: next(asked)))
    assert whole.startswith(part) and 0 < len(part) < len(whole) and talk.was_cut
    assert talk.turns[-1] == Turn("gpt", part)
    said(talk, "go on")
    assert talk.turns[-1].text == at_once(talk, pictures[:1])


def test_an_interrupted_pass_leaves_no_half_memory(
    talk: Conversation, pictures: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some layers have the new positions and some have not: nothing of that is gone on from."""
    talk.add(pictures[0], "here")
    said(talk, "what is it")
    last = talk.assistant.model.language_model.layers[-1]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(last, "forward", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        said(talk, "and how large")
    assert len(talk.turns) == 2
    said(talk, "and how large")
    assert talk.turns[-1].text == at_once(talk, pictures[:1])


def test_a_batch_answers_as_each_question_alone(assistant: Assistant, pictures: list[Path]) -> None:
    texts = ["what", "what colour is the large red circle left of the small green square", "is it"]
    questions = [Question([Turn("human", f"{IMAGE_TAG}\n{t}")], [p], "") for t, p in zip(texts, pictures, strict=True)]
    questions.append(Question([Turn("human", "no picture")], [], ""))
    together = assistant.answers(questions, 8)
    assert together == [assistant.answers([q], 8)[0] for q in questions] and len(set(together)) > 2
    assert assistant.answers(questions, 8, blank=True)[:3] != together[:3]


def test_answers_are_those_of_transformers_model(assistant: Assistant, run: Path, pictures: list[Path]) -> None:
    """Generated by transformers' own LLaVA, from the same ids and pixels."""
    turns = [Turn("human", f"{IMAGE_TAG}\nwhat colour is it")]
    shown = assistant.show(pictures[0], "")
    theirs = LlavaForConditionalGeneration.from_pretrained(run / "export", dtype=torch.float32)
    ids = torch.from_numpy(assistant.ids(turns, [shown], ""))[None]
    ids[ids == IMAGE_ID] = theirs.config.image_token_id
    table = torch.from_numpy(assistant.reader.preprocessor.pixel_table())
    pixels = torch.stack([table[c][torch.from_numpy(shown.tiles[:, c]).long()] for c in range(3)], 1)
    made = theirs.generate(input_ids=ids, pixel_values=pixels, max_new_tokens=12, do_sample=False, eos_token_id=None)
    text = AnswerText(assistant.tokenizer, assistant.form.stop, assistant.stops)
    expected = "".join([*(text.push(int(t)) for t in made[0, ids.shape[1] :]), text.close()])
    assert assistant.answers([Question(turns, pictures[:1], "")], 12) == [expected] != [""]
