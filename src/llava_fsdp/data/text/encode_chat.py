"""Tokenize conversations that a model's own chat template has written, as an inference server does.

A server tokenizes the prompt alone; the model then generates the answer's tokens. So the prompt of each answer that has
labels is tokenized without the answer, even where a tokenizer would join the end of the one and the beginning of the
other into one token. In the prompts of later answers, a server tokenizes earlier answers together with the text before
them. Where this gives other tokens, an earlier answer cannot have labels beside a later one.
"""

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llava_fsdp.config import FULL_WEIGHT, SpecialTokens
from llava_fsdp.data.text.conversation import AnswerPart, Segment
from llava_fsdp.data.text.tokens.constants import IGNORE, IMAGE_ID
from llava_fsdp.data.text.tokens.tokenizer import Stretch, Token, Tokenizer

PLACE = "\ue002"
"""Character that stands for an image in the text of a conversation while it is tokenized."""
PROMPT_ENDS = 1000
"""Greatest number of ends of prompts whose token ids are remembered."""


@dataclass(frozen=True)
class ChatIds:
    """The token ids and labels of a conversation."""

    ids: np.ndarray
    """Token ids, int64 [length]; IMAGE_ID at image tokens."""
    labels: np.ndarray
    """int64 [length], not shifted: the token's own id if it has a label, else IGNORE."""
    unlearnt: int
    """Number of answers without labels, because later prompts show them with other tokens than a model generates."""
    prompt: int = 0
    """Number of tokens of the last answer's prompt; 0 if no answer has labels."""
    kinds: np.ndarray | None = None
    """Which part of an answer each token is (`AnswerPart`), int8 [length]; None if the segments do not tell."""
    weights: np.ndarray | None = None
    """Weight of each token's label in units of 1 / FULL_WEIGHT, int32 [length]; None: all are 1."""
    image_spans: tuple[Stretch, ...] = ()
    """For each image, its range of tokens, in the order of the text; empty if `image_lengths` was given, as are the
    defaults of the two fields below."""
    is_apart: bool = False
    """Whether the last answer and its prompt were tokenized apart, because together they have other tokens."""
    hides_special: bool = False
    """Whether special tokens in the text of the record are tokenized as ordinary text."""


def is_chat(segments: Sequence[Segment]) -> bool:
    """Return whether a model's own chat template has written the segments."""
    return any(segment.begins_answer or segment.image is not None for segment in segments)


def encode_chat(
    segments: Sequence[Segment],
    tokenizer: Tokenizer,
    image_lengths: Sequence[int] | None,
    special_tokens: SpecialTokens,
    adds_bos: bool,
    known: dict[str, list[int]] | None = None,
) -> ChatIds:
    """Tokenize a conversation that a model's own chat template has written, and label its answers.

    The whole text is tokenized at once. An answer gets labels if the prompt before it has the same tokens when it is
    tokenized alone, as a server does. Else the last answer is tokenized apart from its prompt, and an earlier one gets
    no labels.

    Args:
        image_lengths: number of tokens of each image, in the order of the record; each gets so many IMAGE_ID. None: the
            text of an image's segment is tokenized like that of the template, and the result also has the range of
            tokens of each image, and how the text was tokenized.
        special_tokens: whether special tokens in the text of a record are ordinary text or read as special tokens.
        adds_bos: whether the tokenizer's BOS token, if it has one, is put first.
        known: cache {text of the end of a prompt: its token ids}, for all conversations of one template and tokenizer.
            It grows here.
    """
    has_places = image_lengths is not None  # then images have no tokens in `chat`; they are inserted at the end
    chat = TokenizedChat(segments, tokenizer, special_tokens, {} if known is None else known, has_places)
    ids, ends = chat.ids, chat.ends
    places = [bisect.bisect_right(ends, begin) for begin, _ in chat.images]
    marked = np.zeros(len(ids), dtype=bool)
    kinds = chat.kinds_of(chat.begins)
    weights = None if chat.weights is None else token_weights(chat.begins, ends, chat.weights)
    prompt_length = 0
    unlearnt, is_apart = chat.unlearnt, False
    spans = [chat.tokens_in(begin, end) for begin, end in chat.images]
    for number, (begin, end) in enumerate(chat.targets):
        first, prompt = chat.prompt_end(begin)
        after = chat.first_from(end)  # the first token behind the answer
        prompt_length = first + len(prompt)
        if ids[first:prompt_length] == prompt:
            marked[prompt_length:after] = True
            for a, b in chat.context:  # tokens of these characters alone
                marked[bisect.bisect_left(chat.begins, a) : bisect.bisect_right(ends, b)] = False
        # Else the whole text has other tokens, such as one that joins the prompt's end and the answer's beginning. A
        # model that reads the prompt never generates it.
        elif number + 1 < len(chat.targets):  # they stay, without labels: prompts of later answers have them
            unlearnt += 1
        else:  # the last answer: the prompt's end and the answer are tokenized apart, and replace these tokens
            answer = tokenizer.encode_rest(chat.text[begin:end], chat.special_in(begin, end))
            ids = [*ids[:first], *prompt, *(token.id for token in answer), *ids[after:]]
            moved = prompt_length + len(answer) - after
            spans = [(a + moved, b + moved) if a >= after else (a, b) for a, b in spans]
            is_apart = True
            is_of_answer = [not chat.is_context(token, begin) for token in answer]
            # the first token of the prompt's end may be the one that ends the answer before: it keeps its label
            kept, rest = first + 1, len(prompt) - 1
            marked = np.concatenate([marked[:kept], np.zeros(rest, bool), np.array(is_of_answer, bool), marked[after:]])
            if kinds is not None:
                own_kinds = chat.kinds_of([begin + token.begin for token in answer])
                assert own_kinds is not None
                kinds = np.concatenate([kinds[:kept], np.zeros(rest, np.int8), own_kinds, kinds[after:]])
            if weights is not None and chat.weights is not None:
                own_weights = token_weights([t.begin for t in answer], [t.end for t in answer], chat.weights[begin:])
                zeros = np.zeros(rest, np.int32)
                weights = np.concatenate([weights[:kept], zeros, own_weights, weights[after:]])
    found = np.array(ids, dtype=np.int64)
    if weights is not None:
        marked &= weights > 0
        weights = None if (weights[marked] == FULL_WEIGHT).all() else weights
    labels = np.where(marked, found, IGNORE)
    # each image's tokens go in before the text token that follows the image
    lengths = [image_lengths[number] for number in chat.image_numbers] if image_lengths is not None else []
    at = np.repeat(np.array(places[: len(lengths)], dtype=np.int64), np.array(lengths, dtype=np.int64))
    is_text = np.ones(len(found) + len(at), dtype=bool)
    is_text[at + np.arange(len(at))] = False
    made = np.full((2, len(is_text)), [[IMAGE_ID], [IGNORE]], dtype=np.int64)
    made[:, is_text] = found, labels
    if kinds is not None:
        shown, kinds = kinds, np.zeros(len(is_text), dtype=np.int8)
        kinds[is_text] = shown
    if weights is not None:
        shown, weights = weights, np.zeros(len(is_text), dtype=np.int32)
        weights[is_text] = shown
    prompt_length += int((at < prompt_length).sum())
    if adds_bos and tokenizer.bos is not None:
        made = np.insert(made, 0, [tokenizer.bos, IGNORE], axis=1)
        spans = [(a + 1, b + 1) for a, b in spans]
        kinds, weights = (None if values is None else np.insert(values, 0, 0) for values in (kinds, weights))
        prompt_length += 1
    if has_places:
        return ChatIds(made[0], made[1], unlearnt, prompt_length, kinds, weights)
    return ChatIds(
        made[0], made[1], unlearnt, prompt_length, kinds, weights, tuple(spans), is_apart, chat.hides_special
    )


def character_weights(segments: Sequence[Segment], texts: Sequence[str]) -> np.ndarray | None:
    """Return the weight of each character of the joined texts of segments, in units of 1 / FULL_WEIGHT, int32
    [characters]; 0 for a character without a label. Return None if all weights are 1."""
    if all(segment.weight == FULL_WEIGHT for segment in segments):
        return None
    of_segments = np.array([s.weight if s.supervised else 0 for s in segments], dtype=np.int32)
    return np.repeat(of_segments, [len(text) for text in texts])


def token_weights(begins: Sequence[int], ends: Sequence[int], weights: np.ndarray) -> np.ndarray:
    """Return each token's weight, int32 [tokens]: the greatest weight of its characters, as in axolotl; for a token
    without characters, that of the next character.

    Args:
        begins: index of each token's first character in the text.
        ends: index of the character behind each token's last one.
        weights: weight of each character of the text, int32.
    """
    begin = np.minimum(np.array(begins, dtype=np.int64), len(weights) - 1)
    end = np.clip(np.array(ends, dtype=np.int64), begin + 1, len(weights))
    ranges = np.stack([begin, end], axis=1).reshape(-1)
    # the results at odd places are maxima between two tokens, which are dropped; 0 is appended for the last token's end
    return np.maximum.reduceat(np.append(weights, 0), ranges)[::2].astype(np.int32) if len(ranges) else ranges


class TokenizedChat:
    """The text of a conversation and its tokens, all tokenized together."""

    def __init__(
        self,
        segments: Sequence[Segment],
        tokenizer: Tokenizer,
        special_tokens: SpecialTokens,
        known: dict[str, list[int]],
        has_places: bool = True,
    ):
        """Join the texts of the segments, tokenize them together, and note where images, answers and thoughts are.

        Args:
            known: cache {text of the end of a prompt: its token ids}, to which `prompt_end` adds.
            has_places: whether PLACE stands for each image, which then has no tokens; else the segment's own text does.
        """
        texts = [PLACE if has_places and segment.image is not None else segment.text for segment in segments]
        starts = [0, *itertools.accumulate(map(len, texts))]
        self.tokenizer = tokenizer
        self.known = known
        self.text = "".join(texts)
        self.weights = character_weights(segments, texts)
        """Weight of each character, int32 [characters]; None: all labels have weight 1."""
        self.image_numbers = [segment.image for segment in segments if segment.image is not None]
        self.images: list[Stretch] = []
        """Range of characters of each image."""
        self.targets: list[Stretch] = []
        """Range of characters of each answer that may have labels, with what ends it."""
        self.context: list[Stretch] = []
        """Ranges of characters of an answer that have no labels: a thought that is only read."""
        self.kinds = [(begin, segment.kind) for begin, segment in zip(starts, segments, strict=False)]
        """The first character of each segment, and what part of an answer the segment is."""
        self.unlearnt = 0
        """Number of answers that have no labels because of what the template writes."""
        self.records: list[Stretch] = []
        """Ranges of characters that come from the record."""
        for segment, begin, end in zip(segments, starts, starts[1:], strict=False):
            if segment.image is not None:
                self.images.append((begin, end))
            if segment.begins_answer and segment.supervised:
                self.targets.append((begin, end))
            elif segment.begins_answer:
                self.unlearnt += 1
            elif segment.supervised and self.targets:
                self.targets[-1] = (self.targets[-1][0], end)
            elif segment.kind is AnswerPart.thought:
                self.context.append((begin, end))
            if segment.from_record and begin < end:
                self.records.append((begin, end))
        special = self.find_special(segments, texts, special_tokens is SpecialTokens.parse)
        self.special = sorted([*special, *self.images]) if has_places else special
        # whether a text of the record has special tokens that are read as ordinary text
        self.hides_special = not has_places and special != tokenizer.find_special(self.text)
        tokens = tokenizer.encode(self.text, self.special)
        self.ids = [token.id for token in tokens]
        self.begins = [token.begin for token in tokens]
        self.ends = [token.end for token in tokens]

    def find_special(self, segments: Sequence[Segment], texts: Sequence[str], parses: bool) -> list[Stretch]:
        """Return the ranges of characters of the whole text that are read as special tokens: with `parses` all special
        tokens, else only those in the template's own text, not in the record's. `texts`: that of each segment."""
        if parses:
            return self.tokenizer.find_special(self.text)
        found: list[Stretch] = []
        at = 0
        pairs = zip(segments, texts, strict=True)
        for from_record, stretch in itertools.groupby(pairs, lambda pair: pair[0].from_record):
            text = "".join(piece for _, piece in stretch)
            found += [] if from_record else [(at + a, at + b) for a, b in self.tokenizer.find_special(text)]
            at += len(text)
        return found

    def is_context(self, token: Token, begin: int) -> bool:
        """Return whether all characters of a token, counted from `begin`, have no labels."""
        return any(a <= begin + token.begin and begin + token.end <= b for a, b in self.context)

    def kinds_of(self, begins: Sequence[int]) -> np.ndarray | None:
        """Return the `AnswerPart` of each token, int8 [tokens], given the index of each token's first character; None
        if no segment is marked as a part of an answer."""
        if not any(kind for _, kind in self.kinds):
            return None
        firsts, kinds = zip(*self.kinds, strict=True)
        return np.array(kinds, dtype=np.int8)[np.searchsorted(firsts, begins, side="right") - 1]

    def special_in(self, begin: int, end: int) -> list[Stretch]:
        """Return the special tokens and images in a range of characters, counted from its beginning."""
        return [(a - begin, b - begin) for a, b in self.special if begin <= a and b <= end]

    def tokens_in(self, begin: int, end: int) -> Stretch:
        """Return the range of the tokens that have a character of a range of characters."""
        return bisect.bisect_right(self.ends, begin), self.first_from(end)

    def first_from(self, place: int) -> int:
        return bisect.bisect_left(self.begins, place)

    def prompt_end(self, end: int) -> tuple[int, list[int]]:
        """Tokenize the end of a prompt without the answer that follows it. The prompt is the first `end` characters of
        the conversation. Its end begins with its last special token or image, because the tokens before this do not
        depend on what follows. Return the index, among the tokens of the whole conversation, of the first token of the
        prompt's end, and the token ids of this end."""
        anchors = [begin for begin, last in self.special if last <= end]
        begin = anchors[-1] if anchors else 0
        first = bisect.bisect_right(self.ends, begin) if anchors else 0
        text = self.text[begin:end]
        if text in self.known:
            return first, self.known[text]
        ids = self.tokenizer.ids_of(text, self.special_in(begin, end)) if text else []
        # an end without text of the record comes again with the next records, so its ids are remembered
        is_template = not any(begin < b and a < end for a, b in self.records)
        if is_template and len(self.known) < PROMPT_ENDS:
            self.known[text] = ids
        return first, ids
