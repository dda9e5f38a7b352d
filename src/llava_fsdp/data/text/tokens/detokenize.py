"""Decode an answer's tokens while it is generated. Text is returned as soon as later tokens cannot change it."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llava_fsdp.data.text.tokens.tokenizer import Tokenizer, read_optional
from llava_fsdp.runtime.errors import ModelError

BROKEN = "\ufffd"
"""Replacement character U+FFFD, which a tokenizer's decoder writes for incomplete or invalid UTF-8."""
PENDING = 8
"""Greatest number of tokens whose text is held back until a character is complete. UTF-8 has at most four bytes a
character."""


def find_stops(
    tokenizer: Tokenizer | None,
    stops: Iterable[str],
    ends: int | list[int] | None,
    folders: Iterable[Path],
) -> frozenset[int]:
    """Return the ids of the tokens that end a generated answer: every `eos_token_id` in the files `config.json` and
    `generation_config.json` of a model, and the tokens that end an answer in its conversation template.

    A template's token is the last token of one of `stops`, if this is a special token, or if the text is a single
    token. Another text that ends an answer has to be looked for in the generated text.

    Args:
        tokenizer: None: the model has none, and `stops` are not used.
        stops: texts that end an answer in the conversation template (`stops_of`).
        ends: `eos_token_id` of the language model's configuration.
        folders: folders of the model with these files, which may be absent.

    Raises:
        ModelError: a file has an `eos_token_id` that is not an id or a list of ids.
    """
    found = {end for end in (ends if isinstance(ends, list) else [ends]) if type(end) is int}
    for folder in folders:
        for name in ("generation_config.json", "config.json"):
            content = read_optional(folder / name)
            parts = (content, content.get("text_config"))
            found |= {end for part in parts for end in eos_ids(part, folder / name)}
    for stop in stops:
        last = [] if tokenizer is None else tokenizer.encode(stop)
        if last and (len(last) == 1 or ends_in_special(tokenizer, stop)):
            found.add(last[-1].id)
    return frozenset(found)


def eos_ids(content: Any, path: Path) -> list[int]:
    """Return the ids of `eos_token_id` in the content of a configuration, or a part of it; empty if it has none. Raise
    ModelError, which names the file `path`, if a value is not an id or a list of ids."""
    value = content.get("eos_token_id") if isinstance(content, dict) else None
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(number) is int and number >= 0 for number in ids):
        raise ModelError(f"{path} has eos_token_id={value!r}; it must be the id of a token, or a list of ids")
    return ids


def ends_in_special(tokenizer: Tokenizer | None, stop: str) -> bool:
    special = [] if tokenizer is None else tokenizer.find_special(stop)
    return bool(special) and special[-1][1] == len(stop)


@dataclass(frozen=True)
class TokenText:
    """The text of a token, or of several tokens that are one character together."""

    text: str
    """For a special token, its name; for a token without text, its id."""
    is_special: bool = False
    """Whether `text` is a name or id instead of decoded text."""


def spell(tokenizer: Tokenizer, ids: list[int]) -> list[TokenText]:
    """Return the text of each token, in order, for display. Tokens that are bytes of the same character become one
    piece. Until a character is complete, its decoded text ends in the replacement character (BROKEN); after PENDING
    tokens, the bytes are invalid, and are shown so."""
    # tokens are decoded behind these, because decoding may drop a space at the beginning of a text
    before = [token.id for token in tokenizer.encode("a")]
    begin = len(tokenizer.decode(before))
    pieces: list[TokenText] = []
    group: list[int] = []

    def close() -> None:
        if group:
            pieces.append(TokenText(tokenizer.decode([*before, *group])[begin:]))
            group.clear()

    for token in ids:
        name = tokenizer.name(token)
        alone = "" if name is not None else tokenizer.decode([*before, token])[begin:]
        if not alone:  # a special token, or one that decoding drops
            close()
            pieces.append(TokenText(f"token {token}" if name is None else name, is_special=True))
            continue
        if group and not alone.endswith(BROKEN) and not alone.startswith(BROKEN):  # not a part of the character
            close()
        group.append(token)
        if len(group) > PENDING or not tokenizer.decode([*before, *group])[begin:].endswith(BROKEN):
            close()
    close()
    return pieces


class ThoughtText:
    """Collects the tokens of the thought with which an answer may begin.

    Args:
        begin: text before the thought, without white space around it; empty if the prompt begins a thought.
        end: text after it; empty if no thought is expected.
    """

    def __init__(self, tokenizer: Tokenizer, begin: str, end: str):
        """Collect the tokens of a thought with which an answer may begin. `begin` and `end` are the texts around the
        thought. An empty `begin` means that the prompt has it; an empty `end`, that the model writes no thoughts."""
        self.tokenizer, self.begin, self.end = tokenizer, begin, end
        self.may_continue = bool(end)
        """Whether the next token may be one of the thought, or of the texts around it."""
        self.has_begun = not begin
        self.is_cut = False  # whether the tokens ended before the thought did
        self.ids: list[int] = []
        self.text: str | None = None
        """The thought, once it has ended."""
        self._written = ""  # with the names of special tokens

    def push(self, token: int) -> None:
        """Add a token. Update whether the thought has begun; once it has ended, set `text` to the thought.
        `may_continue` becomes false if it has ended, or the tokens are no beginning of a thought."""
        self.ids.append(token)
        self._written += self.tokenizer.name(token) or self.tokenizer.decode([token])
        written = self._written.lstrip()
        if not self.has_begun:
            self.has_begun = written.startswith(self.begin)
            self.may_continue = self.has_begun or self.begin.startswith(written)
        if self.has_begun and self.end in written[len(self.begin) :]:
            whole = self.tokenizer.decode(self.ids)
            inside = whole.partition(self.end)[0].strip()
            self.text, self.may_continue = inside.removeprefix(self.begin).strip(), False


class AnswerText:
    """Collects the tokens of an answer while a model generates it, and returns its text in pieces. A returned piece is
    final: it never contains half a character, a part of the text that ends the answer, or white space at the beginning
    or end of the whole answer.

    Args:
        stop: text that ends the answer.
        stops: ids of the tokens that end the answer.
        begin: text that a model writes before an answer, such as an empty thought. It is no part of the answer's text
            if the answer begins with it.
        thought: texts that a model writes before and after a thought, which is no part of the answer's text. The first
            is empty if the prompt begins a thought; both are empty if no thought is expected.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: str,
        stops: frozenset[int],
        begin: str = "",
        thought: tuple[str, str] = ("", ""),
    ):
        """Decode an answer while it is generated.

        Args:
            stop: text that ends an answer; it is not returned.
            stops: ids of the tokens that end an answer.
            begin: text that a model writes before an answer, such as an empty thought; it is not returned.
            thought: the texts before and after a thought. A thought before the answer is not returned with the answer.
        """
        self._thought = ThoughtText(tokenizer, thought[0].strip(), thought[1].strip())
        tokens = tokenizer.encode_rest(begin, tokenizer.find_special(begin)) if begin else []
        self._begin = [token.id for token in tokens]
        self._generated: list[int] = []
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

    @property
    def thought(self) -> str | None:
        """The thought before the answer, once it has ended; None without one."""
        return self._thought.text

    @property
    def is_thought_cut(self) -> bool:
        """Whether the tokens ended within a thought."""
        return self._thought.is_cut

    def push(self, token: int) -> str:
        """Add a token; return the text of the answer that became final with it ("" within a thought before it)."""
        if self.ended:
            return ""
        thought = self._thought
        if not thought.may_continue:
            return self._push(token)
        thought.push(token)
        if token in self.stops:  # the answer ends here: if its thought has no end, its tokens are shown as the answer
            thought.may_continue = False
        if thought.may_continue:
            return ""
        if thought.text is None:  # there is no thought: its tokens are the answer's
            return "".join(map(self._push, thought.ids))
        self.ids = list(thought.ids)
        self._window = self._decoded = len(self.ids)  # the thought's tokens are not decoded again
        return ""

    def _push(self, token: int) -> str:
        """Add a token that is not one of a thought, and return the text that became final with it. While the tokens are
        the beginning of the text `begin`, which a model writes before an answer, none is returned. If an answer follows
        `begin`, only the answer is returned; if not, the tokens are the answer's."""
        self._generated.append(token)
        if token in self.stops and not self._is_beginning():
            self.ended = True
            return self.close()
        self.ids.append(token)
        if self._is_beginning():
            return ""
        # the first token after `begin`: from here on, text is returned
        if self._begin and self._generated == [*self._begin, token]:
            self._window = self._decoded = len(self._begin)
        return self._release(self._decode(is_last=False))

    def _is_beginning(self) -> bool:
        """Return whether all tokens so far are those of `begin`."""
        return self._generated == self._begin[: len(self._generated)]

    def close(self) -> str:
        """End the answer and return its text that was still held back, without white space at the answer's ends."""
        thought = self._thought
        if thought.may_continue:
            thought.may_continue = False
            if thought.has_begun and thought.ids:  # the thought has no end: there is no answer
                thought.is_cut, self.ended = True, True
                self.ids = list(thought.ids)
                return ""
            begun = "".join(map(self._push, thought.ids))  # no thought has begun: these are the answer's tokens
            return begun + self.close()
        begun = self._release(self._decode(is_last=True))
        rest = self._held.rstrip()
        rest = rest if self.text else rest.strip()
        self.text, self._held, self.ended = self.text + rest, "", True
        return begun + rest

    def _decode(self, is_last: bool) -> str:
        """Return the text of the tokens that were added since the last call that returned text. While they end in the
        middle of a UTF-8 character, the result is empty, unless `is_last`, or more than PENDING tokens wait. A
        replacement character (BROKEN) at the end of the text shows that a character is incomplete."""
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
        """Add new text to the text that is held back, and return the part that is final. An end that may be the
        beginning of the stop text is still held back, and so are spaces at the end, which are no part of an answer. If
        the stop text is found, the answer ends before it."""
        self._held += new
        at = self._held.find(self.stop) if self.stop else -1
        if at >= 0:
            final, self._held, self.ended = self._held[:at].rstrip(), "", True
        else:
            longest = min(len(self.stop) - 1, len(self._held))
            # length of the longest end of the text that may be the beginning of the stop text
            begun = next((n for n in range(longest, 0, -1) if self.stop.startswith(self._held[-n:])), 0)
            final = self._held[: len(self._held) - begun].rstrip()
            self._held = self._held[len(final) :]
        if not self.text:
            final = final.lstrip()
        self.text += final
        return final
