"""Decode an answer's tokens to text while the answer is generated. Text is returned as soon as later tokens cannot
change it."""

from dataclasses import dataclass

from llava_fsdp.data.text.tokenizer import Tokenizer

BROKEN = "\ufffd"
"""Replacement character U+FFFD, which a tokenizer's decoder writes for incomplete or invalid UTF-8."""
PENDING = 8
"""Greatest number of tokens whose text is held back until a character is complete. A UTF-8 character has at most four
bytes."""


def stops_of(tokenizer: Tokenizer, stop: str, ends: int | list[int] | None) -> frozenset[int]:
    """Return the ids of the tokens that end a generated answer.

    Args:
        stop: text that ends an answer; its token is included if the text is a single token.
        ends: `eos_token_id` of the model: an id, a list of ids, or None.
    """
    eos = {end for end in (ends if isinstance(ends, list) else [ends]) if type(end) is int}
    last = tokenizer.encode(stop)
    return frozenset(eos | ({last[-1].id} if len(last) == 1 else set()))


@dataclass(frozen=True)
class Piece:
    """The text of a token, or of several tokens that are one character together."""

    text: str
    """The text. For a special token, it is the token's name; for a token without text, its id."""
    is_special: bool = False
    """Whether `text` is a name or id instead of decoded text."""


def spell(tokenizer: Tokenizer, ids: list[int]) -> list[Piece]:
    """Return the text of each token in a list of token ids, in order. Tokens that are bytes of the same character
    become one piece."""
    before = [token.id for token in tokenizer.encode("a")]  # at the beginning of a text, decoding may drop a space
    begin = len(tokenizer.decode(before))
    pieces: list[Piece] = []
    group: list[int] = []

    def close() -> None:
        if group:
            pieces.append(Piece(tokenizer.decode([*before, *group])[begin:]))
            group.clear()

    for token in ids:
        name = tokenizer.name(token)
        alone = "" if name is not None else tokenizer.decode([*before, token])[begin:]
        if not alone:
            close()
            pieces.append(Piece(f"token {token}" if name is None else name, is_special=True))
            continue
        if group and not alone.endswith(BROKEN) and not alone.startswith(BROKEN):
            close()
        group.append(token)
        if len(group) > PENDING or not tokenizer.decode([*before, *group])[begin:].endswith(BROKEN):
            close()
    close()
    return pieces


class AnswerText:
    """Collects the tokens of an answer while a model generates it, and returns its text in pieces. A returned piece is
    final: it never contains half a character, a part of the text that ends the answer, or white space at the beginning
    or end of the whole answer."""

    def __init__(self, tokenizer: Tokenizer, stop: str, stops: frozenset[int]):
        """Begin an empty answer, whose tokens are then added one by one.

        Args:
            stop: text that ends the answer.
            stops: ids of the tokens that end the answer.
        """
        self.tokenizer = tokenizer
        self.stop = stop
        self.stops = stops
        self.ids: list[int] = []
        self.text = ""
        """The text returned so far."""
        self.ended = False
        self._window = 0  # first token that is decoded again: some tokens decode differently at the beginning of a text
        self._decoded = 0  # number of tokens whose text was returned or is held back
        self._held = ""

    def push(self, token: int) -> str:
        """Add a generated token (its id) to the answer, and return the text that became final with it, which may be
        empty."""
        if self.ended:
            return ""
        if token in self.stops:
            self.ended = True
            return self.close()
        self.ids.append(token)
        return self._release(self._decode(is_last=False))

    def close(self) -> str:
        """End a generated answer and return its text that was still held back."""
        begun = self._release(self._decode(is_last=True))
        rest = self._held.rstrip()
        rest = rest if self.text else rest.strip()
        self.text, self._held, self.ended = self.text + rest, "", True
        return begun + rest

    def _decode(self, is_last: bool) -> str:
        before = self.tokenizer.decode(self.ids[self._window : self._decoded])
        text = self.tokenizer.decode(self.ids[self._window :])
        waits = text.endswith(BROKEN) and len(self.ids) - self._decoded <= PENDING
        if len(text) <= len(before) or (waits and not is_last):
            return ""
        # decoding may drop spaces at the beginning, so the window begins with a token that is not spaces only
        if self.tokenizer.decode(self.ids[self._decoded :]).strip():
            self._window = self._decoded
        self._decoded = len(self.ids)
        return text[len(before) :]

    def _release(self, new: str) -> str:
        self._held += new
        at = self._held.find(self.stop) if self.stop else -1
        if at >= 0:
            final, self._held, self.ended = self._held[:at].rstrip(), "", True
        else:
            longest = min(len(self.stop) - 1, len(self._held))
            begun = next((n for n in range(longest, 0, -1) if self.stop.startswith(self._held[-n:])), 0)
            final = self._held[: len(self._held) - begun].rstrip()
            self._held = self._held[len(final) :]
        if not self.text:
            final = final.lstrip()
        self.text += final
        return final
