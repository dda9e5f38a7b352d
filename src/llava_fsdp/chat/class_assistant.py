"""Generate answers of a whole model of transformers, for the terminal chat, the web page and `evaluate`: its processor
prepares the questions as in training, and its class generates."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from llava_fsdp.chat.answer_scores import AnswerScore, score_answers
from llava_fsdp.chat.answerer import Question, check_tags, one_by_one, out_of_memory, too_long
from llava_fsdp.chat.image_process import ImageProcess
from llava_fsdp.chat.open_model import choose_dtype
from llava_fsdp.config import Normalize, Pixels, TooLong
from llava_fsdp.data.batching.collate import Collator
from llava_fsdp.data.images.check import ImageFile
from llava_fsdp.data.processor.encoder import ProcessorEncoder, check_processor
from llava_fsdp.data.processor.frames import open_frames
from llava_fsdp.data.processor.image_template import open_image_template
from llava_fsdp.data.processor.images import ProcessorImages, Row
from llava_fsdp.data.processor.processor import open_processor
from llava_fsdp.data.records.clip import Clip, Shape
from llava_fsdp.data.records.record import Record, Turn, is_video
from llava_fsdp.data.text.answer_segments import ask_segments
from llava_fsdp.data.text.chat_template.jinja_template import stops_of
from llava_fsdp.data.text.chat_template.message_parts import media_of
from llava_fsdp.data.text.conversation import image_order
from llava_fsdp.data.text.encode import UNLIMITED
from llava_fsdp.data.text.teaching import DEFAULT
from llava_fsdp.data.text.tokens.detokenize import AnswerText, find_stops
from llava_fsdp.data.text.tokens.tokenizer import Tokenizer, open_tokenizer
from llava_fsdp.data.validation_prompts import lay_out_prompts
from llava_fsdp.export.prove.check_causal import answers_alone
from llava_fsdp.export.prove.verify_logits import load_copy
from llava_fsdp.export.source_model import Opened
from llava_fsdp.export.write.whole_folder import WholeSource
from llava_fsdp.model.architecture import Architecture
from llava_fsdp.model.generation import Prompt, Sampling, write_answers

GREY = 0.5
"""Value of a pixel, from 0 to 1, of blank images for a processor that does not say what the mean colour is."""


@dataclass(frozen=True)
class RgbImage:
    """An image or a video of a conversation."""

    path: ImageFile
    pixels: np.ndarray
    """uint8 [height, width, 3]; of a video the used frames, uint8 [frames, height, width, 3]."""
    shape: Shape


class ClassAssistant:
    """A trained whole model of transformers in memory, with its processor."""

    def __init__(
        self, checkpoint: str, opened: Opened, device: torch.device | None = None, limited_images: bool = False
    ):
        """Load a trained model that is one of transformers' own classes, for chatting.

        Args:
            checkpoint: what the user calls the model.
            opened: the result of `open_model` for `checkpoint`.
            device: where the model computes; None: the GPU if there is one, else the CPU.
            limited_images: whether to read images in another process, with limits on time and memory.

        Raises:
            ConfigError, ModelError, CheckpointError: the model or its processor cannot be read.
        """
        source = opened.source
        assert isinstance(source, WholeSource)
        folder, shapes, language = source.folder, source.model, source.model.language_config
        self.checkpoint = checkpoint
        self.device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.template_name = source.template
        self.max_tokens: int = language.max_position_embeddings
        self.tokenizer: Tokenizer = open_tokenizer(folder, language.vocab_size)
        # `form` is the template as it was opened, `teaching` what was learned of thoughts and earlier turns. `template`
        # is the one for questions: it lets the model think if it learned thoughts
        form, teaching = open_image_template(source.template, folder, self.tokenizer), source.teaching
        self.form, self.teaching = form, teaching or DEFAULT
        self.template = form if teaching is None else teaching.asking(form)
        processor = open_processor(folder)
        frames = open_frames(self.template, processor, source.video_fps, source.video_frames)
        self.reader = ProcessorImages(None, processor, Pixels.exact, frames)
        self.encoder = ProcessorEncoder(
            self.tokenizer, self.template, processor, self.reader.shape, self.max_tokens, TooLong.fail,
            source.special_tokens,
        )  # fmt: skip
        check_processor(self.encoder, has_videos=frames is not None)
        self.image_process = ImageProcess(self.reader) if limited_images else None
        self.thoughts_cut: list[bool] = []
        self.text: AnswerText | None = None
        self.stops = find_stops(self.tokenizer, stops_of(self.template), language.eos_token_id, (folder, opened.folder))
        self.model: Architecture = load_copy(
            shapes, opened.sources, choose_dtype(shapes, self.device), device=self.device
        )

    @cached_property
    def answers_one_by_one(self) -> bool:
        """Whether each question is answered in a batch of its own, because padding would change its answer."""
        return answers_alone(self.model.parts)

    @torch.inference_mode()
    def answers(self, questions: list[Question], max_new_tokens: int, blank: bool = False) -> list[str]:
        """Answer several questions in one batch, with greedy decoding; one by one if padding would change the answers.
        With `blank`, all images are replaced by images of the mean color. Afterwards `thoughts_cut` says for each
        answer whether it ended within a thought.

        Raises:
            DataError: an image cannot be read, or a question is longer than the model can read.
        """
        if len(questions) > 1 and self.answers_one_by_one:
            return one_by_one(self, questions, max_new_tokens, blank)
        rows = []
        for question in questions:
            images = [self.load_image(path, question.where) for path in question.images]
            if blank:
                images = [self.blank_image(image) for image in images]
            rows.append(self.encode_question(question.turns, images, question.where, question.tools))
        texts = [self.new_text() for _ in rows]

        def push(chosen: torch.Tensor) -> bool:
            for text, token in zip(texts, chosen.tolist(), strict=True):
                text.push(token)
            return not all(text.ended for text in texts)

        longest = max(len(sample.input_ids) for sample, _ in rows)
        self.generate(rows, Sampling(min(max_new_tokens, self.max_tokens - longest)), push)
        for text in texts:
            text.close()
        self.thoughts_cut = [text.is_thought_cut for text in texts]
        return [text.text for text in texts]

    def stream(
        self,
        turns: Sequence[Turn],
        images: Sequence[RgbImage],
        sampling: Sampling,
        generator: torch.Generator,
        tools: Sequence[dict[str, Any]] = (),
    ) -> Generator[str, None, bool]:
        """Generate the model's answer to a conversation's last question: after every token, yield the new piece of the
        answer that can no longer change, which may be empty. Return whether the model ended the answer; False if it was
        cut at the maximum number of tokens. The generator of random numbers must be on the assistant's `device`.

        transformers' `generate` returns only when the answer is complete. Therefore it runs in a thread, which hands
        over each token. If the caller stops, the thread ends after its next token.

        Raises:
            DataError: tags and images do not match, or the conversation is longer than the model can read.
            OutOfMemory: the conversation does not fit into the device's memory.
        """
        sample, pixels = self.encode_question(turns, images, "the conversation", tools)
        length = len(sample.input_ids)
        sampling = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, self.max_tokens - length))
        text, stopped = self.new_text(), threading.Event()
        self.text = text
        tokens: queue.SimpleQueue[int | Exception | None] = queue.SimpleQueue()

        def push(chosen: torch.Tensor) -> bool:
            """Hand a token over to the caller's thread. Return whether to generate another one."""
            tokens.put(int(chosen))
            return not stopped.is_set()

        def run() -> None:
            """Generate the answer, and then put None, or the exception that ended it, into the queue."""
            try:
                with torch.inference_mode():
                    self.generate([(sample, pixels)], sampling, push, generator)
                tokens.put(None)
            except Exception as error:  # raised again where the answer is read
                tokens.put(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            while (token := tokens.get()) is not None:
                if isinstance(token, torch.OutOfMemoryError):
                    raise out_of_memory(self.device, length) from token
                if isinstance(token, Exception):
                    raise token
                yield text.push(token)
                if text.ended:
                    return True
        finally:
            stopped.set()
            thread.join()
        yield text.close()
        return False

    @torch.inference_mode()
    def scores(self, pairs: Sequence[tuple[Record, list[ImageFile]]], blank: bool = False) -> list[AnswerScore]:
        """Return the log-probabilities of the chosen and the rejected answer of each preference pair, in this order.
        One answer is computed at a time if padding would change its score (`self.answers_one_by_one`).

        Args:
            pairs: for each pair its record, which has a chosen and a rejected answer, and the files of its images.
            blank: whether to replace all images by images of the mean color.

        Raises:
            DataError: a record is not a pair, an image cannot be read, or a pair is longer than the model can read.
        """
        rows = [self.encode_pair(record, files, blank) for record, files in pairs]
        reader = replace(self.reader, positions=self.model.positions)
        return score_answers(
            self.model,
            rows,
            reader,
            lambda micro: micro.map(lambda values: values.to(self.device)),
            self.answers_one_by_one,
        )

    def encode_pair(self, record: Record, files: Sequence[ImageFile], blank: bool) -> Row:
        """Tokenize a preference pair, a record with a chosen and a rejected answer, as training does. Return the sample
        with both answers, and the pixels of its images in the order of their tokens. `files` are the images of the
        record; with `blank` they are replaced by images of the mean color."""
        images = [self.load_image(path, record.where) for path in files]
        images = [self.blank_image(image) for image in images] if blank else images
        encoder = replace(
            self.encoder,
            template=self.teaching.template(self.form),
            teaching=self.teaching,
            max_length=UNLIMITED,
            shape=lambda _, place: shape_of(images[place]),
        )
        sample = encoder(record)
        assert sample is not None, "with too_long=fail it is an error"
        if sample.longest > self.max_tokens:
            raise too_long(record.where, sample.longest, int(sample.is_image.sum()), self.max_tokens)
        return sample, [images[sample.place(number)].pixels for number in range(len(sample.images))]

    def generate(self, rows: list[Row], sampling: Sampling, push, generator: torch.Generator | None = None) -> None:
        """Generate answers to the questions in `rows` in one batch.

        Args:
            rows: for each question its prompt and the pixels of its images.
            sampling: how tokens are chosen, and the maximum number of tokens.
            push: gets the next token of each answer, int64 [answers], and returns whether to generate another one.
            generator: random numbers for sampling; None: those of torch.
        """
        prompts = lay_out_prompts(rows, Collator(self.reader, Normalize.step, pack=False))
        micro = prompts.micro.map(lambda values: values.to(self.device))
        prompt = Prompt(micro.input_ids, prompts.mask.to(self.device), micro.images)
        write_answers(self.model, self.model.language_config, prompt, sampling, push, generator)

    def load_image(self, path: ImageFile, where: str, images: int = 1) -> RgbImage:
        """Read an image or a video. A file is read in the process with limits (`image_process`), if there is one. Error
        messages begin with `where`; `images` is the number of images of the conversation. Raises ImageError if the file
        cannot be read, or is a video and the model takes no videos."""
        apart = self.image_process
        if isinstance(path, Path) and is_video(path):
            self.reader.frame_rule_or_raise(where)  # raises ImageError if the model takes no videos
            if apart is None:
                clip = self.reader.clip(path, where)
                return RgbImage(path, self.reader.load(path, where), clip)
            clip = self.reader.clip_of(apart.examine(path, where), f"{where}: video {path}")
            return RgbImage(path, apart.frames(path, where, clip.numbers), clip)
        if apart is not None and isinstance(path, Path):
            pixels = apart.load(path, where, images)[0]
        else:
            pixels = self.reader.load(path, where, images)
        return RgbImage(path, pixels, (pixels.shape[1], pixels.shape[0]))

    def prepare_images(self, images: Sequence[RgbImage]) -> list[RgbImage]:
        """Return the images of a conversation unchanged: the processor prepares them, whatever their number is."""
        return list(images)

    def blank_image(self, image: RgbImage) -> RgbImage:
        """Return an image, or a video, of the same size and of the mean colour."""
        means = getattr(self.reader.processor.opened.image_processor, "image_mean", None) or [GREY] * 3
        colour = np.round(np.array(means) * 255).astype(np.uint8)
        return replace(image, pixels=np.broadcast_to(colour, image.pixels.shape).copy())

    def encode_question(
        self, turns: Sequence[Turn], images: Sequence[RgbImage], where: str, tools: Sequence[dict[str, Any]] = ()
    ) -> Row:
        """Tokenize a conversation as a prompt for the model's next answer. Return it with the pixels of its images in
        the order of their tokens. The given images are in the order of their image tags in `turns`. `where` is the
        subject of error messages, `tools` are those that the answer may call. Raises DataError if tags and images do
        not match, or the prompt is longer than the model can read."""
        check_tags(turns, len(images), where)
        media = media_of(image.path for image in images)
        segments = ask_segments(turns, self.encoder.writer, media, where, tools)
        shapes = [shape_of(image) for image in images]
        sample = self.encoder.encode(segments, [str(image.path) for image in images], shapes, where)
        if len(sample.input_ids) >= self.max_tokens:
            raise too_long(where, len(sample.input_ids), sum(map(len, sample.image_rows)), self.max_tokens)
        return sample, [images[number].pixels for number in image_order(segments, len(images))]

    def new_text(self) -> AnswerText:
        """Return an empty answer, to which the tokens that the model generates are added."""
        return AnswerText(
            self.tokenizer, self.template.stop, self.stops, self.template.text_before_answer, self.template.thought
        )


def shape_of(image: RgbImage) -> Shape:
    """Return what the tokens of an image or a video depend on. That of a video reads its frames."""
    shape = image.shape
    return replace(shape, read=lambda: image.pixels) if isinstance(shape, Clip) else shape
