"""Convert text to tokens, each with its range of characters in the text, and token ids back to text.

A `tokenizer.json` is read with the tokenizers library, a `tokenizer.model` with SentencePiece. transformers is not
used, because transformers 5 converts a `tokenizer.model` wrongly: repeated spaces get other ids.
"""

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import sentencepiece
from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Tokenizer as FastTokenizer

from llava_fsdp.runtime.errors import ModelError
from llava_fsdp.runtime.files.safe_load import LARGE, library_errors, read_json, refuse_model_code, refuse_pointer
from llava_fsdp.runtime.text.terminal_text import shown_name

Stretch = tuple[int, int]
"""A range [begin, end) of characters of a text."""
LLAMA_CLASSES = (None, "LlamaTokenizer", "LlamaTokenizerFast", "TokenizersBackend", "PreTrainedTokenizerFast")
"""The values of `tokenizer_class` in a `tokenizer_config.json` that mean a Llama tokenizer, in transformers 4 and 5."""
PLACEHOLDERS = ("<image>", "<video>")
"""Placeholders that exports add to a tokenizer."""
PLACEHOLDER_KEYS = ("image_token", "video_token", "audio_token")
"""Keys under which a `tokenizer_config.json` names its placeholders."""
PANIC = "PanicException"
"""Name of the class of errors of the tokenizers library that are no `Exception`: those that it does not expect."""
SPACE = "▁"
"""Character with which SentencePiece represents a space."""


@dataclass(frozen=True, slots=True)
class Token:
    id: int
    begin: int
    end: int
    """The token comes from the characters [begin, end). A character that is not in the vocabulary becomes several byte
    tokens; only the last of them has a range that is not empty."""


class Tokenizer(ABC):
    """Converts text to token ids and back, for one model."""

    bos: int | None
    """Id of the token with which each sequence begins; None if the model expects no such token."""
    legacy: bool
    """The setting `legacy` of transformers' Llama tokenizer; if true, a space is put before the text after each special
    token."""
    size: int
    """Highest token id plus one."""
    fingerprint: str
    """Checksum of the tokenizer's files and settings."""
    _special: dict[str, int]
    """{special token: id}."""
    _find: re.Pattern[str]

    @abstractmethod
    def encode(self, text: str, special: list[Stretch] | None = None) -> list[Token]:
        """Return the tokens of a text, without adding a BOS or EOS token.

        Args:
            special: ranges of characters, in order, that are read as special tokens; elsewhere in the text, special
                tokens are read as ordinary text. A range whose text is no special token also divides the text, but
                gives no token; it stands for an image. None: all special tokens in the text are read as such.
        """

    def ids_of(self, text: str, special: list[Stretch]) -> list[int]:
        return [token.id for token in self.encode(text, special)]

    def encode_rest(self, text: str, special: list[Stretch]) -> list[Token]:
        """Return the tokens of a text that continues another one: without the space that some tokenizers put before a
        text. So the text is tokenized behind another text (the lead), whose tokens are then left out. The first lead is
        taken that the tokenizer does not join with the text into a token; if it joins all, the text is tokenized alone.

        Args:
            special: ranges of characters of the text that are read as special tokens or stand for images.
        """
        for lead in ("\n", "a", "."):
            shifted = [(begin + len(lead), end + len(lead)) for begin, end in special]
            tokens = self.encode(lead + text, shifted)
            before = [token.id for token in self.encode(lead, [])]
            if [token.id for token in tokens[: len(before)]] == before:
                rest = tokens[len(before) :]
                return [
                    Token(token.id, max(token.begin - len(lead), 0), max(token.end - len(lead), 0)) for token in rest
                ]
        return self.encode(text, special)

    @abstractmethod
    def decode(self, ids: list[int]) -> str:
        """Return the text, without special tokens."""

    def find_special(self, text: str) -> list[Stretch]:
        """Return the ranges of the special tokens in a text."""
        return [found.span() for found in self._find.finditer(text)]

    def special(self, text: str) -> int | None:
        """Return the id of a special token; None if the text is not one."""
        return self._special.get(text)

    def name(self, token: int) -> str | None:
        """Return the text of a special token; None if the id is not that of one."""
        return self._names.get(token)

    @cached_property
    def _names(self) -> dict[int, str]:
        return {token: text for text, token in self._special.items()}


def open_tokenizer(folder: Path, vocab_size: int | None = None, extra: tuple[str, ...] = ()) -> Tokenizer:
    """Read the tokenizer of a model folder (`tokenizer.model` or `tokenizer.json`).

    Args:
        vocab_size: number of trained rows of the model's embeddings. Placeholders with this id or a higher one are left
            out: an export adds an image tag and a padding token without training the model on them. None: no limit.
        extra: special tokens to add after the last id, unless the tokenizer has them.

    Raises:
        ModelError: the folder has no tokenizer file, or the file cannot be read; or an added token that may stand in a
            text has no row in the embeddings.
    """
    config = read_optional(folder / "tokenizer_config.json")
    refuse_model_code(config, folder / "tokenizer_config.json")
    if vocab_size is not None:
        with library_errors(f"{folder}: its tokenizer cannot be read; get its files again from the model's makers"):
            refuse_tokens_without_rows(folder, config, vocab_size)
    with library_errors(f"{folder}: its tokenizer cannot be read; get its files again from the model's makers"):
        return read_tokenizer(folder, config, vocab_size, extra)


def read_tokenizer(folder: Path, config: dict, vocab_size: int | None, extra: tuple[str, ...]) -> Tokenizer:
    """Read a model folder's tokenizer from `tokenizer.model` or `tokenizer.json`. Raise ModelError if it has neither.

    Args:
        config: content of `tokenizer_config.json`.
        vocab_size: added tokens with this id or a higher one are left out; None: no limit.
        extra: special tokens to add after the last id, unless the tokenizer has them.
    """
    pieces, frozen = folder / "tokenizer.model", folder / "tokenizer.json"
    if reads_pieces(folder, config):
        added = {t: i for t, i in added_tokens(folder, config).items() if within(i, vocab_size)}
        return LlamaTokenizer(pieces, config, added, extra)
    if frozen.is_file():
        return JsonTokenizer(frozen, config, vocab_size, extra)
    raise ModelError(f"{folder} has no tokenizer.model and no tokenizer.json")


def reads_pieces(folder: Path, config: dict) -> bool:
    """Return whether the tokenizer is read from its `tokenizer.model`, and not from its `tokenizer.json`. If the folder
    has both, this is so only for the class of a Llama tokenizer in `config`, the content of `tokenizer_config.json`."""
    has_both = (folder / "tokenizer.json").is_file()
    return (folder / "tokenizer.model").is_file() and (config.get("tokenizer_class") in LLAMA_CLASSES or not has_both)


def is_legacy(config: dict) -> bool:
    """Return the setting `legacy` of a Llama tokenizer; true by default, as in transformers 4."""
    return config.get("legacy") is not False


def read_optional(path: Path) -> dict:
    """Return the content of a JSON file; empty if it does not exist."""
    return read_json(path) if path.is_file() else {}


def within(token: int, vocab_size: int | None) -> bool:
    return vocab_size is None or token < vocab_size


def added_tokens(folder: Path, config: dict) -> dict[str, int]:
    """Return {text: id} of the tokens added to a `tokenizer.model`, from the other files that transformers 4 writes."""
    listed = config.get("added_tokens_decoder", {})
    return read_optional(folder / "added_tokens.json") | {t["content"]: int(i) for i, t in listed.items()}


def refuse_tokens_without_rows(folder: Path, config: dict, vocab_size: int) -> None:
    """Raise ModelError if tokens were added to a tokenizer, and the model's embeddings got no rows for them: they would
    be trained as letters, while the tokenizer of an export would give ids of rows that were never trained.

    Placeholders are no such tokens, as no text contains them: the tokens for images, videos, audio and padding, unless
    padding also begins or ends texts or stands in the chat template.
    """
    path = folder / "tokenizer.json"
    frozen = read_json(path, largest=LARGE) if path.is_file() and not reads_pieces(folder, config) else {}
    added = added_tokens(folder, config) | {t["content"]: t["id"] for t in frozen.get("added_tokens") or []}
    beyond = {text: number for text, number in added.items() if number >= vocab_size}
    if not beyond:
        return
    fields = (
        config | fields_of(config.get("extra_special_tokens")) | fields_of(config.get("model_specific_special_tokens"))
    )
    named = {key: value.get("content") if isinstance(value, dict) else value for key, value in fields.items()}
    template = folder / "chat_template.jinja"
    written = f"{config.get('chat_template')}{template.read_text(encoding='utf-8') if template.is_file() else ''}"
    pad = named.get("pad_token")
    is_text = pad in (named.get("bos_token"), named.get("eos_token")) or (isinstance(pad, str) and pad in written)
    unseen = {*PLACEHOLDERS, *(named.get(key) for key in PLACEHOLDER_KEYS), *([] if is_text else [pad])}
    lost = sorted((number, text) for text, number in beyond.items() if text not in unseen)
    if lost:
        shown = ", ".join(f"{text} ({number})" for number, text in lost[:5]) + (", ..." if len(lost) > 5 else "")
        raise ModelError(
            f"{folder}: {len(lost)} added tokens of its tokenizer have no row in the model's embeddings, which have "
            f"{vocab_size}: {shown}. They would be trained as letters. Add rows with transformers, "
            "model.resize_token_embeddings(len(tokenizer)), and save model and tokenizer into one folder; or take the "
            "tokens out of tokenizer.json, tokenizer_config.json and added_tokens.json"
        )


def fields_of(value: Any) -> dict:
    return value if isinstance(value, dict) else {}


class JsonTokenizer(Tokenizer):
    """A tokenizer read from a `tokenizer.json`.

    A Llama tokenizer that was converted with `legacy=false` (its Metaspace has `prepend_scheme=first`) puts `▁` before
    a text only if the text does not begin with one, whereas the original tokenizer always does. So this class puts it
    there itself.
    """

    def __init__(self, path: Path, config: dict, vocab_size: int | None, extra: tuple[str, ...]):
        """Read a `tokenizer.json` with the tokenizers library. Some Llama tokenizers put a space (`▁`) only before a
        whole text. For these (`_prefixes`) it is switched off in the library, and this class puts it there.

        Args:
            path: the file.
            config: content of `tokenizer_config.json`.
            vocab_size: added tokens with this id or a higher one are left out; None: no limit.
            extra: special tokens to add after the last id, unless the tokenizer has them.
        """
        self._path = path
        frozen = read_json(path, largest=LARGE)
        frozen["added_tokens"] = [t for t in frozen.get("added_tokens", []) if within(t["id"], vocab_size)]
        present = {t["content"] for t in frozen["added_tokens"]}
        space = metaspace(frozen)
        is_llama = frozen["model"].get("type") == "BPE" and bool(frozen["model"].get("byte_fallback"))
        self._prefixes = (
            is_llama and space is not None and (space.get("prepend_scheme") == "first" or not is_legacy(config))
        )
        if space is not None and self._prefixes:  # `_encode_between` and `encode` put the `▁` there
            space["prepend_scheme"] = "never"
        normalizer = frozen.get("normalizer") or {}
        self.legacy = any(n.get("type") == "Prepend" for n in normalizer.get("normalizers", [normalizer]))
        text = json.dumps(frozen)
        self._fast = FastTokenizer.from_str(text)
        self._fast.add_special_tokens([t for t in extra if t not in present])
        self._added = {t.content: (i, t) for i, t in self._fast.get_added_tokens_decoder().items() if t.special}
        self._special = {content: i for content, (i, _) in self._added.items()}
        self._find = any_of(self._special)
        self.fingerprint = hashlib.sha256(json.dumps([text, extra]).encode()).hexdigest()
        self._fast.no_truncation()
        self._fast.no_padding()
        bos = config.get("bos_token")
        bos_text = bos.get("content") if isinstance(bos, dict) else bos
        bos_id = self._fast.token_to_id(bos_text) if bos_text else None
        self._encode(self._fast, "a")  # names the file if its rules fail for any text
        begins = self._fast.encode("a").ids[:1] == [bos_id]  # whether the library itself puts BOS before a text
        self.bos = bos_id if config.get("add_bos_token", begins) else None
        self.size = max(self._fast.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str, special: list[Stretch] | None = None) -> list[Token]:
        """Return the tokens of a text. Only the ranges of characters in `special` are read as special tokens, or stand
        for images, which give no token; None: all special tokens in the text are read."""
        if special is not None:
            images = [(begin, end) for begin, end in special if text[begin:end] not in self._special]
            if images:
                return self._encode_around_images(text, special, images)
            if special != self.find_special(text):  # some special tokens in the text are read as ordinary text
                return self._encode_between(text, special)
        if not self._prefixes:  # this class does not have to put the space before a text
            return self._encode(self._fast, text)
        if not text:
            return []
        # the space that this class puts before the text is no character of it: the text begins at index -1
        tokens = self._encode(self._fast, SPACE + text.replace(SPACE, " "), at=-1)
        return without_lone_prefix(tokens, self._fast.token_to_id(SPACE), set(self._special.values()))

    def ids_of(self, text: str, special: list[Stretch]) -> list[int]:
        """Return the ids of the tokens that `encode` returns. A text whose only image, if there is one, is at its
        beginning is tokenized directly: the image gives no token, and the rest is text that follows a special token.
        `special`: ranges of characters that are read as special tokens or stand for images."""
        # index behind an image at the beginning, else 0: a range that is no special token stands for an image
        begin = special[0][1] if special and special[0][0] == 0 and text[: special[0][1]] not in self._special else 0
        part, special_here = text[begin:], [(a - begin, b - begin) for a, b in special if a >= begin]
        # if this class must put the first space, or the library would read other special tokens than these
        if self._prefixes or special_here != self.find_special(part):
            return super().ids_of(text, special)
        return [token.id for token in self._encode(self._rest if begin else self._fast, part)]

    def _encode_around_images(self, text: str, special: list[Stretch], images: list[Stretch]) -> list[Token]:
        """Tokenize the parts of a text between images, as the tokenizers library would if an image were a special
        token: a tokenizer that puts a space before a whole text (`_prefixes`) puts none behind an image (`_rest`).

        Args:
            special: ranges of characters that are special tokens or images.
            images: those of images, which get no tokens.
        """
        tokens: list[Token] = []
        begin = 0
        for end, after in [*images, (len(text), len(text))]:
            part = text[begin:end]
            special_here = [
                (a - begin, b - begin) for a, b in special if begin <= a and b <= end and (a, b) != (end, after)
            ]
            if not part:
                pass
            elif begin == 0:  # the space is put here
                tokens += self.encode(part, special_here)
            elif special_here != self.find_special(part):  # some special tokens are read as text
                made = self._encode_between(part, special_here, is_first=False)
                tokens += [Token(token.id, token.begin + begin, token.end + begin) for token in made]
            else:
                tokens += self._encode(self._rest, part.replace(SPACE, " ") if self._prefixes else part, begin)
            begin = after
        return tokens

    @cached_property
    def _rest(self) -> FastTokenizer:
        """The tokenizer for a text after a special token: without the space that only a whole text begins with."""
        frozen = json.loads(self._fast.to_str())
        space = metaspace(frozen)
        if space is None or space.get("prepend_scheme") != "first":
            return self._fast
        space["prepend_scheme"] = "never"
        return FastTokenizer.from_str(json.dumps(frozen))

    @cached_property
    def _plain_rest(self) -> FastTokenizer:
        """The tokenizer `_rest`, but it reads special tokens in a text as ordinary text."""
        plain = FastTokenizer.from_str(self._rest.to_str())
        plain.encode_special_tokens = True
        return plain

    @cached_property
    def _plain(self) -> FastTokenizer:
        """The tokenizer `_fast`, but it reads special tokens in a text as ordinary text."""
        plain = FastTokenizer.from_str(self._fast.to_str())
        plain.encode_special_tokens = True
        return plain

    def _encode_between(self, text: str, special: list[Stretch], is_first: bool = True) -> list[Token]:
        """Tokenize a text in which only the ranges in `special` are special tokens. As in the tokenizers library, a
        special token may include the spaces before and after it (lstrip, rstrip). With `is_first=False`, the text
        follows a special token, and no space is put before it."""
        tokens: list[Token] = []
        at = 0
        for begin, end in [*special, (len(text), len(text))]:
            token, flags = self._added.get(text[begin:end], (None, None))
            before, behind = begin, end
            if flags is not None and flags.lstrip:
                before = at + len(text[at:begin].rstrip())
            if flags is not None and flags.rstrip:
                behind = end + len(text[end:]) - len(text[end:].lstrip())
            part = text[at:before]  # ordinary text before the special token
            if self._prefixes and part:  # this class puts the space before the whole text, which then begins at -1
                part = part.replace(SPACE, " ")
                part, at = (SPACE + part, -1) if at == 0 and is_first else (part, at)
            tokens += self._encode(self._plain if at <= 0 and is_first else self._plain_rest, part, at)
            tokens += [] if token is None else [Token(token, before, behind)]
            at = behind
        return tokens

    def _encode(self, tokenizer: FastTokenizer, text: str, at: int = 0) -> list[Token]:
        """Tokenize with one of this class's tokenizers, by `encode_fast`. Raise ModelError, which names the tokenizer's
        file, if the library fails."""
        try:
            return encode_fast(tokenizer, text, at)
        except BaseException as error:  # a panic of Rust's is no Exception
            if isinstance(error, Exception) or type(error).__name__ == PANIC:
                raise ModelError(
                    f"{self._path}: its rules fail for a text of {len(text):,} characters that begins with "
                    f"{shown_name(repr(text[:40]))} ({shown_name(error)}); get the file again from the model's makers"
                ) from error
            raise

    def decode(self, ids: list[int]) -> str:
        return self._fast.decode(ids, skip_special_tokens=True).removeprefix(" " if self._prefixes else "")


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a regular expression for any of the texts, longer ones first; without texts, it matches nothing."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(re.escape(text) for text in longest_first) or "(?!)")


def encode_fast(tokenizer: FastTokenizer, text: str, at: int = 0) -> list[Token]:
    """Tokenize a part of a text that begins at index `at` of the whole text; -1 if a space was put before the whole
    text. The tokens have character ranges in the whole text."""
    found = tokenizer.encode(text, add_special_tokens=False)
    return [
        Token(i, max(at + begin, 0), max(at + end, 0)) for i, (begin, end) in zip(found.ids, found.offsets, strict=True)
    ]


def model_without_dummy_prefix(path: Path) -> bytes:
    """Return the content of a Llama `tokenizer.model`, changed so that SentencePiece puts no space before a text; the
    caller puts it where it belongs. Raise ModelError if the file is not a SentencePiece model, or has no such space and
    so is not that of a Llama tokenizer."""
    refuse_pointer(path)
    proto = sentencepiece_model_pb2.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]
    try:
        proto.ParseFromString(path.read_bytes())
    except DecodeError as error:
        raise ModelError(f"{path} is no SentencePiece model; put the model's tokenizer.json beside it") from error
    if not proto.normalizer_spec.add_dummy_prefix:
        raise ModelError(f"{path} is not a Llama tokenizer; put the model's tokenizer.json beside it")
    proto.normalizer_spec.add_dummy_prefix = False
    return proto.SerializeToString()


def metaspace(tokenizer_json: dict) -> dict | None:
    """Return the settings of the pre-tokenizer Metaspace, which replaces spaces by `▁`, of a `tokenizer.json`; None
    without one."""
    found = tokenizer_json.get("pre_tokenizer") or {}
    parts = found.get("pretokenizers", [found])
    return next((p for p in parts if p.get("type") == "Metaspace"), None)


def without_lone_prefix(tokens: list[Token], prefix: int | None, special: set[int]) -> list[Token]:
    """Return the tokens without the first one if that is only the space before the text (`▁`, id `prefix`) and a
    special token (an id in `special`) follows it directly."""
    if len(tokens) > 1 and tokens[0].id == prefix and tokens[1].id in special:
        return tokens[1:]
    return tokens


class LlamaTokenizer(Tokenizer):
    """A Llama tokenizer read from a `tokenizer.model`, with the same ids as transformers 4's slow tokenizer.

    With `legacy=false`, transformers 4's tokenizer puts one `▁` before every text but none after a special token, and
    drops the first `▁` if a special token follows it directly. With `legacy=true`, which is the default, each part
    between special tokens begins with one `▁`.
    """

    def __init__(self, path: Path, config: dict, added: dict[str, int], extra: tuple[str, ...]):
        """Read a Llama `tokenizer.model`. With `legacy` (a key of `config`, the content of `tokenizer_config.json`), a
        space is put before the text after each special token, too.

        Args:
            added: {text: id} of tokens that were added to those of the file.
            extra: special tokens to add after the last id, unless the tokenizer has them.

        Raises:
            ModelError: the file is no SentencePiece model, or not that of a Llama tokenizer.
        """
        try:
            # SentencePiece's own space before each text is switched off: this class puts it there
            self._pieces = sentencepiece.SentencePieceProcessor(model_proto=model_without_dummy_prefix(path))
        except RuntimeError as error:
            raise ModelError(f"{path} is no SentencePiece model; put the model's tokenizer.json beside it") from error
        self.legacy = is_legacy(config)
        special_ids = self._pieces.unk_id(), self._pieces.bos_id(), self._pieces.eos_id()
        self._special = {self._pieces.id_to_piece(i): i for i in special_ids if i >= 0} | added
        for token in extra:
            self._special.setdefault(token, self._next_id())
        facts = json.dumps([self.legacy, self._special], sort_keys=True).encode()
        self.fingerprint = hashlib.sha256(path.read_bytes() + facts).hexdigest()
        self._find = any_of(self._special)
        self.bos = self._pieces.bos_id() if config.get("add_bos_token", True) else None
        self.size = self._next_id()

    def _next_id(self) -> int:
        return max(self._pieces.get_piece_size(), *(i + 1 for i in self._special.values()))

    def encode(self, text: str, special: list[Stretch] | None = None) -> list[Token]:
        """Return the tokens of a text. Only the ranges of characters in `special` are read as special tokens, or as
        images, which give no token; None: all special tokens in the text are read."""
        tokens: list[Token] = []
        at = 0
        for begin, end in [*(self.find_special(text) if special is None else special), (len(text), len(text))]:
            tokens += self._encode_part(text[at:begin], at) if at < begin else []
            token = self._special.get(text[begin:end]) if begin < end else None
            tokens += [] if token is None else [Token(token, begin, end)]
            at = end
        return tokens

    def _encode_part(self, part: str, at: int) -> list[Token]:
        """Tokenize a part of a text, which has no special tokens and begins at character `at` of the text. A space is
        put before the part if it begins the text, or with the setting `legacy`. The tokens have character ranges in the
        whole text."""
        prefix = 1 if at == 0 or self.legacy else 0
        plain = " " * prefix + part.replace(SPACE, " ")
        tokens = []
        end = at - prefix
        for piece in self._pieces.encode(plain, return_type="proto").pieces:
            # The surfaces of the pieces cover the text without gaps. In some releases, `begin` and `end` count bytes.
            begin, end = end, end + len(piece.surface)
            tokens.append(Token(piece.id, max(begin, at), max(end, at)))
        return tokens

    def decode(self, ids: list[int]) -> str:
        return self._pieces.decode([i for i in ids if i not in self._special.values()]).removeprefix(" ")
