"""Ask a trained model about a picture: `python -m llava_fsdp.chat image=FILE question="What is it?"`."""

import sys
from pathlib import Path

from llava_fsdp import cli
from llava_fsdp.log import leave_noise_out

if __name__ == "__main__":  # before transformers is imported
    leave_noise_out()

from llava_fsdp.answer import Assistant, Question
from llava_fsdp.config import AspectRatio, ChatConfig
from llava_fsdp.data.source import Turn
from llava_fsdp.data.templates import IMAGE_TAG
from llava_fsdp.errors import ConfigError


def main() -> None:
    cli.run("chat", ChatConfig, chat)


def chat(cfg: ChatConfig) -> None:
    """Answer one question, or every line typed on the terminal, all in one conversation."""
    if cfg.image is not None and not Path(cfg.image).is_file():
        raise ConfigError(f"image={cfg.image} is not a file")
    images = [Path(cfg.image)] if cfg.image is not None else []
    assistant = Assistant(cfg.model.checkpoint, form="v1", aspect=AspectRatio.pad)
    turns: list[Turn] = []
    questions = [cfg.question] if cfg.question is not None else typed_lines()
    for text in questions:
        first = f"{IMAGE_TAG}\n{text}" if images and not turns else text
        turns.append(Turn("human", first))
        [answer] = assistant.answers([Question(turns, images, f"image={cfg.image}")], cfg.max_new_tokens)
        turns.append(Turn("gpt", answer))
        print(answer, flush=True)


def typed_lines():
    """Lines from the terminal until end of file or an empty one."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline().strip()
        if not line:
            return
        yield line


if __name__ == "__main__":
    main()
