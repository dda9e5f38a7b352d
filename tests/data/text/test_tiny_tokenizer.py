"""The shipped tokenizer of ``model=tiny``: how it was made, and that it loses no text."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

import llava_fsdp
from llava_fsdp.config import TooLong
from llava_fsdp.data import toy_shapes
from llava_fsdp.data.records.record import Record, Turn
from llava_fsdp.data.text.encode import ExactEncoder
from llava_fsdp.data.text.llava_v1_5 import Original, encode_like_original
from llava_fsdp.data.text.templates import template
from llava_fsdp.data.text.tokens.tokenizer import open_tokenizer

ASSETS = Path(llava_fsdp.__file__).parent / "assets" / "tiny-llama"
SPECIAL = ("<unk>", "<s>", "</s>")
SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)


def corpus_words() -> list[str]:
    """Every distinct word of the data set and of the chat template, with the mark of a word's start.

    Punctuation is left out so that no merge joins a word with the mark behind it; the two speakers
    keep their colon, because they never stand without it. `USER:` has no mark of a word's start: as in Llama's
    vocabulary it is one token more behind a space, which the original's labels count on (LLaVA train.py:477-479).
    """
    texts = [SYSTEM, toy_shapes.CAPTION_REQUEST]
    for places in ((0,), (1, 2), (0, 1, 3), (0, 1, 2, 3)):
        for shape in toy_shapes.SHAPES:
            for colour in toy_shapes.COLOURS:
                for size in toy_shapes.SIZES:
                    scene = toy_shapes.Scene(shape, colour, size, places)
                    texts.append(toy_shapes.caption(scene))
                    for pair in toy_shapes.questions(scene).values():
                        texts += pair
    for pair in toy_shapes.text_facts():
        texts += pair
    words = {word for text in texts for word in re.findall(r"[A-Za-z]+", text)}
    return [*sorted(f"▁{word}" for word in words), "USER:", "▁ASSISTANT:"]


def build() -> Tokenizer:
    """A Llama-type BPE tokenizer in which every word of the corpus is one token.

    Ids: the special tokens, 256 bytes, the printable ASCII characters, then the merges.
    """
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(vocab_size=4096, min_frequency=2, show_progress=False)
    trained.train_from_iterator(sorted(corpus_words() * 2), trainer)
    merges = [tuple(pair) for pair in json.loads(trained.to_str())["model"]["merges"]]

    characters = ["▁"] + [chr(code) for code in range(33, 127)]
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *characters]
    pieces += dict.fromkeys("".join(pair) for pair in merges)
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first"),
            pre_tokenizers.Digits(individual_digits=True),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """The shipped tokenizer."""
    return PreTrainedTokenizerFast.from_pretrained(ASSETS)


def test_shipped_file_is_what_the_builder_makes() -> None:
    assert json.loads((ASSETS / "tokenizer.json").read_text(encoding="utf-8")) == json.loads(build().to_str())


def test_special_ids(tokenizer: PreTrainedTokenizerFast) -> None:
    assert [tokenizer.unk_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id] == [0, 1, 2]
    assert tokenizer.pad_token_id == 0
    config = json.loads((ASSETS / "config.json").read_text(encoding="utf-8"))
    assert len(tokenizer) <= config["vocab_size"] < len(tokenizer) + 8


def test_corpus_words_are_single_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    for word in set(corpus_words()) - {"USER:"}:
        assert tokenizer.tokenize(word.removeprefix("▁")) == [word]
    assert tokenizer.tokenize("USER:") == ["▁", "USER:"] and tokenizer.tokenize("</s>USER:") == ["</s>", "USER:"]


def test_the_originals_labels_can_be_made_with_it() -> None:
    """`compat=llava_v1_5` on the embedded default masks no sample, and its labels are the exact ones."""
    own = Original(open_tokenizer(ASSETS), template("v1"), 2048)
    exact = ExactEncoder(own.tokenizer, own.form, lambda *_: np.zeros(1), 2048, TooLong.fail)
    for pictures in ((), ("a.png",)):
        tag = "<image>\n" if pictures else ""
        turns = [
            Turn("human", f"{tag}What colour is the circle?"),
            Turn("gpt", "red"),
            Turn("human", "How many?"),
            Turn("gpt", "3"),
        ]
        record = Record("a.json", 0, "x", pictures, tuple(turns), bool(pictures))
        made, sample = encode_like_original(record, own), exact(record)
        assert made.mismatch is None and sample is not None
        assert made.labels.tolist() == sample.labels.tolist()


@pytest.mark.parametrize(
    "text",
    [
        "What colour is the circle?",
        "two  spaces, a tab\tand\na new line\n",
        "\nstarts with a new line",
        "In 1984 it cost 12.50 €",
        "naïve façade — Ünïcödé",
        "日本語とемодзи 🙂🏳️‍🌈 \x00\x7f",
        "",
    ],
)
def test_round_trip(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
    assert tokenizer.unk_token_id not in ids


def test_round_trip_of_random_text(tokenizer: PreTrainedTokenizerFast) -> None:
    """Any text without a leading space or a literal mark of a word's start comes back unchanged."""
    rng = random.Random(0)
    for _ in range(200):
        codes = [rng.choice((rng.randrange(32, 127), rng.randrange(0xA0, 0xD800))) for _ in range(30)]
        text = "".join(map(chr, codes)).replace("▁", "").lstrip()
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_digits_are_split(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.tokenize("2024") == ["▁", "2", "0", "2", "4"]


def test_one_leading_bos(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer("red")["input_ids"][0] == tokenizer.bos_token_id
    assert tokenizer("red")["input_ids"].count(tokenizer.bos_token_id) == 1
