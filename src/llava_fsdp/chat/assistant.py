"""Ask a trained model: what `chat`, its page and `evaluate` share."""

import itertools
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from llava_fsdp.chat.open_model import open_asked, says_no_aspect, wanted_dtype
from llava_fsdp.config import AspectRatio
from llava_fsdp.data.images.anyres import NEWLINE_ROW, grid_sizes
from llava_fsdp.data.images.check import read_size
from llava_fsdp.data.images.preprocess import ImageReader, read_preprocessor
from llava_fsdp.data.loader import normalize, pixel_table
from llava_fsdp.data.records.record import Turn
from llava_fsdp.data.text.constants import IMAGE_ID
from llava_fsdp.data.text.conversation import prompt
from llava_fsdp.data.text.detokenize import AnswerText, stops_of
from llava_fsdp.data.text.encode import encode_prompt
from llava_fsdp.data.text.templates import IMAGE_TAG, Template, template
from llava_fsdp.data.text.tokenizer import Tokenizer, open_tokenizer
from llava_fsdp.export.verify_logits import filled
from llava_fsdp.model.generation import DynamicCache, Memory, Sampling, write_tokens
from llava_fsdp.model.llava import Llava
from llava_fsdp.model.pretrained import read_json
from llava_fsdp.runtime.errors import DataError, OutOfMemory


@dataclass(frozen=True)
class Question:
    """A conversation that ends with a question, and its pictures."""

    turns: list[Turn]
    """Image tags stand in the text where the pictures go."""
    images: list[Path]
    where: str
    """What a message about a picture calls this question."""


@dataclass(frozen=True)
class Shown:
    """A picture, ready for the tower."""

    number: int
    """No other picture of the assistant has it."""
    tiles: np.ndarray
    """uint8 [tiles, 3, size, size]"""
    rows: np.ndarray
    """int64 [positions]: the row of the tiles' features that each position shows"""


class Assistant:
    """A model in memory with its tokenizer, its pictures' preprocessing and its conversation template."""

    def __init__(self, checkpoint: str, form: str, aspect: AspectRatio, device: torch.device | None = None):
        """Load whatever `export` reads: a run (its export, where it has one), a checkpoint of it, the folder of an
        adapter, which is merged into its base, or a model folder of ours, transformers' or the original's.

        Args:
            form: the template for a folder that does not say its own; likewise `aspect`.
            device: None: the GPU, where there is one.

        Raises:
            ConfigError, ModelError, CheckpointError: there is no model, or none that can be read.
        """
        opened = open_asked(checkpoint, form)
        subject, shapes = opened.subject, opened.subject.model
        self.device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.name = checkpoint
        self.template = subject.template
        self.form: Template = template(subject.template)
        self.reader = ImageReader(
            folder=None,
            preprocessor=read_preprocessor(shapes.parts.vision_folder),
            aspect=aspect if says_no_aspect(opened.folder) else subject.aspect,
            pixels=subject.pixels,
            image_tokens=shapes.image_tokens,
            sizes=tuple(grid_sizes(subject.grid_pinpoints, shapes.parts.vision.image_size)),
            merge=shapes.cfg.patch_merge,
        )
        self.special_tokens = subject.special_tokens
        self.tokenizer: Tokenizer = open_tokenizer(shapes.parts.language_folder, shapes.parts.language.vocab_size)
        self.model: Llava = filled(shapes, opened.sources, wanted_dtype(shapes, self.device), device=self.device)
        self.model.language_model.set_attn_implementation("sdpa")  # the one of training has no masks for a cache
        self.stops = self.find_stops(opened.folder)
        self.positions: int = shapes.parts.language.max_position_embeddings
        """Most that a conversation may take, its answer included."""
        self.memory = Memory()
        self._table = pixel_table(self.reader.preprocessor, self.device)
        self._numbers = itertools.count()

    @torch.inference_mode()
    def answers(self, questions: list[Question], max_new_tokens: int, blank: bool = False) -> list[str]:
        """The greedy answer to every question.

        Args:
            blank: show pictures of the mean colour instead.

        Raises:
            DataError: a picture cannot be read, or a question is longer than the model's positions.
        """
        pictures = [[self.show(path, q.where) for path in q.images] for q in questions]
        prompts = [self.ids(q.turns, shown, q.where) for q, shown in zip(questions, pictures, strict=True)]
        length = max(len(p) for p in prompts)
        ids = np.zeros((len(prompts), length), dtype=np.int64)
        mask = np.zeros_like(ids)
        for row, tokens in enumerate(prompts):  # padded on the left: all answers begin at the same position
            ids[row, length - len(tokens) :] = tokens
            mask[row, length - len(tokens) :] = 1
        embeds = self.embedded(ids, list(itertools.chain(*pictures)), blank)
        padding = torch.from_numpy(mask).to(self.device) if not mask.all() else None
        how = Sampling(max_new_tokens=min(max_new_tokens, self.positions - length))
        texts = [AnswerText(self.tokenizer, self.form.stop, self.stops) for _ in prompts]
        pieces: list[list[str]] = [[] for _ in prompts]
        cache = DynamicCache(config=self.model.language_model.config)
        for chosen in write_tokens(self.model, embeds, padding, cache, how):
            for text, found, token in zip(texts, pieces, chosen.tolist(), strict=True):
                found.append(text.push(token))
            if all(text.ended for text in texts):
                break
        return ["".join([*found, text.close()]) for text, found in zip(texts, pieces, strict=True)]

    def stream(
        self,
        turns: Sequence[Turn],
        pictures: Sequence[Shown],
        how: Sampling,
        dice: torch.Generator | None = None,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> Generator[str, None, bool]:
        """The answer to the last turn, in pieces that are final as they come. Of a conversation that goes on from the
        last one that was answered, only what is new is read.

        Args:
            pictures: in the order of their tags.
            dice: on `device`; None: torch's own.
            is_stopped: asked after every token; what was written by then is the answer.

        Returns:
            Whether the model has ended it.

        Raises:
            DataError: tags and pictures do not agree, or the conversation is longer than the model's positions.
            OutOfMemory: the device's memory has no room for it.
        """
        tokens = self.ids(turns, pictures, "the conversation")
        wanted = with_numbers(tokens, pictures)
        how = Sampling(min(how.max_new_tokens, self.positions - len(tokens)), how.temperature, how.top_p)
        text = AnswerText(self.tokenizer, self.form.stop, self.stops)
        written: list[int] = []
        try:
            cache, common = self.memory.begin(self.model, wanted)
            embeds = self.rest_embedded(tokens, list(pictures), common)
            for chosen in write_tokens(self.model, embeds, None, cache, how, dice):
                self.memory.held = wanted + written
                written.append(int(chosen))
                if piece := text.push(written[-1]):
                    yield piece
                if text.ended or is_stopped():
                    break
        except torch.OutOfMemoryError as error:
            self.memory = Memory()
            raise OutOfMemory(
                f"{self.device} has no memory left for a conversation of {len(tokens)} positions: take some of it "
                "back, or begin a new one"
            ) from error
        ended = text.ended
        if piece := text.close():
            yield piece
        return ended

    def show(self, path: Path, where: str) -> Shown:
        """A picture file, read.

        Raises:
            ImageError: it cannot be, with what is wrong as its `kind`.
        """
        rows = np.arange(self.reader.image_tokens)
        if self.reader.in_tiles:
            rows = self.reader.rows_of(read_size(path, where))
        return Shown(next(self._numbers), self.reader.load(path, where), rows)

    def ids(self, turns: Sequence[Turn], pictures: Sequence[Shown], where: str) -> np.ndarray:
        """The prompt's, int64 [length]; IMAGE_ID at positions of pictures."""
        tags = sum(turn.text.count(IMAGE_TAG) for turn in turns if turn.role == "human")
        if pictures and tags != len(pictures):
            raise DataError(f"{where}: {tags} {IMAGE_TAG} tags for {len(pictures)} pictures")
        text = prompt(list(turns), self.form, self.model.cfg.image_start_end, bool(pictures))
        ids = encode_prompt(text, self.tokenizer, [len(shown.rows) for shown in pictures], self.special_tokens)
        if len(ids) >= self.positions:
            cure = "begin a new conversation" if len(turns) > 1 else "make it shorter"
            shown = f", {sum(len(s.rows) for s in pictures)} of them for pictures" if pictures else ""
            cure += ", or show fewer pictures" if pictures else ""
            raise DataError(f"{where} takes {len(ids)} positions{shown}, and the model has {self.positions}: {cure}")
        return ids

    def rest_embedded(self, tokens: np.ndarray, pictures: list[Shown], begin: int) -> torch.Tensor:
        """What the language model reads from a position on, [1, length - begin, hidden]; the tower sees the pictures
        that begin, or go on, behind it."""
        before = int((tokens[:begin] == IMAGE_ID).sum())  # positions of pictures that are not read again
        rest = []
        for shown in pictures:
            seen, before = min(before, len(shown.rows)), max(0, before - len(shown.rows))
            if seen < len(shown.rows):
                rest.append(Shown(shown.number, shown.tiles, shown.rows[seen:]))
        return self.embedded(tokens[None, begin:], rest, blank=False)

    @torch.inference_mode()
    def embedded(self, ids: np.ndarray, pictures: list[Shown], blank: bool) -> torch.Tensor:
        """[rows, length, hidden]

        Args:
            ids: int64 [rows, length]; positions of IMAGE_ID show the pictures in their order.
        """
        features = sum(len(shown.tiles) for shown in pictures) * self.reader.image_tokens
        starts = itertools.accumulate((len(s.tiles) * self.reader.image_tokens for s in pictures), initial=0)
        rows = [np.where(s.rows == NEWLINE_ROW, features, s.rows + at) for s, at in zip(pictures, starts, strict=False)]
        places = np.flatnonzero(ids == IMAGE_ID)
        size = self.reader.preprocessor.size
        tiles = np.concatenate([np.zeros((0, 3, size, size), np.uint8), *(s.tiles for s in pictures)])
        pixels = normalize(torch.from_numpy(tiles).to(self.device), self._table)
        return self.model.embedded(
            torch.from_numpy(np.where(ids == IMAGE_ID, 0, ids)).to(self.device),
            torch.from_numpy(places).to(self.device),
            torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *rows])).to(self.device),
            torch.zeros_like(pixels) if blank else pixels,
        )

    def find_stops(self, folder: Path) -> frozenset[int]:
        """Ids that end an answer: the model's end of sequence, and the template's where it is one token."""
        said: Any = None
        if (folder / "generation_config.json").is_file():
            said = read_json(folder / "generation_config.json", str(folder)).get("eos_token_id")
        return stops_of(
            self.tokenizer, self.form.stop, self.model.parts.language.eos_token_id if said is None else said
        )


def with_numbers(tokens: np.ndarray, pictures: Sequence[Shown]) -> list[int]:
    """The ids, with what `Memory.held` has in place of IMAGE_ID.

    Returns:
        whole numbers; of pictures below 0.
    """
    found = tokens.copy()
    places = [-(1 << 40) - shown.number * (1 << 24) - np.arange(len(shown.rows)) for shown in pictures]
    found[tokens == IMAGE_ID] = np.concatenate([np.zeros(0, np.int64), *places])
    return found.tolist()
