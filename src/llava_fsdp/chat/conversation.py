"""A conversation with an assistant: what has been said and shown so far. The terminal and the page both lead one."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from llava_fsdp.chat.assistant import Assistant, Shown
from llava_fsdp.data.records.record import Turn
from llava_fsdp.data.text.templates import IMAGE_TAG
from llava_fsdp.model.generation import Sampling
from llava_fsdp.runtime.errors import DataError


class Conversation:
    """Turns and pictures. A picture that is added is shown with the next question, and stays."""

    def __init__(self, assistant: Assistant, most_pictures: int | None = None):
        self.assistant = assistant
        self.most_pictures = most_pictures
        self.turns: list[Turn] = []
        self.pictures: list[Shown] = []
        """In the order of their tags in the turns."""
        self.waiting: list[Shown] = []
        """For the next question."""
        self.was_cut = False
        """Whether the last answer stopped before the model ended it."""

    def add(self, path: Path, where: str) -> None:
        """
        Raises:
            ImageError: it cannot be read; `where` begins the message.
            DataError: it is no file, or there are too many already.
        """
        if not path.is_file():
            raise DataError(f"{where}: {path} is {'a folder' if path.is_dir() else 'not a file'}; give a picture file")
        if self.most_pictures is not None and len(self.pictures) + len(self.waiting) >= self.most_pictures:
            raise DataError(f"{where}: a conversation takes {self.most_pictures} pictures at most; begin a new one")
        self.waiting.append(self.assistant.show(path, where))

    def ask(
        self,
        text: str,
        how: Sampling,
        dice: torch.Generator | None = None,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> Iterator[str]:
        """The answer in pieces. Once the last has been taken, question and answer belong to the conversation; an answer
        that was stopped does too, as far as it came.

        Args:
            is_stopped: asked after every token.

        Raises:
            DataError: the question cannot be asked, or is too long; the conversation is as it was.
        """
        turns = [*self.turns, Turn("human", self.tagged(text))]
        pictures = [*self.pictures, *self.waiting]
        pieces: list[str] = []
        stream = self.assistant.stream(turns, pictures, how, dice, is_stopped)
        while True:
            try:
                pieces.append(next(stream))
            except StopIteration as end:
                self.was_cut = not end.value
                break
            yield pieces[-1]
        answer = "".join(pieces).replace(IMAGE_TAG, "")  # a model that writes one means no picture
        self.turns, self.pictures, self.waiting = [*turns, Turn("gpt", answer)], pictures, []

    def tagged(self, text: str) -> str:
        """The question with tags for the pictures that wait, in front unless it has its own.

        Raises:
            DataError: it has another number of its own, or is no text.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"the question is not UTF-8 at character {error.start}; type it again") from error
        tags = text.count(IMAGE_TAG)
        if tags and tags != len(self.waiting):  # as text it would count as a picture's as soon as there is one
            raise DataError(
                f"the question has {IMAGE_TAG} {tags} times, and {len(self.waiting)} new pictures are shown with it; "
                "leave it out, or write it once for each"
            )
        return text if tags else "".join([f"{IMAGE_TAG}\n" * len(self.waiting), text])

    def undo(self) -> bool:
        """Take back the last question and its answer; its pictures wait for the next one. False: there is none."""
        if not self.turns:
            return False
        shown = self.turns[-2].text.count(IMAGE_TAG) if self.pictures else 0
        kept = len(self.pictures) - shown
        self.waiting = [*self.pictures[kept:], *self.waiting]
        self.turns, self.pictures = self.turns[:-2], self.pictures[:kept]
        return True

    def reset(self) -> None:
        self.turns, self.pictures, self.waiting = [], [], []
