"""Generate answers of a trained vision-language model, for the terminal chat, the web page and `evaluate`."""

import itertools
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
from llava_fsdp.chat.open_model import choose_dtype, open_model
from llava_fsdp.config import AspectRatio, TooLong
from llava_fsdp.data.batching.batch import MicroBatch
from llava_fsdp.data.batching.tile_inputs import normalize, with_normalized_tiles
from llava_fsdp.data.images.check import ImageFile, read_size
from llava_fsdp.data.images.image_tokens import join_tokens
from llava_fsdp.data.images.preprocess import ImageReader, read_preprocessor
from llava_fsdp.data.loader import pixel_table
from llava_fsdp.data.records.record import Record, Turn, count_images, is_video
from llava_fsdp.data.text.answer_segments import AnswerWriter, ask_segments
from llava_fsdp.data.text.chat_template.jinja_template import ChatTemplate, open_template, stops_of
from llava_fsdp.data.text.chat_template.message_parts import media_of
from llava_fsdp.data.text.conversation import image_order, prompt, refuse_tools
from llava_fsdp.data.text.encode import UNLIMITED, ExactEncoder, encode_prompt
from llava_fsdp.data.text.sample import Sample
from llava_fsdp.data.text.teaching import DEFAULT
from llava_fsdp.data.text.tokens.constants import IMAGE_ID
from llava_fsdp.data.text.tokens.detokenize import AnswerText, find_stops
from llava_fsdp.data.text.tokens.tokenizer import Tokenizer, open_tokenizer
from llava_fsdp.export.prove.check_causal import answers_alone
from llava_fsdp.export.prove.verify_logits import load_copy
from llava_fsdp.export.source_model import Opened
from llava_fsdp.export.write.formats import SourceModel
from llava_fsdp.model.architecture import Architecture, ImageInputs
from llava_fsdp.model.generation import DynamicCache, PrefixCache, Prompt, Sampling, write_tokens
from llava_fsdp.model.packed_attention.attention import attention_of_transformers


@dataclass(frozen=True)
class LoadedImage:
    """An image (or video) of a conversation that was read and prepared for the vision tower.

    Attributes:
        number: number that no other image of the same assistant has.
        tiles: pixels, uint8 [tiles, 3, size, size].
        rows: one element for each of the image's tokens, which tells of which vision features the token is made.
        images: number of images of the conversation, which decides whether an image is cut into tiles.
    """

    number: int
    path: ImageFile
    tiles: np.ndarray
    rows: np.ndarray
    images: int = 1


class Assistant:
    """A trained vision-language model in memory, with its tokenizer, image preprocessing and conversation template."""

    def __init__(
        self,
        checkpoint: str,
        default_template: str,
        default_aspect: AspectRatio,
        device: torch.device | None = None,
        opened: Opened | None = None,
        limited_images: bool = False,
    ):
        """Load a trained vision-language model for chatting.

        Args:
            checkpoint: folder of a run, of a checkpoint or of a model, or a model's name on the hub.
            default_template, default_aspect: conversation template, and how images are fitted into the vision tower's
                square input, if the model's folder does not name them.
            device: where the model computes; None: the GPU if there is one, else the CPU.
            opened: the result of `open_model` for `checkpoint`; None: `open_model` is called here.
            limited_images: whether to read images in another process, with limits on time and memory.

        Raises:
            ConfigError, ModelError, CheckpointError: the model cannot be found or read, or its folder has another chat
                template than the one that it was trained with.
        """
        opened = opened or open_model(checkpoint, default_template, default_aspect)
        source = opened.source
        assert isinstance(source, SourceModel), "`open_assistant` chooses another class for other models"
        shapes = source.model
        self.device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.checkpoint = checkpoint
        self.template_name = source.template
        self.reader = ImageReader(
            folder=None,
            preprocessor=read_preprocessor(shapes.parts.vision_folder),
            tokens=source.image_tokens,
            pixels=source.pixels,
            sampling=source.sampling,
        )
        self.image_process = ImageProcess(self.reader) if limited_images else None
        self.special_tokens = source.special_tokens
        self.tokenizer: Tokenizer = open_tokenizer(shapes.parts.language_folder, shapes.language_config.vocab_size)
        # `form` is the template as it was opened, `teaching` what was learned of thoughts and earlier turns. `template`
        # is the one for questions: it lets the model think if it learned thoughts
        form = open_template(source.template, shapes.parts.language_folder, self.tokenizer)
        self.form, self.teaching = form, source.teaching or DEFAULT
        if isinstance(form, ChatTemplate) and source.teaching is not None:
            form = source.teaching.asking(form)
        self.template = form
        self.model: Architecture = load_copy(
            shapes, opened.sources, choose_dtype(shapes, self.device), device=self.device
        )
        # transformers' attention: with a cache, the one of training would build a mask of length x length
        self.model.use_attention(attention_of_transformers(shapes.language_config))
        language, folders = shapes.language_config, (shapes.parts.language_folder, opened.folder)
        self.stops = find_stops(self.tokenizer, stops_of(self.template), language.eos_token_id, folders)
        self.max_tokens: int = shapes.language_config.max_position_embeddings  # of a conversation with its answer
        self.prefix = PrefixCache()
        self._table = pixel_table(self.reader.preprocessor, self.device)
        self._numbers = itertools.count()
        self.thoughts_cut: list[bool] = []
        self.text: AnswerText | None = None

    @cached_property
    def answers_one_by_one(self) -> bool:
        """Whether each question is answered in a batch of its own, because padding would change its answer."""
        return answers_alone(self.model.parts)

    @torch.inference_mode()
    def answers(self, questions: list[Question], max_new_tokens: int, blank: bool = False) -> list[str]:
        """Let the model answer several questions in one batch, with greedy decoding; one by one if padding would change
        the answers. With `blank`, all images are replaced by images of the mean color. Afterwards `thoughts_cut` says
        for each answer whether it ended within a thought. Raise DataError if an image cannot be read, or a question is
        longer than the model can read."""
        if len(questions) > 1 and self.answers_one_by_one:
            return one_by_one(self, questions, max_new_tokens, blank)
        prompts: list[np.ndarray] = []
        all_images: list[LoadedImage] = []
        for question in questions:
            num_images = count_images(question.images)
            images = [self.load_image(path, question.where, num_images) for path in question.images]
            token_ids, images = self.encode_question(question.turns, images, question.where, question.tools)
            prompts.append(token_ids)
            all_images += images
        length = max(len(token_ids) for token_ids in prompts)
        ids = np.zeros((len(prompts), length), dtype=np.int64)
        mask = torch.zeros(ids.shape, dtype=torch.bool)
        for row, tokens in enumerate(prompts):  # padded on the left: all answers begin at the same position
            ids[row, length - len(tokens) :] = tokens
            mask[row, length - len(tokens) :] = True
        inputs, pixels = self.to_device(ids, all_images, blank)
        sampling = Sampling(min(max_new_tokens, self.max_tokens - length))
        cache = DynamicCache(config=self.model.language.config)
        texts = [self.new_text() for _ in prompts]
        prompt = Prompt(inputs, mask.to(self.device), pixels)
        for chosen in write_tokens(self.model, prompt, cache, sampling):
            for text, token in zip(texts, chosen.tolist(), strict=True):
                text.push(token)
            if all(text.ended for text in texts):
                break
        for text in texts:
            text.close()
        self.thoughts_cut = [text.is_thought_cut for text in texts]
        return [text.text for text in texts]

    @torch.inference_mode()
    def stream(
        self,
        turns: Sequence[Turn],
        images: Sequence[LoadedImage],
        sampling: Sampling,
        generator: torch.Generator,
        tools: Sequence[dict[str, Any]] = (),
    ) -> Generator[str, None, bool]:
        """Generate the model's answer to a conversation's last question: after every token, yield the new piece of the
        answer that can no longer change, which may be empty. Return whether the model ended the answer; False if it was
        cut at the maximum number of tokens. Meanwhile the answer is in `self.text`. The generator of random numbers
        must be on the assistant's `device`.

        The beginning that the conversation shares with the previously answered one is not computed again, since its
        keys and values are cached. The images are in the order of their tags in `turns`.

        Raises:
            DataError: tags and images do not match, or the conversation is longer than the model can read.
            OutOfMemory: the conversation does not fit into the device's memory.
        """
        tokens, images = self.encode_question(turns, images, "the conversation", tools)
        sampling = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, self.max_tokens - len(tokens)))
        text = self.text = self.new_text()
        prefix = with_image_numbers(tokens, images)  # so that only image tokens of the same images count as shared
        try:
            # the first `common` tokens are in the cache
            cache, common = self.prefix.reuse(self.model, prefix)
            inputs, pixels = self.to_device(tokens[None, common:], images_after(images, tokens[:common]))
            mask = torch.ones((1, len(tokens)), dtype=torch.bool, device=self.device)
            prompt = Prompt(inputs, mask, pixels)
            for chosen in write_tokens(self.model, prompt, cache, sampling, generator):
                self.prefix.tokens = prefix + text.ids
                yield text.push(int(chosen))
                if text.ended:
                    return True
        except torch.OutOfMemoryError as error:
            self.prefix = PrefixCache()
            raise out_of_memory(self.device, len(tokens)) from error
        yield text.close()
        return False

    @torch.inference_mode()
    def scores(self, pairs: Sequence[tuple[Record, list[ImageFile]]], blank: bool = False) -> list[AnswerScore]:
        """Return the log-probabilities of the answers of preference pairs, two for each record, that of the chosen
        answer first. With `blank`, all images are replaced by images of the mean color.

        Args:
            pairs: for each pair its record, which has a chosen and a rejected answer, and the files of its images.

        Raises:
            DataError: a record is not a pair, an image cannot be read, or a pair is longer than the model can read.
        """
        rows = [self.encode_pair(record, files) for record, files in pairs]

        def to_device(micro: MicroBatch) -> MicroBatch:
            micro = micro.map(lambda values: values.to(self.device))
            images = with_normalized_tiles(micro.images, self._table)
            return replace(micro, images=images | ({"tiles": torch.zeros_like(images["tiles"])} if blank else {}))

        return score_answers(self.model, rows, self.reader, to_device, self.answers_one_by_one)

    def encode_pair(self, record: Record, files: Sequence[ImageFile]) -> tuple[Sample, list[np.ndarray]]:
        """Tokenize a preference pair, a record with a chosen and a rejected answer and the images `files`, as training
        does. Return the sample with both answers, and the tiles of its images in the order of their tokens."""
        images = [self.load_image(path, record.where, count_images(files)) for path in files]
        form = self.form
        encoder = ExactEncoder(
            tokenizer=self.tokenizer,
            template=self.teaching.template(form) if isinstance(form, ChatTemplate) else form,
            image_rows=lambda _, place: images[place].rows,
            max_length=UNLIMITED,
            too_long=TooLong.fail,
            start_end=self.model.cfg.image_start_end,
            special_tokens=self.special_tokens,
            teaching=self.teaching,
        )
        sample = encoder(record)
        assert sample is not None, "with too_long=fail it is an error"
        if sample.longest > self.max_tokens:
            raise too_long(record.where, sample.longest, sum(map(len, sample.image_rows)), self.max_tokens)
        return sample, [images[sample.place(number)].tiles for number in range(len(sample.images))]

    def load_image(self, path: ImageFile, where: str, images: int = 1) -> LoadedImage:
        """Read an image file or a video, cut it into tiles for the model's vision tower, and compute its tokens. Error
        messages begin with `where`. `images` is the number of images of the conversation, without videos, which decides
        whether the image becomes one tile or several. Raise ImageError if the file cannot be read."""
        image_tokens = self.reader.tokens
        if self.image_process is not None and isinstance(path, Path):
            tiles, size = self.image_process.load(path, where, images)
        else:
            tiles = self.reader.load(path, where, images)
            size = read_size(path, where) if not is_video(path) and image_tokens.needs_size(images) else None
        # a video has one tile for each frame
        rows = image_tokens.of_video(len(tiles)) if is_video(path) else image_tokens.of(size, images)
        return LoadedImage(next(self._numbers), path, tiles, rows, images)

    def prepare_images(self, images: Sequence[LoadedImage]) -> list[LoadedImage]:
        """Return the images of a conversation, prepared as their number demands: LLaVA-OneVision cuts an image into
        tiles only if it is the only one. So images may be read again after one was added. Raises ImageError if that
        fails."""
        # `tiled` returns whether an image of a conversation with so many images is cut into tiles
        count, tiled = count_images(image.path for image in images), self.reader.tokens.needs_size
        return [
            image
            if is_video(image.path) or tiled(image.images) == tiled(count)
            else self.load_image(image.path, "the conversation", count)
            for image in images
        ]

    def encode(self, turns: Sequence[Turn], images: Sequence[LoadedImage], where: str) -> np.ndarray:
        """Return the token ids of a conversation as a prompt for the model's next answer. Arguments as for
        `encode_question`."""
        return self.encode_question(turns, images, where)[0]

    def encode_question(
        self, turns: Sequence[Turn], images: Sequence[LoadedImage], where: str, tools: Sequence[dict[str, Any]] = ()
    ) -> tuple[np.ndarray, list[LoadedImage]]:
        """Tokenize a conversation as a prompt for the model's next answer. Return its token ids, int64 [length], where
        image tokens have the id IMAGE_ID, and its images in the order of their tokens. The given images are in the
        order of their image tags in `turns`. `where` names the conversation in errors; the answer may call `tools`.

        Raises:
            DataError: tags and images do not match, the template writes no tools, or the prompt is too long for the
                model.
        """
        check_tags(turns, len(images), where)
        media = media_of(image.path for image in images)
        form, start_end = self.template, self.model.cfg.image_start_end
        if isinstance(form, ChatTemplate):
            writer = AnswerWriter(form, DEFAULT, self.special_tokens, start_end)
            text = ask_segments(turns, writer, media, where, tools)
        else:
            refuse_tools(turns, tools, where)
            text = prompt(list(turns), form, start_end, bool(images), where, media)
        lengths = [len(image.rows) for image in images]
        ids = encode_prompt(text, self.tokenizer, lengths, self.special_tokens, self.template.adds_bos)
        if len(ids) >= self.max_tokens:
            raise too_long(where, len(ids), sum(len(image.rows) for image in images), self.max_tokens)
        return ids, [images[number] for number in image_order(text, len(images))]

    def to_device(
        self, ids: np.ndarray, images: Sequence[LoadedImage], blank: bool = False
    ) -> tuple[torch.Tensor, ImageInputs]:
        """Return a batch's token ids and its image inputs on the model's device, as `Architecture.forward` takes them.

        The image inputs are: the indices of the image tokens in the flattened `ids`; for each of them the index of its
        feature (or indices and weights of four features, of which it is the weighted sum); and the pixels of all tiles.
        Without images they are empty.

        Args:
            ids: int64 [batch, length]; the ids of image tokens are IMAGE_ID.
            images: all images of the batch, in the order of their tokens in `ids`.
            blank: whether to replace all images by images of the mean color.
        """
        tokens = torch.from_numpy(np.where(ids == IMAGE_ID, 0, ids)).to(self.device)
        if not images:
            return tokens, {}
        per_tile = self.reader.tokens.features
        rows, weights = join_tokens([(image.rows, len(image.tiles) * per_tile) for image in images])
        pixels = normalize(torch.from_numpy(np.concatenate([i.tiles for i in images])).to(self.device), self._table)
        return tokens, {
            "positions": torch.from_numpy(np.flatnonzero(ids == IMAGE_ID)).to(self.device),
            "rows": torch.from_numpy(rows).to(self.device),
            "weights": torch.from_numpy(weights).to(self.device),
            "tiles": torch.zeros_like(pixels) if blank else pixels,
        }

    def new_text(self) -> AnswerText:
        """Return an empty answer, to which the tokens that the model generates are added."""
        return AnswerText(
            self.tokenizer, self.template.stop, self.stops, self.template.text_before_answer, self.template.thought
        )


def images_after(images: Sequence[LoadedImage], tokens: np.ndarray) -> list[LoadedImage]:
    """Return the images of a conversation whose tokens are not all cached. An image of which some tokens are cached has
    only the others in its `rows`. `tokens`: the cached ids at the beginning of the prompt, IMAGE_ID at image tokens."""
    num_cached = int((tokens == IMAGE_ID).sum())  # image tokens that are cached, less those of the images before
    rest = []
    for image in images:
        if num_cached < len(image.rows):
            rest.append(replace(image, rows=image.rows[num_cached:]))
        num_cached = max(0, num_cached - len(image.rows))
    return rest


def with_image_numbers(tokens: np.ndarray, images: Sequence[LoadedImage]) -> list[int]:
    """Replace the id of every image token (IMAGE_ID) in a prompt with a negative number that is unique to the image and
    the token's position in it. Two conversations then share a prefix only if their images are the same."""
    numbered = tokens.copy()
    numbers = [-(1 << 40) - image.number * (1 << 24) - np.arange(len(image.rows)) for image in images]
    numbered[tokens == IMAGE_ID] = np.concatenate([np.zeros(0, np.int64), *numbers])
    return numbered.tolist()
