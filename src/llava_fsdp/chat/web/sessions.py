"""The conversations of a page: one for every browser tab, kept here and never taken from the browser."""

import threading
from collections import OrderedDict
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from llava_fsdp.chat.assistant import Assistant
from llava_fsdp.chat.conversation import Conversation
from llava_fsdp.chat.web.queue import Line
from llava_fsdp.config import ChatConfig
from llava_fsdp.data.text.templates import IMAGE_TAG
from llava_fsdp.model.generation import Sampling
from llava_fsdp.runtime.errors import DataError

MOST = 32
"""Conversations that are kept; the one that was silent for longest goes."""
MOST_LETTERS = 20_000
"""Of a question: more than any model here reads."""


def set_event() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


@dataclass
class Talk:
    """A tab's conversation."""

    conversation: Conversation
    stopped: threading.Event
    """Set: its question is not to be answered any further."""
    dice: torch.Generator
    """Begins at `seed` with every conversation."""
    is_silent: threading.Event = field(default_factory=set_event)
    """Set: no question is answered or waits."""
    files: list[list[str]] = field(default_factory=list)
    """By question: the files that were shown with it."""

    def shown(self) -> list[tuple[str, list[str], str]]:
        """What has been said: each question, the files shown with it, and its answer."""
        turns = self.conversation.turns
        pairs = zip(turns[::2], self.files, turns[1::2], strict=False)
        return [(question.text.replace(IMAGE_TAG, "").strip(), files, answer.text) for question, files, answer in pairs]


class Talks:
    """Conversations by the name of their tab's session."""

    def __init__(self, assistant: Assistant, cfg: ChatConfig):
        self.assistant = assistant
        self.cfg = cfg
        self.line = Line()
        self._kept: OrderedDict[str, Talk] = OrderedDict()
        self._changing = threading.Lock()
        self._has_ended = False

    def of(self, session: str) -> Talk:
        """The tab's; a new one where there is none."""
        with self._changing:
            if session not in self._kept:
                self._kept[session] = self.new()
                silent = [name for name, talk in self._kept.items() if talk.is_silent.is_set() and name != session]
                for name in silent[: max(0, len(self._kept) - MOST)]:
                    self._kept.pop(name)
            self._kept.move_to_end(session)
            return self._kept[session]

    def new(self) -> Talk:
        dice = torch.Generator(self.assistant.device)
        dice.manual_seed(self.cfg.seed) if self.cfg.seed is not None else dice.seed()
        return Talk(Conversation(self.assistant, self.cfg.max_images), threading.Event(), dice)

    def ask(self, talk: Talk, text: str, files: list[str], how: Sampling) -> Generator[str, None, None]:
        """The answer in pieces, until it is stopped.

        Raises:
            DataError: a file is no picture, or the question cannot be asked; the conversation is as it was.
        """
        if len(text) > MOST_LETTERS:
            raise DataError(f"the question has {len(text)} letters; most are {MOST_LETTERS}")
        conversation = talk.conversation
        try:
            for name in files:
                self.check_size(Path(name))
                conversation.add(Path(name), Path(name).name)
            yield from conversation.ask(text, how, talk.dice, lambda: self.is_stopped(talk))
        except DataError as error:
            raise DataError(named(str(error), files), error.kind) from error
        finally:
            conversation.waiting = []
        talk.files.append(files)

    def check_size(self, path: Path) -> None:
        if path.is_file() and path.stat().st_size > self.cfg.max_upload_mb << 20:
            raise DataError(f"{path.name} has more than {self.cfg.max_upload_mb} MiB; make it smaller")

    def is_stopped(self, talk: Talk) -> bool:
        return talk.stopped.is_set() or self._has_ended

    def stop(self, session: str) -> None:
        with self._changing:
            if session in self._kept:
                self._kept[session].stopped.set()

    def forget(self, session: str, seconds: float = 0) -> None:
        """The conversation is gone, and so is the answer that was on its way: what is asked next begins a new one.

        Args:
            seconds: to wait at most until that answer says no more.
        """
        with self._changing:
            talk = self._kept.pop(session, None)
        if talk is not None:
            talk.stopped.set()
            talk.is_silent.wait(seconds)

    def is_kept(self, session: str, talk: Talk) -> bool:
        """Whether it still is the tab's conversation."""
        with self._changing:
            return self._kept.get(session) is talk

    def end(self) -> None:
        """No answer goes on."""
        self._has_ended = True


def named(message: str, files: list[str]) -> str:
    """Without the folder of this machine that files were put into."""
    for name in files:
        message = message.replace(f"picture {name} ", "").replace(f"{name} ", f"{Path(name).name} ").replace(name, "")
    return message
