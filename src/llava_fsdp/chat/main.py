"""Talk to a trained model about pictures: `python -m llava_fsdp.chat image=FILE`.

Questions are typed on the terminal, given as `question=...`, or, with `serve=true`, asked on a page in the browser.
"""

import contextlib
import csv
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

from llava_fsdp.chat.assistant import Assistant
from llava_fsdp.chat.conversation import Conversation
from llava_fsdp.config import AspectRatio, ChatConfig, cli
from llava_fsdp.model.generation import Sampling
from llava_fsdp.runtime.errors import ConfigError, DataError, OutOfMemory
from llava_fsdp.runtime.log import log
from llava_fsdp.runtime.terminal_text import shown_name, shown_text

HELP = """\
/image FILE   show a picture with the next question
/undo         take back the last question and its answer
/reset        begin a new conversation, without pictures
/help         these lines
/quit         end; so does Ctrl-D
Ctrl-C stops an answer and keeps it as far as it came; a second Ctrl-C ends."""


def main() -> None:
    cli.run("chat", ChatConfig, chat)


def chat(cfg: ChatConfig) -> None:
    """Answer one question, every line typed on the terminal in one conversation, or a page's.

    Raises:
        ConfigError, ModelError, DataError: before the first question; after it only where the command line asks it.
    """
    if cfg.serve:
        from llava_fsdp.chat.web.server import serve  # its package is optional, and takes seconds to load

        return serve(cfg)
    pictures = named_pictures(cfg.image)
    talk = Conversation(Assistant(cfg.model.checkpoint, form="v1", aspect=AspectRatio.pad))
    for path in pictures:
        talk.add(path, "image")
    terminal = Terminal(talk, cfg)
    if cfg.question is not None:
        return terminal.answer(cfg.question)
    terminal.talk()


def named_pictures(image: str | None) -> list[Path]:
    """Files of `image=FILE` or `image=[FILE,FILE]`, where a name with a comma has double quotes.

    Raises:
        ConfigError: one is none.
    """
    if image is None:
        return []
    names = [image]
    if image.startswith("[") and image.endswith("]") and not Path(image).is_file():
        [names] = csv.reader([image[1:-1]], skipinitialspace=True) if image[1:-1].strip() else [[]]
    for name in names:
        if not Path(name).is_file():
            what = "a folder, not a file" if Path(name).is_dir() else "not a file"
            raise ConfigError(f"image={name} is {what}")
    return [Path(name) for name in names]


class Terminal:
    """A conversation that is typed."""

    def __init__(self, talk: Conversation, cfg: ChatConfig):
        self.conversation = talk
        self.how = Sampling(cfg.max_new_tokens, cfg.temperature, cfg.top_p)
        self.dice = torch.Generator(talk.assistant.device)
        self.dice.manual_seed(cfg.seed) if cfg.seed is not None else self.dice.seed()

    def talk(self) -> None:
        """Until the end of the input, or /quit. What is wrong with a line is said, and the conversation goes on."""
        if sys.stdin.isatty():
            name, form = self.conversation.assistant.name, self.conversation.assistant.template
            log().info("%s, template %s; /help lists what else can be typed", name, form)
        for line in typed_lines():
            try:
                if not line.startswith("/"):
                    with stopping() as stopped:
                        self.answer(line.strip(), stopped)
                elif self.obeyed(line.strip()):
                    return
            except (DataError, OutOfMemory) as error:
                log().error("%s", error)

    def answer(self, question: str, stopped: threading.Event | None = None) -> None:
        """Written as it comes, on standard output."""
        is_stopped = stopped.is_set if stopped is not None else lambda: False
        for piece in self.conversation.ask(question, self.how, self.dice, is_stopped):
            print(shown_text(piece), end="", flush=True)
        print(flush=True)
        if stopped is not None and stopped.is_set():
            log().info("(stopped)")
        elif self.conversation.was_cut:
            log().info("(cut at %d tokens: max_new_tokens, or all that the model can read)", self.how.max_new_tokens)

    def obeyed(self, line: str) -> bool:
        """Do what a line that begins with / says; whether it is the end.

        Raises:
            DataError: it says nothing that is known, or what it says cannot be done.
        """
        command, _, rest = line.partition(" ")
        match command:
            case "/quit" | "/exit":
                return True
            case "/help":
                log().info(HELP)
            case "/reset":
                self.conversation.reset()
                log().info("a new conversation, without pictures")
            case "/undo":
                log().info("taken back" if self.conversation.undo() else "nothing has been asked yet")
            case "/image":
                name = rest.strip().strip("'\"")
                if not name:
                    raise DataError("/image needs the name of a file: /image cat.jpg")
                self.conversation.add(Path(name).expanduser(), command)
                log().info("shown with the next question: %s", shown_name(name))
            case _:
                raise DataError(f"{command} is not known; /help lists what is. Begin a question like this with a space")
        return False


@contextlib.contextmanager
def stopping() -> Iterator[threading.Event]:
    """Within it the first Ctrl-C sets the event, the second ends the program."""
    asked = threading.Event()

    def note(*_: object) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


def typed_lines() -> Iterator[str]:
    """Lines that are not empty, until the end of the input; on a terminal they can be edited, and called back."""
    edited = sys.stdin.isatty() and sys.stdout.isatty()
    if edited:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  input() uses it once it is there
    while True:
        if edited:
            try:
                line = input("> ")
            except EOFError:
                print()
                return
        else:
            line = sys.stdin.readline()
            if not line:
                return
        if line.strip():
            yield line
