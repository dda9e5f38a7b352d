"""Render conversations with a language model's own chat template (Jinja), and find which characters come from the turns
(messages) of a record, and which have labels.

The text is exactly what transformers' `apply_chat_template` renders. The template's own text around the turns depends
only on the shape of the conversation: the roles of its turns and the kinds of their parts. So it is determined once for
each shape, by rendering a conversation whose texts are marker texts (see chat_layout.py). Each record's conversation is
then rendered. If the result is not exactly the text determined before with the record's texts in it, the template has
changed what a turn says, and the record is refused.
"""

import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from llava_fsdp.config import OWN_TEMPLATE as OWN
from llava_fsdp.data.problems import Kind
from llava_fsdp.data.records.record import IMAGE_TAG, Turn
from llava_fsdp.data.text.chat_template.answer_target import Asked
from llava_fsdp.data.text.chat_template.bounded_jinja import BREAKS, TemplateRefused, render
from llava_fsdp.data.text.chat_template.chat_features import ASKED, CALL, TOOL, Features, learn_features, said
from llava_fsdp.data.text.chat_template.chat_layout import MARK, MARKS, NO_END, Layout, Unfit, answer_end, learn
from llava_fsdp.data.text.chat_template.message_parts import (
    IMAGE,
    ROLES,
    TEXT,
    VIDEO,
    Message,
    MessageForm,
    divide,
    parse_shape,
    shape_of,
)
from llava_fsdp.data.text.chat_template.template_file import BEGIN, BOS, find_code, find_file, special_tokens
from llava_fsdp.data.text.templates import Template, template
from llava_fsdp.data.text.tokens.tokenizer import Tokenizer, open_tokenizer, read_optional
from llava_fsdp.runtime.errors import ConfigError, DataError
from llava_fsdp.runtime.text.log import log

SECONDS = 0.2
"""Greatest processor time in seconds for rendering a short conversation of marker texts, of which a template gets about
thirty; a slower template is refused. `bounded_jinja` has the limits for all conversations."""
WHOLE = ("llava", "llava_next", "llava_onevision", "internvl")
"""Types (`model_type`) of transformers' whole models, whose processors give images to the template as parts."""
UNREAD = ("fails: ", "leaves turns out")
"""Beginnings of the reasons that may be due to the form of the messages, for which another form is tried."""


@dataclass(frozen=True)
class ImageParts:
    """The texts for images and videos of a vision-language model in transformers' form, whose chat template takes
    images as parts of messages. They are those of the model's processor."""

    image: str = IMAGE_TAG
    """Text that the template writes for an image. The processor replaces it by the image's tokens."""
    video: str = "<video>"
    before: str = ""
    """Text that the processor puts before the tokens of an image; `after` likewise."""
    after: str = ""


@dataclass(frozen=True)
class ChatPiece:
    """A part of the text of a conversation: text of the template, or of a turn, or an image."""

    text: str
    supervised: bool
    """Whether the tokens have labels."""
    turn: int | None = None
    """Index of the turn; None: the text is the template's."""
    image: int | None = None
    """Index of the image or video in the place of which `text` stands."""
    begins_answer: bool = False
    """Whether the prompt for generation ends before this piece, in a conversation that goes on with an answer."""
    answer: int | None = None
    """Index of the turn that is an answer, if the piece is a part of it or is what begins or ends it."""


@dataclass(frozen=True)
class Rendering:
    """How a conversation is rendered with a chat template."""

    ask: bool
    """Whether the text ends with the beginning of an answer, as for generation."""
    form: MessageForm
    tools: tuple[dict[str, Any], ...] = ()
    """JSON schemas of the tools that answers may call."""
    variables: dict[str, Any] = field(default_factory=dict)
    """Variables of the template in addition to those of `ChatTemplate`."""


@dataclass(frozen=True, repr=False)
class ChatTemplate:
    """A language model's own chat template."""

    code: str
    """Jinja code."""
    path: Path
    variables: dict[str, Any]
    """{variable of the template: special token, or another value that all conversations get}."""
    tokenizer: Tokenizer
    parts: bool = False
    """Whether the content of a message is a list of parts; otherwise it is text."""
    images: ImageParts | None = None
    """How a whole model takes images, as parts of messages; None: images are tags in the text of a message."""
    layouts: dict[str, Layout | str] = field(default_factory=dict, compare=False)
    """{shape of a conversation: its Layout, or the reason why the template cannot be used for it}."""
    known: Features | None = field(default=None, compare=False)
    """The features of the template, if they are known."""
    prompt_ends: dict[str, list[int]] = field(default_factory=dict, compare=False)
    """{end of a prompt, from its last special token on: its token ids}, filled while records are encoded."""

    image_only = False

    @property
    def adds_bos(self) -> bool:
        """Whether BOS is added to the token ids instead of being read from the text, as a LLaVA-NeXT model's processor
        does. Its template lacks the token; llava_fsdp has put code that writes it (BOS) before the template."""
        return self.code.startswith(BOS) and self.tokenizer.bos is not None

    def __repr__(self) -> str:
        """Return a text that changes with all that affects the tokens of a conversation."""
        # "prompts apart": prompts are tokenized without their answers; this text is part of the names of cached indexes
        form = f"{self.parts} {self.images} prompts apart"
        return f"chat template {digest(self.code)} {sorted(self.variables.items())} {form}"

    @cached_property
    def image(self) -> str:
        """`<image>` with the texts that the processor puts around the tokens of an image."""
        texts = self.images or ImageParts()
        return f"{texts.before}{IMAGE_TAG}{texts.after}"

    @property
    def placeholders(self) -> dict[str, str]:
        """{kind of a part: the text that the template writes for it}."""
        return {} if self.images is None else {IMAGE: self.images.image, VIDEO: self.images.video}

    @property
    def stop(self) -> str:
        """The text that ends an answer, found by rendering conversations without tools and thoughts or, if the template
        cannot be used for these, by `features`. Raises Unfit if no special token comes behind an answer."""
        try:
            return self._stop
        except Unfit:
            return self.features.stop

    @cached_property
    def call_stop(self) -> str:
        """The special token that ends an answer with a call of a tool; empty if the template shows no calls."""
        for thought in (None, "It is red.") if self.features.tools else ():  # some take no call without a thought
            turns = [said("human", ASKED), said("gpt", "", thought=thought, calls=(CALL,))]
            try:
                text = Asked(self, self.features, turns, (TOOL,)).target(1).text  # the answer as the template writes it
            except Unfit:
                continue
            special = self.tokenizer.find_special(text)
            return text[slice(*special[-1])] if special else ""
        return ""

    @cached_property
    def _stop(self) -> str:
        """The text that ends an answer, by the layout of plain conversations (see `answer_end`). Raises Unfit if
        the template writes no such text."""
        _, frames = self.order_and_frames("hg")  # the template's texts around a question and an answer
        try:
            _, longer = self.order_and_frames("hghg")
            earlier = longer[2]  # the text between the first answer and the second question
        except Unfit:
            earlier = ""
        end = answer_end(frames[-1], earlier, self.tokenizer)
        if not end:
            raise Unfit(NO_END)
        return end

    @cached_property
    def text_before_answer(self) -> str:
        """The text that a model writes before every answer, such as an empty thought; "" if it is white space."""
        try:
            frame = self.layout("hg").frames[-2]  # the template's text before the answer
        except Unfit:
            return ""
        # its last characters come behind the prompt: the model writes them
        between = frame.text[len(frame.text) - frame.precedes_answer :]
        return between if between.strip() else ""

    @cached_property
    def writes_empty_thought(self) -> bool:
        """Whether the template writes an empty thought, such as `<think></think>`, before an answer that has none."""
        try:
            features = self.features
            empty = "".join(f"{features.thought_begin}{features.thought_end}".split())
            return bool(features.thought_begin.strip()) and "".join(self.text_before_answer.split()) == empty
        except Unfit:  # the template's features cannot be found out
            return False

    @cached_property
    def thought(self) -> tuple[str, str]:
        """The texts that a model writes before and after the thought of an answer. Both are empty if it writes no
        thoughts, as when the template's variable for them (`switch`) is false; the first also if the prompt has it."""
        try:
            features = self.features
        except Unfit:  # the template's features cannot be found out
            return "", ""
        return (
            ("", "")
            if features.switch and self.variables.get(features.switch) is False
            else (features.thought_begin, features.thought_end)
        )

    def write(self, turns: Sequence[Turn], where: str, media: str = "", has_labels: bool = True) -> list[ChatPiece]:
        """Render the turns of a conversation, and return the text in pieces. If the last turn is a question, the text
        is the prompt for its answer.

        Args:
            where: name of the conversation in error messages.
            media: kinds of the images and videos (`media_of`); empty if the template does not get them as parts.
            has_labels: whether answers are to have labels; otherwise the text is as transformers writes it.

        Raises:
            DataError: the template refuses the conversation, or changes the text of a turn.
        """
        messages = divide(turns, media) if self.images else [Message(t.role, TEXT, (t.text,), t.learnt) for t in turns]
        try:
            layout = self.layout(shape_of(messages), has_labels)
            filled = layout.fill([text for message in messages for text in message.texts])
            if self.render(messages) != layout.join(filled):
                raise Unfit("changes the text of a turn, or leaves a turn out, because of what it says")
        except Unfit as unfit:
            others = ", or set data.template=chatml or another of LLaVA's" if self.images is None else ""
            raise DataError(
                f"{where}: the chat template {self.path} {unfit}; take the record out{others}",
                Kind.chat_template,
            ) from unfit
        return list(self.pieces(layout, filled, media))

    def pieces(self, layout: Layout, filled: Sequence[str], media: str) -> Iterator[ChatPiece]:
        """Yield the text of a conversation in pieces: texts of the template (frames), texts of turns, and images. The
        first `ends_answer` characters of a frame end an answer, and the last `precedes_answer` characters are what a
        model writes before the text of the next answer; both have labels.

        Args:
            layout: the frames, the turns (slots) between them, and which answers have labels (turn -> bool).
            filled: the text of each slot, as the template writes it.
            media: the kind of each image and video, one letter each. Their placeholders in the frames become pieces;
                empty: no placeholders are looked for.
        """
        numbers = {kind: iter([n for n, letter in enumerate(media) if letter == kind]) for kind in (IMAGE, VIDEO)}
        kinds = {text: kind for kind, text in self.placeholders.items()}
        finder = re.compile("(" + "|".join(map(re.escape, kinds)) + ")") if media else None

        def pieces(text: str, supervised: bool, answer: int | None = None) -> Iterator[ChatPiece]:
            """Yield a text of the template, divided at the placeholders of images and videos."""
            for piece in finder.split(text) if finder else [text]:
                if finder and piece in kinds:
                    yield ChatPiece(piece, False, image=next(numbers[kinds[piece]]))
                elif piece:
                    yield ChatPiece(piece, supervised, answer=answer)

        answer = None  # the turn of the text before, if that is an answer: the frame begins with what ends it
        for frame, slot, text in zip(layout.frames, layout.slots, filled, strict=False):  # there is one more frame
            before = len(frame.text) - frame.precedes_answer
            yield from pieces(frame.text[: frame.ends_answer], True, answer)
            yield from pieces(frame.text[frame.ends_answer : before], False)
            answer = slot.turn if slot.turn in layout.answers else None
            if answer is not None:
                yield ChatPiece(frame.text[before:], True, begins_answer=True, answer=answer)
            yield ChatPiece(text, layout.answers.get(slot.turn, False), slot.turn, answer=answer)
        last = layout.frames[-1]
        yield from pieces(last.text[: last.ends_answer], True, answer)
        yield from pieces(last.text[last.ends_answer :], False)

    @cached_property
    def features(self) -> Features:
        """What the template reads of answers beside their text. Raises Unfit if the template cannot be used."""
        return self.known or learn_features(self)

    def write_text(
        self, messages: Sequence[Message], ask: bool, form: MessageForm, tools: Sequence[Any] = (), **variables: Any
    ) -> str:
        """Render messages that are given in the form `form`; with `ask`, the text ends with the generation prompt.
        `variables` override those of the template. Raise Unfit if the template fails."""
        return self.render(messages, how=Rendering(ask, form, tuple(tools), variables))

    def layout(self, shape: str, has_labels: bool = True) -> Layout:
        """Return, cached, what the template writes around the texts of conversations of one shape, such as `hg` for a
        question (human) and an answer (gpt); see `shape_of`. Raise Unfit if it cannot be used for them."""
        key = shape if has_labels else f"{shape} without labels"
        if key not in self.layouts:
            try:
                self.layouts[key] = learn(self, shape, has_labels)
            except Unfit as unfit:
                self.layouts[key] = str(unfit)
        found = self.layouts[key]
        if isinstance(found, str):
            raise Unfit(found)
        return found

    def order_and_frames(self, shape: str, before: str = "", after: str = "") -> tuple[list[int], list[str]]:
        """Render a conversation of the form `shape`, such as `hg` (a question and an answer), in which each text is a
        numbered marker with `before` and `after` around it. Return the order in which the template writes the texts
        (their numbers), and its own text before, between and after them. Raise Unfit if one is not written once."""
        messages, number = [], 0
        for turn in parse_shape(shape):
            texts = [before + MARK.format(number + n) + after for n in range(turn.kinds.count(TEXT))]
            messages.append(Message(turn.role, turn.kinds, tuple(texts)))
            number += len(texts)
        text = self.render(messages, SECONDS)  # the time limit
        order = [int(n) for n in MARKS.findall(text)]
        if sorted(order) != list(range(number)):
            raise Unfit(f"leaves turns out, or repeats them, in a conversation of {spell(messages)}")
        return order, MARKS.split(text)[::2]

    def render(self, messages: Sequence[Message], most: float = math.inf, how: Rendering | None = None) -> str:
        """Render a conversation; raise Unfit if the template fails, or takes too much memory, or more than `most`
        seconds of processor time. `how`: whether the text ends with the beginning of an answer, as for generation, the
        form of messages, tools and more variables. None: it ends so if the last message is no answer."""
        how = how or Rendering(messages[-1].role != "gpt", MessageForm(self.parts))
        made = [message.to_template(how.form) for message in messages]
        keys: dict[str, Any] = {"add_generation_prompt": how.ask, **self.variables, **how.variables}
        if how.tools:
            keys["tools"] = list(how.tools)
        try:
            text, seconds = render(self.code, made, keys)
        except TemplateRefused as error:
            raise Unfit(f"{error}, for a conversation of {spell(messages)}") from error
        if seconds > most:
            raise Unfit(f"{BREAKS} takes over {most:g} seconds of processor time to render {len(messages)} turns")
        return text


def spell(messages: Sequence[Message]) -> str:
    return ", ".join(ROLES[message.role] for message in messages)


def digest(code: str) -> str:
    return hashlib.sha256(code.encode()).hexdigest()[:12]


def is_own(name: str) -> bool:
    """Return whether `data.template` has the model's own chat template instead of one of LLaVA's."""
    return name == OWN or name.startswith(f"{OWN}-")


def own_name(folder: Path) -> str | None:
    """Return the name (`chat_template-DIGEST`) by which a run records a model folder's template; None without one."""
    found = find_code(folder)
    return None if found is None else f"{OWN}-{digest(found[1])}"


def usable_name(folder: Path) -> str | None:
    """Return the name by which `data.template` selects the model's own chat template; None without a template, or if it
    cannot be trained with, which is logged."""
    name = own_name(folder)
    try:
        if name is not None:
            open_template(name, folder, open_tokenizer(folder))
        return name
    except ConfigError as error:
        log().info("not used: %s", error)
        return None


def read_own(name: str, folder: Path, tokenizer: Tokenizer, cure: str) -> ChatTemplate:
    """Return the chat template in a model's folder, for messages that are one text each, without trying whether it can
    be trained with. Raise ConfigError if the folder has no template, or another than `name` records.

    Args:
        name: value of `data.template`, which may record a digest of the template (`own_name`).
        cure: end of the message for a folder without a template: what to do.
    """
    found = find_code(folder)
    if found is None:
        raise ConfigError(f"data.template={name}, and {folder} has no chat template; {cure}")
    path, code = found
    if name not in (OWN, own_name(folder)):
        raise ConfigError(
            f"data.template={name}, and {path} has another chat template now ({own_name(folder)}): put the old one "
            f"back, or train anew with data.template={OWN}"
        )
    variables = {token: text for token, text in special_tokens(folder).items() if token in code}
    return ChatTemplate(code, path, variables, tokenizer)


def open_template(name: str, folder: Path, tokenizer: Tokenizer) -> Template | ChatTemplate:
    """Return the conversation template that `data.template` names: one of LLaVA's, or the model's own. Raise
    ConfigError if there is no such template; or the folder's chat template is missing, is not the one that `name`
    records, or cannot be trained with."""
    if not is_own(name):
        return template(name)
    as_text = read_own(name, folder, tokenizer, "set data.template=chatml or v1")
    path, images = as_text.path, read_image_parts(folder)
    with_images = [] if images is None else [replace(as_text, parts=True, images=images, layouts={})]
    reasons = []
    # templates take a message as parts with images, as one text, or as a list of one text part
    for candidate in (*with_images, as_text, replace(as_text, parts=True, layouts={})):
        reason = unfit(candidate)
        if reason is None:
            return candidate
        reasons.append(reason)
        if BREAKS in reason:  # it would break its limits with messages of another form, too, and that takes long
            break
    # a reason that only the form of the messages may have caused says less than any other
    reason = next((reason for reason in reasons if not reason.startswith(UNREAD)), reasons[0])
    raise ConfigError(
        f"data.template={name}: the chat template {path} {reason}; set data.template=chatml or another of LLaVA's"
    )


def is_whole(folder: Path) -> bool:
    return read_optional(folder / "config.json").get("model_type") in WHOLE


def read_image_parts(folder: Path) -> ImageParts | None:
    """Return the texts for images and videos of a vision-language model in transformers' form, whose template takes
    images as parts of messages. Return None if the folder has another model or no template; or if a mark (BEGIN) in its
    template says that it is an export of a training in which messages had image tags in their text."""
    found = find_file(folder)
    if not is_whole(folder) or found is None or BEGIN in found[1]:
        return None
    config = read_optional(folder / "tokenizer_config.json")
    named = config.get("extra_special_tokens")
    known = read_optional(folder / "processor_config.json") | config | (named if isinstance(named, dict) else {})

    def token(key: str, default: str) -> str:
        value = known.get(key)
        text = value.get("content") if isinstance(value, dict) else value
        return text if isinstance(text, str) and text else default

    video = token("video_token", "<video>")
    if read_optional(folder / "config.json")["model_type"] != "internvl":
        return ImageParts(token("image_token", IMAGE_TAG), video)
    return ImageParts(
        image=token("context_image_token", "<IMG_CONTEXT>"),
        video=video,
        before=token("start_image_token", "<img>"),
        after=token("end_image_token", "</img>"),
    )


def stops_of(form: Template | ChatTemplate) -> tuple[str, ...]:
    """Return the texts that end an answer of a model that was trained with a template: one without calls of tools, and
    one with them."""
    return (form.stop, form.call_stop) if isinstance(form, ChatTemplate) else (form.stop,)


def unfit(chat_template: ChatTemplate) -> str | None:
    """Return the reason why a template cannot be used for training; None if it can be used for conversations of one
    question and its answer (others are tried when a record has them)."""
    try:
        # letters: h is a user's turn, i an image and t a text in it, g an answer
        chat_template.layout("hg")
        if chat_template.images is not None:
            chat_template.layout("hitg")
    except Unfit as reason:
        # a template that takes too much time or memory (BREAKS) is not tried again; others may still be usable by
        # writing each answer with its prompt apart
        return None if BREAKS not in str(reason) and can_train_answer_by_answer(chat_template) else str(reason)
    return None


def can_train_answer_by_answer(chat_template: ChatTemplate) -> bool:
    """Return whether a template can be trained with although no fixed frames around the texts of a conversation (a
    layout) are found in it: by writing each answer with its prompt apart (`Asked.target`). It is enough if it can do so
    for an answer with a thought, or for one without."""
    shape = "t" if chat_template.images is None else f"{IMAGE}t"
    for thought in (None, "It is red."):
        turns = [Message("human", shape, ("What is it?",)), Message("gpt", TEXT, ("A cat.",), thought=thought)]
        try:
            Asked(chat_template, chat_template.features, turns, ()).target(1)
            return True
        except Unfit:
            continue
    return False
