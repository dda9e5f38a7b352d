"""Encode records with exactly LLaVA's token ids and labels, bugs included (`labels=llava_v1_5`; LLaVA
train.py:268-775).

LLaVA finds the tokens to supervise by tokenizing parts of the text again and adding up their lengths. If the sum is not
the length of the whole text, it masks all labels of the sample.

`has_image` says whether `<image>` tags stand for images; otherwise they are ordinary text.
"""

from dataclasses import dataclass

import numpy as np

from llava_fsdp.data.problems import Kind
from llava_fsdp.data.records.record import IMAGE_TAG, Record, Turn
from llava_fsdp.data.text.conversation import image_tag, refuse_tools, role_cure
from llava_fsdp.data.text.templates import Style, Template
from llava_fsdp.data.text.tokens.constants import IGNORE, IMAGE_ID
from llava_fsdp.data.text.tokens.tokenizer import Tokenizer
from llava_fsdp.runtime.errors import DataError


@dataclass(frozen=True)
class Original:
    """Settings that determine the token ids and labels of the original LLaVA trainer."""

    tokenizer: Tokenizer
    form: Template
    max_length: int
    """The tokenizer's `model_max_length`. Samples without image are truncated to it before labels are made."""
    pad_id: int = 0
    """Id of the padding token, by default that of `<unk>`. LLaVA does not count tokens with this id, and removes them
    as padding."""
    start_end: bool = False
    """LLaVA's setting `mm_use_im_start_end`: put `<im_start>` and `<im_end>` around each image."""


@dataclass(frozen=True)
class Tokens:
    """Token ids and labels as LLaVA's dataset returns them."""

    ids: np.ndarray
    """Token ids, int64 [length]; each image is a single IMAGE_ID."""
    labels: np.ndarray
    """Labels, int64 [length]."""
    mismatch: tuple[int, int] | None = None
    """The two counts (sum over the parts of the text, count for the whole text) because of which LLaVA masks all
    labels."""
    cut: int = 0
    """Number of tokens by which a sample without image was truncated."""


def encode_like_original(record: Record, settings: Original) -> Tokens:
    """Return the token ids and labels that LLaVA's dataset makes of a record, before its collator pads them. Raise
    DataError where LLaVA would raise an exception."""
    turns = list(record.turns)
    if record.has_image_key:
        turns = [Turn(t.role, image_first(t.text, settings)) for t in turns]
    return encode_turns(turns, record.has_image_key, settings, record.where)


def check_like_original(record: Record, settings: Original) -> None:
    """Raise DataError if LLaVA would fail at a record. To save time, the record is tokenized only if it has more image
    tags than images."""
    refuse_tools(record.turns, record.tools, record.where)
    turns = list(record.turns)
    if not all(turn.learnt and turn.weights is None for turn in turns):
        raise DataError(
            f"{record.where} says of an answer that it is not learnt, and the original learns every answer; "
            "labels=exact obeys it",
            Kind.key_not_obeyed,
        )
    if len(record.images) > 1:
        raise DataError(
            f"{record.where} has a list of {len(record.images)} images, at which the original stops; labels=exact "
            "reads it",
            Kind.image_count,
        )
    if settings.form.style is Style.PLAIN:
        check_caption(turns, record.where)
    elif settings.form.style is not Style.MARKERS:
        conversation(turns, settings.form, record.where)
        # the original leaves out a first answer, as `conversation` does, so that tags in it are not counted
        turns = turns[1:] if turns[0].role == "gpt" else turns
    tags_are_images = record.has_image_key or settings.form.style is Style.PLAIN
    tags = sum(IMAGE_TAG in turn.text for turn in turns) if tags_are_images else 0
    if tags > len(record.images[:1]):
        check_images(encode_like_original(record, settings).ids[: settings.max_length], record)


def check_images(ids: np.ndarray, record: Record) -> None:
    """Raise DataError if the token ids contain more images than LLaVA reads for a record, which is at most one."""
    num_tags = int((ids == IMAGE_ID).sum())
    if num_tags > len(record.images[:1]):
        raise DataError(
            f"{record.where}: {num_tags} images in the text of a record with {len(record.images)}; the original "
            "stops here, or takes another record's image. labels=exact reads lists of images",
            Kind.image_count,
        )


def image_first(text: str, settings: Original) -> str:
    """Return a turn with a single image tag, at its beginning, instead of all its image tags, in the form of
    `settings`; without image tags it is returned unchanged (LLaVA train.py:308-329)."""
    if IMAGE_TAG in text:
        text = f"{IMAGE_TAG}\n{text.replace(IMAGE_TAG, '').strip()}".strip()
    return text.replace(IMAGE_TAG, image_tag(settings.form, settings.start_end))


def encode_turns(turns: list[Turn], has_image: bool, settings: Original, where: str) -> Tokens:
    """Encode the turns of a conversation in the style of the template (LLaVA train.py:610-655): PLAIN is an image with
    its caption, MARKERS the template `v0`, and all others have rounds of a question and an answer. `has_image`: whether
    image tags stand for images; otherwise they are ordinary text. `where` names the record in errors."""
    match settings.form.style:
        case Style.PLAIN:
            return encode_caption(turns, settings, where)
        case Style.MARKERS:
            return encode_markers(turns, has_image, settings)
        case _:
            return encode_rounds(conversation(turns, settings.form, where), has_image, settings)


def encode_caption(turns: list[Turn], settings: Original, where: str) -> Tokens:
    """Encode an image and its caption with the template `plain` (LLaVA train.py:588-607): the question is replaced by
    an `<image>` tag, and the caption is supervised."""
    check_caption(turns, where)
    ids = with_images(f"{IMAGE_TAG}{turns[1].text}{settings.form.sep}", settings.tokenizer)
    labels = ids.copy()
    labels[: len(with_images(IMAGE_TAG, settings.tokenizer))] = IGNORE
    return Tokens(ids, labels)


def check_caption(turns: list[Turn], where: str) -> None:
    """Raise DataError if LLaVA would stop at these turns with the template `plain`."""
    if len(turns) != 2 or IMAGE_TAG not in turns[0].text:
        raise DataError(
            f"{where}: template plain takes two turns with {IMAGE_TAG} in the first; the original stops here",
            Kind.odd_turns if len(turns) != 2 else Kind.image_count,
        )


def encode_markers(turns: list[Turn], has_image: bool, settings: Original) -> Tokens:
    """Encode the turns of a conversation with the template `v0`. To find the labels, LLaVA also tokenizes each turn by
    itself and counts its tokens (LLaVA train.py:268-305, 630-655). `has_image`: whether image tags stand for images. A
    conversation without images is truncated to `max_length`, and tokens with the id of padding are not counted in it,
    as in LLaVA."""
    form = settings.form
    names = {"human": form.user, "gpt": form.assistant}
    header = f"{form.system}\n\n"
    sentences = [f"### {names.get(t.role.lower(), 'unknown')}: {t.text}\n" for t in turns]
    text = header + "".join(sentences) + "### "
    if has_image:
        ids, beyond = with_images(text, settings.tokenizer), 0
        lengths = [len(with_images(s, settings.tokenizer)) for s in [header, *sentences]]
    else:
        whole = plain_text(text, settings.tokenizer)
        ids = whole[: settings.max_length]
        beyond = len(whole) - len(ids)
        cut = [plain_text(s, settings.tokenizer)[: settings.max_length] for s in [header, *sentences]]
        lengths = [int((s != settings.pad_id).sum()) for s in cut]
    labels = ids.copy()
    at = lengths[0]
    labels[:at] = IGNORE
    for turn, length in zip(turns, lengths[1:], strict=True):
        # as in LLaVA, a capitalized role (Human) is not masked, and the first two tokens of a question are not
        if turn.role == "human":
            labels[at + 2 : at + length] = IGNORE
        at += length
    return Tokens(ids, labels, cut=beyond)


@dataclass(frozen=True)
class Rounds:
    """LLaVA's corrections, for one style of templates, to the number of tokens that it counts for a round (a question
    and its answer)."""

    begin: int
    """Number of tokens before the first round: the BOS token."""
    off_instruction: int
    """Number of tokens to subtract from the count for an instruction (the part of a round before the answer) that is
    tokenized by itself: its BOS token, and with v1 and llama_2 the space after the instruction."""
    correction: int
    """Number of tokens to add to the count for each round but the first, if the tokenizer's `legacy` equals
    `corrects`."""
    corrects: bool | None


ROUNDS: dict[Style, Rounds] = {
    Style.TWO: Rounds(begin=1, off_instruction=2, correction=-1, corrects=False),  # train.py:412-495
    Style.LLAMA_2: Rounds(begin=1, off_instruction=2, correction=0, corrects=None),  # train.py:332-409
    Style.MPT: Rounds(begin=0, off_instruction=1, correction=1, corrects=True),  # train.py:498-585
}


def encode_rounds(text: str, has_image: bool, settings: Original) -> Tokens:
    """Encode a conversation, rendered with a template like v1, llama_2 or mpt. To mask the labels of questions, LLaVA
    tokenizes each round (question and answer) and each question by itself and counts tokens, with the corrections in
    ROUNDS. If the counts do not add up to the length of the whole text, all labels are masked, and the result has both
    counts. `has_image`: whether image tags stand for images; a text without images is first cut to `max_length`."""
    rule = ROUNDS[settings.form.style]
    tokenize = with_images if has_image else plain_text
    whole = tokenize(text, settings.tokenizer)
    ids = whole if has_image else whole[: settings.max_length]
    labels = ids.copy()
    total = int((ids != settings.pad_id).sum())
    mark = answer_mark(settings.form)
    at = rule.begin
    labels[:at] = IGNORE
    for number, part in enumerate(split_rounds(text, settings.form)):
        pieces = part.split(mark)
        if part == "" or len(pieces) != 2:
            break
        length = len(tokenize(part, settings.tokenizer))
        instruction = len(tokenize(pieces[0] + mark, settings.tokenizer)) - rule.off_instruction
        if number and settings.tokenizer.legacy is rule.corrects:  # LLaVA corrects the counts of later rounds
            length += rule.correction
            instruction += rule.correction
        labels[at : at + instruction] = IGNORE
        at += length
    labels[at:] = IGNORE
    if at < settings.max_length and at != total:  # a conversation that fills max_length is not checked, as in LLaVA
        labels[:] = IGNORE
        return Tokens(ids, labels, (at, total), cut=len(whole) - len(ids))
    return Tokens(ids, labels, cut=len(whole) - len(ids))


def answer_mark(form: Template) -> str:
    """Return the text at which LLaVA splits a round into question and answer."""
    if form.style is Style.LLAMA_2:
        return "[/INST] "
    return form.sep + form.assistant + (": " if form.style is Style.TWO else "")


def split_rounds(text: str, form: Template) -> list[str]:
    """Split the text of a conversation into rounds (a question and its answer) as LLaVA does."""
    if form.style is not Style.MPT:  # `sep2` ends each answer; with MPT, `sep` ends each message
        return text.split(form.sep2)
    parts = text.split(form.sep)
    first, later = parts[:3], parts[3:]  # parts of the first round: system, question, answer
    pairs = [later[i : i + 2] for i in range(0, len(later), 2)]
    return [form.sep.join(p) for p in [first, *pairs]]


def conversation(turns: list[Turn], form: Template, where: str) -> str:
    """Render a conversation with a template like v1, llama_2 or mpt as LLaVA does (conversation.py:32-106). An answer
    at the beginning is left out; of an empty turn only the role is written. Raise DataError where LLaVA would stop."""
    if not turns:
        raise DataError(f"{where}: the conversation is empty; the original stops here", Kind.odd_turns)
    if turns[0].role == "gpt":
        turns = turns[1:]
    for number, turn in enumerate(turns):
        if turn.role != ("human", "gpt")[number % 2]:
            raise DataError(
                f"{where}: turn {number} is from {turn.role!r}; the original stops here: {role_cure(turn.role)}",
                Kind.wrong_roles,
            )
    if form.style is Style.LLAMA_2:
        return conversation_llama_2(turns, form, where)
    after_name = ": " if form.style is Style.TWO else ""
    text = form.system + form.sep
    for turn in turns:
        asked = turn.role == "human"
        name = form.user if asked else form.assistant
        end = form.sep if asked or form.style is Style.MPT else form.sep2
        text += f"{name}{after_name}{turn.text}{end}" if turn.text else name + after_name.strip()
    return text


def conversation_llama_2(turns: list[Turn], form: Template, where: str) -> str:
    """Write a conversation as the original does with the template llama_2; empty turns are left out."""
    if turns and not turns[0].text:
        raise DataError(f"{where}: the first question is empty; the original stops here", Kind.bad_form)
    text = ""
    for number, turn in enumerate(turns):
        if not turn.text:
            continue
        if turn.role == "human":
            text += f"{form.sep}[INST] {'' if number else form.system}{turn.text} [/INST]"
        else:
            text += f" {turn.text} {form.sep2}"
    return text.lstrip(form.sep)  # strips characters, not a prefix, as LLaVA does (conversation.py:93)


def with_images(text: str, tokenizer: Tokenizer) -> np.ndarray:
    """Return the token ids of a text with IMAGE_ID for each image tag, int64 [length]. The parts between image tags are
    tokenized separately (LLaVA mm_utils.py:185-204)."""
    ids = [] if tokenizer.bos is None else [tokenizer.bos]
    for number, chunk in enumerate(text.split(IMAGE_TAG)):
        ids += [IMAGE_ID] if number else []
        ids += [t.id for t in tokenizer.encode(chunk)]
    return np.array(ids, dtype=np.int64)


def plain_text(text: str, tokenizer: Tokenizer) -> np.ndarray:
    """Return the token ids of a text in which image tags are ordinary text, int64 [length]."""
    ids = [] if tokenizer.bos is None else [tokenizer.bos]
    return np.array([*ids, *(t.id for t in tokenizer.encode(text))], dtype=np.int64)
