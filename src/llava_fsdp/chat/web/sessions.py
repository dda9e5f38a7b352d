"""Keep the conversations of the web page for chatting with a model, one for every browser tab. They are stored on the
server only. The argument `key` of functions is Gradio's key of the tab."""

import threading
from collections import OrderedDict
from collections.abc import Generator, Iterator
from pathlib import Path

from llava_fsdp.chat.answerer import Answerer
from llava_fsdp.chat.conversation import Conversation
from llava_fsdp.config import ChatConfig
from llava_fsdp.model.generation import Sampling
from llava_fsdp.runtime.errors import DataError

MAX_SESSIONS = 32
"""Maximum number of conversations kept; if there are more, the least recently used one is deleted."""
MAX_QUESTION_LENGTH = 20_000
"""Maximum number of characters of a question: more than any supported model can read."""


class Session(Conversation):
    """Conversation of a browser tab with the model, and the generator that yields the latest answer."""

    answer: Generator[str, None, None] | None = None


class Sessions:
    """The conversations of all browser tabs. They share one model."""

    def __init__(self, assistant: Answerer, cfg: ChatConfig):
        """Begin without conversations. `assistant` is the model that answers in all tabs."""
        self.assistant = assistant
        self.cfg = cfg
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        # held while a token is computed, because Gradio starts the next answer before a stopped one has ended
        self._model_lock = threading.RLock()
        self._has_ended = False

    def get(self, key: str) -> Session:
        """Return the conversation of the browser tab with Gradio's key `key`; a new one if the tab has none. If there
        are more than MAX_SESSIONS, those that were not used for the longest time are forgotten."""
        with self._model_lock:
            if key not in self._sessions:
                self._sessions[key] = Session(self.assistant, self.cfg.max_images, self.cfg.seed)
                while len(self._sessions) > MAX_SESSIONS:
                    self._sessions.popitem(last=False)
            self._sessions.move_to_end(key)
            return self._sessions[key]

    def ask(self, session: Session, text: str, files: list[Path], sampling: Sampling) -> Iterator[str]:
        """Ask the model a question with the images `files` in the conversation of a tab, and yield pieces of the answer
        until it ends or is stopped. Afterwards no image waits for the next question.

        Raises:
            DataError: the question is not valid, or an image cannot be read; the message hides the server's folders.
            OutOfMemory: the conversation does not fit into memory.
        """
        if len(text) > MAX_QUESTION_LENGTH:
            raise DataError(f"the question has {len(text)} characters; at most {MAX_QUESTION_LENGTH} are taken")
        try:
            for path in files:  # without the lock: others are answered while an image is read
                session.add(path, path.name)
            with self._model_lock:
                session.answer = answer = session.ask(text, sampling)
            while not self._has_ended:
                with self._model_lock:
                    piece = next(answer, None)
                if piece is None:
                    return
                yield piece
        except DataError as error:
            raise DataError(without_folders(str(error), files), error.kind) from error
        finally:
            session.next_images = []

    def stop(self, key: str) -> None:
        """Stop the model's answer in a tab. The text generated so far stays in the conversation."""
        with self._model_lock:
            session = self._sessions.get(key)
            if session is not None and session.answer is not None:
                session.answer.close()

    def forget(self, key: str) -> None:
        """Stop the model's answer in a tab and delete the conversation."""
        with self._model_lock:
            self.stop(key)
            self._sessions.pop(key, None)

    def end(self) -> None:
        """Stop all answers of the chat page and the reading of images, and refuse new ones, because the server ends."""
        self._has_ended = True
        if self.assistant.image_process is not None:
            self.assistant.image_process.stop()


def without_folders(message: str, files: list[Path]) -> str:
    """Return an error message with uploaded files named without their folders, which visitors must not see."""
    for path in files:
        message = message.replace(f"image {path} ", "").replace(f"{path} ", f"{path.name} ").replace(str(path), "")
    return message
