"""Compute the log-probabilities of given answers: what `evaluate task=pairs` needs of a model, of whichever kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from llava_fsdp.config import Normalize
from llava_fsdp.data.batching.batch import MicroBatch, StepFacts
from llava_fsdp.data.batching.collate import Collator
from llava_fsdp.data.batching.tile_inputs import Row
from llava_fsdp.data.images.image_source import ImageSource
from llava_fsdp.model.architecture import Architecture

LOGIT_BYTES = 1 << 29
"""Maximum number of bytes of a batch's logits in fp32, unless one answer has more."""


@dataclass(frozen=True)
class AnswerScore:
    """The probability of an answer behind its prompt."""

    log_probability: float
    """Sum over the answer's tokens, the one that ends it included."""
    tokens: int


def score_answers(
    model: Architecture,
    pairs: Sequence[Row],
    reader: ImageSource,
    to_device: Callable[[MicroBatch], MicroBatch],
    one_by_one: bool,
) -> list[AnswerScore]:
    """Return, for each answer of preference pairs, the sum of the log-probabilities of its tokens and their number.
    Each pair gives two scores, that of the chosen answer first.

    Args:
        pairs: for each pair the sample with both answers (`answers`), and the pixels of its images.
        reader: makes the image inputs of a batch.
        to_device: moves a micro-batch to the model's device and prepares its pixels.
        alone: whether each answer is scored in a batch of its own, because padding would change its score.
    """
    rows = [(part, images) for sample, images in pairs for part in sample.answers]
    collate = Collator(reader, Normalize.step, pack=False)
    most_labels = 1 if one_by_one else LOGIT_BYTES // (4 * model.language_config.vocab_size)
    found: list[AnswerScore] = []
    for batch in batches(rows, most_labels):
        # `facts` describe a training step; this batch is the only micro-batch of step 0
        facts = StepFacts(0, samples=len(batch), images=sum(len(images) for _, images in batch))
        micro = to_device(collate(batch, facts, 1))
        logits = model(**micro.inputs, return_logits=True)  # [labels, vocabulary]
        of_labels = logits.float().log_softmax(-1).gather(1, micro.label_ids[:, None])[:, 0]
        counts = [sample.num_labels for sample, _ in batch]
        sums = [of_answer.double().sum().item() for of_answer in of_labels.split(counts)]
        found += [AnswerScore(total, count) for total, count in zip(sums, counts, strict=True)]
    return found


def batches(rows: Sequence[Row], most_labels: int) -> Iterator[list[Row]]:
    """Divide rows (a sample and its images), in order, into batches of at most `most_labels` labels, or of a row."""
    batch: list[Row] = []
    for row in rows:
        if batch and sum(sample.num_labels for sample, _ in [*batch, row]) > most_labels:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
