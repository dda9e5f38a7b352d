"""Write an export's chat template (Jinja, for transformers), and check that it gives the token ids of training.

Training tokenizes each stretch of text between two images on its own. transformers tokenizes the whole conversation at
once, and some tokenizers encode text after an image's special token differently. The template therefore splits the
conversation at its image tags, and puts a space in front of a stretch where the tokenizer needs one to give the ids of
training.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from llava_fsdp.config import TooLong
from llava_fsdp.data.records.record import Record, Turn
from llava_fsdp.data.text.constants import IMAGE_ID
from llava_fsdp.data.text.conversation import image_tag, prompt
from llava_fsdp.data.text.encode import UNLIMITED, ExactEncoder, encode_prompt
from llava_fsdp.data.text.templates import IMAGE_TAG, Template
from llava_fsdp.data.text.tokenizer import Tokenizer

STRETCHES = ("What is it?", "\nx", " and  ", "  two", ", a", "12 b", "größe 中文 🙂", "\t\n a", "###", "[INST] x", "▁x")
"""Test texts that some tokenizers encode differently after an image or at the beginning than on their own."""
PROBES: tuple[tuple[str, ...], ...] = (
    ("what colour is it?", "red"),
    ("<image>\nwhat colour  is it?", "red", " and now ", " blue\n", "", ""),
    ("is  it\n<image> ", "12 größe 中文 🙂"),
    ("<image>", "a"),
    ("<image><image>", "a", "and <image>\n", "b"),
    ("first <image> , then<image>\n<image>", "two", "text", "c", "x <image>y <image> z", "d"),
    ("what?", "nothing", "<image>\nand here?", "a  circle"),
)
"""Test conversations (question, answer, question, ...) for which wrong templates have given other ids than training."""


@dataclass(frozen=True)
class Gap:
    """Whether a template must put a space before each stretch of text, but not before those that begin with certain
    texts, so that it gets the same ids after a special token as on its own."""

    everywhere: bool
    but_before: tuple[str, ...] = ()

    def before(self, stretch: str) -> str:
        return " " if self.everywhere and stretch and not stretch.startswith(self.but_before) else ""

    @property
    def jinja(self) -> str:
        if not self.everywhere:
            return ""
        unless = "".join(f" and not stretch.startswith({quoted(text)})" for text in self.but_before)
        return "{%- if stretch" + unless + " -%}{{- ' ' -}}{%- endif -%}"


def find_gap(theirs: Any, ours: Tokenizer) -> Gap:
    """Find the rule for spaces with which transformers' tokenizer gives text after a special token the ids of training.

    A Llama tokenizer with `legacy=false` puts one space before every text that it is given, and transformers gives it
    the whole conversation as one text. If no rule fits, the rule without spaces is returned; `rehearse` then finds what
    differs.
    """
    added = (str(token) for token in theirs.added_tokens_decoder.values())
    special = tuple(t for t in added if [i.id for i in ours.encode(f"{t}x")][:1] == [theirs.convert_tokens_to_ids(t)])
    stretches = (*STRETCHES, *(f"{text}x" for text in special))
    for gap in (Gap(False), Gap(True), Gap(True, special), Gap(True, (*special, " ", "▁"))):
        after_image = [theirs(IMAGE_TAG + gap.before(s) + s, add_special_tokens=False)["input_ids"] for s in stretches]
        if all(ids[1:] == [t.id for t in ours.encode(s)] for ids, s in zip(after_image, stretches, strict=True)):
            return gap
    return Gap(False)


def quoted(text: str) -> str:
    """Return a Jinja string literal of a text; Jinja understands JSON's escapes."""
    return json.dumps(text)


def chat_template(form: Template, start_end: bool, begins: bool, gap: Gap) -> str:
    """Translate one of our conversation templates to a chat template for transformers, in Jinja.

    The content of a message is text with image tags in it, or a list of parts of type `image` and `text`. As in
    training, the only image of a message moves to its front, and an answer before the first question is left out.

    Args:
        start_end: whether to put `<im_start>` and `<im_end>` around every image.
        begins: whether to begin with the BOS token, as in training.
    """
    pattern = form.pattern
    return "\n".join(
        [
            "{%- set chat = namespace(text='', begun=false, asked=false) -%}",
            "{%- for message in messages -%}",
            *CONTENT,
            "{%- if message['role'] == 'user' -%}",
            "{%- if chat.asked -%}" + refuse("user and assistant take turns") + "{%- endif -%}",
            *question(form, start_end),
            f"{{%- set first, later = {quoted(pattern.first_question)}, {quoted(pattern.next_question)} -%}}",
            "{%- set chat.text = chat.text ~ (later if chat.begun else first) ~ said.text -%}",
            f"{{%- set chat.text = chat.text ~ {quoted(pattern.after_question)} -%}}",
            "{%- if add_generation_prompt or not loop.last -%}",
            f"{{%- set chat.text = chat.text ~ {quoted(pattern.answer_header)} -%}}",
            "{%- endif -%}",
            "{%- set chat.begun = true -%}",
            "{%- set chat.asked = true -%}",
            "{%- elif message['role'] != 'assistant' -%}",
            refuse("the template has its own system text; roles are user and assistant"),
            "{%- elif '<image>' in said.text -%}",
            refuse("images belong to messages of the user"),
            "{%- elif chat.asked -%}",
            f"{{%- set chat.text = chat.text ~ {quoted(pattern.before_answer)} ~ said.text -%}}",
            f"{{%- set chat.text = chat.text ~ {quoted(pattern.after_answer)} -%}}",
            f"{{%- if loop.last -%}}{{%- set chat.text = chat.text ~ {quoted(pattern.end)} -%}}{{%- endif -%}}",
            "{%- set chat.asked = false -%}",
            "{%- elif not loop.first -%}",
            refuse("user and assistant take turns"),
            "{%- endif -%}",
            "{%- endfor -%}",
            *(["{{- bos_token -}}"] if begins else []),
            "{%- for stretch in chat.text.split('<image>') -%}",
            "{%- if not loop.first -%}{{- '<image>' -}}{%- endif -%}",
            gap.jinja + "{{- stretch -}}",
            "{%- endfor -%}",
        ]
    )


CONTENT = (
    "{%- set said = namespace(text='') -%}",
    "{%- if message['content'] is string -%}",
    "{%- set said.text = message['content'] -%}",
    "{%- else -%}",
    "{%- for part in message['content'] -%}",  # servers look for this loop to see whether they may pass a list
    "{%- if part['type'] == 'image' -%}{%- set said.text = said.text ~ '<image>' -%}",
    "{%- elif part['type'] == 'text' -%}{%- set said.text = said.text ~ part['text'] -%}",
    "{%- else -%}{{- raise_exception('a part of a message has type image or text') -}}{%- endif -%}",
    "{%- endfor -%}",
    "{%- endif -%}",
)
"""Jinja code that sets `said.text` to the content of a message as one text."""


def question(form: Template, start_end: bool) -> list[str]:
    """Return Jinja code that rewrites the question in `said.text` as training does (see `conversation.image_first`)."""
    pieces, tag = "{%- set pieces = said.text.split('<image>') -%}", quoted(image_tag(form, start_end))
    if form.image_only:
        return [pieces, "{%- set said.text = '<image>' * (pieces|length - 1) -%}"]
    return [
        pieces,
        "{%- if pieces|length == 2 -%}",
        "{%- set rest = pieces|join|trim -%}",
        f"{{%- set said.text = {tag} ~ ('\\n' ~ rest if rest else '') -%}}",
        "{%- else -%}",
        f"{{%- set said.text = pieces|join({tag}) -%}}",
        "{%- endif -%}",
    ]


def refuse(why: str) -> str:
    return f"{{{{- raise_exception({quoted(why)}) -}}}}"


def rehearse(folder: Path, ours: Tokenizer, form: Template, start_end: bool) -> str | None:
    """Compare the token ids that an exported chat template gives with those of training, for test conversations and
    their prompts.

    Args:
        folder: the export, with its `config.json`, by which transformers chooses the tokenizer's class.
        ours: the tokenizer of the training.

    Returns:
        A message with the first conversation whose ids differ; None if all ids are equal.
    """
    theirs = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    encoder = ExactEncoder(ours, form, lambda *_: np.zeros(1, dtype=np.int64), UNLIMITED, TooLong.fail, start_end)
    for texts in PROBES:
        whole, prompted = trained_ids(encoder, texts, theirs.convert_tokens_to_ids(IMAGE_TAG))
        for messages in (as_text(texts), as_parts(texts)):
            full_ids = theirs.apply_chat_template(messages, return_dict=False)
            prompt_ids = theirs.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
            for given, ids, trained in ((messages, full_ids, whole), (messages[:-1], prompt_ids, prompted)):
                if ids != trained:
                    return f"for {given!r} transformers makes {ids}, and training makes {trained}"
    return None


def trained_ids(encoder: ExactEncoder, texts: Sequence[str], image_id: int) -> tuple[list[int], list[int]]:
    """Return the token ids of a conversation as in training, and those of its prompt; `image_id` is for an image."""
    turns = [Turn("gpt" if n % 2 else "human", text) for n, text in enumerate(texts)]
    images = ("image",) * sum(turn.text.count(IMAGE_TAG) for turn in turns)
    sample = encoder(Record("conversation", 0, "0", images, tuple(turns), bool(images)))
    assert sample is not None
    text = prompt(turns[:-1], encoder.template, encoder.start_end, bool(images))
    both = sample.input_ids, encode_prompt(text, encoder.tokenizer, [1] * len(images))
    whole, prompted = (np.where(ids == IMAGE_ID, image_id, ids).tolist() for ids in both)
    return whole, prompted


def as_text(texts: Iterable[str]) -> list[dict[str, Any]]:
    """Return a conversation as transformers' chat messages, with image tags in their text."""
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]


def as_parts(texts: Iterable[str]) -> list[dict[str, Any]]:
    """Return a conversation as transformers' chat messages, each a list of image and text parts."""
    messages = as_text(texts)
    for message in messages:
        parts: list[dict[str, str]] = []
        for number, piece in enumerate(message["content"].split(IMAGE_TAG)):
            parts += [{"type": "image"}] * (number > 0) + [{"type": "text", "text": piece}] * bool(piece)
        message["content"] = parts
    return messages
