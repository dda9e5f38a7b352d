"""The conversations of a page: one for every browser tab, kept here and never taken from the browser."""

import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from llava_fsdp.answer import Assistant
from llava_fsdp.config import ChatConfig
from llava_fsdp.data.templates import IMAGE_TAG
from llava_fsdp.errors import DataError
from llava_fsdp.generate import Sampling
from llava_fsdp.talk import Conversation

MOST = 32
"""Conversations that are kept; the one that was silent for longest goes."""
MOST_LETTERS = 20_000
"""Of a question: more than any model here reads."""


@dataclass
class Talk:
    """A tab's conversation."""

    conversation: Conversation
    stopped: threading.Event
    """Set: its question is not to be answered any further."""
    files: list[list[str]] = field(default_factory=list)
    """By question: the files that were shown with it."""


class Talks:
    """Conversations by the name of their tab's session."""

    def __init__(self, assistant: Assistant, cfg: ChatConfig):
        self.assistant = assistant
        self.cfg = cfg
        self.dice = torch.Generator(assistant.device)
        self.dice.manual_seed(cfg.seed) if cfg.seed is not None else self.dice.seed()
        self._kept: OrderedDict[str, Talk] = OrderedDict()
        self._changing = threading.Lock()
        self._has_ended = False

    def of(self, session: str) -> Talk:
        """The tab's; a new one where there is none."""
        with self._changing:
            if session not in self._kept:
                self._kept[session] = Talk(Conversation(self.assistant, self.cfg.max_images), threading.Event())
                while len(self._kept) > MOST:
                    self._kept.popitem(last=False)[1].stopped.set()
            self._kept.move_to_end(session)
            return self._kept[session]

    def expect(self, session: str) -> None:
        """A question of this tab is on its way: from here on it can be stopped, also while it waits for others'."""
        self.of(session).stopped.clear()

    def is_stopped(self, session: str) -> bool:
        """Also where the tab is gone, whose question may still have waited for its turn."""
        with self._changing:
            return session not in self._kept or self._kept[session].stopped.is_set()

    def ask(self, session: str, text: str, files: list[str], how: Sampling) -> Iterator[str]:
        """The answer in pieces, until the tab is stopped.

        Raises:
            DataError: a file is no picture, or the question cannot be asked; the conversation is as it was.
        """
        talk = self.of(session)
        if len(text) > MOST_LETTERS:
            raise DataError(f"the question has {len(text)} letters; most are {MOST_LETTERS}")
        conversation = talk.conversation
        try:
            for name in files:
                self.check_size(Path(name))
                conversation.add(Path(name), Path(name).name)
            yield from conversation.ask(text, how, self.dice, lambda: talk.stopped.is_set() or self._has_ended)
        except DataError as error:
            raise DataError(named(str(error), files), error.kind) from error
        finally:
            conversation.waiting = []
        talk.files.append(files)

    def check_size(self, path: Path) -> None:
        if path.is_file() and path.stat().st_size > self.cfg.max_upload_mb << 20:
            raise DataError(f"{path.name} has more than {self.cfg.max_upload_mb} MiB; make it smaller")

    def shown(self, session: str) -> list[tuple[str, list[str], str]]:
        """What has been said: each question, the files shown with it, and its answer."""
        talk = self.of(session)
        turns = talk.conversation.turns
        pairs = zip(turns[::2], talk.files, turns[1::2], strict=False)
        return [(question.text.replace(IMAGE_TAG, "").strip(), files, answer.text) for question, files, answer in pairs]

    def stop(self, session: str) -> None:
        if session in self._kept:
            self._kept[session].stopped.set()

    def clear(self, session: str) -> None:
        talk = self.of(session)
        talk.conversation.reset()
        talk.files.clear()

    def forget(self, session: str) -> None:
        """The tab is gone: so is its conversation, and the answer that was on its way."""
        with self._changing:
            if session in self._kept:
                self._kept.pop(session).stopped.set()

    def end(self) -> None:
        """No answer goes on."""
        self._has_ended = True


def named(message: str, files: list[str]) -> str:
    """Without the folder of this machine that files were put into."""
    for name in files:
        message = message.replace(f"picture {name} ", "").replace(f"{name} ", f"{Path(name).name} ").replace(name, "")
    return message
