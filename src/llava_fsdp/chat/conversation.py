"""Keep a conversation with a vision-language model, for the terminal chat and the web page."""

from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import torch

from llava_fsdp.chat.answerer import Answerer, Question, ShownImage
from llava_fsdp.data.records.record import IMAGE_TAG, Turn, count_images
from llava_fsdp.model.generation import Sampling
from llava_fsdp.runtime.errors import DataError


class Conversation:
    """The turns and images of a chat, which the assistant's model answers. An added image is shown to the model with
    the next question, and stays in the conversation.

    Args:
        max_images: maximum number of images; None: no limit.
        seed: seed for sampling the answers; None: a different seed every time.
    """

    def __init__(self, assistant: Answerer, max_images: int | None = None, seed: int | None = None):
        """Begin an empty conversation with the model of `assistant`.

        Args:
            max_images: maximum number of images in the conversation; None: no limit.
            seed: seed for sampling the answers; None: a different one every time.
        """
        self.assistant = assistant
        self.max_images = max_images
        self.generator = torch.Generator(assistant.device)
        self.generator.manual_seed(seed) if seed is not None else self.generator.seed()
        self.was_cut = False  # whether the last answer stopped before the model ended it
        self.reset()

    def reset(self) -> None:
        """Remove all turns and images of a conversation with the model."""
        self.turns: list[Turn] = []
        self.images: list[ShownImage] = []
        """Images that were shown to the model, in the order of their tags in `turns`."""
        self.next_images: list[ShownImage] = []
        """Images that will be shown with the next question."""
        self.tools: Sequence[dict[str, Any]] = ()
        """The tools that the model may call, as JSON schemas."""

    def add(self, path: Path, where: str) -> None:
        """Read an image file, to show it with the next question. Error messages begin with `where`.

        Raises:
            ImageError: the image cannot be read.
            DataError: the path is not a file, or the conversation already has its maximum number of images.
        """
        if not path.is_file():
            raise DataError(f"{where}: {path} is not a file; give an image file")
        if self.max_images is not None and len(self.images) + len(self.next_images) >= self.max_images:
            raise DataError(f"{where}: a conversation takes at most {self.max_images} images; begin a new one")
        self.next_images.append(self.assistant.load_image(path, where))

    def ask(self, text: str, sampling: Sampling) -> Generator[str, None, None]:
        """Add a question to the conversation, and yield the model's answer in pieces: one for each token, maybe empty.

        Closing the generator stops the answer, whose text so far stays in the conversation. After an error, the
        question is taken back. `was_cut` says whether the answer stopped before the model ended it.

        Raises:
            DataError: the question is not valid text, has the wrong number of image tags, or is too long.
            OutOfMemory: the conversation does not fit into memory.
        """
        yield from self.reply([*self.turns, Turn("human", self.with_tags(text))], sampling)

    def go_on(self, question: Question, sampling: Sampling) -> Generator[str, None, None]:
        """Replace this conversation by that of `question`, with its tools, and yield in pieces the model's answer to
        its last turn. Raises DataError if an image cannot be read or the turns are too long, and OutOfMemory if they do
        not fit into memory; the conversation is then empty."""
        self.reset()
        self.tools = question.tools
        count = count_images(question.images)
        self.next_images = [self.assistant.load_image(file, question.where, count) for file in question.images]
        yield from self.reply(question.turns, sampling)

    def reply(self, turns: list[Turn], sampling: Sampling) -> Generator[str, None, None]:
        """Yield in pieces the model's answer to the last of `turns`, which become the conversation's turns, with the
        answer as another one. If an error is raised, the conversation is again as it was before."""
        images = self.assistant.prepare_images([*self.images, *self.next_images])
        state_before = self.turns, self.images, self.next_images
        self.was_cut = True  # until the model has ended the answer
        answer = ""
        stream = self.assistant.stream(turns, images, sampling, self.generator, self.tools)
        try:
            while True:
                piece = next(stream)
                answer += piece
                # a tag that the model writes stands for no image
                self.turns = [*turns, Turn("gpt", answer.replace(IMAGE_TAG, ""), thought=self.thought)]
                self.images, self.next_images = images, []
                yield piece
        except StopIteration as end:
            self.was_cut = not end.value
        except GeneratorExit:  # the caller wants no more: what has been written stays in the conversation
            stream.close()
        except BaseException:
            self.turns, self.images, self.next_images = state_before
            raise

    @property
    def thought(self) -> str | None:
        """The thought before the last answer, as soon as it has ended; None without one."""
        text = self.assistant.text
        return text.thought or None if text is not None else None

    def with_tags(self, text: str) -> str:
        """Return the question with one image tag (`<image>`) for each image that was added since the last question. If
        it has no tags, they are put in front. Raises DataError for another number of tags, or for invalid text."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"the question is not UTF-8 at character {error.start}; type it again") from error
        tags = text.count(IMAGE_TAG)
        if tags and tags != len(self.next_images):  # an image that is added later would be shown at a spare tag
            raise DataError(
                f"the question has {IMAGE_TAG} {tags} times, and {len(self.next_images)} new images are shown with it; "
                "leave it out, or write it once for each"
            )
        return text if tags else f"{IMAGE_TAG}\n" * len(self.next_images) + text

    def exchanges(self) -> list[tuple[str, list[Path], str]]:
        """Return a list of (question without image tags, files of the images shown with it, answer)."""
        rest = iter(self.images)
        exchanges = []
        for question, answer in zip(self.turns[::2], self.turns[1::2], strict=True):
            paths = [next(rest).path for _ in range(self.count_tags(question))]
            exchanges.append((question.text.replace(IMAGE_TAG, "").strip(), paths, answer.text))
        return exchanges

    def undo(self) -> bool:
        """Remove the last question and its answer, and keep the question's images for the next one. Return False if
        there is no question."""
        if not self.turns:
            return False
        num_kept = len(self.images) - self.count_tags(self.turns[-2])
        self.next_images = [*self.images[num_kept:], *self.next_images]
        self.turns, self.images = self.turns[:-2], self.images[:num_kept]
        return True

    def count_tags(self, question: Turn) -> int:
        """Return the number of image tags in a question. In a conversation without images they are plain text."""
        return question.text.count(IMAGE_TAG) if self.images else 0
