"""Make the image inputs of a micro-batch with a processor: tensors by name, in which nobody but the model looks.

The names are those of the model's processor: inputs of the vision part (`pixel_values`, `image_grid_thw`, ...), and the
types of tokens (`token_type_ids`, `mm_token_type_ids`). `position_ids` are added for models with positions of their
own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image

from llava_fsdp.data.processor.images import ProcessorImages, Row
from llava_fsdp.data.processor.processor import TYPES, Processed
from llava_fsdp.data.text.encode import ProcessorText, Sample
from llava_fsdp.runtime.errors import DataError

Types = dict[str, torch.Tensor]
"""Types of the tokens of a sample by name, int64 [length]."""


@dataclass(frozen=True)
class ProcessorInputs:
    """Makes the image inputs of a model that has a processor."""

    reader: ProcessorImages

    def completed(self, rows: list[Row], others_show: bool) -> list[Row]:
        """Return the samples of a micro-batch, and, if the model needs it and no sample has an image, the blank one.
        `others_show`: whether a sample of any micro-batch of the step, on whatever rank, has an image; without, no rank
        runs the vision part, and none needs a blank sample."""
        blank = self.reader.blank if others_show else None
        return [*rows, blank] if blank is not None and not any(images for _, images in rows) else rows

    def collate(
        self,
        rows: list[Row],
        ids: np.ndarray,
        seeds: Sequence[int] = (),
        tile_numbers: Sequence[Sequence[int]] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Prepare the images of a micro-batch with one call of the processor; empty without images.

        Args:
            rows: the samples, after `completed`.
            ids: the token ids of the rows, int64 [rows, length]: one packed row, or rows padded on the right.
            seeds, tile_numbers: not used.

        Raises:
            DataError: the processor makes other token ids of a sample than it has, or fails.
        """
        shown = [(sample, images) for sample, images in rows if images]
        # texts without images are only checked; those of the others are checked in `process`
        for sample, images in rows:
            if not images and (text := text_of(sample)).is_whole:
                check_ids(sample, text, self.reader.processor.tokenize("".join(text.texts[:1])))
        if not shown:
            return {}
        made = self.process(shown)
        types = iter(made.types)
        every = [self.types_of(sample, next(types)) if images else {} for sample, images in rows]
        names = sorted({name for own in every for name in own})
        lengths = [len(sample.input_ids) for sample, _ in rows]
        filled = [
            {name: own.get(name, torch.zeros(length, dtype=torch.int64)) for name in names}
            for own, length in zip(every, lengths, strict=True)
        ]
        inputs = made.pixels | {name: lay_out([own[name] for own in filled], ids) for name in names}
        if self.reader.positions is not None:
            inputs["position_ids"] = lay_out(self.positions_of(rows, filled, made), ids)
        return inputs

    def collate_prompts(self, rows: list[Row], ids: np.ndarray) -> dict[str, torch.Tensor]:
        """Do the same as `collate` for rows padded on the left, as transformers' generate takes them."""
        made = self.collate(rows, ids)
        for name in [name for name in made if name.endswith(TYPES) or name == "position_ids"]:
            for row, (sample, _) in enumerate(rows):
                shift = ids.shape[1] - len(sample.input_ids)
                made[name][..., row, :] = made[name][..., row, :].roll(shift, dims=-1)
        return made

    def process(self, shown: list[Row]) -> Processed:
        """Call the processor for all samples with images, and check the token ids that it makes."""
        texts = [text_of(sample) for sample, _ in shown]
        joined = ["".join(text.texts[: len(images) + 1]) for text, (_, images) in zip(texts, shown, strict=True)]
        try:
            made = self.reader.processor(joined, [[Image.fromarray(own) for own in images] for _, images in shown])
        except (ValueError, TypeError, ArithmeticError, LookupError, RuntimeError) as error:
            raise DataError(
                f"the model's processor cannot prepare the images of {', '.join(text.where for text in texts)} in one "
                f"micro-batch: {' '.join(str(error).split())[:200]}"
            ) from error
        for (sample, _), text, ids in zip(shown, texts, made.ids, strict=True):
            if text.is_whole:
                check_ids(sample, text, ids)
            elif (ids == self.reader.processor.image_id).sum() != text.is_image.sum():
                raise DataError(f"{text.where}: {CHANGED}")
        return made

    def types_of(self, sample: Sample, types: Types) -> Types:
        """Return the types of a sample's tokens, given those of the text that the processor got (`types`). Tokens after
        this text are of answers, which have type 0 in all processors. If the text had only the placeholders of the
        images, image tokens get the largest type, and all others 0."""
        text, length = text_of(sample), len(sample.input_ids)
        filled = {name: torch.zeros(length, dtype=torch.int64) for name in types}
        for name, values in types.items():
            if text.is_whole:
                kept = values[:length]
                filled[name][: len(kept)] = kept
            else:
                filled[name][torch.from_numpy(text.is_image)] = values.max()
        return filled

    def positions_of(self, rows: list[Row], types: list[Types], made: Processed) -> list[torch.Tensor]:
        """Return the position ids of each sample's tokens, int64 [axes, length], by the model's rule
        (`ProcessorImages.positions`). The axes are the model's, such as time, row and column in M-RoPE.

        The rule needs sizes of images, such as `image_grid_thw`. It gets those inputs of the vision part that have one
        entry for each image of the micro-batch, with the entries of the sample's images. Other inputs, such as patches,
        are left out.

        Args:
            types: for each sample, the types of its tokens by name.
        """
        rule, num_images, first = self.reader.positions, sum(len(images) for _, images in rows), 0
        assert rule is not None
        found = []
        for (sample, images), sample_types in zip(rows, types, strict=True):
            here = slice(first, first + len(images))
            pixels = {name: values[here] for name, values in made.pixels.items() if len(values) == num_images}
            found.append(rule(torch.from_numpy(sample.input_ids), sample_types, pixels if images else {}))
            first += len(images)
        return found


CHANGED = (
    "the model's processor makes other tokens of it than were counted before training: its files have changed, or it "
    "prepares an image by more than its size; take the record out"
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
    if len(ids) == 1:
        made[..., 0, :] = torch.cat(list(values), dim=-1)
        return made
    for row, own in enumerate(values):
        made[..., row, : own.shape[-1]] = own
    return made
