"""Random conversations with thoughts, calls of tools, their results and images, and a judge of the samples made of
them: transformers' own `apply_chat_template`."""

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from chat_templates import specials, write_tokenizer
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from llava_fsdp.config import SpecialTokens, Thoughts, TooLong
from llava_fsdp.data.processor.image_template import NO_VIDEO, learn_placeholder
from llava_fsdp.data.records.record import Call, Record, Turn
from llava_fsdp.data.text.chat_template.chat_layout import Unfit
from llava_fsdp.data.text.chat_template.jinja_template import OWN, ChatTemplate, ImageParts, read_own
from llava_fsdp.data.text.chat_template.message_parts import IMAGE
from llava_fsdp.data.text.encode import UNLIMITED, ExactEncoder
from llava_fsdp.data.text.sample import Sample
from llava_fsdp.data.text.teaching import Teaching
from llava_fsdp.data.text.tokens.constants import IGNORE, IMAGE_ID
from llava_fsdp.data.text.tokens.tokenizer import open_tokenizer

WORDS = (
    'the red car stands left of a house 3.5 m away; it\'s "new" {x: 1} [2] a\\b naïve 中文 🙂 ok \t tab\n\nline\n- item'
)
EDGES = ("\n", "  ", "\n\n", " \n")
EMPTY = ("", " ", "\n\n")
"""Thoughts that say nothing: the answer counts as one without a thought."""
TOOLS: tuple[dict[str, Any], ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": about,
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string", "description": "Where?"}},
                "required": ["place"],
            },
        },
    }
    for name, about in (("look", "Looks."), ("crop", 'Cuts "out" <b> é & more.'))
)
IMAGE_TOKENS = 3


@dataclass(frozen=True)
class Allowed:
    """What the conversations have, because the template reads it."""

    system: bool = True
    calls: bool = True
    parallel: bool = True
    thoughts: bool = True
    always: bool = False
    """Whether every answer has a thought."""
    call_texts: bool = True
    """Whether an answer with calls may have a text."""
    images: bool = True
    result_images: bool = True


@dataclass
class Maker:
    """Makes random conversations."""

    dice: random.Random
    allowed: Allowed

    def text(self, most: int = 8, edges: bool = True) -> str:
        words = WORDS.split(" ")
        made = " ".join(self.dice.choice(words) for _ in range(self.dice.randint(1, most)))
        if edges:
            made = self.dice.choice(EDGES) * (self.dice.random() < 0.2) + made
            made += self.dice.choice(EDGES) * (self.dice.random() < 0.2)
        return made if made.strip() else "ok"

    def arguments(self) -> dict[str, Any]:
        some = [("zoom", self.dice.choice([1, 2.5, 1e-7, True, None])), ("box", [1, 2, {"b": "é\"<'"}]),
                ("a&b", {"k": "v", "a": []}), ("place", self.text(3, edges=False))]  # fmt: skip
        return dict(self.dice.choices(some, k=self.dice.randint(1, 3))) | {"place": self.text(2, edges=False)}

    def answer(self, calls: tuple[Call, ...] = (), thinks: bool = False) -> Turn:
        text = self.text()
        if calls and (not self.allowed.call_texts or self.dice.random() < 0.6):
            text = ""
        thought = None
        if self.allowed.always or (thinks and self.dice.random() < 0.8):
            thought = self.text(12)
        elif thinks and self.dice.random() < 0.3:
            thought = self.dice.choice(EMPTY)
        return Turn("gpt", text, self.dice.random() > 0.1, thought=thought, calls=calls)

    def asked(self, role: str, calls: tuple[Call, ...] = ()) -> Turn:
        may = self.allowed.result_images if role == "tool" else self.allowed.images
        parts = [self.text(), *(["<image>"] * self.dice.randint(1, 2) if may and self.dice.random() < 0.4 else [])]
        self.dice.shuffle(parts)
        return Turn(role, "".join(parts), parts=tuple(parts), calls=calls)

    def record(self) -> Record:
        dice, allowed = self.dice, self.allowed
        turns = [Turn("system", self.text())] if allowed.system and dice.random() < 0.5 else []
        is_agent = allowed.calls and dice.random() < 0.6
        thinks = allowed.thoughts and dice.random() < 0.75
        for _ in range(dice.randint(1, 3)):
            turns.append(self.asked("human"))
            for _ in range(dice.randint(0, 2) if is_agent else 0):
                ids = ["".join(dice.choices("abcdefghij0123456789", k=9))
                       for _ in range(dice.randint(1, 2) if allowed.parallel else 1)]  # fmt: skip
                calls = tuple(Call(dice.choice(("look", "crop")), self.arguments(), own) for own in ids)
                turns.append(self.answer(calls, thinks))
                turns += [self.asked("tool", (call,)) for call in calls]
            turns.append(self.answer((), thinks))
        images = tuple(f"{n}.png" for n in range(sum(turn.text.count("<image>") for turn in turns)))
        return Record("data.json", 3, "abc", images, tuple(turns), bool(images), tools=TOOLS if is_agent else ())


@dataclass
class Judge:
    """Compares samples with what transformers makes of the same conversations."""

    form: ChatTemplate
    theirs: Any
    teaching: Teaching
    training: str | None
    """TRL's template for training, with marks around what is supervised; None: it has none."""
    counts: Counter[str]
    only_trl: set[str]
    """Texts that TRL supervises, and that have no labels here."""

    def check(self, record: Record, samples: Sequence[Sample]) -> None:
        """Each answer that is to be learnt is in one sample, behind the ids of the template's own prompt."""
        turns = [replace(turn, thought=turn.thought if (turn.thought or "").strip() else None) for turn in record.turns]
        record = replace(record, turns=tuple(turns))
        wanted = [n for n, turn in enumerate(record.turns) if turn.role == "gpt" and turn.learnt]
        if not wanted:
            assert all((sample.labels == IGNORE).all() for sample in samples)
            return
        spans = [sample.turns or (wanted[0], wanted[-1]) for sample in samples]
        assert [n for first, last in spans for n in wanted if first <= n <= last] == wanted
        assert len(samples) == 1 or all(sample.turns is not None for sample in samples)
        for sample, (first, last) in zip(samples, spans, strict=True):
            self.counts["samples"] += 1
            labelled = sample.labels != IGNORE
            own = [n for n in wanted if first <= n <= last]
            begins = [self.prompt_of(record, n, sample) for n in own]
            for n, begin, end in zip(own, begins, [*begins[1:], len(labelled)], strict=True):
                self.answer(record, n, sample, (begin, end))
            assert not labelled[: begins[0]].any()

    def prompt_of(self, record: Record, turn: int, sample: Sample) -> int:
        """Compare the ids before an answer with the template's prompt, and return their number."""
        asked = self.ids(record, record.turns[:turn], ask=True, turn=record.turns[turn])
        assert sample.input_ids[: len(asked)].tolist() == asked, record.turns
        self.counts["answers"] += 1
        return len(asked)

    def answer(self, record: Record, number: int, sample: Sample, span: tuple[int, int]) -> None:
        """Compare the labels of an answer with the template's text of it, and with TRL's marks."""
        turn, begin = record.turns[number], span[0]
        labels = sample.labels[begin : span[1]]
        end = begin + int(np.flatnonzero(labels != IGNORE)[-1]) + 1
        target = np.where(sample.labels[begin:end] != IGNORE, sample.labels[begin:end], sample.input_ids[begin:end])
        text = self.text_of(target)
        learnt = self.text_of(target[sample.labels[begin:end] != IGNORE])
        assert learnt.endswith(tuple(specials(self.form.code))), text
        assert turn.text.strip() in learnt
        thought = (turn.thought or "").strip()
        if self.teaching.thoughts is Thoughts.train:
            assert thought in learnt
        elif self.teaching.thoughts is Thoughts.context:
            assert thought in text and (not thought or thought not in learnt.replace(turn.text.strip(), ""))
        for call in turn.calls:
            assert call.name in learnt
        shown = self.ids(record, record.turns[: number + 1], ask=False, turn=turn)
        until = sample.input_ids[:begin].tolist() + target.tolist()
        if shown[: len(until)] != until:
            joined = self.text_of(shown).startswith(self.text_of(until))
            self.counts["joined tokens" if joined else "rule 2 or 3"] += 1
            if not joined:
                features = self.form.features
                is_other = not self.text_of(shown).startswith(self.text_of(until[:begin]))
                assert features.opener or features.next_stop or is_other, (self.text_of(shown), self.text_of(until))
            return
        self.counts["as shown"] += 1
        if self.training is None or self.teaching.thoughts is not Thoughts.train:
            return
        try:
            ids, marks = self.marked(record, record.turns[: number + 1], turn)
        except TemplateError:  # TRL's template fails where the published one does not
            self.counts["trl fails"] += 1
            return
        if ids != shown:
            self.counts["trl writes another text"] += 1
            return
        labelled = sample.labels[begin:end] != IGNORE
        first = 0 if turn.thought is not None else int(np.argmax(labelled))  # an empty thought may have no labels
        own, theirs = labelled[first:].tolist(), [bool(mark) for mark in marks[begin + first : end]]
        self.counts["trl equal" if own == theirs else "trl differs"] += 1
        if own != theirs:
            both = zip(target[first:].tolist(), own, theirs, strict=True)
            self.only_trl.add(self.text_of([token for token, mine, its in both if its != mine]))

    def ids(self, record: Record, turns: Sequence[Turn], ask: bool, turn: Turn) -> list[int]:
        """transformers' ids of some turns; IMAGE_ID stands for the tokens of an image."""
        made = self.theirs.apply_chat_template(
            self.messages(turns), add_generation_prompt=ask, **self.keys(record, turn)
        )
        return self.with_images(made["input_ids"], made["input_ids"])

    def marked(self, record: Record, turns: Sequence[Turn], turn: Turn) -> tuple[list[int], list[int]]:
        assert self.training is not None
        keys = self.keys(record, turn) | {"chat_template": self.training}
        made = self.theirs.apply_chat_template(self.messages(turns), return_assistant_tokens_mask=True, **keys)
        ids = made["input_ids"]
        return self.with_images(ids, ids), self.with_images(ids, made["assistant_masks"])

    def keys(self, record: Record, turn: Turn) -> dict[str, Any]:
        form = self.form
        named = {name: value for name, value in form.variables.items() if not name.endswith("_token")}
        if (
            form.features.switch is not None
            and turn.thought is not None
            and self.teaching.thoughts is not Thoughts.drop
        ):
            named[form.features.switch] = True
        tools = list(record.tools) or None
        code = form.code if "strftime_now" in form.code else None
        return {"tools": tools, "return_dict": True, "chat_template": code, **named}

    def messages(self, turns: Sequence[Turn]) -> list[dict[str, Any]]:
        names = {"human": "user", "gpt": "assistant"}
        made = []
        for turn in turns:
            parts = [{"type": "image"} if part == "<image>" else {"type": "text", "text": part}
                     for part in turn.parts or (turn.text,)]  # fmt: skip
            bare = not turn.text and bool(turn.calls)
            own: dict[str, Any] = {
                "role": names.get(turn.role, turn.role),
                "content": turn.text if bare or not self.form.parts else parts,
            }
            if turn.thought is not None and self.teaching.thoughts is not Thoughts.drop:
                own[self.form.features.form.thought or "reasoning_content"] = turn.thought
            if turn.role == "tool":
                own |= {"name": turn.calls[0].name, "tool_call_id": turn.calls[0].id}
            elif turn.calls:
                as_text = self.form.features.form.text_arguments
                own["tool_calls"] = [
                    {"id": call.id, "type": "function", "function": {"name": call.name, "arguments":
                     json.dumps(call.arguments, ensure_ascii=False) if as_text else call.arguments}}
                    for call in turn.calls
                ]  # fmt: skip
            made.append(own)
        return made

    def text_of(self, ids: Sequence[int] | np.ndarray) -> str:
        return self.theirs.decode([token for token in ids if token != IMAGE_ID])

    def with_images(self, ids: list[int], values: Sequence[int]) -> list[int]:
        """The values of tokens, with IMAGE_TOKENS times IMAGE_ID where the ids are those of an image's text."""
        if self.form.images is None:
            return list(values)
        mark = self.theirs.encode(self.form.images.image, add_special_tokens=False)
        made, at = [], 0
        while at < len(ids):
            is_image = ids[at : at + len(mark)] == mark
            made += [IMAGE_ID] * IMAGE_TOKENS if is_image else [values[at]]
            at += len(mark) if is_image else 1
        return made


def rows_of(*_: Any) -> np.ndarray:
    return np.arange(IMAGE_TOKENS)


def open_form(code: str, folder: Path, training: str | None = None) -> ChatTemplate:
    """The template with a small tokenizer; with image parts if it reads them."""
    write_tokenizer(code + (training or ""), folder)
    (folder / "chat_template.jinja").write_text(code)
    form = read_own(OWN, folder, open_tokenizer(folder), "")
    with_parts = replace(form, parts=True, layouts={})
    try:
        images = ImageParts(image=learn_placeholder(with_parts, IMAGE), video=NO_VIDEO)
        imaged = replace(with_parts, images=images, layouts={})
        imaged.layout("hitg", has_labels=False)
        return replace(imaged, known=imaged.features)
    except Unfit:
        pass
    for own in (form, with_parts):
        try:
            return replace(own, known=own.features)
        except Unfit:
            continue
    raise AssertionError("no form of messages fits")


def open_judge(
    name: str, code: str, training: str | None, folder: Path, teaching: Teaching
) -> tuple[ExactEncoder, Judge]:
    form = teaching.template(open_form(code, folder, training))
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    dated = form.code.removesuffix(code.removesuffix("\n"))  # what makes the date the same every day
    training = None if training is None else dated + training
    encoder = ExactEncoder(
        form.tokenizer, form, rows_of, UNLIMITED, TooLong.fail, False, SpecialTokens.text,
        teaching,
    )  # fmt: skip
    return encoder, Judge(form, theirs, teaching, training, Counter(), set())
