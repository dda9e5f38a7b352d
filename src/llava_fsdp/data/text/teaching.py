"""What is learnt of the answers of records: thoughts, empty thoughts, all answers or the last."""

import re
from dataclasses import dataclass, replace
from typing import Any

from llava_fsdp.config import Answers, DataConfig, EmptyThoughts, History, LabelWeights, Thoughts
from llava_fsdp.data.problems import Kind
from llava_fsdp.data.records.record import Record, Turn
from llava_fsdp.data.text.chat_template.chat_features import Features
from llava_fsdp.data.text.chat_template.chat_layout import Unfit
from llava_fsdp.data.text.chat_template.jinja_template import OWN, ChatTemplate
from llava_fsdp.runtime.errors import ConfigError, DataError

THOUGHT_IN_TEXT = (
    re.compile(r"\s*<think>(?P<thought>.*?)</think>(?P<text>.*)", re.DOTALL),
    re.compile(r"\s*<\|begin_of_thought\|>(?P<thought>.*?)<\|end_of_thought\|>(?P<text>.*)", re.DOTALL),
)
"""Finds a thought with which the text of an answer begins: of DeepSeek-R1's data, and of OpenThoughts."""
SOLUTION = re.compile(r"\s*<\|begin_of_solution\|>(.*?)<\|end_of_solution\|>\s*", re.DOTALL)
"""Finds the answer behind a thought of OpenThoughts."""
TAGS = ("<think>", "</think>", "<|begin_of_thought|>", "<|end_of_thought|>")
"""Texts that begin or end a thought."""
SOLUTION_TAGS = ("<|begin_of_solution|>", "<|end_of_solution|>")
CURE = "set data.thoughts=train to learn it, context to read it alone, or drop to leave it out"


@dataclass(frozen=True)
class Teaching:
    """The settings `data.thoughts`, `data.empty_thoughts`, `data.history`, `data.answers` and `data.weights`."""

    thoughts: Thoughts = Thoughts.refuse
    empty_thoughts: EmptyThoughts = EmptyThoughts.train
    history: History = History.template
    answers: Answers = Answers.all
    weights: LabelWeights = LabelWeights.use

    @classmethod
    def of_config(cls, cfg: DataConfig) -> "Teaching":
        return cls(cfg.thoughts, cfg.empty_thoughts, cfg.history, cfg.answers, cfg.weights)

    @classmethod
    def of_text(cls, text: str | None) -> "Teaching | None":
        """Parse a text that `str` of these settings has written; None for any other text."""
        try:
            thoughts, empty, history, answers, *weights = (text or "").split(" ")
            taught = LabelWeights(weights[0]) if weights else LabelWeights.use  # older runs wrote no weights
            return cls(Thoughts(thoughts), EmptyThoughts(empty), History(history), Answers(answers), taught)
        except ValueError:
            return None

    @property
    def thinks(self) -> bool:
        """Whether the model was taught thoughts, or answers after them."""
        return self.thoughts in (Thoughts.train, Thoughts.context)

    def asking(self, form: ChatTemplate) -> ChatTemplate:
        """Return the chat template with which a model that was trained with these settings is asked for answers. If it
        learned thoughts, or answers after thoughts, the template's switch (its Jinja variable) for thoughts is on."""
        made, switch = self.template(form), form.features.switch  # `template` sets the variables for training
        if not self.thinks or switch is None:
            return made
        # the caches (layouts, prompt_ends) are emptied: another value of the variable gives other texts
        return replace(made, variables=made.variables | {switch: True}, layouts={}, prompt_ends={})

    def __str__(self) -> str:
        own = (self.thoughts, self.empty_thoughts, self.history, self.answers, self.weights)
        return " ".join(each.value for each in own)

    def template(self, form: ChatTemplate) -> ChatTemplate:
        """Return the chat template `form` with the variables that these settings need. With `empty_thoughts=context`,
        its switch for thoughts is off, unless an answer has one. With `history=keep`, its prompts keep the thoughts of
        earlier turns. Raise ConfigError if `history=keep` is set and the template has no variable for it, or if the
        template cannot be trained with at all."""
        try:
            features = form.features
        except Unfit as unfit:
            raise ConfigError(f"data.template={OWN}: the chat template {form.path} {unfit}") from unfit
        variables: dict[str, Any] = {}
        if self.empty_thoughts is EmptyThoughts.context and features.switch is not None:
            variables[features.switch] = False
        if self.history is History.keep:
            if features.keeps is None:
                raise ConfigError(
                    f"data.history=keep: the chat template {form.path} has no variable that keeps the thoughts of "
                    "earlier turns in its prompts; set data.history=template"
                )
            variables[features.keeps[0]] = features.keeps[1]
        # the caches (layouts, prompt_ends) are emptied, because other variables give other texts
        return replace(form, variables=form.variables | variables, known=features, layouts={}, prompt_ends={})

    def hides_empty(self, form: ChatTemplate) -> bool:
        """Return whether the template writes an empty thought before answers without one, and it must get no labels."""
        return self.empty_thoughts is EmptyThoughts.context and form.writes_empty_thought

    def chosen(self, turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
        """Return the turns with `learnt` set as `data.answers` says: all answers that the record lets learn, or the
        last alone. With `data.weights=ignore`, the record's own marks and weights are dropped first."""
        if self.weights is LabelWeights.ignore:
            turns = tuple(replace(turn, learnt=True, weights=None) for turn in turns)
        return last_learnt(turns) if self.answers is Answers.last else turns

    def weighted(self, record: Record) -> Record:
        """Return a record in which the answers that are learnt are marked: with `data.answers=all` those that the
        record lets learn, else at most the last one. With `data.weights=ignore`, the record's own marks and weights are
        dropped first. Raise DataError if the record has a weight that cannot be obeyed, unless weights are ignored."""
        if self.weights is LabelWeights.use and record.weights_not_obeyed is not None:
            raise DataError(f"{record.where}: {record.weights_not_obeyed}", Kind.key_not_obeyed)
        if self.weights is LabelWeights.use and self.answers is Answers.all:
            return record
        return replace(record, turns=self.chosen(record.turns))

    def record(self, record: Record, features: Features | None) -> Record:
        """Apply these settings to a record: mark the answers that get no labels, and move the thought in an answer's
        text to `Turn.thought`, or drop it. `features`: those of the model's chat template; None: one of LLaVA's
        templates, which know no thoughts. Raise DataError if a thought is refused by `data.thoughts`, or is not
        well-formed; or if a weight cannot be obeyed."""
        record = self.weighted(record)
        if not any(has_thought(turn) for turn in record.turns):
            return record
        turns = tuple(
            self.answer(turn, number, record, features) if has_thought(turn) else turn
            for number, turn in enumerate(record.turns)
        )
        return replace(record, turns=turns)

    def answer(self, turn: Turn, number: int, record: Record, features: Features | None) -> Turn:
        """Return an answer whose thought is moved from its text to `Turn.thought`, or dropped, as `data.thoughts` says.
        An empty thought is dropped. Raise DataError if the thought is refused or not well-formed.

        Args:
            turn: an answer that has a thought, or one of TAGS (such as `<think>`) in its text.
            number: index of the turn, for messages.
            features: those of the model's chat template; None: one of LLaVA's templates, which know no thoughts.
        """
        where = f"{record.where}: turn {number}"
        is_in_text = turn.thought is None
        knows = features is not None and features.thoughts
        if is_in_text and not knows and self.thoughts in (Thoughts.refuse, Thoughts.train):
            return turn  # to a template that knows no thoughts, it is text
        answer = apart(turn, where) if any(tag in turn.text for tag in TAGS) else turn
        if answer is not turn and turn.weights is not None and turn.weights.spans is not None:
            raise DataError(
                f"{where} has a train_detail, and a thought in its text; write the thought under the key "
                "reasoning_content, and count characters in the text behind it",
                Kind.key_not_obeyed,
            )
        is_empty = not (answer.thought or "").strip()
        # an empty answer with an empty thought under a key of its own is like an empty answer without thought
        if not answer.text.strip() and not answer.calls and not (is_empty and answer is turn):
            raise DataError(f"{where} has a thought and no answer; take the record out", Kind.empty_answer)
        if is_empty:
            return replace(answer, thought=None)
        if self.thoughts is Thoughts.refuse:
            raise DataError(f"{where} has a thought before its answer; {CURE}", Kind.key_not_obeyed)
        if self.thoughts is Thoughts.drop:
            answer = replace(answer, thought=None)
        elif not knows:
            raise DataError(
                f"{where} has a thought, and data.thoughts={self.thoughts.value}; the conversation template shows no "
                "thoughts: set data.thoughts=drop, or write them into the texts of the answers",
                Kind.key_not_obeyed,
            )
        return answer


DEFAULT = Teaching()


def has_thought(turn: Turn) -> bool:
    return turn.role == "gpt" and (turn.thought is not None or any(tag in turn.text for tag in TAGS))


def apart(turn: Turn, where: str) -> Turn:
    """Move the thought with which an answer's text begins from the text to `Turn.thought`. Raise DataError if a thought
    stands elsewhere in the text, or has no end, or differs from the one that the record has under a key of its own."""
    for pattern in THOUGHT_IN_TEXT:
        found = pattern.fullmatch(turn.text)
        if found is None or any(tag in found["text"] or tag in found["thought"] for tag in TAGS):
            continue
        solution = SOLUTION.fullmatch(found["text"])
        text = found["text"].lstrip("\n") if solution is None else solution[1]
        if any(tag in text for tag in SOLUTION_TAGS):
            continue
        thought = found["thought"].strip("\n")
        if turn.thought is not None and turn.thought.strip() != thought.strip():
            raise DataError(
                f"{where} has one thought in its text and another under a key of its own; keep one", Kind.key_not_obeyed
            )
        return replace(turn, text=text if text.strip() else "", thought=thought, parts=None)
    raise DataError(
        f"{where} has a thought that does not begin its text, does not end, or is one of several; fix it",
        Kind.key_not_obeyed,
    )


def last_learnt(turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    """Return the turns with all answers but the last marked as not learnt. The last one keeps its mark."""
    last = max((number for number, turn in enumerate(turns) if turn.role == "gpt"), default=-1)
    return tuple(
        replace(turn, learnt=False) if turn.role == "gpt" and number != last else turn
        for number, turn in enumerate(turns)
    )
