"""Divide the turns of a conversation into the parts that a chat template gets: texts, images and videos."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from llava_fsdp.data.records.record import IMAGE_TAG, READS_IMAGES, Call, Turn, is_video

TEXT, IMAGE, VIDEO = "t", "i", "v"
"""Letters for the kinds of parts, which are used in shapes of conversations."""
ROLES = {"system": "system", "human": "user", "gpt": "assistant", "tool": "tool"}
"""{role of a turn: role of a message of transformers}."""
LETTERS = {"s": ("system", True), "h": ("human", True), "g": ("gpt", True), "u": ("gpt", False)}
"""{letter of a message in the shape of a conversation: its role, and whether it has labels if it is an answer}."""
TURNS = re.compile(f"([{''.join(LETTERS)}])([{TEXT}{IMAGE}{VIDEO}]*)")


@dataclass(frozen=True)
class MessageForm:
    """How a chat template takes the messages of a conversation."""

    parts: bool = False
    """Whether the content of a message is a list of parts; otherwise it is text."""
    thought: str | None = None
    """Key of an answer for its thought; None: the template reads no thoughts."""
    text_arguments: bool = False
    """Whether the arguments of a call are JSON text; otherwise they are an object."""


@dataclass(frozen=True)
class Message:
    """A turn of a conversation, divided into parts."""

    role: str
    """`system`, `human`, `gpt` or `tool`."""
    kinds: str
    """The kind of each part: `t` (text), `i` (image) or `v` (video)."""
    texts: tuple[str, ...]
    learnt: bool = True
    """Whether an answer has labels; else it is only read, like a question."""
    thought: str | None = None
    calls: tuple[Call, ...] = ()
    """The calls of an answer, or the one call that a result (`tool`) belongs to."""

    def to_template(self, form: MessageForm) -> dict[str, Any]:
        """Return the message as a template takes it: an object. `form` says whether its content is a list of parts,
        which key a thought has, and whether the arguments of a call are text."""
        # an answer with only a call or a thought: some templates write a line break for a list with an empty text
        is_bare = self.role == "gpt" and self.texts == ("",) and (self.calls or self.thought is not None)
        content = self.content() if form.parts and not is_bare else self.texts[0]
        made: dict[str, Any] = {"role": ROLES[self.role], "content": content}
        if self.thought is not None and form.thought is not None:
            made[form.thought] = self.thought
        if self.role == "tool":
            return made | {"name": self.calls[0].name, "tool_call_id": self.calls[0].id}
        if self.calls:
            made["tool_calls"] = [call_to_template(call, form.text_arguments) for call in self.calls]
        return made

    def content(self) -> list[dict[str, str]]:
        """Return the parts in transformers' form."""
        texts = iter(self.texts)
        names = {IMAGE: "image", VIDEO: "video"}
        return [{"type": "text", "text": next(texts)} if k == TEXT else {"type": names[k]} for k in self.kinds]


def call_to_template(call: Call, text_arguments: bool) -> dict[str, Any]:
    """Return a call in OpenAI's form, which templates take."""
    given = json.dumps(call.arguments, ensure_ascii=False) if text_arguments else call.arguments
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": given}}


def media_of(names: Iterable[object]) -> str:
    """Return the kinds of images and videos as one letter each (`i` or `v`), given their names or files."""
    return "".join(VIDEO if is_video(name) else IMAGE for name in names)  # pyright: ignore[reportArgumentType]


def divide(turns: Sequence[Turn], media: str) -> list[Message]:
    """Divide the turns of a conversation into parts. Only questions and the results of calls have several.

    A line break directly before or after an image tag is no text: LLaVA's records write it between an image and the
    text of a question. It is kept if the record has the parts themselves (`Turn.parts`). `media`: the kinds of the
    images and videos, in the order of their tags; empty: image tags are ordinary text."""
    kinds = iter(media)
    return [
        divide_question(turn, kinds if media else None)
        if turn.role in READS_IMAGES
        else Message(turn.role, TEXT, (turn.text,), turn.learnt, turn.thought, turn.calls)
        for turn in turns
    ]


def divide_question(turn: Turn, kinds: Iterator[str] | None) -> Message:
    """Divide a question, or a tool's result, at its image tags, without the line breaks beside them and without empty
    texts. A text that is a part in the record itself (`Turn.parts`) stays as it is. `kinds` yields the kind of each
    image or video; None: image tags are ordinary text."""
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
    return Message(turn.role, "".join(letters) or TEXT, tuple(texts) if letters else ("",), calls=turn.calls)


class TurnShape(NamedTuple):
    """What a chat template knows of a message before it reads its texts; the fields are those of Message."""

    role: str
    kinds: str
    learnt: bool


def shape_of(messages: Iterable[Message | TurnShape]) -> str:
    """Return the shape of a conversation: for each message a letter (`s`: system, `h`: question, `g`: answer, `u`:
    answer without labels) and, unless it is one text, the kinds of its parts, such as `hitghg` if only the first
    question has an image."""
    letters = {placeholder: letter for letter, placeholder in LETTERS.items()}
    return "".join(
        letters[m.role, m.learnt or m.role != "gpt"] + (m.kinds if m.kinds != TEXT else "") for m in messages
    )


def parse_shape(shape: str) -> list[TurnShape]:
    """Undo `shape_of`."""
    return [TurnShape(LETTERS[letter][0], kinds or TEXT, LETTERS[letter][1]) for letter, kinds in TURNS.findall(shape)]
