"""Text to ids and back, with the stretch of text that every token came from.

A frozen `tokenizer.json` is read with the tokenizers library as it is; a SentencePiece `tokenizer.model` with
SentencePiece itself (transformers 5's conversion of such files gives wrong ids on repeated spaces).
"""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Tokenizer as FastTokenizer

from llava_fsdp.errors import ModelError


@dataclass(frozen=True)
class Token:
    id: int
    begin: int
    end: int
    """Characters [begin, end) of the text; empty for the leading bytes of a character that has no token."""


class Tokenizer(Protocol):
    bos: int | None
    """Set where the model expects every sequence to begin with it."""
    size: int
    """Highest id plus one."""
    fingerprint: str
    """Of the file that it was read from."""

    def encode(self, text: str) -> list[Token]:
        """Tokens of a text, special tokens in it included, nothing added."""
        ...

    def decode(self, ids: list[int]) -> str:
        """The text of ids, special tokens left out."""
        ...


def open_tokenizer(folder: Path, rows: int | None = None) -> Tokenizer:
    """The tokenizer of a model folder.

    Args:
        rows: tokens that were added at or beyond this id, as an export adds an image tag and a padding token, are
            left out: the model was not trained with them, and in a text they are text.

    Raises:
        ModelError: the folder has neither file.
    """
    config_file = folder / "tokenizer_config.json"
    config = json.loads(config_file.read_text()) if config_file.is_file() else {}
    if (folder / "tokenizer.model").is_file():
        return LlamaTokenizer(folder / "tokenizer.model", bool(config.get("add_bos_token", True)))
    if (folder / "tokenizer.json").is_file():
        return JsonTokenizer(folder / "tokenizer.json", config, rows)
    raise ModelError(f"{folder} has no tokenizer.model and no tokenizer.json")


class JsonTokenizer:
    """A frozen `tokenizer.json`."""

    def __init__(self, path: Path, config: dict, rows: int | None):
        frozen = json.loads(path.read_text())
        if rows is not None:
            frozen["added_tokens"] = [t for t in frozen.get("added_tokens", []) if t["id"] < rows]
        text = json.dumps(frozen)
        self._fast = FastTokenizer.from_str(text)
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()
        self._fast.no_truncation()
        self._fast.no_padding()
        bos = config.get("bos_token")
        bos_text = bos.get("content") if isinstance(bos, dict) else bos
        bos_id = self._fast.token_to_id(bos_text) if bos_text else None
        begins = self._fast.encode("a").ids[:1] == [bos_id]
        self.bos = bos_id if config.get("add_bos_token", begins) else None
        self.size = max(self._fast.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str) -> list[Token]:
        found = self._fast.encode(text, add_special_tokens=False)
        return [Token(i, begin, end) for i, (begin, end) in zip(found.ids, found.offsets, strict=True)]

    def decode(self, ids: list[int]) -> str:
        return self._fast.decode(ids, skip_special_tokens=True)


class LlamaTokenizer:
    """A Llama `tokenizer.model`, with the ids of transformers 4's slow tokenizer and `legacy=false`.

    That tokenizer begins every text with one `▁`, however it starts, puts none after a special token, and drops the
    first one where a special token comes right behind it.
    """

    def __init__(self, path: Path, add_bos: bool):
        proto = sentencepiece_model_pb2.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]
        proto.ParseFromString(path.read_bytes())
        self.fingerprint = hashlib.sha256(path.read_bytes()).hexdigest()
        proto.normalizer_spec.add_dummy_prefix = False
        self._pieces = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
        self._special = {
            self._pieces.id_to_piece(i): i
            for i in (self._pieces.unk_id(), self._pieces.bos_id(), self._pieces.eos_id())
            if i >= 0
        }
        self._split = re.compile("(" + "|".join(re.escape(s) for s in self._special) + ")")
        self.bos = self._pieces.bos_id() if add_bos else None
        self.size = self._pieces.get_piece_size()

    def encode(self, text: str) -> list[Token]:
        tokens: list[Token] = []
        at = 0  # in the text
        for part in self._split.split(text):
            if part in self._special:
                tokens.append(Token(self._special[part], at, at + len(part)))
            elif part:
                tokens += self._encode_part(part, at)
            at += len(part)
        return tokens

    def _encode_part(self, part: str, at: int) -> list[Token]:
        prefix = 1 if at == 0 else 0
        plain = " " * prefix + part.replace("▁", " ")
        tokens = []
        end = at - prefix
        for piece in self._pieces.encode(plain, return_type="proto").pieces:
            # Surfaces tile the text; begin and end of the piece itself count bytes in some releases.
            begin, end = end, end + len(piece.surface)
            tokens.append(Token(piece.id, max(begin, at), max(end, at)))
        return tokens

    def decode(self, ids: list[int]) -> str:
        return self._pieces.decode([i for i in ids if i not in self._special.values()]).removeprefix(" ")
