"""Make the image inputs of a micro-batch with a processor: tensors by name, in which nobody but the model looks.

The names are those of the model's processor: inputs of the vision part (`pixel_values`, `image_grid_thw`, ...), and the
types of tokens (`token_type_ids`, `mm_token_type_ids`). `position_ids` are added for models with positions of their
own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from PIL import Image
from torch import nn

from llava_fsdp.data.processor.images import ProcessorImages, Row
from llava_fsdp.data.processor.processor import FAILURES, TYPES, Processed, as_tensor
from llava_fsdp.data.records.clip import Clip
from llava_fsdp.data.text.chat_template.message_parts import IMAGE, VIDEO
from llava_fsdp.data.text.sample import ProcessorText, Sample
from llava_fsdp.runtime.errors import DataError

Types = dict[str, torch.Tensor]
"""Types of the tokens of a sample by name, int64 [length]."""


@dataclass(frozen=True)
class ProcessorInputs:
    """Makes the image inputs of a model that has a processor."""

    reader: ProcessorImages
    divides: ClassVar[bool] = False
    """False: a rank that has some positions of a row gets the ids and images of the whole row, and the model divides
    it when the embeddings are made."""

    def completed(self, rows: list[Row], others_show: bool) -> list[Row]:
        """Return the samples of a micro-batch, each with its images, and, if the model needs them, blank samples for
        the kinds of media that no sample has. `others_show`: whether a sample of any micro-batch of the step, on
        whatever rank, has an image or a video. If not, no rank runs the vision part, so that none needs blanks."""
        present = {kind_of(item) for _, media in rows for item in media}
        blanks = self.reader.blanks if others_show else {}
        return [*rows, *(blank for kinds, blank in blanks.items() if present.isdisjoint(kinds))]

    def collate(
        self,
        rows: list[Row],
        ids: np.ndarray,
        seeds: Sequence[int] = (),
        tile_numbers: Sequence[Sequence[int]] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Prepare the images of a micro-batch. Return the inputs of the vision part, and what the model needs of each
        token (types, and position ids) in the shape of `ids`, by name; empty without images. If both answers of a pair
        have the image tokens, the images are given twice, because features go to the tokens of a row by their order.

        Args:
            rows: the samples, with the blank ones that `completed` has added.
            ids: the token ids of the rows, int64 [rows, length]: one packed row, or rows padded on the right.
            seeds, tile_numbers: not used, because no image is cut into tiles.

        Raises:
            DataError: the processor makes other token ids of a sample than it has, or fails.
        """
        # for each answer, how many of its first tokens are not repeated in the row: those, with all images, that it
        # shares with the answer before it
        shared_counts = [sample.shared_prompt_tokens * n for sample, _ in rows for n in range(len(sample.answers))]
        rows = [(part, images) for sample, images in rows for part in sample.answers]
        shown = [row for row, count in zip(rows, shared_counts, strict=True) if row[1] and not count]
        # texts without images are only checked; those of the others are checked in `process`
        for sample, images in rows:
            if not images and (text := text_of(sample)).is_whole:
                check_ids(sample, text, self.reader.processor.tokenize("".join(text.texts[:1])))
        if not shown:
            return {}
        made = self.process(shown)
        pairs = zip(shown, made.ids, made.types, strict=True)
        found = iter([self.types_of(sample, sample_ids, types) for (sample, _), sample_ids, types in pairs])
        every: list[Types] = []
        for (sample, images), count in zip(rows, shared_counts, strict=True):
            if images and count:
                more = len(sample.input_ids) - count
                every.append({name: nn.functional.pad(values[:count], (0, more)) for name, values in every[-1].items()})
            else:
                every.append(next(found) if images else {})
        names = sorted({name for sample_columns in every for name in sample_columns})
        lengths = [len(sample.input_ids) for sample, _ in rows]
        filled = [
            {name: sample_columns.get(name, torch.zeros(length, dtype=torch.int64)) for name in names}
            for sample_columns, length in zip(every, lengths, strict=True)
        ]
        columns = {name: [sample_columns[name] for sample_columns in filled] for name in names}
        if self.reader.positions is not None:
            columns["position_ids"] = self.positions_of(rows, shared_counts, filled, made)
        in_row = {
            name: [sample_values[..., count:] for sample_values, count in zip(values, shared_counts, strict=True)]
            for name, values in columns.items()
        }
        return made.pixels | {name: lay_out(values, ids) for name, values in in_row.items()}

    def collate_prompts(self, rows: list[Row], ids: np.ndarray) -> dict[str, torch.Tensor]:
        """Prepare the images of prompts that are padded on the left, as transformers' generate takes them. Return the
        inputs of the vision part, and what the model needs of each token (types, and position ids) in the shape of
        `ids`, by name; empty without images. `rows`: (sample, its images) each; `ids`: int64 [rows, length]."""
        # the values of each token are laid out as for padding on the right, and moved to the end of their row below
        made = self.collate(rows, ids)
        for name in [name for name in made if name.endswith(TYPES) or name == "position_ids"]:
            for row, (sample, _) in enumerate(rows):
                shift = ids.shape[1] - len(sample.input_ids)
                made[name][..., row, :] = made[name][..., row, :].roll(shift, dims=-1)
        return made

    def process(self, shown: list[Row]) -> Processed:
        """Call the processor for all samples with images or videos, and check the token ids that it makes. Raise
        DataError if they are not the sample's."""
        has_videos = any(kind_of(item) == VIDEO for _, media in shown for item in media)
        # a call can have only images or only videos if both become inputs of the same names
        if has_videos and self.reader.processor.shares_inputs:
            made = joined([self.call([row]) for row in shown])
        else:
            made = self.call(shown)
        texts = [text_of(sample) for sample, _ in shown]
        for (sample, _), text, ids in zip(shown, texts, made.ids, strict=True):
            if text.is_whole:
                check_ids(sample, text, ids)
            # else the processor got only the placeholders of images and videos, because it would tokenize the record's
            # text otherwise: only the number of their tokens is compared
            elif self.stands_for_media(ids).sum() != text.is_image.sum():
                raise DataError(f"{text.where}: {CHANGED}")
        return made

    def call(self, shown: list[Row]) -> Processed:
        """Call the processor with the texts, images and videos of some samples. Raise DataError if it fails."""
        texts = [text_of(sample) for sample, _ in shown]
        # `texts`: before the first image, then each placeholder with the text behind it. Those of images that
        # truncation has cut off are left out
        whole = ["".join(text.texts[: len(media) + 1]) for text, (_, media) in zip(texts, shown, strict=True)]
        images = [[Image.fromarray(item) for item in media if kind_of(item) == IMAGE] for _, media in shown]
        videos = [
            (as_tensor(item), shape)
            for text, (_, media) in zip(texts, shown, strict=True)
            for item, shape in zip(media, text.shapes, strict=False)  # truncation has cut off the last ones
            if isinstance(shape, Clip)
        ]
        try:
            return self.reader.processor(whole, images, videos)
        except FAILURES as error:
            raise DataError(
                f"the model's processor cannot prepare the images of {', '.join(text.where for text in texts)} in one "
                f"micro-batch: {' '.join(str(error).split())[:200]}"
            ) from error

    def stands_for_media(self, ids: np.ndarray) -> np.ndarray:
        """Return whether each token stands for a vision feature, bool [length]."""
        return np.isin(ids, self.reader.processor.media_ids)

    def types_of(self, sample: Sample, ids: np.ndarray, types: Types) -> Types:
        """Return the types of a sample's tokens by name: outputs of the processor that say of each token what it stands
        for, such as `mm_token_type_ids`.

        Args:
            ids: the token ids that the processor made of its text. The text may end before the sample does; all tokens
                after it are of an answer, which have type 0 in all processors. If it had only the placeholders of
                images and videos, their tokens keep their types, and all others get 0.
            types: the types of the tokens `ids`, by name.
        """
        text, length = text_of(sample), len(sample.input_ids)
        filled = {name: torch.zeros(length, dtype=torch.int64) for name in types}
        for name, values in types.items():
            if text.is_whole:
                kept = values[:length]
                filled[name][: len(kept)] = kept
            else:
                filled[name][torch.from_numpy(text.is_image)] = values[torch.from_numpy(self.stands_for_media(ids))]
        return filled

    def positions_of(
        self, rows: list[Row], shared_counts: list[int], types: list[Types], made: Processed
    ) -> list[torch.Tensor]:
        """Return the position ids of each sample's tokens, int64 [axes, length], by the model's rule
        (`ProcessorImages.positions`). The axes are the model's, such as time, row and column in M-RoPE.

        The rule needs sizes of images and videos, such as `image_grid_thw`, and the times of frames. It gets the inputs
        of the vision part that have one entry for each image, or each video, of the micro-batch, cut to the entries of
        the sample's images or videos. Other inputs, such as patches, are left out.

        Args:
            rows: the samples, each with its images.
            shared_counts: for each sample, how many of its first tokens (of images too) are those of the sample before.
            types: for each sample, the types of its tokens by name.
            made: what the processor made of the micro-batch.
        """
        rule, names = self.reader.positions, self.reader.processor.image_names
        assert rule is not None
        kinds = ["".join(map(kind_of, media)) for _, media in rows]
        totals = Counter("".join(letters for letters, count in zip(kinds, shared_counts, strict=True) if not count))
        first = Counter[str]()
        found = []
        for (sample, _), sample_kinds, is_shared, sample_types in zip(rows, kinds, shared_counts, types, strict=True):
            counts = Counter(sample_kinds)
            first -= counts if is_shared else Counter()  # its images are again those of the sample before
            sizes = {
                name: values[first[kind] : first[kind] + counts[kind]]
                for name, values in made.pixels.items()
                # the input is of images or of videos; without videos, each is of images
                for kind in [IMAGE if name in names or not totals[VIDEO] else VIDEO]
                if counts[kind] and len(values) == totals[kind]
            }
            found.append(rule(torch.from_numpy(sample.input_ids), sample_types, sizes))
            first += counts
        return found


CHANGED = (
    "the model's processor makes other tokens of it than were counted before training: its files have changed, or it "
    "prepares an image by more than its size; take the record out"
)


def kind_of(pixels: np.ndarray) -> str:
    """Return the letter for an image or a video, given its values."""
    return IMAGE if pixels.ndim == 3 else VIDEO


def joined(parts: list[Processed]) -> Processed:
    """Join what a processor made of single samples, as it joins them itself: inputs that have one entry for each sample
    are padded with zeros to the size of the largest."""
    pixels: dict[str, torch.Tensor] = {}
    for name in sorted({name for part in parts for name in part.pixels}):
        values = [part.pixels[name] for part in parts if name in part.pixels]
        most = torch.tensor([tensor.shape[1:] for tensor in values]).amax(0).tolist()
        padded = [values[0].new_zeros((len(tensor), *most)) for tensor in values]
        for filled, tensor in zip(padded, values, strict=True):
            filled[tuple(map(slice, tensor.shape))] = tensor
        pixels[name] = torch.cat(padded)
    return Processed(
        [ids for part in parts for ids in part.ids], [types for part in parts for types in part.types], pixels
    )


def text_of(sample: Sample) -> ProcessorText:
    assert sample.processor_text is not None, "made by ProcessorEncoder"
    return sample.processor_text


def check_ids(sample: Sample, text: ProcessorText, ids: np.ndarray) -> None:
    """Raise DataError if the token ids that the processor makes, int64 [length], are not those of the sample, as far as
    it has them. The sample may be truncated, and the text that the processor got may end before the last answer."""
    both = min(len(ids), len(sample.input_ids))
    ends_early = len(ids) < len(sample.input_ids) and not text.is_prompt
    ends_late = len(ids) > len(sample.input_ids) and not sample.positions_cut
    if ends_early or ends_late or not np.array_equal(ids[:both], sample.input_ids[:both]):
        raise DataError(f"{text.where}: {CHANGED}")


def lay_out(values: Sequence[torch.Tensor], ids: np.ndarray) -> torch.Tensor:
    """Put values of the tokens of each sample, [..., length], where the tokens are in rows of the shape of `ids`:
    [..., rows, length], zero at padding."""
    made = values[0].new_zeros((*values[0].shape[:-1], *ids.shape))
    # one packed row, in which the samples stand one behind the other
    if len(ids) == 1:
        row = torch.cat(list(values), dim=-1)
        made[..., 0, : row.shape[-1]] = row
        return made
    for row, row_values in enumerate(values):
        made[..., row, : row_values.shape[-1]] = row_values
    return made
