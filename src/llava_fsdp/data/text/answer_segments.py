"""The answers of a conversation that are to be learnt, each as the segments of its prompt and of what must be generated
behind it, written by a model's own chat template (see answer_target.py)."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llava_fsdp.config import EmptyThoughts, SpecialTokens, Thoughts
from llava_fsdp.data.problems import Kind
from llava_fsdp.data.records.record import IMAGE_TAG, READS_IMAGES, Call, Record, Turn
from llava_fsdp.data.text.chat_template.answer_target import BREAK, Asked, Target, guard, values_in
from llava_fsdp.data.text.chat_template.chat_layout import Unfit
from llava_fsdp.data.text.chat_template.jinja_template import ChatTemplate
from llava_fsdp.data.text.chat_template.message_parts import IMAGE, TEXT, VIDEO, Message, divide, media_of
from llava_fsdp.data.text.conversation import (
    AnswerPart,
    Segment,
    asked_turns,
    check_turns,
    image_first,
    image_tag,
    prompt,
    weighted,
    without_bos,
)
from llava_fsdp.data.text.teaching import Teaching
from llava_fsdp.runtime.errors import DataError

PICTURE = "\ue006"
"""Character that stands for an image in a text while it is rendered, with a template that gets no images as parts."""


@dataclass(frozen=True)
class AnswerSegments:
    """An answer to be learnt."""

    turn: int
    """Index of the answer among the record's turns (`asked_turns`)."""
    segments: list[Segment]
    """The text of the prompt, and of the answer."""
    images: int
    """Number of images (and videos) in the prompt: the first ones of the record."""


@dataclass(frozen=True)
class AnswerWriter:
    """Writes the answers of records with a model's own chat template."""

    template: ChatTemplate
    teaching: Teaching
    special_tokens: SpecialTokens
    start_end: bool = False
    """Whether to put `<im_start>` and `<im_end>` around each image."""

    def answers(self, record: Record, turns: tuple[int, int] | None = None) -> Iterator[AnswerSegments]:
        """Yield the answers of a record that are to be learnt, in order, with the segments of their prompts and texts.

        Args:
            turns: indices of the first and the last answer to yield; None: all.

        Raises:
            DataError: the turns of the record are wrong, or the template cannot be trained with them (Unfit).
        """
        check_turns(record)
        turns_asked, media = asked_turns(record), media_of(record.images)
        # 1 if the record begins with an answer, which is left out; error messages count it as turn 0
        left_out = len(record.turns) - len(turns_asked)
        try:
            asked = self.asked(turns_asked, record.tools, media)
        except Unfit as unfit:
            raise self.refused(record, str(unfit)) from unfit
        first, last = turns or (0, len(turns_asked))
        for number, turn in enumerate(turns_asked):
            if turn.role != "gpt" or not turn.learnt or not first <= number <= last:
                continue
            try:
                found, messages = asked.target(number), asked.messages[:number]
                yield AnswerSegments(
                    number,
                    [*self.prompt(found.prompt, messages, media), *self.answer(found, turn)],
                    count_images(messages),
                )
            except Unfit as unfit:
                why = f"cannot teach turn {number + left_out}, an answer: it {unfit}"
                raise self.refused(record, why) from unfit

    def asked(self, turns: Sequence[Turn], tools: Sequence[dict[str, Any]], media: str) -> Asked:
        """Return a conversation as an `Asked`, which can render it with the chat template. In its texts, the special
        tokens of the template are interrupted by the character BREAK (see `guard`). Raise Unfit if there are tools and
        the template shows none, or a text already has BREAK or PICTURE (which stands for an image).

        Args:
            media: the kinds of the conversation's images and videos, one letter each.
        """
        if tools and not self.template.features.tools:
            raise Unfit("leaves the tools out")
        said = [[turn.text, turn.thought, [[call.name, call.arguments] for call in turn.calls]] for turn in turns]
        if any(mark in text for text, *_ in values_in([*said, *tools]) for mark in (BREAK, PICTURE)):
            raise Unfit("gets no texts with U+E005 or U+E006, which mark places in them while they are rendered")
        return Asked(
            self.template, self.template.features, self.messages(turns, media), guarded(list(tools), self.guard)
        )

    def refused(self, record: Record, why: str) -> DataError:
        """Return the error for a record that the template cannot be trained with. `why`: what the template does."""
        return DataError(
            f"{record.where}: the chat template {self.template.path} {why}; take the record out, or set "
            "data.template=chatml or another of LLaVA's",
            Kind.chat_template,
        )

    def question(self, turns: Sequence[Turn], tools: Sequence[dict[str, Any]], media: str) -> list[Segment]:
        """Return the prompt for the answer to a conversation's last turn, which is a question or the result of a call,
        as segments without labels. Raise Unfit if the template refuses or changes the turns. `tools`: JSON schemas of
        the tools that the answer may call. `media`: the kinds of the images and videos, one letter each."""
        asked = self.asked(turns, tools, media)
        # `asked.prompt`: the template's text for all turns, without more variables; `self.prompt` divides it
        return self.prompt(asked.prompt(len(turns), {}), asked.messages, media)

    def messages(self, turns: Sequence[Turn], media: str) -> list[Message]:
        """Return the turns as messages for the template. In all their texts, the special tokens of the template are
        interrupted by a character (see `guard`). Images are parts of messages if the template takes them so; otherwise
        the character PICTURE stands for each in the texts. `media`: the kinds of images and videos, one letter each."""
        if self.template.images is not None:
            made = divide(turns, media)
        else:  # the record's texts have image tags, as in LLaVA's code
            made = divide([self.with_pictures(turn, bool(media)) for turn in turns], "")
        return [
            replace(
                message,
                texts=tuple(map(self.guard, message.texts)),
                thought=None if message.thought is None else self.guard(message.thought),
                calls=tuple(
                    Call(self.guard(call.name), guarded(call.arguments, self.guard), call.id) for call in message.calls
                ),
            )
            for message in made
        ]

    def with_pictures(self, turn: Turn, has_images: bool) -> Turn:
        """Return a turn as one text, in which the character PICTURE stands for each image tag. Without images, or in a
        turn whose role has none (such as an answer), the tag is plain text, and stays. In a question, a single tag
        moves to the front."""
        if not has_images or turn.role not in READS_IMAGES:
            return replace(turn, parts=None)
        text = image_first(turn.text, has_images) if turn.role == "human" else turn.text
        return replace(turn, text=text.replace(IMAGE_TAG, PICTURE), parts=None)

    def guard(self, text: str) -> str:
        """Return a record's text with the character BREAK in each special token and image placeholder, so that it is
        not taken for one that the template writes. With `special_tokens=parse`, special tokens stay as they are."""
        special = [] if self.special_tokens is SpecialTokens.parse else self.template.tokenizer.find_special(text)
        if self.template.images is not None:
            named = re.compile("|".join(map(re.escape, self.template.placeholders.values())))
            special = sorted({*special, *(found.span() for found in named.finditer(text))})
        return guard(text, special) if special else text

    def answer(self, target: Target, turn: Turn) -> list[Segment]:
        """Return the segments of an answer behind those of its prompt: the thought with what is around it, the text,
        and the calls. All have labels, but with the choice `context` the thought has none: it is only read.

        Args:
            target: what the model must generate, as the template writes it.
            turn: the answer, as the record has it; its weights become those of the segments.
        """
        teaching, text = self.teaching, target.text
        # whether the thought, which may be empty, is only read and has no labels
        is_read_alone = (teaching.thoughts is Thoughts.context and target.has_thought) or (
            teaching.empty_thoughts is EmptyThoughts.context and target.has_empty_thought
        )
        begin, end = target.said
        said = text[begin:end]
        parts = [
            (text[: target.begin], AnswerPart.thought, None),
            (text[target.begin : begin], AnswerPart.text, None),
            # a template at most strips white space from the text, so that what it writes is found in the record's text
            (said, AnswerPart.text, turn.text.find(said.replace(BREAK, ""))),
            (text[end:], AnswerPart.calls if turn.calls else AnswerPart.text, None),
        ]
        answer = [Segment("", supervised=True, begins_answer=True)]  # marks where the prompt ends
        for part_text, kind, place in parts:
            learnt = not (is_read_alone and kind is AnswerPart.thought)
            for piece in weighted(Segment(part_text, supervised=learnt, kind=kind), turn, place, hidden=BREAK):
                answer += split_at_breaks(piece.text, replace(piece, text=""))
        return answer

    def prompt(self, text: str, messages: Sequence[Message], media: str) -> list[Segment]:
        """Return the segments of a prompt, which have no labels. Each image and video is a segment of its own. Raise
        Unfit if the prompt has not all images and videos of its messages.

        Args:
            text: the prompt as the template writes it. An image is a placeholder of the template, or the character
                PICTURE if the template gets no images. Special tokens in texts of the record are interrupted by BREAK.
            messages: the messages before the answer.
            media: the kinds of the conversation's images and videos, one letter each.
        """
        form = self.template
        kinds = (
            {PICTURE: IMAGE}
            if form.images is None
            else {placeholder: kind for kind, placeholder in form.placeholders.items()}
        )
        numbers = {kind: iter([n for n, kind_here in enumerate(media) if kind_here == kind]) for kind in (IMAGE, VIDEO)}
        if form.images is None:  # PICTURE stands for images and videos
            numbers[IMAGE] = iter(range(len(media)))
        before, after = image_tag(form, self.start_end).split(IMAGE_TAG)
        segments: list[Segment] = []
        found = 0
        for piece in re.split("(" + "|".join(map(re.escape, kinds)) + ")", text) if media else [text]:
            if piece in kinds and media:
                found += 1
                number = next(numbers[kinds[piece]], None)
                segments += [
                    Segment(before, supervised=False),
                    Segment(IMAGE_TAG, supervised=False, image=number),
                    Segment(after, supervised=False),
                ]
            elif piece:
                segments += split_at_breaks(piece, Segment("", supervised=False))
        if found != count_images(messages):
            raise Unfit(f"writes {found} of {count_images(messages)} images and videos of a conversation")
        return without_bos(segments, form)


def ask_segments(
    turns: Sequence[Turn], writer: AnswerWriter, media: str, where: str, tools: Sequence[dict[str, Any]] = ()
) -> list[Segment]:
    """Return the segments of the prompt for the answer to a conversation's last turn. A conversation without tools,
    calls and thoughts is rendered by `prompt`.

    Args:
        media: the kinds of the conversation's images and videos, one letter each.
        where: name of the conversation in messages.
        tools: JSON schemas of the tools that the answer may call.

    Raises:
        DataError: the template refuses or changes the turns.
    """
    if not tools and all(turn.thought is None and not turn.calls for turn in turns):
        return prompt(turns, writer.template, writer.start_end, bool(media), where, media)
    try:
        return writer.question(turns, tools, media)
    except Unfit as unfit:
        raise DataError(f"{where}: the chat template {writer.template.path} {unfit}", Kind.chat_template) from unfit


def count_images(messages: Sequence[Message]) -> int:
    """Return the number of images and videos in messages: parts of their kinds, and PICTURE in texts."""
    return sum(len(own.kinds) - own.kinds.count(TEXT) + sum(text.count(PICTURE) for text in own.texts)
               for own in messages)  # fmt: skip


def split_at_breaks(text: str, like: Segment) -> list[Segment]:
    """Divide a text at each BREAK into segments that are otherwise equal to `like`, whose own text is empty. BREAK is
    the character that interrupts special tokens in a record's text. In its place comes an empty segment that counts as
    text of the record, so that the texts on its two sides are tokenized apart and make no special token together."""
    first, *rest = text.split(BREAK)
    made = [replace(like, text=first)] if first else []
    for piece in rest:
        made += [replace(like, from_record=True), replace(like, text=piece)]
    return made


def guarded(value: Any, protect: Callable[[str], str]) -> Any:
    """Return a JSON value with the function `protect` applied to all its texts and keys."""
    if isinstance(value, str):
        return protect(value)
    if isinstance(value, list):
        return [guarded(item, protect) for item in value]
    if isinstance(value, dict):
        return {protect(key): guarded(item, protect) for key, item in value.items()}
    return value
