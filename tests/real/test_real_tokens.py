"""The published tokenizer with its own chat template and with every template of LLaVA: random conversations have the
ids of transformers' tokenizer on the text that the template's authors write, and labels on the answers."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from real_parts import IMAGE, one_record, open_processor
from transformers import AutoTokenizer

from llava_fsdp.config import SpecialTokens, TooLong
from llava_fsdp.data.records.forms.parse_record import parse_record
from llava_fsdp.data.text.chat_template.jinja_template import OWN, ChatTemplate, open_template
from llava_fsdp.data.text.encode import UNLIMITED, ExactEncoder
from llava_fsdp.data.text.sample import Sample
from llava_fsdp.data.text.templates import TEMPLATES, Style, Template
from llava_fsdp.data.text.tokens.constants import IGNORE, IMAGE_ID
from llava_fsdp.data.text.tokens.tokenizer import open_tokenizer

COUNT = 200
TILES = 3
"""Number of image tokens of an image with LLaVA's templates."""
ATOMS = " |  |\n|\n\n|\t|a|the|Red|12|3.5|größe|中文|🙂|▁|x.|, a|USER:|###|</s>|[/INST]|'s|user|{{x}}|{% if %}".split(
    "|"
)
WORDS = [atom for atom in ATOMS if atom.strip()]
SPECIAL = ["<|im_end|>", "<|im_start|>", "<|endoftext|>", "<file_sep>"]
Turns = list[dict[str, str]]


def text_of(dice: random.Random, begins: bool, special: bool = False) -> str:
    """A text of a few odd pieces.

    Args:
        begins: whether it begins with a word, so that no tokenizer joins its beginning with what stands before.
        special: whether it may have special tokens, which transformers' tokenizer reads as such.
    """
    atoms = dice.choices(ATOMS, k=dice.randrange(1, 7))
    if special and dice.random() < 0.2:
        atoms.insert(dice.randrange(len(atoms) + 1), dice.choice(SPECIAL))
    return "".join([dice.choice(WORDS), *atoms] if begins else atoms)


def conversation(dice: random.Random, images: int, special: bool, begins: bool) -> Turns:
    """One to four exchanges in LLaVA's form. The tag of a single image may stand anywhere in its question."""
    turns: Turns = []
    if dice.random() < 0.25:
        turns.append({"from": "system", "value": text_of(dice, True, special)})
    for number in range(dice.randrange(1, 5)):
        asked = text_of(dice, True, special)
        if number == 0 and images == 1:
            at = dice.choice([0, len(asked)])
            asked = f"{asked[:at]}{IMAGE}{asked[at:]}"
        elif number == 0:
            asked = "".join(f"{IMAGE}\n" for _ in range(images)) + asked
        turns += [{"from": "human", "value": asked}, {"from": "gpt", "value": text_of(dice, begins, special)}]
    return turns


def image_first(text: str) -> str:
    """As LLaVA's preprocess_multimodal does for a question with an image (LLaVA train.py:308-329)."""
    if text.count(IMAGE) != 1:
        return text
    return f"{IMAGE}\n{text.replace(IMAGE, '').strip()}".strip()


def pieces_of_llava(turns: Turns, form: Template) -> list[tuple[str, bool]]:
    """The text that LLaVA trains on, in pieces that have labels or not: its Conversation.get_prompt (LLaVA
    conversation.py:33-107), preprocess_plain and _add_speaker_and_signal (LLaVA train.py:276-293, 575-598)."""
    system = form.system
    if turns[0]["from"] == "system":
        before, after = form.around_system
        system, turns = f"{before}{turns[0]['value']}{after}", turns[1:]
    if form.style is Style.PLAIN:
        return [(IMAGE * turns[0]["value"].count(IMAGE), False), *last_answers(turns, form)]
    starts = {
        Style.TWO: system + form.sep, Style.MPT: system + form.sep, Style.LLAMA_2: "", Style.MARKERS: f"{system}\n\n",
    }  # fmt: skip
    pieces = [(starts[form.style], False)]
    for number, turn in enumerate(turns):
        text = image_first(turn["value"]).replace(IMAGE, form.image) if number % 2 == 0 else turn["value"]
        match form.style:
            case Style.TWO if number % 2 == 0:
                pieces.append((f"{form.user}: {text}{form.sep}{form.assistant}:", False))
            case Style.TWO:
                pieces.append((f" {text}{form.sep2}", True))
            case Style.MPT if number % 2 == 0:
                pieces.append((f"{form.user}{text}{form.sep}{form.assistant}", False))
            case Style.MPT:
                pieces.append((f"{text}{form.sep}", True))
            case Style.LLAMA_2 if number % 2 == 0:
                begin = form.sep if number else ""  # the original strips the first
                pieces.append((f"{begin}[INST] {system if number == 0 else ''}{text} [/INST]", False))
            case Style.LLAMA_2:
                pieces.append((f" {text} {form.sep2}", True))
            case Style.MARKERS if number % 2 == 0:
                begin = "### " if number == 0 else " "
                pieces.append((f"{begin}{form.user}: {text}\n### {form.assistant}:", False))
            case _:
                pieces.append((f" {text}\n###", True))
    return [*pieces, (" ", False)] if form.style is Style.MARKERS else pieces


def last_answers(turns: Turns, form: Template) -> list[tuple[str, bool]]:
    return [(f"{turn['value']}{form.sep}", True) for turn in turns if turn["from"] == "gpt"]


def tokens_of_llava(pieces: list[tuple[str, bool]], tokenizer: Any, has_images: bool) -> tuple[list[int], list[int]]:
    """Ids and labels as LLaVA's tokenizer_image_token makes them (LLaVA mm_utils.py:185-204): the text between two
    images by itself. A token has a label if one of its characters is to have one."""
    text = "".join(text for text, _ in pieces)
    marked = np.repeat([own for _, own in pieces], [len(text) for text, _ in pieces])
    ids: list[int] = []
    labels: list[int] = []
    at = 0
    for number, chunk in enumerate(text.split(IMAGE) if has_images else [text]):
        if number:
            ids += [IMAGE_ID] * TILES
            labels += [IGNORE] * TILES
            at += len(IMAGE)
        made = tokenizer(chunk, add_special_tokens=False, return_offsets_mapping=True)
        for token, (begin, end) in zip(made["input_ids"], made["offset_mapping"], strict=True):
            ids.append(token)
            labels.append(token if marked[at + begin : at + end].any() else IGNORE)
        at += len(chunk)
    return ids, labels


def encoder(name: str, language: Path, tiles: int) -> ExactEncoder:
    ours = open_tokenizer(language)
    form = open_template(name, language, ours)
    return ExactEncoder(ours, form, lambda *_: np.arange(tiles), UNLIMITED, TooLong.fail, False, SpecialTokens.parse)


def encoded(encode: ExactEncoder, turns: Turns, names: list[str]) -> Sample:
    raw = {"id": "r", "conversations": turns, **({"image": names} if names else {})}
    sample = encode(parse_record("data.json", 0, raw))
    assert sample is not None
    return sample


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_template_of_llava(name: str, parts: Path) -> None:
    form, dice, has_labels = TEMPLATES[name], random.Random(name), 0
    encode = encoder(name, parts / "language", TILES)
    theirs: Any = AutoTokenizer.from_pretrained(parts / "language")
    for number in range(COUNT):
        count = 1 if form.image_only else number % 3
        turns = conversation(dice, count, special=True, begins=False)
        turns = [turn for turn in turns if turn["from"] != "system"][:2] if form.image_only else turns
        sample = encoded(encode, turns, [f"{n}.png" for n in range(count)])
        ids, labels = tokens_of_llava(pieces_of_llava(turns, form), theirs, bool(count))
        assert sample.input_ids.tolist() == ids, turns
        assert sample.labels.tolist() == labels, turns
        has_labels += sample.num_labels > 0
    assert has_labels == COUNT


def test_its_own_chat_template_with_images(parts: Path, dataset: Path) -> None:
    """Ids and labels of transformers' processor, whose template, tokenizer and image tokens are the published ones.
    Answers begin with a word; a question with an image is written as LLaVA writes it."""
    dice, processor = random.Random(1), open_processor(parts)
    encode = encoder(OWN, parts / "language", 16)
    image_id = processor.tokenizer.convert_tokens_to_ids(IMAGE)
    records = json.loads((dataset / "mixed.json").read_text())
    names = next(record["image"] for record in records if isinstance(record.get("image"), list))
    for number in range(COUNT):
        count = number % 3
        turns = conversation(dice, count, special=False, begins=True)
        written = [{**turn, "value": image_first(turn["value"])} for turn in turns]
        record = {"id": "r", "conversations": written, "image": names[:count]}
        expected = one_record(record, processor, dataset)
        sample = encoded(encode, turns, names[:count])
        ids = np.where(sample.input_ids == IMAGE_ID, image_id, sample.input_ids)
        assert ids.tolist() == expected.ids.tolist(), turns
        assert sample.labels.tolist() == expected.labels.tolist(), turns


def test_its_own_chat_template_with_any_text(parts: Path) -> None:
    """Special tokens, and answers that begin with white space: each answer is learnt once, its labels begin where
    transformers' prompt for it ends, tokenized alone, and the last sample's text is the one that transformers writes.
    Where the tokenizer joins an answer with its prompt, the next answer begins a sample of its own."""
    dice, several = random.Random(2), 0
    encode = encoder(OWN, parts / "language", 16)
    theirs: Any = AutoTokenizer.from_pretrained(parts / "language")
    assert isinstance(encode.template, ChatTemplate)
    roles = {"system": "system", "human": "user", "gpt": "assistant"}
    for _ in range(COUNT):
        turns = conversation(dice, 0, special=True, begins=False)
        messages = [{"role": roles[turn["from"]], "content": turn["value"]} for turn in turns]
        prompts = {
            number: theirs.apply_chat_template(messages[:number], add_generation_prompt=True, return_dict=False)
            for number, message in enumerate(messages)
            if message["role"] == "assistant"
        }
        record = parse_record("data.json", 0, {"id": "r", "conversations": turns})
        samples, learnt = encode.samples(record, UNLIMITED), []
        for sample in samples:
            ids, labels = list(sample.input_ids), np.array(sample.labels)
            marks = np.flatnonzero(np.diff(np.concatenate([[0], labels != IGNORE, [0]])))
            ends = dict(zip(marks[::2].tolist(), marks[1::2].tolist(), strict=True))
            for number, asked in prompts.items():
                if len(asked) in ends and ids[: len(asked)] == asked:
                    answer = theirs.decode(ids[len(asked) : ends.pop(len(asked))])
                    assert answer == f"{messages[number]['content']}<|im_end|>", turns
                    learnt.append(number)
            assert not ends, "labels behind no prompt of the template"
        assert sorted(learnt) == [*prompts], turns
        text, whole = theirs.decode(samples[-1].input_ids), theirs.apply_chat_template(messages, tokenize=False)
        assert whole in ([text] if len(samples) == 1 else [f"{text}\n"]), "a sample of its own ends with its answer"
        several += len(samples) > 1
    assert 0 < several < COUNT
