"""Samples of whole models of transformers: what their processor makes of a row, and of what it is asked."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import make_family
from PIL import Image

from llava_fsdp.config import Normalize, Pixels, SpecialTokens, TooLong
from llava_fsdp.data.batching.batch import StepFacts
from llava_fsdp.data.batching.collate import Collator, SampleKeys
from llava_fsdp.data.processor import encoder as processor_encoder
from llava_fsdp.data.processor.encoder import ProcessorEncoder, check_processor
from llava_fsdp.data.processor.image_template import open_image_template
from llava_fsdp.data.processor.images import ProcessorImages, Row
from llava_fsdp.data.processor.processor import Processor, open_processor
from llava_fsdp.data.records.record import Record, Turn
from llava_fsdp.data.text.tokens.constants import IGNORE
from llava_fsdp.data.text.tokens.tokenizer import open_tokenizer
from llava_fsdp.runtime.errors import ConfigError, DataError, ModelError

SIZES = [(40, 28), (24, 56), (32, 32), (61, 17)]
WORDS = "how many dogs jump over the lazy fox"


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def write(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            config, processor = make_family(name)
            config.save_pretrained(made[name])
            processor.save_pretrained(made[name])
        return made[name]

    return write


def encoder_of(folder: Path, max_length: int = 4000, **values: Any) -> ProcessorEncoder:
    tokenizer = open_tokenizer(folder)
    template = open_image_template("chat_template", folder, tokenizer)

    def size(record: Record, number: int) -> tuple[int, int]:
        assert record.sizes is not None
        return record.sizes[number]

    return ProcessorEncoder(tokenizer, template, open_processor(folder), size, max_length, TooLong.truncate, **values)


def record_of(*texts: str, sizes: Sequence[tuple[int, int]] = ()) -> Record:
    turns = tuple(Turn(("human", "gpt")[n % 2], text) for n, text in enumerate(texts))
    names = tuple(f"{n}.png" for n in range(len(sizes)))
    return Record("r.json", 0, "r", names, turns, bool(sizes), sizes=tuple(sizes))


RECORDS = [
    record_of(WORDS, "two"),
    record_of("<image>\nwhat?", "A red square.", "sure", "yes", sizes=SIZES[:1]),
    record_of("first <image> and second <image>", "the second", f"and <image> {WORDS}", WORDS, sizes=SIZES[1:]),
]


def row_of(encode: ProcessorEncoder, record: Record) -> Row:
    sample = encode(record)
    assert sample is not None and record.sizes is not None
    dice = np.random.default_rng(len(record.images))
    sizes = [record.sizes[sample.place(n)] for n in range(len(sample.images))]
    return sample, [dice.integers(0, 256, (height, width, 3), dtype=np.uint8) for width, height in sizes]


def reader_of(encode: ProcessorEncoder, **values: Any) -> ProcessorImages:
    return ProcessorImages(None, encode.processor, Pixels.exact, **values)


def collated(
    reader: ProcessorImages,
    rows: list[Row],
    pack: bool = True,
    keys: SampleKeys = SampleKeys(),  # noqa: B008  (frozen)
    images: int = 1,
) -> Any:
    """A micro-batch of a step with so many images."""
    return Collator(reader, Normalize.step, pack)(rows, StepFacts(0, images=images), 1, keys)


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("name", ["gemma3", "idefics3", "granite4_vision"])
def test_a_row_is_what_one_call_of_the_processor_makes(name: str, pack: bool, folder_of: Callable[[str], Path]) -> None:
    encode = encoder_of(folder_of(name))
    rows = [row_of(encode, record) for record in RECORDS]
    micro = collated(reader_of(encode), rows, pack)
    shown = rows[1:]
    texts = ["".join(text.texts) for s, _ in shown if (text := s.processor_text) is not None]
    theirs = encode.processor(texts, [[Image.fromarray(image) for image in images] for _, images in shown])
    assert theirs.pixels and all(torch.equal(micro.images[key], value) for key, value in theirs.pixels.items())
    each = [{key: torch.zeros(len(rows[0][0].input_ids)) for key in theirs.types[0]}, *theirs.types]
    for key in theirs.types[0]:
        if pack:
            wanted = torch.cat([own[key] for own in each])[None]
        else:
            wanted = torch.nn.utils.rnn.pad_sequence([own[key] for own in each], batch_first=True)
        assert torch.equal(micro.images[key], wanted)
    ids = [torch.from_numpy(sample.input_ids) for sample, _ in rows]
    assert torch.equal(
        micro.input_ids[0] if pack else micro.input_ids[0, : len(ids[0])], torch.cat(ids) if pack else ids[0]
    )


@pytest.mark.parametrize("name", ["gemma3", "aya_vision"])
def test_truncation_never_splits_an_image_and_the_processor_agrees(name: str, folder_of: Callable[[str], Path]) -> None:
    encode = encoder_of(folder_of(name))
    whole = encode(RECORDS[2])
    assert whole is not None
    found = set()
    for length in range(2, len(whole.input_ids)):
        sample, images = row_of(replace(encode, max_length=length), RECORDS[2])
        assert np.array_equal(sample.input_ids, whole.input_ids[: len(sample.input_ids)])
        spans = whole.image_spans
        assert len(images) == sum(end <= length for _, end in spans)
        assert not any(begin < len(sample.input_ids) < end for begin, end in spans)
        assert sample.is_image.sum() == sum(map(len, sample.image_rows))
        found.add(len(images))
        if length % 7 == 0:
            collated(reader_of(encode), [(sample, images)])  # the processor makes the same token ids
    assert found == {0, 1, 2, 3}


def test_a_token_that_joins_an_image_with_the_text_before_it_goes_with_the_image(
    folder_of: Callable[[str], Path],
) -> None:
    """Gemma 3 writes two line breaks before an image. With that of the question they are one token."""
    encode = encoder_of(folder_of("gemma3"))
    record = record_of("what?\n\n<image>x", "y", sizes=SIZES[:1])
    whole = encode(record)
    assert whole is not None
    ((begin, _),) = whole.image_spans
    joined = encode.tokenizer.encode("\n\n\n")
    assert [token.id for token in joined] == [whole.input_ids[begin]]
    row = row_of(replace(encode, max_length=begin + 2), record)
    assert len(row[0].input_ids) == begin and not row[1]
    collated(reader_of(encode), [row])


def test_truncation_is_refused_where_fewer_images_are_prepared_otherwise(folder_of: Callable[[str], Path]) -> None:
    encode = encoder_of(folder_of("gemma3"))
    whole = encode(RECORDS[2])
    assert whole is not None
    cut = replace(encode, max_length=whole.image_spans[1][0] + 1)
    encode.expansions[SIZES[1], 1] = ("other",)
    with pytest.raises(DataError, match="truncated to 1 of its 3 images"):
        cut(RECORDS[2])


def test_a_row_without_images_gets_the_blank_sample(folder_of: Callable[[str], Path]) -> None:
    encode = encoder_of(folder_of("gemma3"))
    text, shown = row_of(encode, RECORDS[0]), row_of(encode, RECORDS[1])
    bare = collated(reader_of(encode), [text])
    blanks = encode.blanks(has_videos=False)
    (blank,) = blanks.values()
    assert bare.images == {} and (blank[0].labels == IGNORE).all() and blank[0].is_image.any()
    reader = reader_of(encode, blanks=blanks)
    micro = collated(reader, [text], keys=SampleKeys(seeds=[7], sources=[1]))
    count = len(text[0].input_ids)
    assert micro.lengths == (count, len(blank[0].input_ids))
    assert micro.sample_lengths.tolist() == [count, 0], "load-balance losses leave the blank sample out"
    assert torch.equal(micro.label_positions, bare.label_positions) and torch.equal(micro.label_ids, bare.label_ids)
    assert micro.images["pixel_values"].shape[0] == 1 and micro.images["token_type_ids"][0, :count].sum() == 0
    assert micro.seeds.shape == micro.input_ids.shape and micro.label_sources.tolist() == [1] * len(micro.label_ids)
    assert torch.equal(collated(reader, [shown]).input_ids, collated(reader_of(encode), [shown]).input_ids)
    assert collated(reader, []).lengths == (len(blank[0].input_ids),)
    assert collated(reader, [text], images=0).images == {}, "no rank runs the vision part"


@pytest.mark.parametrize("pack", [True, False])
def test_positions_are_asked_for_each_sample_with_its_own_images(pack: bool, folder_of: Callable[[str], Path]) -> None:
    encode = encoder_of(folder_of("granite4_vision"))
    asked = []

    def number(
        ids: torch.Tensor, types: Mapping[str, torch.Tensor], pixels: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        asked.append(pixels)
        return torch.arange(len(ids)) + 100 * torch.arange(1, 4)[:, None]

    rows = [row_of(encode, record) for record in RECORDS]
    micro = collated(reader_of(encode, positions=number), rows, pack)
    lengths = [len(sample.input_ids) for sample, _ in rows]
    found = micro.images["position_ids"]
    assert found.shape == (3, *micro.input_ids.shape) and found.dtype == torch.int64
    if pack:
        assert found[1, 0].tolist() == [200 + n for length in lengths for n in range(length)]
    else:
        assert [row[: len(r)].tolist() for row, r in zip(found[1], map(range, lengths), strict=True)] == [
            [200 + n for n in range(length)] for length in lengths
        ]
        assert (found[:, 0, lengths[0] :] == 0).all()
    assert asked[0] == {}
    wanted = [[[height, width] for width, height in sizes] for sizes in (SIZES[:1], SIZES[1:])]
    assert [own["image_sizes"].tolist() for own in asked[1:]] == wanted


def test_other_token_ids_than_the_processors_are_refused(folder_of: Callable[[str], Path]) -> None:
    encode = encoder_of(folder_of("gemma3"))
    for record in RECORDS[:2]:
        sample, images = row_of(encode, record)
        ids = sample.input_ids.copy()
        ids[3] += 1
        with pytest.raises(DataError, match=r"r\.json, record 0 .*other tokens"):
            collated(reader_of(encode), [(replace(sample, input_ids=ids), images)])
        with pytest.raises(DataError, match="other tokens"):
            collated(reader_of(encode), [(replace(sample, input_ids=sample.input_ids[:-1]), images)])


def test_an_image_of_another_size_is_refused(folder_of: Callable[[str], Path]) -> None:
    encode = encoder_of(folder_of("idefics3"))
    sample, _ = row_of(encode, RECORDS[1])
    with pytest.raises(DataError, match="other tokens"):
        collated(reader_of(encode), [(sample, [np.zeros((20, 90, 3), dtype=np.uint8)])])


@pytest.mark.parametrize("text", ["a <end_of_turn> b", "a <image_soft_token> b", "<start_of_image>"])
def test_special_tokens_in_a_record_are_text(text: str, folder_of: Callable[[str], Path]) -> None:
    encode = encoder_of(folder_of("gemma3"))
    record = record_of(f"<image>{text}", f"it says {text}", sizes=SIZES[:1])
    row = row_of(encode, record)
    micro = collated(reader_of(encode), [row])
    is_image = torch.from_numpy(row[0].is_image)
    assert is_image.sum() == 4
    assert torch.equal(micro.images["token_type_ids"][0] == 1, is_image)
    labels = row[0].labels[row[0].labels != IGNORE].tolist()
    assert encode.tokenizer.decode(labels).strip() == f"it says {text}"


def test_a_placeholder_that_a_record_writes_itself_is_refused(folder_of: Callable[[str], Path]) -> None:
    encode = encoder_of(folder_of("gemma3"), special_tokens=SpecialTokens.parse)
    with pytest.raises(DataError, match="stands for images"):
        encode(record_of("<image>a <image_soft_token> b", "c", sizes=SIZES[:1]))


def test_an_answer_is_tokenized_apart_from_its_prompt(folder_of: Callable[[str], Path]) -> None:
    """The prompt ends with a line break. Together with a line break at the beginning of the answer it would be one
    token, which a model that answers never writes."""
    encode = encoder_of(folder_of("gemma3"))
    row = row_of(encode, record_of("<image>" + WORDS, "\n\nyes", sizes=SIZES[:1]))
    sample, text = row[0], row[0].processor_text
    assert text is not None
    prompt = encode.processor(["".join(text.texts)], [[Image.fromarray(row[1][0])]]).ids[0]
    first = int(np.flatnonzero(sample.labels != IGNORE)[0])
    assert np.array_equal(sample.input_ids[:first], prompt[:first])
    collated(reader_of(encode), [row])


def test_expansions_of_any_number_of_sizes_take_a_bounded_memory(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor_encoder, "MOST_EXPANSIONS", 3)
    encode = encoder_of(folder_of("gemma3"))
    texts = []
    for side in range(40, 47):
        texts.append(encode.of_image((side, side), 1, "r"))
        assert len(encode.expansions) <= 3
    assert texts[0] and all(text is texts[0] for text in texts), "equal texts are one object"


def test_an_image_without_tokens_is_refused(folder_of: Callable[[str], Path]) -> None:
    encode = encoder_of(folder_of("gemma3"))
    encode.expansions[SIZES[0], 1] = ("nothing",)
    with pytest.raises(DataError, match="no tokens"):
        encode(RECORDS[1])


@pytest.mark.parametrize(
    ("image", "learnt"),
    [
        ("<image>", "<image>"),
        ("<image>\n", "<image>"),
        ("<|im_start|>x<image><|im_end|>", "<|im_start|>x<image><|im_end|>"),
    ],
)
@pytest.mark.parametrize("is_first", [False, True])
def test_what_a_template_writes_for_an_image_is_learnt(
    image: str, learnt: str, is_first: bool, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(folder_of("granite4_vision"), tmp_path / "model")
    loop = "{%- for c in m['content'] if c['type'] == KIND -%}{{ WRITTEN }}{%- endfor -%}"
    images, texts = (
        loop.replace("KIND", "'image'").replace("WRITTEN", repr(image)),
        loop.replace("KIND", "'text'").replace("WRITTEN", "c['text']"),
    )
    both = "{%- for c in m['content'] -%}{{ IMAGE if c['type'] == 'image' else c['text'] }}{%- endfor -%}"
    content = images + texts if is_first else both.replace("IMAGE", repr(image))
    code = (
        "{%- for m in messages -%}{{ '<|im_start|>' + m['role'] + '\n' }}" + content + "{{ '<|im_end|>\n' }}"
        "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
    )
    (folder / "chat_template.jinja").write_text(code)
    template = open_image_template("chat_template", folder, open_tokenizer(folder))
    assert template.images is not None and template.images.image == learnt


def test_llavas_templates_and_templates_without_images_are_refused(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(folder_of("granite4_vision"), tmp_path / "model")
    tokenizer = open_tokenizer(folder)
    with pytest.raises(ConfigError, match="its own chat template"):
        open_image_template("v1", folder, tokenizer)
    path = folder / "chat_template.jinja"
    path.write_text(path.read_text().replace("<image>", ""))
    with pytest.raises(ConfigError, match="does not write the images"):
        open_image_template("chat_template", folder, tokenizer)
    path.unlink()
    with pytest.raises(ConfigError, match="has no chat template"):
        open_image_template("chat_template", folder, tokenizer)


def test_a_processor_that_needs_an_image_is_refused_before_training(folder_of: Callable[[str], Path]) -> None:
    check_processor(encoder_of(folder_of("gemma3")))
    with pytest.raises((ConfigError, DataError)):
        check_processor(encoder_of(folder_of("paligemma")))


class OneImageAlone(ProcessorEncoder):
    """An encoder whose processor takes no two images."""

    def of_image(self, size: tuple[int, int], count: int, where: str) -> str:
        if count > 1:
            raise DataError(f"{where} has two images")
        return super().of_image(size, count, where)


def test_a_processor_for_one_image_is_not_refused_before_training(folder_of: Callable[[str], Path]) -> None:
    made = encoder_of(folder_of("gemma3"))
    check_processor(OneImageAlone(**{own.name: getattr(made, own.name) for own in fields(made) if own.init}))


def test_an_answer_may_end_with_the_beginning_of_the_next_question(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """As in GLM's templates, which write nothing behind the last answer."""
    folder = shutil.copytree(folder_of("granite4_vision"), tmp_path / "model")
    path = folder / "chat_template.jinja"
    path.write_text(path.read_text().replace("<|im_end|>", ""))
    encoder = encoder_of(folder)
    check_processor(encoder)
    end = encoder.tokenizer.special("<|im_start|>")
    samples = encoder.samples(record_of("how many?", "two", "sure?", "yes"), 4000)
    learnt = [sample.labels[sample.labels != IGNORE].tolist() for sample in samples]
    assert [own for labels in learnt for own in labels].count(end) == 2 and learnt[-1][-1] == end


def test_a_processor_with_other_token_ids_is_refused_with_the_token(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenize = Processor.tokenize
    monkeypatch.setattr(Processor, "tokenize", lambda self, text: tokenize(self, text.replace("cat", "dog")))
    with pytest.raises(ConfigError, match=r"token \d+ is \['.+'\] of the processor and \['.+'\] of"):
        check_processor(encoder_of(folder_of("gemma3")))


def test_a_processor_with_code_of_its_own_is_never_opened(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folder_of("gemma3"), tmp_path / "model")
    path = folder / "processor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": {"AutoProcessor": "a.B"}}))
    with pytest.raises(ModelError, match="auto_map"):
        open_processor(folder)


def test_what_a_processor_lacks_is_named(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folder_of("gemma3"), tmp_path / "model")
    (folder / "processor_config.json").unlink()
    with pytest.raises(ModelError, match=r"has no preprocessor_config\.json or processor_config\.json"):
        open_processor(folder)
    (folder / "processor_config.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot open the processor"):
        open_processor(folder)
