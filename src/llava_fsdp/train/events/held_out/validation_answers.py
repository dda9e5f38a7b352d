"""Generate answers to held-out questions with the model in training, on all ranks, and score them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from llava_fsdp.config import BadRecords, Config
from llava_fsdp.data.batching.tile_inputs import Row
from llava_fsdp.data.records.record import count_images
from llava_fsdp.data.text.chat_template.jinja_template import stops_of
from llava_fsdp.data.text.tokens.detokenize import AnswerText, find_stops
from llava_fsdp.data.validation_prompts import HeldOutQuestion, lay_out_prompts
from llava_fsdp.data.validation_set import HeldOut
from llava_fsdp.export.prove.check_causal import answers_alone
from llava_fsdp.model.architecture import Architecture
from llava_fsdp.model.generation import Prompt, Sampling, write_answers
from llava_fsdp.parallel.ranks.consensus import any_rank, on_first_rank, rank_and_size
from llava_fsdp.parallel.ranks.mesh import gather_lists
from llava_fsdp.parallel.ranks.rank_layout import RankLayout
from llava_fsdp.runtime.errors import ImageError
from llava_fsdp.runtime.text.log import log
from llava_fsdp.train.events.held_out.answer_metric import AnswerMetric, choose_metric
from llava_fsdp.train.pipeline_step import PipelinedModel


@dataclass(frozen=True)
class Answered:
    """A generated answer to a held-out question, with its score from 0 to 1."""

    number: int
    """Index of the question."""
    text: str
    score: float
    is_thought_cut: bool = False
    """Whether the answer ended within its thought, at `val.max_new_tokens`; it has no text then."""


class AnswerGenerator:
    """Generates answers to held-out questions with the sharded model.

    All ranks must run the same number of forward passes, because with FSDP each pass is a collective. Therefore all
    ranks run the same number of batches, each batch continues until the longest answer on any rank is complete, and a
    rank without questions runs one blank row. Ranks that compute layers together (`parallel.tensor`) or have different
    stages of the model (`parallel.pipeline`) answer the same questions.
    """

    def __init__(
        self,
        model: nn.Module | PipelinedModel,
        held_out: HeldOut,
        cfg: Config,
        wants_stop: Callable[[], bool],
        pause: Callable[[], None],
        metric: AnswerMetric | None = None,
    ):
        """Create the generator. Collective.

        Args:
            model: the sharded model in training, or this rank's stages of it.
            wants_stop: returns whether this rank was requested to stop.
            pause: called by all ranks between two batches. It saves or stops the run if this was requested on any rank.
            metric: scores the answers; None: `val.metric`.
        """
        assert isinstance(model, Architecture | PipelinedModel)  # FSDP replaces the model's class by a subclass
        self.model = model
        self.language = model.language_config
        self.loader = held_out.loader
        self.questions = held_out.questions
        self.cfg = cfg
        self.metric = metric or choose_metric(cfg, None)
        self.wants_stop = wants_stop
        self.pause = pause
        self.tokenizer = self.loader.steps.encoder.tokenizer
        self.stop = self.loader.steps.encoder.template.stop
        """Text that ends an answer."""
        folders = [model.parts.language_folder]
        stops = stops_of(self.loader.steps.encoder.template)
        self.stops = find_stops(self.tokenizer, stops, self.language.eos_token_id, folders)
        """Ids of the tokens that end an answer."""
        several = bool(self.questions) and cfg.val.batch_size > 1
        self.answers_one_by_one = several and on_first_rank(
            lambda: answers_alone(model.parts), "cannot try padded prompts"
        )
        """Whether each question is answered in a batch of its own, because padding would change its answer."""

    @property
    def rows(self) -> int:
        """Number of questions that a rank answers at once: at most `val.batch_size`, at least one, and so few that
        questions and answers have at most half as many tokens as one rank processes at once in training; one if padding
        would change the answers.

        Half, because a token's key-value cache takes up to twice the memory that training keeps of it in a block.
        """
        if self.answers_one_by_one:
            return 1
        longest = max(len(question.sample.input_ids) for question in self.questions) + self.cfg.val.max_new_tokens
        return max(1, min(self.cfg.val.batch_size, self.cfg.rank_tokens // 2 // longest))

    def answers(self) -> list[Answered]:
        """Answer all questions, each on one rank. Return the answers on every rank, in the order of the questions.
        Collective. Raises ImageError if an image cannot be read any more and `data.bad_records=fail`."""
        if not self.questions:
            return []
        rank, ranks = rank_and_size()
        layout = RankLayout(self.cfg.parallel, ranks)
        number, count = layout.copy_of_layers(rank)  # index of this rank's copy of the model, number of copies
        lengths = [len(question.sample.input_ids) for question in self.questions]
        # questions of a batch have similar lengths, because shorter ones are padded
        by_length = sorted(range(len(lengths)), key=lambda number: (-lengths[number], number))
        at_once = count * self.rows  # a copy answers `rows` questions as one batch
        found: list[Answered] = []
        for begin in range(0, len(by_length), at_once):
            self.pause()
            found += self.answer(by_length[begin : begin + at_once][number::count])
        self.pause()  # raises an error if a stop was requested, which has interrupted the answers of the last batch
        answers_of_copy = found if layout.is_lowest_of_copy(rank) else []  # all ranks of a copy have the same answers
        return sorted(gather_lists(answers_of_copy), key=lambda answered: answered.number)

    def answer(self, numbers: list[int]) -> list[Answered]:
        """Answer this rank's questions of a batch; `numbers`, their indices, may be empty. Collective."""
        rows_by_number = [(number, row) for number in numbers if (row := self.read(self.questions[number])) is not None]
        prompt = self.prompt_of([row for _, row in rows_by_number])
        begin = self.loader.steps.encoder.template.text_before_answer  # what a model writes before an answer
        texts = [
            AnswerText(self.tokenizer, self.stop, self.stops, begin, self.questions[number].thought)
            for number, _ in rows_by_number
        ]

        def push(chosen: torch.Tensor) -> bool:
            """Add the next token of each row to its text. Return whether all ranks go on. Collective."""
            # a rank without questions runs one blank row, whose tokens belong to no text
            for text, token in zip(texts, chosen.tolist(), strict=False):
                text.push(token)
            any_unfinished, any_wants_stop = any_rank(not all(text.ended for text in texts), self.wants_stop())
            return any_unfinished and not any_wants_stop

        write_answers(self.model, self.language, prompt, Sampling(self.cfg.val.max_new_tokens), push)
        for text in texts:
            text.close()
        return [self.score_answer(number, text) for (number, _), text in zip(rows_by_number, texts, strict=True)]

    def prompt_of(self, rows: list[Row]) -> Prompt:
        """Return `rows`, tokenized questions with their images, as a batch on the device. Without `rows`, the batch is
        one blank row, with which this rank takes part in the forward passes of the others."""
        prompts = lay_out_prompts(rows, self.loader.steps.collate)
        micro = self.loader.to_device(prompts.micro)
        return Prompt(micro.input_ids, prompts.mask.to(micro.input_ids.device), micro.images)

    def score_answer(self, number: int, answer: AnswerText) -> Answered:
        """Return the answer to question `number`, without its thought (the reasoning before it), and with its score."""
        question = self.questions[number]
        score = self.metric.score(question.question, answer.text, question.reference, question.record)
        return Answered(number, answer.text, score, answer.is_thought_cut)

    def read(self, question: HeldOutQuestion) -> Row | None:
        """Return the tokenized sample of a question and its image tiles; None if an image is broken and
        `data.bad_records=skip`. Raises ImageError if an image is broken and `data.bad_records=fail`."""
        try:
            # with the size for which the image's tokens were counted, if it is known
            return question.sample, [
                self.loader.steps.image_reader.load(
                    path, question.record, count_images(question.images), (question.sizes or ())[n : n + 1]
                )
                for n, path in enumerate(question.images)
            ]
        except ImageError as error:
            if self.loader.data.bad_records is BadRecords.fail:
                error.on_every_rank = False  # every rank reads only its own questions
                error.about(record=question.record)
                raise
            log().warning("the validation is done without %s", error)
            return None
