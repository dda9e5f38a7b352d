"""Render the conversation of a record as text, in segments that have labels (answers) or not.

In the functions, `form` is the conversation template, `start_end` says whether to put `<im_start>` and `<im_end>`
around every image tag, and `has_images` whether `<image>` tags stand for images; otherwise they are ordinary text.
`where` names the conversation in error messages.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from llava_fsdp.config import FULL_WEIGHT
from llava_fsdp.data.problems import Kind
from llava_fsdp.data.records.forms.messages import SPEAKERS
from llava_fsdp.data.records.record import IMAGE_TAG, READS_IMAGES, Record, Turn, product
from llava_fsdp.data.text.chat_template.jinja_template import ChatTemplate
from llava_fsdp.data.text.chat_template.message_parts import IMAGE, media_of
from llava_fsdp.data.text.templates import Template
from llava_fsdp.runtime.errors import DataError
from llava_fsdp.runtime.text.terminal_text import shown_name

OTHER_TAG = re.compile(
    r"<(?!image>)[|\s]*(?:(?i:image|img|picture))[\w\s.|/-]{0,20}>|\[(?i:image|img|picture)[\w\s.-]{0,20}\]"
)
"""Finds what other programs write for an image in a text, such as `<Image>`, `<image1>`, `<|image|>` and `[image]`. It
is shown in messages alone."""
IM_START, IM_END = "<im_start>", "<im_end>"


class AnswerPart(IntEnum):
    """The parts of an answer that reports tell apart."""

    other = 0
    thought = 1
    calls = 2
    text = 3


@dataclass(frozen=True)
class Segment:
    """A part of the text of a conversation. Either all its tokens have labels (are supervised), or no token has."""

    text: str
    supervised: bool
    from_record: bool = False
    """Whether the text comes from the record and not from the conversation template."""
    image: int | None = None
    """With a model's own chat template: index of the image or video in whose place the text stands."""
    begins_answer: bool = False
    """With a model's own chat template: whether the prompt for generation ends before this segment."""
    kind: AnswerPart = AnswerPart.other
    """What part of an answer the text is, for reports."""
    weight: int = FULL_WEIGHT
    """Weight of the labels of a supervised text, in units of 1 / FULL_WEIGHT. With 0 the text has no labels."""


def weighted(segment: Segment, turn: Turn, begin: int | None = None, hidden: str = "") -> list[Segment]:
    """Return a part of an answer with the weight of its labels, in several pieces if its characters' weights differ.

    Args:
        segment: the part, as the conversation template writes it.
        turn: the answer, as the record has it.
        begin: index in the answer's text of the segment's first character; None: the segment is no part of this text.
        hidden: characters of the segment that are not in the answer's text.
    """
    weights = turn.weights
    if weights is None:
        return [segment]
    if weights.spans is None or begin is None or not segment.text:
        return [replace(segment, weight=weights.whole)]
    of_text = [0] * len(turn.text)
    for first, end, weight in weights.spans:
        of_text[first:end] = [product(weight, weights.whole)] * (end - first)
    places = itertools.accumulate((letter not in hidden for letter in segment.text), initial=begin)
    # a hidden character has the weight of the one behind it
    runs = itertools.groupby(
        zip(segment.text, places, strict=False),
        lambda letter_and_place: of_text[min(letter_and_place[1], len(of_text) - 1)],
    )
    return [replace(segment, text="".join(letter for letter, _ in run), weight=weight) for weight, run in runs]


def render(record: Record, form: Template | ChatTemplate, start_end: bool) -> list[Segment]:
    """Render a record's conversation, with an image tag for each image. With `start_end`, `<im_start>` and `<im_end>`
    stand around each tag.

    Raises:
        DataError: the turns do not alternate human, gpt after a system turn; an answer is missing; the number of image
            tags is not the number of images; or a model's own template refuses or changes the turns.
    """
    check_turns(record)
    if not isinstance(form, ChatTemplate):
        refuse_tools(record.turns, record.tools, record.where)
    media = media_of(record.images)
    segments = prompt(asked_turns(record), form, start_end, bool(record.images), record.where, media)
    return segments if isinstance(form, ChatTemplate) else [*segments, Segment(form.pattern.end, supervised=False)]


def refuse_tools(turns: Sequence[Turn], tools: Sequence[object], where: str) -> None:
    """Raise DataError, naming `where`, if a conversation has tools, calls or thoughts: LLaVA's templates write none."""
    found = "tools" if tools else next((name_extra(turn) for turn in turns if name_extra(turn)), None)
    if found is not None:
        raise DataError(
            f"{where} has {found}, which only a model's own chat template can write; take them out, or train with "
            "data.template=chat_template and a model that has one",
            Kind.key_not_obeyed if found == "thoughts" else Kind.wrong_roles,
        )


def name_extra(turn: Turn) -> str | None:
    """Return what a turn has beside its text, in words; None if it has nothing."""
    if turn.role == "tool":
        return "results of calls"
    return "calls of tools" if turn.calls else None if turn.thought is None else "thoughts"


def prompt(
    turns: Sequence[Turn],
    form: Template | ChatTemplate,
    start_end: bool,
    has_images: bool,
    where: str = "the conversation",
    media: str = "",
) -> list[Segment]:
    """Render the turns of a conversation without the text that ends a conversation. If the last turn is a question, the
    text ends where a model's answer begins.

    The text of a system turn (only the first turn can be one) replaces the template's system text. The template for
    captions leaves out system texts and questions.

    Args:
        form: one of LLaVA's templates, or a model's own chat template.
        start_end: whether to put `<im_start>` and `<im_end>` around each image.
        has_images: whether image tags in questions stand for images; otherwise they are ordinary text.
        where: name of the conversation in messages.
        media: for a model's own chat template, a letter for the kind of each image and video; empty: all are images.

    Raises:
        DataError: a model's own template refuses or changes the turns.
    """
    if isinstance(form, ChatTemplate):
        tags = sum(turn.text.count(IMAGE_TAG) for turn in turns if turn.role == "human") if has_images else 0
        # one kind for each tag
        return own_prompt(turns, form, start_end, media[:tags].ljust(tags, IMAGE), where)
    pattern = form.pattern
    system, turns = split_system(turns)
    segments = [Segment(pattern.before_system, supervised=False), *write_system(system, form)]
    for number, turn in enumerate(turns):
        if turn.role == "human":
            segments.append(Segment(pattern.next_question if number else pattern.first_question, supervised=False))
            segments += write_question(turn.text, form, start_end, has_images)
            segments.append(Segment(pattern.after_question + pattern.answer_header, supervised=False))
        else:  # `weighted` gives labels the weights of the record; `begin`: place of a segment in the answer's text
            segments += weighted(Segment(pattern.before_answer, supervised=turn.learnt), turn)
            segments += weighted(Segment(turn.text, supervised=turn.learnt, from_record=True), turn, begin=0)
            segments += weighted(Segment(pattern.after_answer, supervised=turn.learnt), turn)
    return segments


def write_system(turn: Turn | None, form: Template) -> list[Segment]:
    """Return the segments before the first question, without labels: the system turn with the template's text around it
    or, without such a turn or with the template for captions, the template's own system text."""
    if turn is None or form.image_only:
        return [Segment(form.system, supervised=False)]
    before, after = form.around_system
    return [
        Segment(before, supervised=False),
        Segment(turn.text, supervised=False, from_record=True),
        Segment(after, supervised=False),
    ]


def write_question(text: str, form: Template, start_end: bool, has_images: bool) -> list[Segment]:
    if form.image_only:
        return [Segment(IMAGE_TAG * text.count(IMAGE_TAG), supervised=False)]
    return tagged(image_first(text, has_images), image_tag(form, start_end), has_images)


def tagged(text: str, tag: str, has_images: bool) -> list[Segment]:
    """Return the segments of a question, none with labels, in which `tag` replaces each `<image>` tag. Without
    `has_images`, these tags are ordinary text."""
    first, *rest = text.split(IMAGE_TAG) if has_images else [text]
    segments = [Segment(first, supervised=False, from_record=True)]
    for piece in rest:
        segments.append(Segment(tag, supervised=False))
        segments.append(Segment(piece, supervised=False, from_record=True))
    return segments


def own_prompt(
    turns: Sequence[Turn], form: ChatTemplate, start_end: bool, media: str, where: str, has_labels: bool = True
) -> list[Segment]:
    """Render the turns of a conversation with a model's own chat template. The text of an image or video is a segment
    that has the image's index (`Segment.image`).

    Args:
        start_end: whether to put `<im_start>` and `<im_end>` around each image.
        media: the kind of the image or video of each `<image>` tag, one letter each; empty: tags are ordinary text.
        where: name of the conversation in messages.
        has_labels: whether answers are to have labels; otherwise the text is as transformers writes it.

    Raises:
        DataError: the template refuses or changes the turns.
    """
    if form.images is None:  # the template gets images as tags in texts: a single one moves to the front of a question
        turns = [Turn(t.role, image_first(t.text, bool(media))) if t.role == "human" else t for t in turns]
    before, after = image_tag(form, start_end).split(IMAGE_TAG)
    numbers = itertools.count()
    segments = []

    def add_image(number: int) -> None:
        segments.append(Segment(before, supervised=False))
        segments.append(Segment(IMAGE_TAG, supervised=False, image=number))
        segments.append(Segment(after, supervised=False))

    for piece in form.write(turns, where, media if form.images else "", has_labels):
        if piece.image is not None:
            add_image(piece.image)
        elif piece.turn is not None and turns[piece.turn].role == "human" and media and form.images is None:
            for place, text in enumerate(piece.text.split(IMAGE_TAG)):  # images are tags in the text of a question
                if place:
                    add_image(next(numbers))
                segments.append(Segment(text, supervised=False, from_record=True))
        else:
            from_record = piece.turn is not None
            segment = Segment(
                piece.text, supervised=piece.supervised, from_record=from_record, begins_answer=piece.begins_answer
            )
            answer = None if piece.answer is None else turns[piece.answer]
            # a template at most strips white space from a text, so that what it writes is found in the answer's text
            begin = answer.text.find(piece.text) if answer is not None and from_record else None
            segments += [segment] if answer is None else weighted(segment, answer, begin)
    return without_bos(segments, form)


def without_bos(segments: list[Segment], form: ChatTemplate) -> list[Segment]:
    """Return the segments without the BOS token at the beginning, if it is put before the tokens later."""
    if not form.adds_bos:
        return segments
    return [replace(segments[0], text=segments[0].text.removeprefix(form.variables["bos_token"])), *segments[1:]]


def image_order(segments: Sequence[Segment], count: int) -> list[int]:
    """Return the indices of the record's `count` images and videos in the order in which they stand in the text."""
    order = [segment.image for segment in segments if segment.image is not None]
    return order or list(range(count))


def image_tag(form: Template | ChatTemplate, start_end: bool) -> str:
    """Return `<image>` with the text that the template puts around it."""
    return form.image.replace(IMAGE_TAG, f"{IM_START}{IMAGE_TAG}{IM_END}") if start_end else form.image


def image_first(text: str, has_images: bool) -> str:
    """Return a question with its `<image>` tag moved to a line of its own at the front (LLaVA train.py:308-329). With
    no tag or several, and without images, where a tag is ordinary text, it is returned unchanged."""
    if not has_images or text.count(IMAGE_TAG) != 1:
        return text
    return f"{IMAGE_TAG}\n{text.replace(IMAGE_TAG, '').strip()}".strip()


def split_system(turns: Sequence[Turn]) -> tuple[Turn | None, Sequence[Turn]]:
    """Return the system turn with which a conversation begins (None if it has none), and its other turns."""
    return (turns[0], turns[1:]) if turns and turns[0].role == "system" else (None, turns)


def asked_turns(record: Record) -> tuple[Turn, ...]:
    """Return the turns of a record. If the first turn after the system turn is an answer, it is left out, as LLaVA does
    (train.py:441-443), because no question precedes it."""
    system, turns = split_system(record.turns)
    asked = turns[1:] if turns and turns[0].role == "gpt" else turns
    return tuple(asked) if system is None else (system, *asked)


def opening_question(record: Record) -> tuple[str | None, str, int, str]:
    """Return a record's system text (or None), its first question (with image tags), the number of the question's
    images, and the answer. Raise DataError if the record begins otherwise, or the answer calls a tool."""
    system, turns = split_system(asked_turns(record))
    if [turn.role for turn in turns[:2]] != ["human", "gpt"]:
        raise DataError(f"{record.where}: it must begin with a question (human) and its answer (gpt)")
    if turns[1].calls:
        raise DataError(
            f"{record.where}: its first answer calls {turns[1].calls[0].name}, and calls are not scored; leave the "
            "record out, or with val.every set val.answers=0: the loss is measured all the same"
        )
    images = min(len(record.images), turns[0].text.count(IMAGE_TAG))
    return None if system is None else system.text, turns[0].text, images, turns[1].text


def first_answer(record: Record) -> Turn:
    """Return the answer to the first question of a record that `opening_question` takes."""
    return split_system(asked_turns(record))[1][1]


def opening_turns(record: Record) -> list[Turn]:
    """Return the turns up to the first question: the system turn, if there is one, and the question."""
    system, turns = split_system(asked_turns(record))
    return [turns[0]] if system is None else [system, turns[0]]


def asking(system: str | None, question: str) -> list[Turn]:
    asked = Turn("human", question)
    return [asked] if system is None else [Turn("system", system), asked]


def role_cure(role: str) -> str:
    """Return advice for an error message about a turn whose role is wrong."""
    match role.lower():
        case "human" | "gpt" if role in ("human", "gpt"):
            return "human (user) and gpt (assistant) take turns, human first: fix the conversation"
        case "system":
            return "labels=exact reads one system turn, at the beginning: move it there, or take it out"
        case name if name in SPEAKERS:
            return f"rename {role} to {name}"
        case _:
            return "rename it to system, human or gpt, or take it out"


def check_turns(record: Record) -> None:
    """Raise DataError if the turns do not alternate human, gpt after a system turn (where results of calls stand
    between two answers), or the image tags in them do not match the record's images."""
    system, turns = split_system(asked_turns(record))
    allowed, offset = ("human",), 0 if system is None else 1
    for position, turn in enumerate(turns, offset):
        if turn.role not in allowed:
            raise DataError(
                f"{record.where}: turn {position} is from {turn.role!r}, not from {allowed[0]!r}; "
                f"{role_cure(turn.role)}",
                Kind.wrong_roles,
            )
        # results follow an answer with calls; that each belongs to one of the calls was checked when they were read
        allowed = {"human": ("gpt",), "gpt": ("tool",) if turn.calls else ("human",)}.get(turn.role, ("gpt", "tool"))
        if turn.role == "gpt" and record.images and IMAGE_TAG in turn.text:
            raise DataError(
                f"{record.where}: turn {position} is an answer with {IMAGE_TAG} in it; images belong to "
                "questions: take it out",
                Kind.image_count,
            )
    if system is not None and record.images and IMAGE_TAG in system.text:
        raise DataError(
            f"{record.where}: the system turn has {IMAGE_TAG} in it; images belong to questions: take it out",
            Kind.image_count,
        )
    if not turns:
        only = "no turns" if not record.turns or record.turns[-1].role != "gpt" else "an answer and no question"
        raise DataError(
            f"{record.where}: the conversation has {only}; it must have a question and its answer, and an answer "
            "before the first question is left out: add them, or take the record out",
            Kind.odd_turns,
        )
    if turns[-1].role != "gpt":
        raise DataError(
            f"{record.where}: the conversation has {len(turns)} turns; it must end with an answer: "
            "add one, or take the last question out",
            Kind.odd_turns,
        )
    tags = sum(turn.text.count(IMAGE_TAG) for turn in turns if turn.role in READS_IMAGES)
    if record.images and tags != len(record.images):
        other = next((found[0] for turn in turns if (found := OTHER_TAG.search(turn.text))), None)
        written = "" if other is None else f" ({shown_name(other)} in its text is no tag: write {IMAGE_TAG})"
        raise DataError(
            f"{record.where}: {tags} {IMAGE_TAG} tags for {len(record.images)} images{written}; give every image "
            "one tag in a question, or in the result of a call",
            Kind.image_count,
        )
