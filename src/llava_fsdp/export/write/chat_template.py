"""Write the chat template (Jinja, for transformers) of an exported model, and check that it gives the same token ids as
training.

Training tokenizes each stretch of text between two images separately. transformers tokenizes the whole conversation at
once, and some tokenizers encode text differently if an image's special token precedes it. The template therefore splits
the conversation at its `<image>` tags, and puts a space before a stretch where the tokenizer needs one to give the same
ids as training.

Arguments of many functions here:
    template: the conversation template of training.
    start_end: whether training puts `<im_start>` and `<im_end>` around every image.
    gap: rule for where to put a space before the text that follows an image.
    video: whether parts of type `video` and `<video>` tags are accepted, and treated like images.
"""

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from transformers import AutoProcessor, AutoTokenizer

from llava_fsdp.config import TooLong
from llava_fsdp.data.images.image_tokens import ImageTokens
from llava_fsdp.data.records.record import IMAGE_TAG, Record, Turn
from llava_fsdp.data.text.chat_template.bounded_jinja import TemplateRefused, render
from llava_fsdp.data.text.chat_template.chat_layout import Unfit
from llava_fsdp.data.text.chat_template.jinja_template import ChatTemplate
from llava_fsdp.data.text.chat_template.message_parts import IMAGE, VIDEO
from llava_fsdp.data.text.chat_template.template_file import BEGIN, BEGIN_PARTS, END
from llava_fsdp.data.text.conversation import Segment, check_turns, image_order, image_tag, own_prompt, prompt
from llava_fsdp.data.text.encode import UNLIMITED, ExactEncoder, encode_prompt
from llava_fsdp.data.text.templates import Template
from llava_fsdp.data.text.tokens.constants import IMAGE_ID
from llava_fsdp.data.text.tokens.tokenizer import Tokenizer
from llava_fsdp.runtime.errors import DataError

VIDEO_TAG = "<video>"
ANY_TAG = f"{IMAGE_TAG}|{VIDEO_TAG}"
STRETCHES = ("What is it?", "\nx", " and  ", "  two", ", a", "12 b", "größe 中文 🙂", "\t\n a", "###", "[INST] x", "▁x")
"""Test texts for `find_gap`: some tokenizers give them other ids after an image's special token, or at the beginning of
a conversation, than alone."""
PROBES: tuple[tuple[str, ...], ...] = (
    ("what colour is it?", "red"),
    ("<image>\nwhat colour  is it?", "red", " and now ", " blue\n", "", ""),
    ("is  it\n<image> ", "12 größe 中文 🙂"),
    ("<image>", "a"),
    ("<image><image>", "a", "and <image>\n", "b"),
    ("first <image> , then<image>\n<image>", "two", "text", "c", "x <image>y <image> z", "d"),
    ("what?", "nothing", "<image>\nand here?", "a  circle"),
)
"""Test conversations for `first_conversation_with_other_ids`, as (question, answer, ...), to which wrong chat templates
gave other token ids."""
VIDEO_PROBES: tuple[tuple[str, ...], ...] = (
    ("<video>\nwhat colour  is it?", "red", "and now", "blue"),
    ("is  it\n<video> ", "12 größe 中文 🙂"),
    ("first <image> , then<video>\n<video>", "two", "text", "c", "x <video>y <image> z", "d"),
)
"""Test conversations for `first_conversation_with_other_ids` that contain videos, for chat templates that accept
them."""
PROBE_SIZE = (31, 50)
"""Width and height in pixels of the images with which an export's processor is tried."""
SYSTEM_PROBE = " be  kind\n"
"""System message of the test conversations that `first_conversation_with_other_ids` compares."""
IMAGE_PROBES: tuple[tuple[tuple[str, ...], str | None], ...] = (
    (PROBES[0], None),
    (PROBES[1], SYSTEM_PROBE),
    (PROBES[2], None),
    (PROBES[6], None),
    (("<image> or  <image>?", "a", "and\n<image> now?", "b"), None),
)
"""Test conversations for `first_image_conversation_with_other_ids`, each with its system message or None."""


@dataclass(frozen=True)
class GapRule:
    """Rule for where a chat template puts a space before a stretch of text (between two images), so that the stretch
    gets the same token ids after an image's special token as if it were tokenized separately.

    Attributes:
        everywhere: put a space before every stretch, with the exceptions in `but_before`; False: put no spaces.
        but_before: a stretch that begins with one of these texts gets no space.
    """

    everywhere: bool
    but_before: tuple[str, ...] = ()

    def before(self, stretch: str) -> str:
        return " " if self.everywhere and stretch and not stretch.startswith(self.but_before) else ""

    @property
    def jinja(self) -> str:
        """Jinja code that outputs a space if this rule puts one before the text in the variable `stretch`: the rule
        applies `everywhere`, and the text is not empty and does not begin with one of `but_before`."""
        if not self.everywhere:
            return ""
        unless = "".join(f" and not stretch.startswith({quoted(text)})" for text in self.but_before)
        return "{%- if stretch" + unless + " -%}{{- ' ' -}}{%- endif -%}"


def find_gap(theirs: Any, ours: Tokenizer) -> GapRule:
    """Return the rule with which the exported tokenizer (`theirs`, opened with transformers) gives text after an
    image's special token the same ids as the tokenizer of training (`ours`).

    A Llama tokenizer with `legacy=false` puts one space before each text that it encodes. Training encodes every
    stretch of text between images separately, but transformers the whole conversation as one text, so that spaces are
    missing. `GapRule(True, texts)` puts one before each stretch that does not begin with one of `texts`. If no rule
    gives equal ids, the rule without spaces is returned; `first_conversation_with_other_ids` then reports the
    difference.
    """
    added = (str(token) for token in theirs.added_tokens_decoder.values())
    # those that the tokenizer of training, too, takes for special tokens at the beginning of a text
    special = tuple(t for t in added if [i.id for i in ours.encode(f"{t}x")][:1] == [theirs.convert_tokens_to_ids(t)])
    stretches = (*STRETCHES, *(f"{text}x" for text in special))
    for gap in (GapRule(False), GapRule(True), GapRule(True, special), GapRule(True, (*special, " ", "▁"))):
        after_image = [theirs(IMAGE_TAG + gap.before(s) + s, add_special_tokens=False)["input_ids"] for s in stretches]
        if all(ids[1:] == [t.id for t in ours.encode(s)] for ids, s in zip(after_image, stretches, strict=True)):
            return gap
    return GapRule(False)


def quoted(text: str) -> str:
    """Return a text as a Jinja string literal. Only characters that a literal cannot contain are escaped, since the
    Jinja of llama.cpp does not know `\\u` and a number."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")


def raise_line(why: str) -> str:
    """Return Jinja code that raises an exception with the message `why`."""
    return f"{{{{- raise_exception({quoted(why)}) -}}}}"


def chat_template(template: Template, start_end: bool, adds_bos: bool, gap: GapRule, video: bool = False) -> str:
    """Return a chat template for transformers (Jinja) that formats conversations as training does with one of
    llava_fsdp's conversation templates. `start_end` says whether each image is between `<im_start>` and `<im_end>`, and
    `adds_bos` whether the conversation begins with the BOS token, as it does in training if the tokenizer has one.
    `gap` says where a space precedes text after an image. With `video`, videos are accepted like images.

    The content of a message may be text with `<image>` tags, or a list of parts of type `image` and `text`. As in
    training, the image of a message with exactly one image is moved to the front of the message, an answer before the
    first question is left out, and the text of a system message replaces the template's system text.
    """
    pattern, checks = template.pattern, checks_of(video)
    # a template that is image_only (of stage 1) trains no texts of questions, and no system text
    before, after = template.around_system
    system = quoted(template.system) if template.image_only else f"{quoted(before)} ~ said.text ~ {quoted(after)}"
    return "\n".join(
        [
            f"{{%- set chat = namespace(text='', system={quoted(template.system)}, "
            "begun=false, asked=false, tags=[]) -%}",
            "{%- for message in messages -%}",
            *content_of(video),
            "{%- if message['role'] == 'user' -%}",
            "{%- if chat.asked -%}" + raise_line("user and assistant take turns") + "{%- endif -%}",
            *tags_of(video),
            *question_lines(template, start_end),
            "{%- if chat.begun -%}",
            f"{{%- set chat.text = chat.text ~ {quoted(pattern.next_question)} -%}}",
            "{%- else -%}",
            f"{{%- set chat.text = {quoted(pattern.before_system)} ~ chat.system -%}}",
            f"{{%- set chat.text = chat.text ~ {quoted(pattern.first_question)} -%}}",
            "{%- endif -%}",
            "{%- set chat.text = chat.text ~ said.text -%}",
            f"{{%- set chat.text = chat.text ~ {quoted(pattern.after_question)} -%}}",
            "{%- if add_generation_prompt or not loop.last -%}",
            f"{{%- set chat.text = chat.text ~ {quoted(pattern.answer_header)} -%}}",
            "{%- endif -%}",
            "{%- set chat.begun = true -%}",
            "{%- set chat.asked = true -%}",
            *checks[:3],  # end with the branch for a system message
            f"{{%- set chat.system = {system} -%}}",
            *checks[3:],
            "{%- elif chat.asked -%}",
            f"{{%- set chat.text = chat.text ~ {quoted(pattern.before_answer)} ~ said.text -%}}",
            f"{{%- set chat.text = chat.text ~ {quoted(pattern.after_answer)} -%}}",
            f"{{%- if loop.last -%}}{{%- set chat.text = chat.text ~ {quoted(pattern.end)} -%}}{{%- endif -%}}",
            "{%- set chat.asked = false -%}",
            "{%- else -%}",
            UNASKED + raise_line("user and assistant take turns") + "{%- endif -%}",
            "{%- endif -%}",
            "{%- endfor -%}",
            *(["{{- bos_token -}}"] if adds_bos else []),
            *stretch_lines("chat.text", gap),
        ]
    )


def own_chat_template(template: ChatTemplate, start_end: bool, gap: GapRule, video: bool = False) -> str:
    """Return a chat template for transformers (Jinja) that formats conversations as training does with the language
    model's own chat template. Its code first rewrites `messages` as training does (it leaves out an answer before the
    first question, for example) into `chat.messages`, and then contains the model's template, which gets those.
    Thoughts, calls of tools and their results pass unchanged if the model's template shows them. `start_end`: each
    image is between `<im_start>` and `<im_end>`. `gap` says whether a space follows a BOS token that a processor adds.
    With `video`, videos are accepted like images."""
    # Jinja variables: `said` is the message at hand; `chat.begun`: a question came; `chat.asked`: the last message is
    # one. `takes_parts`: the model's template gets images as parts of messages, else as tags in the text.
    takes_parts, extra = template.images is not None, read_beside_text(template)
    has_tools = "tool_calls" in extra
    text = "[{'type': 'text', 'text': said.text}]" if template.parts else "said.text"
    content = "said.parts" if takes_parts else text
    asked = parts_lines(video)
    if not takes_parts:
        asked = [*tags_of(video), *question_lines(template, start_end, results=has_tools)]
    return "\n".join(
        [
            "{%- set chat = namespace(messages=[], begun=false, asked=false, "
            + ("called=false, " * has_tools + "tags=[]) -%}"),
            "{%- for message in messages -%}",
            *content_of(video, calls=has_tools),
            *(["{%- set said.parts = " + text + " -%}"] if takes_parts else []),
            *(RESULT_CHECKS if has_tools else ("{%- if message['role'] == 'user' -%}{%- if chat.asked -%}",)),
            raise_line("user and assistant take turns") + "{%- endif -%}",
            *asked,
            "{%- set chat.begun = true -%}",
            "{%- set chat.asked = true -%}",
            *checks_of(video),
            "{%- elif not chat.asked -%}",
            UNASKED + raise_line("user and assistant take turns") + "{%- endif -%}",
            "{%- else -%}",
            "{%- set chat.asked = false -%}",
            "{%- set chat.called = message['tool_calls'] -%}" if has_tools else NO_CALLS,
            "{%- endif -%}",
            *extra_lines(extra, content),
            "{%- if chat.begun or message['role'] == 'system' -%}",
            f"{{%- set chat.messages = chat.messages + [{{'role': message['role'], 'content': {content}}}] -%}}",
            "{%- endif -%}",
            *(["{%- endif -%}"] if extra else []),
            "{%- endfor -%}",
            "{%- set messages = chat.messages -%}",
            "{%- set text %}" + (BEGIN_PARTS if takes_parts else BEGIN) + template.code + END,
            *(bos_lines(gap) if template.adds_bos else ()),
            *(image_lines(template, start_end) if takes_parts else stretch_lines("text", GapRule(False))),
        ]
    )


def read_beside_text(template: ChatTemplate) -> list[str]:
    """Return the keys of an assistant's message that a language model's own chat template shows beside `content`: the
    key of a thought (reasoning) and `tool_calls`. Empty if it shows neither, or training cannot use it."""
    try:
        features = template.features
    except Unfit:
        return []
    return [key for key in (features.form.thought, "tool_calls" if features.tools else None) if key is not None]


def extra_lines(keys: Sequence[str], content: str) -> list[str]:
    """Return lines of Jinja code for a message that has more than text: a value under one of `keys` or, if `tool_calls`
    is one of them, the role `tool`. The lines add the message to the list `chat.messages`, with the Jinja expression
    `content` as its content and all else unchanged, and begin the branch for other messages. Empty without keys."""
    if not keys:
        return []
    has_extra = " or ".join(f"message['{key}']" for key in keys)
    has_extra += " or message['role'] == 'tool'" * ("tool_calls" in keys)
    content = f"({content} if said.text or not message['tool_calls'] else '')"
    return [
        "{%- if chat.begun and (" + has_extra + ") -%}",
        "{%- set chat.messages = chat.messages + [dict(message, content=" + content + ")] -%}",
        "{%- else -%}",
    ]


def bos_lines(gap: GapRule) -> tuple[str, ...]:
    """Return lines of Jinja code that output the BOS token with which the variable `text` begins, remove it from
    `text`, and output a space if `gap` puts one before the rest (its code reads `stretch`)."""
    return (
        "{{- bos_token -}}",
        "{%- set text = text[bos_token | length:] -%}",
        "{%- set stretch = text -%}" + gap.jinja,
    )


def image_lines(template: ChatTemplate, start_end: bool) -> list[str]:
    """Return lines of Jinja code that output a conversation with the export's image token in place of the text that the
    model's own template writes for an image. That template gets images as parts of messages. `start_end`: each image is
    between `<im_start>` and `<im_end>`."""
    assert template.images is not None
    tags = (template.images.image, image_tag(template, start_end)), (template.images.video, VIDEO_TAG)
    code = "".join(f".replace({quoted(old)}, {quoted(new)})" for old, new in tags if old != new)
    return [f"{{{{- text{code} -}}}}"]


def stretch_lines(text: str, gap: GapRule) -> list[str]:
    """Return lines of Jinja code that output the text in the Jinja variable `text`, split at its `<image>` tags, with a
    space before a piece where `gap` puts one. The Jinja list `chat.tags` has the output for each tag."""
    return [
        f"{{%- for stretch in {text}.split('<image>') -%}}",
        "{%- if not loop.first -%}{{- chat.tags[loop.index0 - 1] -}}{%- endif -%}",
        gap.jinja + "{{- stretch -}}",
        "{%- endfor -%}",
    ]


VIDEO_PART = "{%- elif part['type'] == 'video' -%}{%- set said.text = said.text ~ '<video>' -%}"
TAGS = (
    "{%- set pieces = said.text.split('<__media') -%}",
    "{%- set said.text = '' -%}",
    "{%- for piece in pieces -%}",
    "{%- set rest = piece if loop.first else piece.split('>')[1:]|join('>') -%}",
    "{%- if not loop.first -%}",
    "{%- set chat.tags = chat.tags + ['<__media' ~ piece.split('>')[0] ~ '>'] -%}",
    "{%- set said.text = said.text ~ '<image>' -%}",
    "{%- endif -%}",
    "{%- set said.text = said.text ~ rest -%}",
    "{%- for stretch in rest.split('<image>') -%}",
    "{%- if not loop.first -%}{%- set chat.tags = chat.tags + ['<image>'] -%}{%- endif -%}",
    "{%- endfor -%}",
    "{%- endfor -%}",
)
"""Jinja code that adds the tags of a question, in the variable `said.text`, to the list `chat.tags`. The server of
llama.cpp has replaced each image by a marker like `<__media_...__>` before it renders the template; the code replaces
these markers by `<image>`, and the list keeps them."""
VIDEO_TAGS = (
    "{%- for _ in stretch.split('<video>')[1:] -%}{%- set chat.tags = chat.tags + ['<video>'] -%}{%- endfor -%}"
)
VIDEO_AS_IMAGE = "{%- set said.text = said.text.replace('<video>', '<image>') -%}"


def parts_lines(video: bool) -> list[str]:
    """Return lines of Jinja code that set the variable `said.parts` to the parts of a user's message: text, images and,
    with `video`, videos. As in training, a line break directly before or after an image tag is left out."""
    tag = "<video>" if video else "<image>"  # <image> splits nothing more, since it has split the text already
    return [
        "{%- set said.parts = [] -%}",
        "{%- if message['content'] is string -%}",
        "{%- for stretch in message['content'].split('<image>') -%}",
        "{%- set is_first, is_last = loop.first, loop.last -%}",
        "{%- if not is_first -%}{%- set said.parts = said.parts + [{'type': 'image'}] -%}{%- endif -%}",
        f"{{%- for piece in stretch.split('{tag}') -%}}",
        "{%- if not loop.first -%}{%- set said.parts = said.parts + [{'type': 'video'}] -%}{%- endif -%}",
        "{%- set said.text = piece -%}",
        "{%- if said.text.startswith('\\n') and not (is_first and loop.first) -%}",
        "{%- set said.text = said.text[1:] -%}",
        "{%- endif -%}",
        "{%- if said.text.endswith('\\n') and not (is_last and loop.last) -%}",
        "{%- set said.text = said.text[:-1] -%}",
        "{%- endif -%}",
        "{%- if said.text -%}{%- set said.parts = said.parts + [{'type': 'text', 'text': said.text}] -%}{%- endif -%}",
        "{%- endfor -%}",
        "{%- endfor -%}",
        "{%- else -%}",
        "{%- set said.parts = message['content'] | list -%}",
        "{%- endif -%}",
        "{%- if not said.parts -%}{%- set said.parts = [{'type': 'text', 'text': ''}] -%}{%- endif -%}",
    ]


CHECKS = (
    "{%- elif '<image>' in said.text -%}",
    raise_line("images belong to questions, not to answers or the system message"),
    "{%- elif message['role'] == 'system' -%}"
    "{%- if not loop.first -%}" + raise_line("a system message comes first") + "{%- endif -%}",
    "{%- elif message['role'] != 'assistant' -%}",
    raise_line("roles are system, user and assistant"),
)
"""Jinja code that refuses messages which training refuses. It follows the branch `if message['role'] == 'user'`."""
RESULT_CHECKS = (
    "{%- if message['role'] == 'user' or message['role'] == 'tool' -%}",
    "{%- if message['role'] == 'tool' and not chat.called -%}" + raise_line("a result follows a call"),
    "{%- elif message['role'] == 'user' and (chat.asked or chat.called) -%}",
)
"""Jinja code that begins the branch for questions and, with tools, the results of calls."""
NO_CALLS = "{%- if message['tool_calls'] -%}" + raise_line("the template shows no calls of tools") + "{%- endif -%}"
"""Jinja code that refuses an answer with calls, which training refuses."""
VIDEO_CHECK = "{%- elif '<image>' in said.text or '<video>' in said.text -%}"
"""The first line of CHECKS if videos are accepted."""
UNASKED = "{%- if chat.begun or loop.index > 2 or loop.index == 2 and messages[0]['role'] != 'system' -%}"
"""Jinja condition that is true for an answer without a question, which training leaves out, unless it begins the
conversation."""


def tags_of(video: bool) -> tuple[str, ...]:
    """Return the lines of TAGS, with those for `<video>` tags if `video`."""
    return (*TAGS[:-2], VIDEO_TAGS, *TAGS[-2:], VIDEO_AS_IMAGE) if video else TAGS


def content_of(video: bool, calls: bool = False) -> list[str]:
    """Return lines of Jinja code that set the variable `said.text` to the content of `message` as one text with
    `<image>` tags. `video`: a part may have type `video`. `calls`: a message with calls may have no content."""
    return [
        "{%- set said = namespace(text='') -%}",
        "{%- if message['content'] is string -%}",
        "{%- set said.text = message['content'] -%}",
        "{%- elif message['content'] or not message['tool_calls'] and not message['reasoning_content'] -%}"
        if calls
        else "{%- else -%}",
        "{%- for part in message['content'] -%}",  # inference servers that find this loop pass the content as a list
        "{%- if part['type'] == 'image' -%}{%- set said.text = said.text ~ '<image>' -%}",
        *([VIDEO_PART] if video else []),
        "{%- elif part['type'] == 'text' -%}{%- set said.text = said.text ~ part['text'] -%}",
        "{%- else -%}{{- raise_exception('a part of a message has type image or text') -}}{%- endif -%}",
        "{%- endfor -%}",
        "{%- endif -%}",
    ]


def checks_of(video: bool) -> tuple[str, ...]:
    """Return the lines of CHECKS, with the first one for videos too if `video`."""
    return (VIDEO_CHECK, *CHECKS[1:]) if video else CHECKS


def question_lines(template: Template | ChatTemplate, start_end: bool, results: bool = False) -> list[str]:
    """Return lines of Jinja code that rewrite a user's message, in the variable `said.text`, as training does: a single
    `<image>` tag is moved to its front; a template that is `image_only` (of stage 1) drops all text. `start_end`: each
    image is between `<im_start>` and `<im_end>`. `results`: the message may be the result of a call of a tool, in which
    tags stay where they are."""
    pieces, tag = "{%- set pieces = said.text.split('<image>') -%}", quoted(image_tag(template, start_end))
    if template.image_only:
        return [pieces, "{%- set said.text = '<image>' * (pieces|length - 1) -%}"]
    return [
        pieces,
        "{%- if pieces|length == 2" + " and message['role'] == 'user'" * results + " -%}",
        "{%- set rest = pieces|join|trim -%}",
        f"{{%- set said.text = {tag} ~ ('\\n' ~ rest if rest else '') -%}}",
        "{%- else -%}",
        f"{{%- set said.text = pieces|join({tag}) -%}}",
        "{%- endif -%}",
    ]


def first_conversation_with_other_ids(
    folder: Path, ours: Tokenizer, template: Template | ChatTemplate, start_end: bool
) -> str | None:
    """Compare the token ids that an exported model's chat template gives with those of training, for test conversations
    and their prompts (all but the last answer). Return a message about the first whose ids differ, or None.

    The exported folder must have `config.json`, by which transformers chooses the tokenizer's class. `start_end`: each
    image is between `<im_start>` and `<im_end>`.
    """
    theirs = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    # with one token for each image, as the chat template writes it
    encoder = ExactEncoder(ours, template, lambda *_: np.zeros(1, dtype=np.int64), UNLIMITED, TooLong.fail, start_end)
    image_id = theirs.convert_tokens_to_ids(IMAGE_TAG)
    video_id = theirs.convert_tokens_to_ids(VIDEO_TAG) if VIDEO_PART in theirs.chat_template else None
    for texts, system in itertools.product(PROBES if video_id is None else PROBES + VIDEO_PROBES, (None, SYSTEM_PROBE)):
        try:
            conversation_ids, prompt_ids = ids_of_training(encoder, texts, image_id, system, video_id)
        except DataError:  # the model's own template takes no system turn, or no empty one
            continue
        for messages in (as_text(texts, system), as_parts(texts, system, joins_lines(template))):
            for messages_here, is_prompt, expected in (
                (messages, False, conversation_ids),
                (messages[:-1], True, prompt_ids),
            ):
                try:
                    ids = template_ids(theirs, messages_here, is_prompt)
                except TemplateRefused as error:
                    return f"for {messages_here!r} the template {error}"
                if ids != expected:
                    return f"for {messages_here!r} transformers makes {ids}, and training makes {expected}"
    return None


def render_messages(tokenizer: Any, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
    """Return the text that the chat template of transformers' tokenizer makes of a conversation. The template, of which
    a part may come from a model of unknown origin, is rendered by transformers in a process with limits.
    `add_generation_prompt` adds the beginning of an answer. Raises TemplateRefused if it fails or breaks a limit."""
    variables = {**tokenizer.special_tokens_map, "add_generation_prompt": add_generation_prompt}
    return render(tokenizer.get_chat_template(), messages, variables)[0]


def template_ids(tokenizer: Any, messages: list[dict[str, Any]], add_generation_prompt: bool) -> list[int]:
    """Return the token ids that a tokenizer's `apply_chat_template` gives a conversation. The template is rendered in a
    process with limits; TemplateRefused is raised if it fails or breaks one."""
    text = render_messages(tokenizer, messages, add_generation_prompt)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def first_image_conversation_with_other_ids(
    folder: Path, ours: Tokenizer, template: Template | ChatTemplate, start_end: bool, tokens: ImageTokens
) -> str | None:
    """Compare the token ids of test conversations with images and of their prompts: those of an exported model's
    processor, and those of training. Return a message about the first ones that differ; None if all are equal.
    `folder` has all files of the processor. `tokens` computes which tokens training gives an image."""
    processor: Any = AutoProcessor.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    encoder = ExactEncoder(ours, template, lambda *_: np.zeros(1, dtype=np.int64), UNLIMITED, TooLong.fail, start_end)
    image_id, image = processor.tokenizer.convert_tokens_to_ids(IMAGE_TAG), Image.new("RGB", PROBE_SIZE)
    for texts, system in IMAGE_PROBES:
        try:
            conversation_ids, prompt_ids = ids_of_training(encoder, texts, image_id, system)
        except DataError:  # the model's own template takes no system turn
            continue
        messages = as_parts(texts, system, joins_lines(template))
        count = sum(text.count(IMAGE_TAG) for text in texts)
        length = len(tokens.of(PROBE_SIZE, count)) if count else 0
        for messages_here, is_prompt, expected in (
            (messages, False, conversation_ids),
            (messages[:-1], True, prompt_ids),
        ):
            images = [image for message in messages_here for part in message["content"] if part["type"] == "image"]
            try:
                text = render_messages(processor.tokenizer, messages_here, is_prompt)
            except TemplateRefused as error:
                return f"for {messages_here!r} the template {error}"
            ids = processor(text=text, images=images or None, add_special_tokens=False)["input_ids"][0]
            if ids != [copy for one in expected for copy in [one] * (length if one == image_id else 1)]:
                return f"for {messages_here!r} transformers' processor makes {ids}, and training makes {expected}"
    return None


def ids_of_training(
    encoder: ExactEncoder, texts: Sequence[str], image_id: int, system: str | None = None, video_id: int | None = None
) -> tuple[list[int], list[int]]:
    """Return the token ids that training gives a conversation, and those of its prompt (the conversation without its
    last answer). With a language model's own template, the ids of the conversation are those that it has in the prompt
    of a later answer. They may differ from those of training on it, which tokenizes each answer with labels separately.

    Args:
        texts: the messages in turn: question, answer, question, and so on; with `<image>` and `<video>` tags.
        image_id: token id of images: one for each of an image's tokens in the conversation, and one in the prompt.
        system: text of a system message before the first question; None: no system message.
        video_id: the same for videos; None: there are no videos.
    """
    tags = [VIDEO if tag == VIDEO_TAG else IMAGE for tag in re.findall(ANY_TAG, "".join(texts))]
    if video_id is None:
        tags = [tag for tag in tags if tag == IMAGE]
    else:
        texts = [text.replace(VIDEO_TAG, IMAGE_TAG) for text in texts]
    turns = [] if system is None else [Turn("system", system)]
    turns += [Turn("gpt" if n % 2 else "human", text) for n, text in enumerate(texts)]
    media, form, tokenizer = "".join(tags), encoder.template, encoder.tokenizer
    record = Record("conversation", 0, "0", ("image",) * len(tags), tuple(turns), bool(tags))
    check_turns(record)
    lengths = [len(encoder.image_rows(record, number)) for number in range(len(tags))]
    asked = prompt(turns[:-1], form, encoder.start_end, bool(tags), media=media)
    if isinstance(form, ChatTemplate):
        conversation = own_prompt(turns, form, encoder.start_end, media, "the conversation", has_labels=False)
    else:
        conversation = [
            *prompt(turns, form, encoder.start_end, bool(tags)),
            Segment(form.pattern.end, supervised=False),
        ]
    ids_of_both = []
    for segments, lengths_here in ((conversation, lengths), (asked, [1] * len(tags))):
        ids = encode_prompt(segments, tokenizer, lengths_here, encoder.special_tokens, form.adds_bos)
        media_ids = [
            video_id if tags[n] == VIDEO else image_id
            for n in image_order(segments, len(tags))
            for _ in range(lengths_here[n])
        ]
        ids[ids == IMAGE_ID] = media_ids[: int((ids == IMAGE_ID).sum())]  # a prompt lacks what the last answer has
        ids_of_both.append(ids.tolist())
    return ids_of_both[0], ids_of_both[1]


def joins_lines(template: Template | ChatTemplate) -> bool:
    """Return whether a line break beside an image tag is text in training. It is not where the language model's own
    template gets images as parts of messages."""
    return not isinstance(template, ChatTemplate) or template.images is None


def as_text(texts: Iterable[str], system: str | None = None) -> list[dict[str, Any]]:
    """Return a conversation as chat messages for transformers, whose content is text with `<image>` tags. `texts` are a
    question, an answer, a question, and so on; `system` is the text of a system message before them."""
    lead = [] if system is None else [{"role": "system", "content": system}]
    return [*lead, *({"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts))]


def as_parts(texts: Iterable[str], system: str | None = None, joins: bool = True) -> list[dict[str, Any]]:
    """Return a conversation as chat messages for transformers, whose content is a list of image, video and text parts.
    `texts` are a question, an answer, a question, and so on, with tags; `system` is the text of a system message before
    them. With `joins` false, a line break beside a tag is left out."""
    messages = as_text(texts, system)
    for message in messages:
        parts: list[dict[str, str]] = []
        pieces = re.split(f"({ANY_TAG})", message["content"])
        if not joins:
            last = len(pieces) - 1
            pieces = [part if n == 0 else part.removeprefix("\n") for n, part in enumerate(pieces)]
            pieces = [part if n == last else part.removesuffix("\n") for n, part in enumerate(pieces)]
        for piece in pieces:
            kind = {IMAGE_TAG: "image", VIDEO_TAG: "video"}.get(piece)
            parts += [{"type": kind}] if kind else [{"type": "text", "text": piece}] * bool(piece)
        message["content"] = parts
    return messages
