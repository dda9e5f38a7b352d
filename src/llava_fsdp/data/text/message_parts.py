"""Divide the turns of a conversation into the parts that a chat template gets: texts, images and videos."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from llava_fsdp.data.records.record import IMAGE_TAG, Turn, is_video

TEXT, IMAGE, VIDEO = "t", "i", "v"
"""Letters for the kinds of parts, which are used in shapes of conversations."""
ROLES = {"system": "system", "human": "user", "gpt": "assistant"}
"""{role of a turn: role of a message of transformers}."""
LETTERS = {"s": ("system", True), "h": ("human", True), "g": ("gpt", True), "u": ("gpt", False)}
"""{letter of a message in the shape of a conversation: its role, and whether it has labels if it is an answer}."""
TURNS = re.compile(f"([{''.join(LETTERS)}])([{TEXT}{IMAGE}{VIDEO}]*)")


@dataclass(frozen=True)
class Message:
    """A turn of a conversation, divided into parts."""

    role: str
    """`system`, `human` or `gpt`."""
    kinds: str
    """The kind of each part: `t` (text), `i` (image) or `v` (video)."""
    texts: tuple[str, ...]
    learnt: bool = True
    """Whether an answer has labels; else it is only read, like a question."""

    def content(self) -> list[dict[str, str]]:
        """Return the parts in transformers' form."""
        texts = iter(self.texts)
        names = {IMAGE: "image", VIDEO: "video"}
        return [{"type": "text", "text": next(texts)} if k == TEXT else {"type": names[k]} for k in self.kinds]


def media_of(names: Iterable[object]) -> str:
    """Return the kinds of images and videos as one letter each (`i` or `v`), given their names or files."""
    return "".join(VIDEO if is_video(name) else IMAGE for name in names)  # pyright: ignore[reportArgumentType]


def divide(turns: Sequence[Turn], media: str) -> list[Message]:
    """Divide the turns of a conversation into parts. Only questions have several.

    A line break directly before or after an image tag is no text: LLaVA's records write it between an image and the
    text of a question. It is kept if the record has the parts themselves (`Turn.parts`).

    Args:
        media: the kinds of the images and videos, in the order of their tags; empty: image tags are ordinary text.
    """
    kinds = iter(media)
    return [
        divide_question(turn, kinds if media else None)
        if turn.role == "human"
        else Message(turn.role, TEXT, (turn.text,), turn.learnt)
        for turn in turns
    ]


def divide_question(turn: Turn, kinds: Iterator[str] | None) -> Message:
    """Divide a question at its image tags, without the line breaks beside them and without empty texts. A text that is
    a part in the record itself (`Turn.parts`) stays as it is. `kinds` yields the kind of each image or video; None:
    image tags are ordinary text."""
    letters: list[str] = []
    texts: list[str] = []
    for part in (turn.text,) if turn.parts is None else turn.parts:
        pieces = [part] if kinds is None else part.split(IMAGE_TAG)
        for number, piece in enumerate(pieces):
            if number:
                assert kinds is not None
                letters.append(next(kinds))
            if turn.parts is None:
                piece = piece.removeprefix("\n") if number else piece
                piece = piece.removesuffix("\n") if number + 1 < len(pieces) else piece
            if piece or (turn.parts is not None and len(pieces) == 1):
                letters.append(TEXT)
                texts.append(piece)
    return Message(turn.role, "".join(letters) or TEXT, tuple(texts) if letters else ("",))


class TurnShape(NamedTuple):
    """What a chat template knows of a message before it reads its texts; the fields are those of Message."""

    role: str
    kinds: str
    learnt: bool


def shape_of(messages: Iterable[Message | TurnShape]) -> str:
    """Return the shape of a conversation: for each message a letter (`s`, `h`, `g`, or `u` for an answer that has no
    labels) and, unless it is one text, the kinds of its parts, such as `hitghg` for a question with an image and a
    text, an answer, a question and an answer."""
    letters = {own: letter for letter, own in LETTERS.items()}
    return "".join(
        letters[m.role, m.learnt or m.role != "gpt"] + (m.kinds if m.kinds != TEXT else "") for m in messages
    )


def parse_shape(shape: str) -> list[TurnShape]:
    """Undo `shape_of`."""
    return [TurnShape(LETTERS[letter][0], kinds or TEXT, LETTERS[letter][1]) for letter, kinds in TURNS.findall(shape)]
