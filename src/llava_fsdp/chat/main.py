"""Chat with a trained model about images: `python -m llava_fsdp.chat image=FILE`.

Questions come from the terminal, from `question=...`, from a file with a conversation (`messages=FILE`), or, with
`serve=true`, from a page in the browser.
"""

import contextlib
import csv
import os
import signal
import sys
import threading
from collections.abc import Generator, Iterator
from pathlib import Path

from llava_fsdp.chat.conversation import Conversation
from llava_fsdp.chat.messages_file import read_messages_file
from llava_fsdp.chat.open_assistant import open_assistant
from llava_fsdp.config import ChatConfig, ShownThoughts
from llava_fsdp.model.generation import Sampling
from llava_fsdp.runtime.errors import ConfigError, DataError, OutOfMemory
from llava_fsdp.runtime.text.log import log
from llava_fsdp.runtime.text.terminal_text import shown_name, shown_text

THOUGHT = "(thought)"
HELP = """\
/image FILE   show an image with the next question
/undo         take back the last question and its answer
/reset        begin a new conversation, without images
/help         show these lines
/quit         end; so does Ctrl-D
Ctrl-C stops an answer and keeps what was written of it; a second Ctrl-C ends the program."""


def chat(cfg: ChatConfig) -> None:
    """Answer a question (of the command line or the last turn of a file), chat on the terminal, or serve a page."""
    if cfg.serve:
        from llava_fsdp.chat.web.server import serve  # gradio is optional, and takes seconds to import

        return serve(cfg)
    images = image_files(cfg.image)
    question = None if cfg.messages is None else read_messages_file(Path(cfg.messages))
    conversation = Conversation(open_assistant(cfg.model.checkpoint), seed=cfg.seed)
    for path in images:
        conversation.add(path, "image")
    terminal = Terminal(conversation, cfg)
    if question is not None:
        return terminal.show(conversation.go_on(question, terminal.sampling))
    if cfg.question is not None:
        return terminal.answer(cfg.question)
    terminal.run()


def image_files(image: str | None) -> list[Path]:
    """Return the image files of the command line's `image=FILE` or `image=[FILE,FILE]`. In a list, a name with a comma
    is in double quotes. Raises ConfigError if one of the names is not a file."""
    if image is None:
        return []
    names = [image]
    if image.startswith("[") and image.endswith("]") and not Path(image).is_file():
        [names] = csv.reader([image[1:-1]], skipinitialspace=True) if image[1:-1].strip() else [[]]
    for name in names:
        if not Path(name).is_file():
            raise ConfigError(f"image={name} is not a file")
    return [Path(name) for name in names]


class Terminal:
    """Chat with a model in the terminal: reads questions and commands, and prints answers."""

    def __init__(self, conversation: Conversation, cfg: ChatConfig):
        self.conversation = conversation
        self.sampling = Sampling(cfg.max_new_tokens, cfg.temperature, cfg.top_p)
        self.shows_thoughts = cfg.thoughts is ShownThoughts.show

    def run(self) -> None:
        """Answer the lines that the user types, until the end of the input or /quit. An error in a line is logged."""
        if sys.stdin.isatty():
            assistant = self.conversation.assistant
            log().info("%s, template %s; /help lists all commands", assistant.checkpoint, assistant.template_name)
        for line in typed_lines():
            try:
                if not line.startswith("/"):
                    with stop_on_interrupt() as stopped:
                        self.answer(line.strip(), stopped)
                elif self.run_command(line.strip()):
                    return
            except (DataError, OutOfMemory) as error:
                log().error("%s", error)

    def answer(self, question: str, stopped: threading.Event | None = None) -> None:
        """Print the model's answer to a question while it is generated; stop when `stopped` is set meanwhile."""
        self.show(self.conversation.ask(question, self.sampling), stopped)

    def show(self, pieces: Generator[str, None, None], stopped: threading.Event | None = None) -> None:
        """Print the pieces of an answer while the conversation yields them; stop when `stopped` is set meanwhile. If
        thoughts are shown, print the thought first. Log why the answer ends early or has no text."""
        text, thought = "", None
        for piece in pieces:
            text += piece
            if thought is None and (thought := self.conversation.thought) is not None and self.shows_thoughts:
                print(f"{THOUGHT} {shown_text(thought)}", end="\n\n", flush=True)
            print(shown_text(piece), end="", flush=True)
            if stopped is not None and stopped.is_set():
                pieces.close()
        print(flush=True)
        if stopped is not None and stopped.is_set():
            log().info("(stopped)")
        elif not text.strip():
            log().info("(the answer has no text)")
        elif self.conversation.was_cut:
            limit = self.sampling.max_new_tokens
            log().info("(cut at max_new_tokens=%d, or at the most that the model can read)", limit)

    def run_command(self, line: str) -> bool:
        """Run a command that the user types in the chat, such as `/image FILE`. Return True if it ends the program."""
        command, _, rest = line.partition(" ")
        match command:
            case "/quit" | "/exit":
                return True
            case "/help":
                log().info(HELP)
            case "/reset":
                self.conversation.reset()
                log().info("a new conversation, without images")
            case "/undo":
                log().info("taken back" if self.conversation.undo() else "there is no question yet")
            case "/image":
                name = rest.strip().strip("'\"")
                if not name:
                    raise DataError("/image needs the name of a file: /image cat.jpg")
                self.conversation.add(Path(os.path.expanduser(name)), command)
                log().info("shown with the next question: %s", shown_name(name))
            case _:
                raise DataError(
                    f"{command} is not a command; /help lists them. Begin a question like this with a space"
                )
        return False


@contextlib.contextmanager
def stop_on_interrupt() -> Iterator[threading.Event]:
    """Context manager for the time in which an answer is printed: it yields an event, which the first Ctrl-C sets. The
    second Ctrl-C raises KeyboardInterrupt."""
    stopped = threading.Event()

    def interrupt(*_: object) -> None:
        if stopped.is_set():
            raise KeyboardInterrupt
        stopped.set()

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)


def typed_lines() -> Iterator[str]:
    """Yield the non-empty lines that the user types. On a terminal, lines can be edited and recalled."""
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  input() uses it once it is imported
    with contextlib.suppress(EOFError):
        while True:
            if (line := input("> " if is_terminal else "")).strip():
                yield line
    if is_terminal:
        print()
