"""Make prompts from validation records. The model answers them at each validation during training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from llava_fsdp.config import Config
from llava_fsdp.data.batching.batch import MicroBatch
from llava_fsdp.data.batching.collate import Collator
from llava_fsdp.data.batching.tile_inputs import Row
from llava_fsdp.data.images.anyres import Size
from llava_fsdp.data.images.check import ImageFile
from llava_fsdp.data.images.image_source import ImageSource
from llava_fsdp.data.images.preprocess import ImageReader
from llava_fsdp.data.processor.encoder import ProcessorEncoder
from llava_fsdp.data.records.clip import Clip
from llava_fsdp.data.records.record import IMAGE_TAG, Record
from llava_fsdp.data.text.answer_segments import AnswerWriter, ask_segments
from llava_fsdp.data.text.chat_template.jinja_template import ChatTemplate
from llava_fsdp.data.text.chat_template.message_parts import media_of
from llava_fsdp.data.text.conversation import first_answer, image_order, opening_question, opening_turns, prompt
from llava_fsdp.data.text.encode import Encoder, encode_prompt
from llava_fsdp.data.text.sample import Sample
from llava_fsdp.data.text.tokens.constants import IGNORE, IMAGE_ID


@dataclass(frozen=True)
class HeldOutQuestion:
    """The first question of a validation record, and the record's answer to it."""

    record: str
    """Name of the record in messages."""
    question: str
    """Text without image tags."""
    reference: str
    sample: Sample
    """The prompt: the tokens of the question up to the beginning of the answer, without labels."""
    images: tuple[ImageFile, ...]
    sizes: tuple[Size, ...] | None = None
    """The sizes for which the tokens of the images were counted; None if they are not from an index."""
    source: int = 0
    """Index of the record's data source."""
    thought: tuple[str, str] = ("", "")
    """The texts around the thought that the model is asked to begin with; empty without one (`AnswerText`)."""


@dataclass(frozen=True)
class Prompts:
    """A batch of questions up to the beginning of the answer."""

    micro: MicroBatch
    """The prompts as rows padded on the left, so that all answers begin at the same column."""
    mask: torch.Tensor
    """Attention mask, bool [rows, length]; False at padding."""


def ask(record: Record, encoder: Encoder, reader: ImageSource, cfg: Config, source: int = 0) -> HeldOutQuestion:
    """Return the first question of a validation record as a prompt that is encoded as in training, with the record's
    answer to it. Only this question's images are used. The prompt asks for a thought if the record's answer has one.

    Args:
        encoder: encodes records in training; its template and settings are used.
        reader: says where images are and, unless the encoder does it, how many tokens they have.
        source: index of the record's data source.

    Raises:
        DataError: the record does not begin with a question and its answer, or the model's own template refuses it.
        ImageError: the size of an image, needed with anyres, cannot be read.
    """
    form = encoder.template
    if isinstance(form, ChatTemplate):
        record = encoder.teaching.record(record, form.features)  # moves thoughts out of the texts of answers
    _, text, num_images, answer = opening_question(record)
    names, media, start_end = (
        record.images[:num_images],
        media_of(record.images[:num_images]),
        cfg.model.image_start_end,
    )
    thought = "", ""  # the texts before and behind a thought; empty if none is asked for
    if isinstance(form, ChatTemplate):
        if first_answer(record).thought is not None:
            form = encoder.teaching.asking(form)
            thought = form.thought
        writer = AnswerWriter(form, encoder.teaching, cfg.trained_special_tokens, start_end)
        segments = ask_segments(opening_turns(record), writer, media, record.where, record.tools)
    else:
        segments = prompt(opening_turns(record), form, start_end, num_images > 0, record.where, media)
    # the template may show images in another order: `order` has their numbers in the record, in the order of the prompt
    order, sizes, frames = image_order(segments, num_images), record.sizes, record.frames
    if sizes is not None and frames is not None:  # the index has both, or neither
        sizes, frames = sizes[:num_images], frames[:num_images]
    shown = replace(record, images=names, sizes=sizes, frames=frames)  # with the images of this question alone
    question = text.replace(IMAGE_TAG, "").strip() if record.images else text
    if isinstance(encoder, ProcessorEncoder):  # the model's processor prepares images, and determines their tokens
        shapes = [encoder.shape(shown, number) for number in range(num_images)]
        sample = encoder.encode(segments, names, shapes, record.where)  # with the images in the order of the prompt
        files = tuple(reader.checked_path(record, name) for name in sample.images)
        sizes_of_all = [shape.size if isinstance(shape, Clip) else shape for shape in shapes]
        sizes = tuple(sizes_of_all[n] for n in order)
        return HeldOutQuestion(record.where, question, answer, sample, files, sizes, source, thought)
    assert isinstance(reader, ImageReader)
    # for each image, the index of the vision feature of each of its tokens
    image_rows = [reader.image_rows(shown, number) for number in range(num_images)]
    lengths = [len(rows) for rows in image_rows]
    ids = encode_prompt(segments, encoder.tokenizer, lengths, cfg.trained_special_tokens, form.adds_bos)
    names, image_rows = tuple(names[n] for n in order), tuple(image_rows[n] for n in order)
    sizes = None if sizes is None else tuple(sizes[n] for n in order)
    sample = Sample(ids, np.full(len(ids), IGNORE), names, image_rows, positions_cut=0, labels_cut=0)
    files = tuple(reader.checked_path(record, name) for name in names)
    return HeldOutQuestion(record.where, question, answer, sample, files, sizes, source, thought)


def lay_out_prompts(rows: Sequence[Row], collate: Collator) -> Prompts:
    """Collate prompts, each a sample with its images, into a batch, padded on the left. Without prompts, return a batch
    of one row with one token: a rank without a prompt runs the model with the others. `collate` prepares the images,
    and adds blank samples for a model that needs an image in each batch."""
    rows = collate.images.completed(list(rows), True)
    length = max((len(sample.input_ids) for sample, _ in rows), default=1)
    ids = np.zeros((max(1, len(rows)), length), dtype=np.int64)
    mask = np.zeros(ids.shape, dtype=bool)
    mask[:, -1] = True  # a row without a prompt has one token
    for row, (sample, _) in enumerate(rows):
        ids[row, length - len(sample.input_ids) :] = sample.input_ids
        mask[row, length - len(sample.input_ids) :] = True
    images = collate.images.collate_prompts(rows, ids)
    ids[ids == IMAGE_ID] = 0
    micro = MicroBatch(
        input_ids=torch.from_numpy(ids),
        images=images,
        label_positions=torch.arange(1, len(ids) + 1) * length - 1,  # the last token of each row predicts the answer
        label_ids=torch.zeros(0, dtype=torch.int64),
        scale=0.0,
    )
    return Prompts(micro, torch.from_numpy(mask))
