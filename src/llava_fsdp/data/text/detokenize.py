"""The text of an answer, as its tokens come: text is final once it is certain."""

from llava_fsdp.data.text.tokenizer import Tokenizer

BROKEN = "\ufffd"
"""How bytes are decoded that make no character, or none yet."""
PENDING = 8
"""Tokens that may wait for the rest of a character, which has four bytes at most."""


def stops_of(tokenizer: Tokenizer, stop: str, ends: int | list[int] | None) -> frozenset[int]:
    """Ids that end an answer: a model's ends of a sequence, and a template's where it is one token.

    Args:
        stop: the template's, as text.
        ends: as configurations have them.
    """
    own = {end for end in (ends if isinstance(ends, list) else [ends]) if type(end) is int}
    last = tokenizer.encode(stop)
    return frozenset(own | ({last[-1].id} if len(last) == 1 else set()))


class AnswerText:
    """Text of tokens as they come. What is given out is final: no half character, nothing of a stop text, no space
    around the whole; the pieces together are the answer."""

    def __init__(self, tokenizer: Tokenizer, stop: str, stops: frozenset[int]):
        """
        Args:
            stop: text that ends an answer, over however many tokens.
            stops: ids that end an answer.
        """
        self.tokenizer = tokenizer
        self.stop = stop
        self.stops = stops
        self.ids: list[int] = []
        self.ended = False
        self._window = 0  # tokens from here on are decoded again: some decode otherwise at the beginning of a text
        self._decoded = 0  # tokens whose text has been taken
        self._held = ""
        self._has_begun = False

    def push(self, token: int) -> str:
        """The text that has become certain with this token."""
        if self.ended:
            return ""
        if token in self.stops:
            self.ended = True
            return self.close()
        self.ids.append(token)
        return self._release(self._decode(is_last=False))

    def close(self) -> str:
        """What was still held back when no token follows."""
        text = self._release(self._decode(is_last=True)) + self._held.rstrip()
        self._held, self.ended = "", True
        return text if self._has_begun else text.strip()

    def _decode(self, is_last: bool) -> str:
        before = self.tokenizer.decode(self.ids[self._window : self._decoded])
        text = self.tokenizer.decode(self.ids[self._window :])
        waits = text.endswith(BROKEN) and len(self.ids) - self._decoded <= PENDING
        if len(text) <= len(before) or (waits and not is_last):
            return ""
        # at its beginning a text may lose spaces, so that the window begins with a token that has more than spaces
        if self.tokenizer.decode(self.ids[self._decoded :]).strip():
            self._window = self._decoded
        self._decoded = len(self.ids)
        return text[len(before) :]

    def _release(self, new: str) -> str:
        self._held += new
        at = self._held.find(self.stop) if self.stop else -1
        if at >= 0:
            certain, self._held, self.ended = self._held[:at].rstrip(), "", True
        else:
            longest = min(len(self.stop) - 1, len(self._held))
            begun = next((n for n in range(longest, 0, -1) if self.stop.startswith(self._held[-n:])), 0)
            certain = self._held[: len(self._held) - begun].rstrip()
            self._held = self._held[len(certain) :]
        if not self._has_begun:
            certain = certain.lstrip()
            self._has_begun = bool(certain)
        return certain
