"""Learn what a chat template (Jinja) writes around the messages of conversations of one shape, and what has labels.

A model is trained to write what follows the prompt that it reads when it answers. So for each answer that has labels,
two things must hold, which are learnt from renderings of marker texts:

1. The text before its labels is the template's own prompt (`add_generation_prompt=True`) for the turns before it. All
   that the template writes between this prompt and the answer has labels, too, because the model must write it.
2. The answer, with what ends it, is written in the same way once other turns follow.

A function raises Unfit if the template cannot be used for the conversations. Frames are the template's own texts, slots
the positions of the conversation's texts between them.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from llava_fsdp.data.text.chat_template.message_parts import IMAGE, TEXT, VIDEO, TurnShape, parse_shape, shape_of
from llava_fsdp.data.text.tokens.tokenizer import Tokenizer

MARK = "\ue000turn {}\ue001"
"""Stands for text number {} of a conversation, with private-use characters, which no template treats specially."""
MARKS = re.compile("\ue000turn (\\d+)\ue001")
LEFT, RIGHT = "\n\t\n", "\n \n"
"""White space that is put before and after MARK, to determine how the template strips a text."""
STRIPPED = ("", "\n", None)
"""Possible arguments of `str.strip` with which a template strips a text: nothing, line breaks, or white space."""
RULE_1 = "rule 1: the text before an answer is the prompt of add_generation_prompt"
NO_END = "writes no special token after the last answer, so that a model would not learn to end one"
SHOWN = 40
"""Number of characters of a template's text that an error message shows."""


class Unfit(Exception):
    """A chat template cannot be used for a conversation; the message says why."""


@dataclass(frozen=True)
class Slot:
    """Position in a rendered conversation at which one of its texts is inserted."""

    number: int
    """Number of the text in the conversation."""
    turn: int
    """Index of the text's turn (message)."""
    left: str | None
    """Argument of `str.lstrip` with which the template strips the text; `right` likewise of `str.rstrip`."""
    right: str | None

    def fill(self, text: str) -> str:
        """Return a text without the white space that the template strips."""
        return text.lstrip(self.left).rstrip(self.right)


@dataclass(frozen=True)
class Frame:
    """Text that a chat template writes before, between or after the texts of a conversation."""

    text: str
    ends_answer: int = 0
    """Number of characters at the beginning of `text` that end an answer; they have labels, like the answer."""
    precedes_answer: int = 0
    """Number of characters at the end of `text` that are between the prompt for generation and an answer; they have
    labels, like the answer."""


@dataclass(frozen=True)
class Layout:
    """The frames and slots of every conversation of one shape. A conversation that ends with a question is a prompt,
    whose text ends where the model's answer begins."""

    frames: tuple[Frame, ...]
    """The frames as they are trained: one before each text, and one after the last."""
    slots: tuple[Slot, ...]
    shown: tuple[str, ...] | None = None
    """The frames in a conversation that is rendered whole, if they differ: before the last answer it writes other white
    space than in its prompt."""
    answers: dict[int, bool] = field(default_factory=dict)
    """{index of an answer's turn: whether it has labels}; empty for a prompt."""

    def fill(self, texts: Sequence[str]) -> list[str]:
        """Return the texts of a conversation as the template writes them, and in its order."""
        return [slot.fill(texts[slot.number]) for slot in self.slots]

    def join(self, filled: Sequence[str]) -> str:
        """Return the text of a whole conversation, from the result of `fill`."""
        return joined(self.shown or [frame.text for frame in self.frames], filled)

    @property
    def marks(self) -> list[str]:
        return [MARK.format(slot.number) for slot in self.slots]

    def until_answer(self, frames: Sequence[str]) -> str:
        """Return the text of a conversation of marker texts, up to its last answer and with it."""
        return joined([*frames[:-1], ""], self.marks)


class Form(Protocol):
    """A chat template, as this module needs it."""

    @property
    def stop(self) -> str: ...
    @property
    def placeholders(self) -> dict[str, str]: ...
    def layout(self, shape: str, has_labels: bool = True) -> Layout: ...
    def order_and_frames(self, shape: str, before: str = "", after: str = "") -> tuple[list[int], list[str]]: ...


def answer_end(last: str, earlier: str, tokenizer: Tokenizer) -> str:
    """Return the text that ends an answer: the beginning of what the template writes behind the last answer of a
    conversation, up to its first special token. Special tokens that follow directly belong to it if they also stand
    behind an earlier answer. Empty if there is no special token.

    Args:
        last: the text behind the last answer.
        earlier: the text behind an earlier answer; empty if it is not known.
    """
    end = 0
    for begin, behind in tokenizer.find_special(last):
        if not end or (begin == end and earlier.startswith(last[:behind])):
            end = behind
    return last[:end]


def joined(frames: Sequence[str], filled: Sequence[str]) -> str:
    return "".join(frame + text for frame, text in zip(frames, [*filled, ""], strict=True))


def learn(form: Form, shape: str, has_labels: bool = True) -> Layout:
    """Return the layout of conversations of one shape, such as `hg` (a question and its answer). It consists of frames,
    the texts that the template writes around the texts of the turns, and slots, where these stand. It is found by
    rendering marker texts in place of the texts. Without `has_labels`, no text has labels."""
    order, frames = form.order_and_frames(shape)  # numbers of the texts as the template orders them, and its own texts
    # with white space before or after each text, to find out what of it the template strips
    _, lefts = form.order_and_frames(shape, before=LEFT)
    _, rights = form.order_and_frames(shape, after=RIGHT)
    turns = parse_shape(shape)
    owners = [turn for turn, message in enumerate(turns) for _ in range(message.kinds.count(TEXT))]
    # what follows a text is reversed, because `stripped` compares the ends of its arguments
    slots = tuple(
        Slot(
            number,
            owners[number],
            stripped(before, frame, LEFT, str.lstrip),
            stripped(behind[::-1], after[::-1], RIGHT, str.rstrip),
        )
        for number, before, frame, behind, after in zip(order, lefts, frames, rights[1:], frames[1:], strict=False)
    )
    for kind, called in ((IMAGE, "images"), (VIDEO, "videos")):
        wanted = sum(turn.kinds.count(kind) for turn in turns)
        placeholder = form.placeholders.get(kind)
        found = sum(frame.count(placeholder) for frame in frames) if placeholder else 0
        if found != wanted:
            raise Unfit(f"writes {found} of {wanted} {called} of a conversation")
    if turns[-1].role != "gpt" or not has_labels:
        return Layout(tuple(map(Frame, frames)), slots)
    return with_labels(form, turns, slots, frames)


def with_labels(form: Form, turns: list[TurnShape], slots: tuple[Slot, ...], frames: list[str]) -> Layout:
    """Return the layout of conversations that end with an answer, with the characters that have labels.

    The last answer has labels if its turn is to be learnt. An earlier answer has labels if the conversation begins with
    exactly the text that would be trained if this answer were the last one. It has no labels if only white space before
    it differs from that text: a model would not write that. Otherwise Unfit is raised.

    Args:
        slots: where the texts of the turns stand.
        frames: the template's own texts before, between and after them.
    """
    last = len(turns) - 1
    if slots[-1].turn != last:
        raise Unfit("writes other turns after the last answer")
    # by turn: number of characters between the prompt and the answer; whether the answer has labels
    taught, sizes, answers = frames, dict[int, int](), dict[int, bool]()
    if turns[last].learnt:
        taught, sizes[last] = after_prompt(form, turns, slots, frames)
        answers[last] = True
    # the conversation up to and with its last answer; marker texts stand for the texts of the turns
    whole = Layout(tuple(map(Frame, taught)), slots).until_answer(taught)
    for turn, shape in enumerate(turns[:-1]):
        if shape.role == "gpt" and shape.learnt:
            alone_layout = form.layout(shape_of(turns[: turn + 1]))
            alone = alone_layout.until_answer([frame.text for frame in alone_layout.frames]) + form.stop
            answers[turn] = whole.startswith(alone)
            sizes[turn] = alone_layout.frames[-2].precedes_answer
            shown = alone_layout.shown
            is_spaced = shown is not None and whole.startswith(alone_layout.until_answer(shown) + form.stop)
            if not answers[turn] and not is_spaced:
                raise Unfit(
                    f"cannot teach turn {turn}, an answer: a model writes and reads {difference(alone, whole)} (rule "
                    "2: an answer and the text around it stay the same once other turns follow)"
                )
    learnt = [answers.get(slot.turn, False) for slot in slots]
    ends = [len(form.stop) * is_learnt for is_learnt in (False, *learnt)]
    starts = [sizes[slot.turn] if is_learnt else 0 for slot, is_learnt in zip(slots, learnt, strict=True)]
    # Frame: text, number of its first characters that end an answer, number of its last that come before the next one
    made = tuple(map(Frame, taught, ends, [*starts, 0]))
    return Layout(made, slots, None if taught == frames else tuple(frames), answers)


def after_prompt(
    form: Form, turns: list[TurnShape], slots: tuple[Slot, ...], frames: list[str]
) -> tuple[list[str], int]:
    """Return the template's own texts (frames) in conversations that are trained, and the number of characters that the
    template writes between the prompt for the last answer and this answer. If the conversation differs from the prompt
    in white space, the frames before the answer are those of the prompt, which a model reads when it answers. Raise
    Unfit if they differ in more than white space.

    Args:
        form: the chat template.
        turns: kind and contents of each turn; the last one is an answer.
        slots: the places of the turns' texts, in the order in which the template writes them.
        frames: the frames of a conversation that is rendered whole: before each slot, and behind the last.
    """
    where = f"cannot teach turn {len(turns) - 1}, an answer:"
    if not frames[-1].startswith(form.stop):
        raise Unfit(f"{where} it does not end with {form.stop!r}")
    asked = form.layout(shape_of(turns[:-1]))
    prompt = joined([frame.text for frame in asked.frames], asked.marks)
    # up to the answer, with the same marks in the place of texts
    head = joined(frames[:-1], [MARK.format(slot.number) for slot in slots[:-1]])
    if head.startswith(prompt):
        return frames, len(head) - len(prompt)
    if head.split() == prompt.split() and asked.slots == slots[:-1]:
        return [*(frame.text for frame in asked.frames), frames[-1]], 0
    raise Unfit(f"{where} a model that answers reads {difference(prompt, head)} ({RULE_1})")


def difference(wanted: str, found: str) -> str:
    """Return words that say where two texts first differ, without the markers in them."""
    same = common_prefix_length(wanted, found)
    parts = [MARKS.sub("...", text[same:])[:SHOWN] for text in (wanted, found)]
    return f"{parts[0]!r} where the conversation has {parts[1]!r}"


def common_prefix_length(one: str, other: str) -> int:
    """Return the length of the longest common beginning of two texts."""
    same, most = 0, min(len(one), len(other))
    while same < most:
        end = (same + most + 1) // 2
        if one[same:end] == other[same:end]:
            same = end
        else:
            most = end - 1
    return same


def stripped(padded: str, frame: str, pad: str, strip: Any) -> str | None:
    """Return the argument of `strip` (`str.lstrip` or `str.rstrip`) with which a template strips a text: one of
    STRIPPED. Raise Unfit if the template changes the white space in another way.

    Args:
        padded: the template's text before a text (or that after it, reversed), with the white space `pad` between.
        frame: the same text, rendered without `pad`.
    """
    for chars in STRIPPED:
        rest = strip(pad, chars)
        if padded == frame + (rest if strip is str.lstrip else rest[::-1]):
            return chars
    raise Unfit("changes white space at the beginning or end of a turn in a way of its own")
