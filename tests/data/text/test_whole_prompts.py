"""Prompts of whole models: ids and labels as transformers' own processors make them, with their published templates."""

import itertools
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chat_templates import published, write_tokenizer
from small import write_json
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlavaNextProcessor,
    LlavaOnevisionProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

from llava_fsdp.config import AspectRatio, PatchMerge, TooLong
from llava_fsdp.data.images.image_tokens import ImageTokens
from llava_fsdp.data.records.forms.parse_record import parse_record
from llava_fsdp.data.records.record import Record, Turn, is_video
from llava_fsdp.data.text.chat_template.jinja_template import OWN, ChatTemplate, open_template, own_name
from llava_fsdp.data.text.chat_template.message_parts import divide, media_of
from llava_fsdp.data.text.conversation import asked_turns, prompt
from llava_fsdp.data.text.encode import UNLIMITED, ExactEncoder, encode_prompt, truncate
from llava_fsdp.data.text.tokens.constants import IGNORE, IMAGE_ID
from llava_fsdp.data.text.tokens.tokenizer import open_tokenizer
from llava_fsdp.export.write.chat_template import first_conversation_with_other_ids
from llava_fsdp.export.write.processor import write_tokenizer as write_exported

ONEVISION = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + ' '}}{# Render all images first #}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>' }}{% endfor %}"
    "{# Render all video then #}{% for content in message['content'] | selectattr('type', 'equalto', 'video') %}"
    "{{ '<video>' }}{% endfor %}{# Render all text next #}{% if message['role'] != 'assistant' %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ '\\n' + content['text'] }}"
    "{% endfor %}{% else %}{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% generation %}{{ '\\n' + content['text'] }}{% endgeneration %}{% endfor %}{% endif %}{{'<|im_end|>'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Of llava-hf/llava-onevision-qwen2-7b-ov-hf. It writes a space before the line break of an answer's header, and its
prompt for generation has none."""
INTERNVL = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n'}}{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for content in message['content'] %}{% if content['type'] == 'image' %}"
    "{{ '<IMG_CONTEXT>\\n' }}{% elif content['type'] == 'video' %}{{ '<video>\\n' }}"
    "{% elif content['type'] == 'text' %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}{{'<|im_end|>\\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{'<|im_start|>assistant\\n' }}{% endif %}"
)
"""Of OpenGVLab/InternVL3-1B-hf."""
CHATML_34B = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n'}}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\\n' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] }}{% endfor %}"
    "{{'<|im_end|>'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Of llava-hf/llava-v1.6-34b-hf."""
GRIDS = [[28, 56], [56, 28], [84, 56]]
"""[height, width]"""
SIDE, PATCHES = 28, 4
ATOMS = " |  |\n|\n\n|\t|a|the|Red|12|größe|中文|🙂|x.|, a|USER:|'s|user|{{x}}|\u2028".split("|")
WORDS = [atom for atom in ATOMS if atom.strip()]
IMAGES = [(40, 30), (9, 70), (28, 28), (150, 61)]


@dataclass
class Case:
    """A whole model: its files, transformers' processor of them, and this project's encoder."""

    encoder: ExactEncoder
    processor: Any
    image_id: int
    video_id: int | None
    has_videos: bool = False

    def theirs(self, messages: list[dict[str, Any]], sizes: list[Any], of: int = 0) -> list[int]:
        """The ids of transformers' processor: its template, its own text for each image and video, its tokenizer. (A
        processor with a video part cannot be called without torchvision, but each of these can.)

        Args:
            sizes: (width, height) of each image, number of frames of each video.
            of: number of images of the conversation of which these messages are the beginning; 0: no others.
        """
        own = self.processor
        text = own.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        images = [size for size in sizes if isinstance(size, tuple)]
        frames = [size for size in sizes if not isinstance(size, tuple)]
        shown = image_inputs(own, images, of or len(images))
        videos = {"pixel_values_videos": [torch.zeros(count, 3, SIDE, SIDE) for count in frames]}
        [text], _ = own.get_text_with_replacements(
            [text],
            [own.replace_image_token(shown, n) for n in range(len(images))],
            [own.replace_video_token(videos, n) for n in range(len(frames))],
        )
        return own.tokenizer(text)["input_ids"]


def image_inputs(processor: Any, images: list[tuple[int, int]], count: int) -> dict[str, Any]:
    """What the processor knows of images of these sizes (width, height)."""
    if isinstance(processor, InternVLProcessor):
        return {"num_patches": [1] * len(images)}
    sizes = [[height, width] for width, height in images]
    return {"image_sizes": sizes, "pixel_values": [np.zeros((1, 3, SIDE, SIDE))], "batch_num_images": [count]}


def open_case(kind: str, folder: Path, spaces: str = "bytes") -> Case:
    codes = {"llava_next": published()["llava_next"], "llava_onevision": ONEVISION, "internvl": INTERNVL}
    tokens = "<image><video><|im_start|><|im_end|>"
    tokens += "<img></img><IMG_CONTEXT>" if kind == "internvl" else ""
    code = codes[kind]
    write_tokenizer(
        f"{{# {tokens} #}}{code}",
        folder,
        spaces != "bytes",
        special=["<image>", "<video>", "<img>", "</img>", "<IMG_CONTEXT>"],
    )
    put_spaces(spaces, folder / "tokenizer.json")
    write_json(folder / "config.json", {"model_type": kind})
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "chat_template.jinja").write_text(code)
    if kind == "internvl":
        named = {
            "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        }  # fmt: skip
        config |= {"extra_special_tokens": named}
    if kind == "llava_next":
        frozen = json.loads((folder / "tokenizer.json").read_text())
        bos = next(t["id"] for t in frozen["added_tokens"] if t["content"] == "<bos>")
        special = {"<bos>": {"id": "<bos>", "ids": [bos], "tokens": ["<bos>"]}}
        first = [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        frozen["post_processor"] = {
            "type": "TemplateProcessing", "single": first, "pair": first, "special_tokens": special,
        }  # fmt: skip
        write_json(folder / "tokenizer.json", frozen)
    write_json(folder / "tokenizer_config.json", config)
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder)
    processor: Any
    if kind == "llava_next":
        reader = LlavaNextImageProcessorPil(image_grid_pinpoints=GRIDS, size={"shortest_edge": SIDE})
        processor = LlavaNextProcessor(reader, tokenizer, 14, "default", code, num_additional_image_tokens=1)
        sizes = tuple((width, height) for height, width in GRIDS)
        rule = ImageTokens(AspectRatio.anyres, SIDE, PATCHES, sizes, PatchMerge.spatial_unpad)
    elif kind == "llava_onevision":
        processor = object.__new__(LlavaOnevisionProcessor)
        processor.image_processor = LlavaOnevisionImageProcessorPil(image_grid_pinpoints=GRIDS)
        processor.num_image_tokens, processor.vision_feature_select_strategy = PATCHES, "full"
        processor.vision_aspect_ratio = "anyres_max_2"
        processor.image_token, processor.video_token = "<image>", "<video>"
        sizes = tuple((width, height) for height, width in GRIDS)
        rule = ImageTokens(AspectRatio.anyres_max, SIDE, PATCHES, sizes, PatchMerge.spatial_unpad, 2)
    else:
        processor = object.__new__(InternVLProcessor)
        processor.image_seq_length = PATCHES
        processor.start_image_token, processor.end_image_token = tokenizer.start_image_token, tokenizer.end_image_token
        processor.image_token, processor.video_token = tokenizer.context_image_token, tokenizer.video_token
        rule = ImageTokens(AspectRatio.square, SIDE, PATCHES)
    processor.tokenizer, processor.chat_template = tokenizer, code
    ours = open_tokenizer(folder)
    form = open_template(OWN, folder, ours)
    assert isinstance(form, ChatTemplate) and form.images is not None
    image_id = tokenizer.convert_tokens_to_ids(processor.image_token)
    video_id = tokenizer.convert_tokens_to_ids("<video>")
    encoder = ExactEncoder(ours, form, rows_of(rule), UNLIMITED, TooLong.fail)
    return Case(encoder, processor, image_id, video_id, kind == "llava_onevision")


def put_spaces(kind: str, path: Path) -> None:
    """Change a tokenizer: a space before a text alone, or before each text between special tokens, as Llama's."""
    frozen = json.loads(path.read_text())
    if kind == "first":
        frozen["normalizer"] = None
        frozen["pre_tokenizer"] = {
            "type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False,
        }  # fmt: skip
    if kind == "legacy":
        space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        steps = [{"type": "Prepend", "prepend": "▁"}, space]
        frozen |= {"normalizer": {"type": "Sequence", "normalizers": steps}, "pre_tokenizer": None}
        for token in frozen["added_tokens"]:
            token["normalized"] = False
    write_json(path, frozen)


def rows_of(rule: ImageTokens) -> Callable[[Record, int], np.ndarray]:
    """The tokens of images and videos whose names end with their sizes: `40x30.png`, `3.mp4`."""

    def rows(record: Record, number: int) -> np.ndarray:
        name = record.images[number]
        return rule.of_video(size_of(name)) if is_video(name) else rule.of(size_of(name), record.num_images)

    return rows


def size_of(name: str) -> Any:
    stem = Path(name).stem.partition("_")[2]
    return int(stem) if is_video(name) else tuple(map(int, stem.split("x")))


def text_of(dice: random.Random, begins: bool = False) -> str:
    """A text of a few odd pieces.

    Args:
        begins: whether it begins with a word, so that no tokenizer joins its beginning with what stands before.
    """
    atoms = dice.choices(ATOMS, k=dice.randrange(1, 6))
    return "".join([dice.choice(WORDS), *atoms] if begins else atoms)


def conversation(dice: random.Random, kind: str, videos: bool, begins: bool) -> list[dict[str, Any]]:
    """Messages as transformers takes them. `kind` is what they have: text, one (image), several, turns or video."""
    numbers = itertools.count()

    def image() -> dict[str, Any]:
        width, height = dice.choice(IMAGES)
        return {"type": "image", "image": f"{next(numbers)}_{width}x{height}.png"}

    def video() -> dict[str, Any]:
        return {"type": "video", "video": f"{next(numbers)}_{dice.randrange(1, 4)}.mp4"}

    messages = [{"role": "system", "content": [{"type": "text", "text": text_of(dice, True)}]}] * (dice.random() < 0.2)
    exchanges = dice.randrange(2, 5) if kind == "turns" or dice.random() < 0.2 else 1
    for number in range(exchanges):
        parts: list[dict[str, Any]] = [
            {"type": "text", "text": text_of(dice)} for _ in range(dice.choice([1, 1, 1, 2]))
        ]
        count = {"text": 0, "one": number == 0, "several": dice.randrange(1, 4)}.get(kind, dice.randrange(2))
        for _ in range(count):
            made = video() if videos and kind == "video" and dice.random() < 0.6 else image()
            parts.insert(dice.randrange(len(parts) + 1), made)
        messages.append({"role": "user", "content": parts})
        messages.append({"role": "assistant", "content": [{"type": "text", "text": text_of(dice, begins)}]})
    return messages


def as_record(messages: list[dict[str, Any]], dice: random.Random) -> Record:
    """The record with these messages: with their parts, or in LLaVA's form if it can say the same."""
    raw: dict[str, Any] = {"id": "r", "messages": messages}
    asked = [message["content"] for message in messages if message["role"] == "user"]
    is_usual = all(
        [part["type"] for part in parts].count("text") == 1 and parts[-1]["type"] == "text" for parts in asked
    )
    if is_usual and dice.random() < 0.5:
        roles = {"system": "system", "user": "human", "assistant": "gpt"}
        turns = []
        for message in messages:
            tag = "".join("<image>\n" for part in message["content"] if part["type"] != "text")
            turns.append({"from": roles[message["role"]], "value": tag + message["content"][-1]["text"]})
        names = [part[part["type"]] for parts in asked for part in parts if part["type"] != "text"]
        raw = {"id": "r", "conversations": turns, **({"image": names} if names else {})}
    return parse_record("data.json", 0, raw, videos=True)


KINDS = ["text", "one", "several", "turns", "video"]


def check(case: Case, messages: list[dict[str, Any]], record: Record) -> tuple[int, int]:
    """Compare a record's prompts and labels with the processor's; return (answers, answers with labels)."""
    sizes = [size_of(name) for name in record.images]
    sample = case.encoder(record)
    assert sample is not None
    form, tokenizer = case.encoder.template, case.encoder.tokenizer
    assert isinstance(form, ChatTemplate)
    turns, answers, learnt = asked_turns(record), 0, 0
    runs = label_runs(sample.labels)
    ids = with_tokens(case, sample.input_ids, sample.images, [len(rows) for rows in sample.image_rows])
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        answers += 1
        tags = sum(turn.text.count("<image>") for turn in turns[:number] if turn.role == "human") * bool(record.images)
        asked = case.theirs(messages[:number], sizes[:tags])
        media = media_of(record.images)
        segments = prompt(turns[:number], form, False, bool(record.images), media=media)
        lengths = [len(case.encoder.image_rows(record_of(record, tags), n)) for n in range(tags)]
        own = encode_prompt(segments, tokenizer, lengths, adds_bos=form.adds_bos)
        order = [segment.image for segment in segments if segment.image is not None]
        names, counts = [record.images[n] for n in order], [lengths[n] for n in order]
        assert with_tokens(case, own, names, counts).tolist() == asked, messages[:number]
        asked = case.theirs(messages[:number], sizes[:tags], record.num_images)
        begin = len(asked)
        if ids[:begin].tolist() == asked and begin in runs:
            learnt += 1
            target = tokenizer.decode(ids[begin : runs.pop(begin)].tolist())
            assert target.strip() == message["content"][0]["text"].strip(), messages
    assert not runs, "labels behind no prompt of the processor"
    return answers, learnt


def record_of(record: Record, count: int) -> Record:
    return Record(record.file, 0, "r", record.images[:count], record.turns, True)


def label_runs(labels: np.ndarray) -> dict[int, int]:
    """{begin of a run of labels: its end}"""
    marks = np.concatenate([[0], labels != IGNORE, [0]])
    begins, ends = np.flatnonzero(np.diff(marks) == 1), np.flatnonzero(np.diff(marks) == -1)
    return dict(zip(begins.tolist(), ends.tolist(), strict=True))


def with_tokens(case: Case, ids: np.ndarray, names: Any, lengths: list[int]) -> np.ndarray:
    """Ids with the tokens of images and videos that the processor writes."""
    tokens = [case.video_id if is_video(name) else case.image_id for name in names]
    ids = ids.copy()
    ids[ids == IMAGE_ID] = np.repeat(np.array(tokens, dtype=np.int64), lengths)
    return ids


@pytest.mark.parametrize("count", [12, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["llava_next", "llava_onevision", "internvl"])
def test_prompts_are_the_processor_s(kind: str, count: int, tmp_path: Path) -> None:
    """Random dialogues: with text alone, one image, several, several turns, videos."""
    case, dice = open_case(kind, tmp_path / "model"), random.Random(kind)
    answers = learnt = 0
    for number in range(count):
        messages = conversation(dice, KINDS[number % len(KINDS)], case.has_videos, number % 3 > 0)
        found = check(case, messages, as_record(messages, dice))
        answers, learnt = answers + found[0], learnt + found[1]
    assert learnt > count / 2


@pytest.mark.parametrize("count", [6, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("spaces", ["first", "legacy"])
@pytest.mark.parametrize("kind", ["llava_next", "internvl"])
def test_prompts_with_tokenizers_that_put_spaces_before_texts(
    kind: str, spaces: str, count: int, tmp_path: Path
) -> None:
    case, dice = open_case(kind, tmp_path / "model", spaces), random.Random(kind)
    for number in range(count):
        messages = conversation(dice, KINDS[number % len(KINDS)], case.has_videos, True)
        answers, learnt = check(case, messages, as_record(messages, dice))
        assert answers == learnt


@pytest.mark.parametrize("kind", ["llava_next", "llava_onevision", "internvl"])
@pytest.mark.parametrize("spaces", ["bytes", "first"])
def test_an_export_s_prompts_are_those_of_training(kind: str, spaces: str, tmp_path: Path) -> None:
    """Its chat template takes the messages that the source's takes, and text with tags; read again, it is the same."""
    case, dice = open_case(kind, tmp_path / "model", spaces), random.Random(kind)
    form, tokenizer, name = case.encoder.template, case.encoder.tokenizer, own_name(tmp_path / "model")
    assert name is not None
    (tmp_path / "export").mkdir()
    config = LlamaConfig(vocab_size=tokenizer.size)
    write_exported(tmp_path / "model", tmp_path / "export", config, name, False, case.has_videos)
    write_json(tmp_path / "export" / "config.json", {"model_type": kind})
    assert own_name(tmp_path / "export") == name
    again = open_template(name, tmp_path / "export", tokenizer)
    assert isinstance(form, ChatTemplate) and isinstance(again, ChatTemplate) and again.images == form.images
    assert first_conversation_with_other_ids(tmp_path / "export", tokenizer, form, False) is None
    if not case.has_videos:
        said = [{"role": "user", "content": "what is <video>?"}]
        asked = prompt([Turn("human", "what is <video>?")], form, False, False)
        ids = AutoTokenizer.from_pretrained(tmp_path / "export").apply_chat_template(
            said, add_generation_prompt=True, tokenize=False
        )
        assert ids.endswith("".join(segment.text for segment in asked)), "the tag is text without videos"
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path / "export")
    for number in range(12):
        messages = conversation(dice, KINDS[number % len(KINDS)], case.has_videos, True)
        record = as_record(messages, dice)
        sample = case.encoder(record)
        assert sample is not None
        asked = theirs.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
        ones = replace(case.encoder, image_rows=lambda *_: np.zeros(1, dtype=np.int64))(record)
        assert ones is not None
        tokens = theirs.convert_tokens_to_ids(["<image>", "<video>"])
        ids = ones.input_ids[: len(asked)]
        ids[ids == IMAGE_ID] = [tokens[is_video(name)] for name in ones.images]
        assert ids.tolist() == asked, messages


def test_images_come_in_the_order_of_the_template(tmp_path: Path) -> None:
    """OneVision's writes images before videos; each image's tokens, name and place in the record go together."""
    case = open_case("llava_onevision", tmp_path / "model")
    names = "0_3.mp4", "1_40x30.png", "2_2.mp4", "3_9x70.png"
    parts = [{"type": "video" if is_video(name) else "image", "path": name} for name in names]
    messages = [
        {"role": "user", "content": [*parts[:2], {"type": "text", "text": "what?"}, *parts[2:]]},
        {"role": "assistant", "content": "red"},
    ]
    record = parse_record("data.json", 0, {"id": "r", "messages": messages}, videos=True)
    assert record.images == names
    sample = case.encoder(record)
    assert sample is not None
    assert (
        sample.record_positions is not None
        and sample.record_positions == (1, 3, 0, 2)
        and sample.images == tuple(names[n] for n in sample.record_positions)
    )
    assert [sample.place(n) for n in range(4)] == [1, 3, 0, 2]
    assert [len(rows) for rows in sample.image_rows] == [5, 5, 4, 3]
    cut = truncate(sample, int(np.flatnonzero(sample.input_ids == IMAGE_ID)[11]))
    assert cut.images == sample.images[:2] and cut.place(1) == 3


PARTS = {
    "<image>\nq": ("it", ["q"]),
    "<image>\n<image>\nq": ("iit", ["q"]),
    "q\n<image>": ("ti", ["q"]),
    "is <image> left of<image> ": ("titit", ["is ", " left of", " "]),
    "<image>\n\nq\n": ("it", ["\nq\n"]),
    "<image>": ("i", []),
    "": ("t", [""]),
}
"""Questions, and the kinds and texts of their parts."""


@pytest.mark.parametrize("text", PARTS)
def test_a_line_break_beside_an_image_is_no_text(text: str) -> None:
    kinds, texts = PARTS[text]
    [message] = divide([Turn("human", text)], "i" * text.count("<image>"))
    assert (message.kinds, [*message.texts]) == (kinds, texts)
    [tags] = divide([Turn("human", text)], "")
    assert (tags.kinds, tags.texts) == ("t", (text,)), "tags are text without images"
    if text:
        pieces = re.split("(<image>)", text)
        parts = tuple(piece for piece in pieces if piece)
        [exact] = divide([Turn("human", text, parts=parts)], "i" * text.count("<image>"))
        assert "".join(exact.texts) == text.replace("<image>", ""), "a record's own parts are kept"
