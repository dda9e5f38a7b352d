"""From a record's turns to text, with the stretches that are supervised marked while it is written.

Templates are data. Their texts are those of LLaVA conversation.py:211-392.
"""

from dataclasses import dataclass

from llava_fsdp.data.source import Record, Records, Turn
from llava_fsdp.errors import ConfigError, DataError
from llava_fsdp.log import log

IMAGE_TAG = "<image>"


@dataclass(frozen=True)
class Template:
    """A conversation's text is `begin`, then for every turn its text between a `before` and an `after`."""

    begin: str
    before_question: str
    after_question: str
    before_answer: str
    """Supervised with the answer: the model writes it too."""
    after_answer: str
    """Supervised with the answer: it is how the model stops."""
    image_only: bool = False
    """Every question is replaced by its image tag (stage 1: caption the picture)."""

    @property
    def stop(self) -> str:
        """The text at which generation stops."""
        return self.after_answer


TEMPLATES: dict[str, Template] = {
    "plain": Template("", "", "", "", "\n", image_only=True),
    "v1": Template(
        begin="A chat between a curious user and an artificial intelligence assistant. "
        "The assistant gives helpful, detailed, and polite answers to the user's questions. ",
        before_question="USER: ",
        after_question=" ASSISTANT:",
        before_answer=" ",
        after_answer="</s>",
    ),
    "chatml": Template(
        begin="<|im_start|>system\nAnswer the questions.<|im_end|>",
        before_question="<|im_start|>user\n",
        after_question="<|im_end|><|im_start|>assistant\n",
        before_answer="",
        after_answer="<|im_end|>",
    ),
}


def template(name: str) -> Template:
    """The template of that name.

    Raises:
        ConfigError: no template has that name; the message lists those that exist.
    """
    if name not in TEMPLATES:
        raise ConfigError(f"data.template={name} does not exist; choose one of {sorted(TEMPLATES)}")
    return TEMPLATES[name]


@dataclass(frozen=True)
class Segment:
    """A stretch of text that is supervised or not."""

    text: str
    supervised: bool


def render(record: Record, form: Template) -> list[Segment]:
    """The conversation's text; image tags stand where the pictures go.

    Raises:
        DataError: turns do not alternate human, gpt, or an answer is missing, or the number of image tags is not the
            number of pictures.
    """
    check_turns(record)
    segments = [Segment(form.begin, False)]
    for turn in record.turns:
        if turn.role == "human":
            question = image_tags(turn.text) if form.image_only else image_first(turn.text, bool(record.images))
            segments.append(Segment(form.before_question + question + form.after_question, False))
        else:
            segments.append(Segment(form.before_answer + turn.text + form.after_answer, True))
    return segments


def prompt(questions_and_answers: list[Turn], form: Template) -> str:
    """The text after which the model writes its answer: the turns so far, the last one a question."""
    text = form.begin
    for turn in questions_and_answers:
        if turn.role == "human":
            text += form.before_question + turn.text + form.after_question
        else:
            text += form.before_answer + turn.text + form.after_answer
    return text


def image_first(text: str, has_images: bool) -> str:
    """A single tag moves to the front on a line of its own, as in LLaVA train.py:308-329; several stay."""
    if not has_images or text.count(IMAGE_TAG) != 1:
        return text
    return f"{IMAGE_TAG}\n{text.replace(IMAGE_TAG, '').strip()}".strip()


def image_tags(text: str) -> str:
    return IMAGE_TAG * text.count(IMAGE_TAG)


def check_records(records: Records, images: str | None) -> None:
    """Look at every record once, before training, so that a wrong one does not stop a run hours later.

    Raises:
        DataError: naming the first record that is wrong.
    """
    lone = []
    for index in range(len(records)):
        record = records[index]
        check_turns(record)
        if record.images and images is None:
            raise DataError(f"{record.where} has picture {record.images[0]}, and data.images is not set")
        if not record.images and any(IMAGE_TAG in turn.text for turn in record.turns):
            lone.append(record.where)
    if lone:
        log().warning(
            "%d records have %s in their text and no picture; it is text to them: %s", len(lone), IMAGE_TAG, lone[0]
        )


def check_turns(record: Record) -> None:
    for position, turn in enumerate(record.turns):
        expected = "human" if position % 2 == 0 else "gpt"
        if turn.role != expected:
            raise DataError(f"{record.where}: turn {position} is from {turn.role!r}, not from {expected!r}")
        if turn.role == "gpt" and record.images and IMAGE_TAG in turn.text:
            raise DataError(f"{record.where}: turn {position} is an answer with {IMAGE_TAG} in it")
    if len(record.turns) % 2 or not record.turns:
        raise DataError(f"{record.where}: the conversation has {len(record.turns)} turns; it must end with an answer")
    tags = sum(turn.text.count(IMAGE_TAG) for turn in record.turns if turn.role == "human")
    if record.images and tags != len(record.images):
        raise DataError(f"{record.where}: {tags} {IMAGE_TAG} tags for {len(record.images)} pictures")
