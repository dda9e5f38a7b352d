"""Numbers at their bounds, and tables row by row, of what makes samples, steps and pictures."""

import dataclasses
import json
import pickle
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from llava_fsdp.config import FULL_WEIGHT, AspectRatio, BadRecords, Normalize, Parity, Pixels, SourceConfig, TooLong
from llava_fsdp.data import loader
from llava_fsdp.data.batching.batch import MicroBatch, SkippedSample, Step, StepFacts
from llava_fsdp.data.batching.collate import Collator, per_token
from llava_fsdp.data.batching.sampler import Shuffle, amounts, shares_of
from llava_fsdp.data.batching.step_dataset import Steps
from llava_fsdp.data.batching.tile_inputs import tile_seeds
from llava_fsdp.data.containers.data_files import CacheFolder
from llava_fsdp.data.containers.file_reader import LocalFile
from llava_fsdp.data.images import check, preprocess
from llava_fsdp.data.images.fast_resize import Decoded
from llava_fsdp.data.images.image_tokens import ImageTokens
from llava_fsdp.data.images.preprocess import ImageReader, Preprocessor, check_enlarged, parse_preprocessor
from llava_fsdp.data.index import build, statistics
from llava_fsdp.data.index.build import Index
from llava_fsdp.data.index.dataset import Records
from llava_fsdp.data.index.examine import duplicate_ids
from llava_fsdp.data.index.integrity import read_rows
from llava_fsdp.data.index.record_store import (
    DataSource,
    FindRecords,
    RecordStore,
    SourceFile,
    TextFile,
    join_positions,
)
from llava_fsdp.data.index.statistics import describe_lengths
from llava_fsdp.data.index.token_pass import (
    FIRST_TURN,
    LABEL_WEIGHT,
    LAST_TURN,
    LOSSES_COLUMN,
    ROW_COUNTS,
    TAUGHT,
    EncodeRecords,
)
from llava_fsdp.data.problems import BITS, Kind, is_kept
from llava_fsdp.data.records.parquet import ParquetRows, check_types
from llava_fsdp.data.records.record import TOO_LARGE, Record, Turn, check_name, names_media
from llava_fsdp.data.text.encode import ExactEncoder, OriginalEncoder
from llava_fsdp.data.text.llava_v1_5 import Original
from llava_fsdp.data.text.sample import Sample
from llava_fsdp.data.text.templates import ALIASES, template
from llava_fsdp.data.text.tokens.constants import IGNORE
from llava_fsdp.data.text.tokens.tokenizer import Tokenizer, any_of, open_tokenizer
from llava_fsdp.runtime.errors import DamagedError, DataError, ImageError, ModelError
from llava_fsdp.runtime.seeds import derive

TINY = Path(check.__file__).parents[2] / "assets" / "tiny-llama"
TURNS = (Turn("human", "what colour"), Turn("gpt", "red blue green circle"))
RECORD = Record("data.json", 3, "abc", (), TURNS, False)
CLIP = Preprocessor(28, True, Image.Resampling.BICUBIC, (0.5, 0.4, 0.3), (0.5, 0.4, 0.3))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return open_tokenizer(TINY)


def exact(tokenizer: Tokenizer, max_length: int, too_long: TooLong, start_end: bool = False) -> ExactEncoder:
    return ExactEncoder(tokenizer, template("v1"), lambda *_: np.arange(4), max_length, too_long, start_end)


def original(tokenizer: Tokenizer, max_length: int) -> OriginalEncoder:
    return OriginalEncoder(Original(tokenizer, template("v1"), max_length), lambda *_: np.arange(4))


@pytest.mark.parametrize("too_long", TooLong)
def test_a_sample_of_exactly_the_maximum_length_is_not_too_long(tokenizer: Tokenizer, too_long: TooLong) -> None:
    whole = exact(tokenizer, 999, too_long)(RECORD)
    assert whole is not None
    fits = exact(tokenizer, len(whole.input_ids), too_long)(RECORD)
    assert fits is not None and fits.input_ids.tolist() == whole.input_ids.tolist() and not fits.positions_cut


def test_what_other_maximum_lengths_would_cost(tokenizer: Tokenizer) -> None:
    """One that the sample just fits in costs nothing; the whole is never a cut one."""
    whole = exact(tokenizer, 999, TooLong.truncate)(RECORD)
    assert whole is not None
    length = len(whole.input_ids)
    for make in (lambda n: exact(tokenizer, n, TooLong.truncate), lambda n: original(tokenizer, n)):
        (made,) = make(length - 2).measure(RECORD, [length - 5, length - 1, length, length + 1])
        assert sorted(made.at) == [length - 5, length - 2, length - 1]
        assert len(made.whole.input_ids) == length and not made.whole.positions_cut
        assert len(made.sample.input_ids) == length - 2
        for limit, cut in made.at.items():
            expected = make(limit)(RECORD)
            assert expected is not None and cut.labels.tolist() == expected.labels.tolist()


def test_a_label_at_the_first_position_is_never_predicted() -> None:
    labels = np.array([7, IGNORE, 9, 9])
    assert Sample(np.array([7, 8, 9, 9]), labels, (), (), 0, 0).num_labels == 2


def test_tokens_around_neighbouring_images_are_special() -> None:
    each = open_tokenizer(TINY, extra=("<im_start>", "<im_end>"))
    turns = (Turn("human", "<image><image> a"), TURNS[1])
    sample = exact(each, 999, TooLong.fail, True)(dataclasses.replace(RECORD, images=("a", "b"), turns=turns))
    assert sample is not None
    assert [(sample.input_ids == each.special(t)).sum() for t in ("<im_start>", "<im_end>")] == [2, 2]


def test_only_a_sample_that_had_labels_can_be_left_without(tokenizer: Tokenizer) -> None:
    encoder = exact(tokenizer, 6, TooLong.truncate)
    task = EncodeRecords(
        Path(),
        1,
        None,
        CacheFolder(Path(), 0),
        Path(),
        Path(),
        encoder,
        ImageReader(None, CLIP, ImageTokens(AspectRatio.pad, CLIP.size, 4), Pixels.exact),
    )
    (made,) = encoder.measure(RECORD, [6])
    assert task.count_losses(made)[0, 3] == 1
    unlabelled = dataclasses.replace(made.whole, labels=np.full_like(made.whole.labels, IGNORE))
    assert task.count_losses(dataclasses.replace(made, whole=unlabelled))[0, 3] == 0


def test_which_images_are_too_narrow(tokenizer: Tokenizer) -> None:
    """Several images of a LLaVA-OneVision sample are padded, which takes the square of the long side. A video, and an
    image that is cut into tiles, may have any shape."""
    tokens = ImageTokens(AspectRatio.anyres_max, 28, 4, ((28, 56),))
    reader = ImageReader(None, CLIP, tokens, Pixels.exact)
    task = EncodeRecords(
        Path(), 1, None, CacheFolder(Path(), 0), Path(), Path(), exact(tokenizer, 99, TooLong.truncate), reader
    )
    vars(task)["sizes"] = SimpleNamespace(sizes_of=lambda number, place: (4, 40_000, 40_000))
    for names, is_refused in ((("a.mp4",), False), (("a.png",), False), (("a.png", "b.png"), True)):
        kinds = []
        try:
            task.check_shapes(dataclasses.replace(RECORD, images=names, folder=Path("x")), 0)
        except ImageError as error:
            kinds.append(error.kind)
        assert kinds == [Kind.image_shape] * is_refused


def test_every_count_of_a_step_is_without_what_is_left_out() -> None:
    names = [f.name for f in dataclasses.fields(StepFacts) if f.type == "int" and f.name != "step"]
    assert len(names) == 8
    counts: list[dict[str, Any]] = [{name: base + n for n, name in enumerate(names)} for base in (100, 1)]
    whole = StepFacts(5, **counts[0], unlabelled=["a", "b"], source_labels={"x": 9})
    lacks = StepFacts(0, **counts[1], unlabelled=["b"], source_labels={"x": 2})
    out = [SkippedSample(n, "r", "url", "", lacks) for n in range(2)]
    rest = whole.without(out)
    assert [getattr(rest, name) for name in names] == [100 + n - 2 * (n + 1) for n in range(8)]
    assert (rest.step, rest.unlabelled, rest.source_labels, rest.skipped) == (5, ["a"], {"x": 5}, out)


def test_dropout_and_sources_are_of_the_samples_that_are_kept() -> None:
    """Of three samples the middle one, which has another source, turns out broken."""
    given: list[tuple[Any, ...]] = []
    ahead: list[set[int]] = []
    out = SkippedSample(1, "r", "url", "", StepFacts(0))
    steps = Steps.__new__(Steps)
    stand_ins = {
        "sampler": SimpleNamespace(samples=lambda step: [2, 1, 0], assignment=lambda step: [[[2, 1], [0]]]),
        "facts": lambda step, numbers: StepFacts(step),
        "records": SimpleNamespace(fetch_ahead=ahead.append),
        "read": lambda number: out if number == 1 else f"row {number}",
        "collate": lambda rows, facts, total, keys: given.append((rows, total, keys.seeds, keys.sources)),
    }
    vars(steps).update(
        stand_ins,
        rank=0,
        world_size=3,
        seed=5,
        drops=True,
        has_pairs=False,
        sources=["a", "b"],
        ends=np.array([2, 3]),
        cut=None,
        round_micro_batches=int,
    )
    assert steps.prepare(7).facts.skipped == [out]
    assert ahead == [{0, 1, 2}], "the images of all micro-batches are downloaded together"
    seeds = [derive("dropout", 5, 7, number) % 2**31 for number in (2, 0)]
    assert given == [(["row 2"], 6, seeds[:1], [1]), (["row 0"], 6, seeds[1:], [0])]
    vars(steps).update(drops=False, sources=["a"])
    steps.prepare(7)
    assert [own[2:] for own in given[2:]] == [([], []), ([], [])]


def test_only_a_record_that_broke_since_counts_against_the_limit() -> None:
    """A run that continues knows of two, and may have been given a lower limit meanwhile."""
    data = SimpleNamespace(bad_records=BadRecords.skip, max_bad_records="3", budget=lambda records: 3)
    records = SimpleNamespace(index=range(10), num_wrong=1, number_in_index=lambda number: number)
    own = loader.Loader.__new__(loader.Loader)
    own.gather, own.broken, own.data = list, {4, 5}, data  # pyright: ignore[reportAttributeAccessIssue]
    own.steps = SimpleNamespace(  # pyright: ignore[reportAttributeAccessIssue]
        records=records, cut=None, shares_rows=False, collate=SimpleNamespace(normalize=Normalize.step)
    )

    def agreed(*numbers: int) -> int:
        facts = StepFacts(
            0, samples=4, skipped=[SkippedSample(n, "r", "url", "", StepFacts(0, samples=1)) for n in numbers]
        )
        return own.agree(Step(facts, [])).facts.samples

    assert agreed(5, 4) == 2 and own.broken == {4, 5}
    with pytest.raises(DataError):
        agreed(4, 6)
    assert agreed(6) == 3, "it was counted when it broke"
    own.broken = {4}
    assert agreed(5) == 3 and own.broken == {4, 5}, "as many as are allowed"


def test_a_step_without_labels_has_a_scale() -> None:
    none = torch.zeros(0)
    micro = MicroBatch(none, {}, none, none, scale=0.25)
    step = Step(StepFacts(0, label_tokens=4), [micro])
    out = [SkippedSample(0, "r", "url", "", StepFacts(0, label_tokens=4))]
    assert step.without(out, Normalize.step).micro_batches[0].scale == 1
    assert step.without(out, Normalize.micro_batch).micro_batches[0].scale == 0.25


def test_labels_of_skipped_records_take_along_all_that_is_said_of_them() -> None:
    """Labels of a row that several ranks process are taken out with their positions, sources and records."""
    none = torch.zeros(0)
    fields = {"label_positions": [3, 4, 5], "label_ids": [7, 8, 9], "label_sources": [0, 1, 0]}
    tensors = {name: torch.tensor(values) for name, values in fields.items()}
    micro = MicroBatch(none, {}, scale=0.25, **tensors, label_records=torch.tensor([20, 30, 20]))
    lacks = StepFacts(0, label_tokens=1)
    found = Step(StepFacts(0, label_tokens=3), [micro]).without(
        [SkippedSample(30, "r", "url", "", lacks)], Normalize.step
    )
    (rest,) = found.micro_batches
    assert {name: getattr(rest, name).tolist() for name in (*fields, "label_records")} == {
        "label_positions": [3, 5], "label_ids": [7, 9], "label_sources": [0, 0], "label_records": [20, 20],
    }  # fmt: skip
    assert rest.scale == 1 / 2
    bare = dataclasses.replace(micro, label_sources=torch.zeros(0, dtype=torch.int64))
    assert not len(bare.without_labels([20]).label_sources), "there is a single source"


@pytest.mark.parametrize("pack", [True, False])
def test_a_micro_batch_of_nothing_is_one_position_without_a_label(pack: bool) -> None:
    reader = ImageReader(None, CLIP, ImageTokens(AspectRatio.pad, CLIP.size, 4), Pixels.exact)
    made = Collator(reader, Normalize.micro_batch, pack)([], StepFacts(0), 2)
    assert made.input_ids.tolist() == [[0]] and not len(made.label_ids) and not len(made.label_positions)
    assert (made.lengths, made.cu_seqlens.tolist()) == (((1,), [0, 1]) if pack else ((), []))
    assert made.scale == 0.5 and made.images["tiles"].shape == (0, 3, 28, 28)
    assert made.seeds.shape == (1, 1), "without dropout no seeds are copied to the device"
    assert made.sample_lengths.tolist() == [0], "its only position is of no sample"


def test_tiles_have_seeds_of_their_own_below_the_bound() -> None:
    sample = Sample(np.zeros(1), np.zeros(1), (), (), 0, 0)
    rows = [(sample, [np.zeros((2, 1)), np.zeros((1, 1))]), (sample, []), (sample, [np.zeros((3, 1))])]
    seeds = [10, 20, 2**31 - 2]
    assert tile_seeds(seeds, rows).tolist() == [11, 12, 13, 2**31 - 1, 0, 1]
    assert tile_seeds(seeds, rows, [[2], [], [0, 1]]).tolist() == [13, 2**31 - 1, 0], "the same, of some tiles"
    assert not len(tile_seeds([], rows))


def test_every_token_has_the_seed_of_its_sample() -> None:
    assert per_token([7, 9], (1, 3), True).tolist() == [[7, 9, 9, 9]]
    assert per_token([7, 9], (1, 3), False).tolist() == [[7], [9]], "every column of a padded row"


def sources(**own: dict[str, Any]) -> dict[str, SourceConfig]:
    return {name: SourceConfig(path=f"{name}.json", **keys) for name, keys in own.items()}


@pytest.mark.parametrize(
    ("epochs", "count", "samples"), [(0.7, 5, 4), (0.5, 5, 3), (1.1, 4, 4), (0.29, 100, 29), (0.1, 4, 0)]
)
def test_a_fraction_of_a_source_is_rounded(epochs: float, count: int, samples: int) -> None:
    """Halves up, and as the fraction is written: 0.7 of 5 is 3.5 and not 3.4999."""
    assert amounts(sources(a={"epochs": epochs}, b={}), [count, 7]) == [samples, 7]


def test_sources_and_passes_are_shuffled_apart() -> None:
    """Which records come first is not the same in two sources of one size, nor in two passes over one."""
    shares = shares_of(sources(a={"epochs": 0.25}, b={"epochs": 0.25}), [40, 40])
    order = Shuffle(80, 1, 8, shares)
    first, second = (order.members(share, 0) - share.first for share in shares)
    assert sorted(first.tolist()) != sorted(second.tolist())
    assert sorted(order.members(shares[0], 0).tolist()) != sorted(order.members(shares[0], 4).tolist())


def test_which_problems_are_trained_on() -> None:
    always = {Kind.duplicate_id, Kind.special_token}
    like_original = {Kind.media_not_read, Kind.empty_answer, Kind.tag_without_image, Kind.no_labels}
    for labels in Parity:
        for too_long in TooLong:
            kept = {kind for kind in Kind if is_kept(kind, labels, too_long)}
            expected = always | (like_original if labels is Parity.llava_v1_5 else set())
            assert kept == expected | ({Kind.too_long} if too_long is TooLong.truncate else set())
    assert sorted(BITS.values()) == [1 << n for n in range(len(Kind))]


def test_what_is_left_out_for_its_length_is_not_wrong() -> None:
    """A long record has lost its labels to a cut that is never made; one without labels of its own is wrong."""
    long, bare, url = (BITS[kind] for kind in (Kind.too_long, Kind.no_labels, Kind.url))
    flags = np.array([0, long, long | bare, bare, long | url, url | bare], dtype=np.uint32)
    found = {}
    for too_long in TooLong:
        records: Any = object.__new__(Records)
        records.index = FakeIndex(flags)
        records.dropped_kinds = [kind for kind in Kind if not is_kept(kind, Parity.exact, too_long)]
        records.counts, records.num_wrong, records.num_too_long = dict.fromkeys(Kind, 0), 0, 0
        records.num_records = 0
        count, numbers = records._count(), np.concatenate(list(records._sample_numbers())).tolist()
        found[too_long] = numbers, records.num_wrong, records.num_too_long
        assert count == len(numbers)
        assert (records.counts[Kind.too_long], records.counts[Kind.no_labels]) == (3, 3)
    assert found[TooLong.truncate] == ([0, 1], 4, 0)
    assert found[TooLong.skip] == found[TooLong.fail] == ([0], 3, 2)


class FakeIndex:
    """Flags of records, in blocks of two."""

    def __init__(self, flags: np.ndarray):
        self.flags = flags
        self.first_sample = None

    def __len__(self) -> int:
        return len(self.flags)

    def blocks(self):
        return [(at, self.flags[at : at + 2]) for at in range(0, len(self.flags), 2)]


def test_places_add_up_over_chunks() -> None:
    counts = np.array([2, 0, 1, 5, 0, 0, 4, 1], dtype=np.int32)
    chunks = [counts[:3], counts[3:3], counts[3:]]
    assert np.concatenate(list(duplicate_ids.running_sum(chunks))).tolist() == [0, *np.cumsum(counts).tolist()]


@pytest.mark.parametrize("block", [3, 4, 1 << 20])
def test_sources_are_counted_a_block_at_a_time(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first source some are left out; numbers are of what is kept, one source after the other."""
    monkeypatch.setattr(statistics, "BLOCK", block)
    dice = np.random.default_rng(0)
    names = "lengths", "labels", "pictures", "tiles", "image_tokens"
    columns = {name: dice.integers(0, 3, 11).astype(np.int32) for name in names}
    sources = [SourceFile("a", "a.json", None), SourceFile("b", "b.json", "images")]
    store = SimpleNamespace(sources=sources, source_bounds=[0, 9, 13])
    taught = np.arange(2 * len(TAUGHT)).reshape(2, -1)
    index = SimpleNamespace(store=store, taught=taught)
    records: Any = SimpleNamespace(
        index=index, source_counts=[7, 4], count_records=lambda begin, end: end - begin, **columns,
        weight_of=lambda block: int(columns["labels"][block].sum()) * FULL_WEIGHT // 2,
    )  # fmt: skip
    found = statistics.count_sources(records)
    assert [(own.records, own.left_out, own.samples) for own in found] == [(9, 2, 7), (4, 0, 4)]
    assert [list(own.taught.values()) for own in found] == taught.tolist()
    for own, part in zip(found, (slice(0, 7), slice(7, 11)), strict=True):
        sums = [own.tokens, own.label_tokens, own.pictures, own.tiles, own.image_tokens]
        assert sums == [int(values[part].sum()) for values in columns.values()]
        assert own.text_only == int((columns["pictures"][part] == 0).sum()) and own.label_weight == own.label_tokens / 2
    records.image_tokens = None  # as in indexes that did not count them
    assert [own.image_tokens for own in statistics.count_sources(records)] == [None, None]


@pytest.mark.parametrize("count", [0, 1, 6, 7, 8])
def test_flags_come_a_block_at_a_time(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "BLOCK", 3)
    folders = [tmp_path / name for name in ("records", "pictures", "encoded")]
    for shift, folder in enumerate(folders):
        folder.mkdir()
        np.save(folder / "flags.npy", (np.arange(count, dtype=np.uint32) % 2) << shift)
    texts: Any = range(count)
    found = list(Index(tmp_path, texts, *folders, [], np.zeros(0), np.zeros(0)).blocks())
    assert [begin for begin, _ in found] == list(range(0, count, 3))
    assert [flag for _, flags in found for flag in flags.tolist()] == [7 * (n % 2) for n in range(count)]


@pytest.mark.parametrize("block", [3, 17, 1 << 20])
def test_percentiles_of_lengths(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least length that so many samples do not exceed; a record that is no sample has none."""
    monkeypatch.setattr(statistics, "BLOCK", block)
    np.save(tmp_path / "full.npy", np.array([0, *range(1, 101), 0], dtype=np.int32))
    index: Any = SimpleNamespace(encoded=tmp_path)
    found = describe_lengths(index)
    assert found["percentiles"] == {str(p): p for p in (1, 5, 25, 50, 75, 95, 99, 100)}
    assert (found["samples"], found["mean"]) == (100, 50.5)
    assert [bar["records"] for bar in found["histogram"]] == [4, *[5] * 19, 1]


def test_what_maximum_lengths_cost_is_added_up_for_each_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the chunks of all its files, and over all sources."""
    chunks = {Path(name): np.arange(8) + 10 * n for n, name in enumerate("abc")}
    learnt = np.zeros(len(TAUGHT), dtype=np.int64)
    monkeypatch.setattr(build, "column", lambda path, name: chunks[path] if name == LOSSES_COLUMN else learnt)
    for name in (ROW_COUNTS, FIRST_TURN, LAST_TURN):
        np.save(tmp_path / f"{name}.npy", np.ones(8, dtype=np.int32))
    np.save(tmp_path / "labels.npy", np.arange(8, dtype=np.int32))
    np.save(tmp_path / f"{LABEL_WEIGHT}.npy", np.arange(8) * FULL_WEIGHT)
    sources = [SimpleNamespace(name=name) for name in ("x", "y")]
    parts = {0: SimpleNamespace(source=0), 5: SimpleNamespace(source=1), 7: SimpleNamespace(source=1)}
    task: Any = SimpleNamespace(
        limits=[512, 1024], store=SimpleNamespace(sources=sources, part=parts.__getitem__), file_begins=[0, 5, 7]
    )
    facts = build.encoded_facts(task, list(chunks), tmp_path)
    second = [[30 + 2 * n for n in range(4)], [38 + 2 * n for n in range(4)]]
    losses = [[[0, 1, 2, 3], [4, 5, 6, 7]], second]
    assert facts == {"limits": [512, 1024], "losses": losses, "taught": [learnt.tolist()] * 2}
    assert [own.name for own in tmp_path.iterdir()] == ["labels.npy"], "columns of several samples, and of weights"
    index: Any = SimpleNamespace(store=task.store, limits=facts["limits"], losses=np.array(facts["losses"]))
    for row, own in enumerate(statistics.describe_losses(index)):
        found = {name: list(values.values()) for name, values in own["sources"].items()}
        assert found == {"x": facts["losses"][0][row], "y": second[row]}
        assert list(own.values())[1:5] == [a + b for a, b in zip(*found.values(), strict=True)]


@pytest.mark.parametrize("key", ["record", "id", "kind", "reason"])
def test_a_problem_without_one_of_its_keys_is_damage(key: str, tmp_path: Path) -> None:
    row: dict[str, int] = dict.fromkeys(("record", "id", "kind", "reason"), 1)
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    assert list(read_rows(path)) == [row]
    del row[key]
    path.write_text(json.dumps(row))
    with pytest.raises(DamagedError):
        list(read_rows(path))


def test_a_record_of_exactly_the_most_bytes_is_read(tmp_path: Path) -> None:
    """And one without bytes is none."""
    (tmp_path / "a.json").write_text('[{"a": 1}, {"b": 23}]')
    for most, fits in ((8, False), (9, True)):
        folder = tmp_path / str(most)
        source = SourceFile("a", str(tmp_path / "a.json"), None)
        finding = FindRecords((TextFile(source, tmp_path / "a.json", "k"),), tmp_path / f"pieces{most}", most)
        finding(0)
        join_positions([DataSource("a", source.path, (source,))], finding, folder, "f", lambda: None)
        store = RecordStore(folder)
        assert store.read(0) == b'{"a": 1}'
        if fits:
            assert store.read(1) == b'{"b": 23}'
            continue
        with pytest.raises(DataError) as caught:
            store.read(1)
        assert caught.value.kind == Kind.record_too_large
    for videos in (True, False):
        sent = pickle.loads(pickle.dumps(RecordStore(folder, videos, CacheFolder(tmp_path, 2))))
        assert (sent.videos, sent.cache, len(sent)) == (videos, CacheFolder(tmp_path, 2), 2), "in another process"
        assert sent.data_files.cache == sent.cache
    store = RecordStore(folder)
    store.size = np.array([0, 9], dtype=np.int32)
    with pytest.raises(DamagedError):
        store.read(0)


def test_a_row_of_exactly_the_most_bytes_is_made_json(tmp_path: Path) -> None:
    row = {"id": "i" * 300, "conversations": [{"from": "human", "value": "a"}]}
    pq.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
    rows = ParquetRows(LocalFile(tmp_path / "a.parquet"))
    (made,) = rows.lines(0, 9999)
    assert list(rows.lines(0, len(made))) == [made]
    (short,) = rows.lines(0, len(made) - 1)
    assert json.loads(short) == {"id": "i" * 300, TOO_LARGE: [len(made), len(made) - 1]}


TEXT = pyarrow.string()
LISTS = {"list": pyarrow.list_, "large list": pyarrow.large_list, "fixed list": lambda one: pyarrow.list_(one, 2)}
TEXTS = {
    "text": TEXT,
    "large text": pyarrow.large_string(),
    "dictionary": pyarrow.dictionary(pyarrow.int32(), TEXT),
    "nulls": pyarrow.null(),
}
DATA = {"bytes": pyarrow.binary(), "large bytes": pyarrow.large_binary(), "no bytes": pyarrow.null()}


@pytest.mark.parametrize("kind", LISTS)
@pytest.mark.parametrize("text", TEXTS)
def test_every_form_of_lists_and_texts_is_read(kind: str, text: str) -> None:
    turns = LISTS[kind](pyarrow.struct([("from", TEXTS[text]), ("value", TEXTS[text])]))
    for own in (TEXTS[text], LISTS[kind](TEXTS[text])):
        check_types("a", pyarrow.schema([("conversations", turns), ("id", TEXTS[text]), ("image", own)]))


@pytest.mark.parametrize("data", DATA)
def test_every_form_of_images_in_rows_is_read(data: str) -> None:
    turns = pyarrow.list_(pyarrow.struct([("from", TEXT), ("value", TEXT)]))
    image = pyarrow.struct([("bytes", DATA[data]), ("path", TEXT)])
    bare = pyarrow.struct([("bytes", DATA[data])])
    for own in (image, bare, DATA[data], pyarrow.list_(image), pyarrow.list_(bare), pyarrow.list_(DATA[data])):
        for identity in (pyarrow.int64(), pyarrow.float64()):
            check_types("a", pyarrow.schema([("conversations", turns), ("id", identity), ("image", own)]))
    for wrong in (pyarrow.struct([("data", DATA[data])]), pyarrow.struct([("bytes", TEXT), ("path", TEXT)])):
        with pytest.raises(DataError):
            check_types("a", pyarrow.schema([("conversations", turns), ("image", wrong)]))


@pytest.mark.parametrize("words", [
    "image img picture pic photo screenshot thumbnail frame jpg jpeg png gif",
    "video vid movie clip audio sound speech voice wav media",
])  # fmt: skip
def test_words_of_media(words: str) -> None:
    """Alone, as several, and beside another word; not as a part of a longer word."""
    for word in words.split():
        assert names_media(word) and names_media(f"{word}s") and names_media(f"main_{word.upper()}"), word
        assert not names_media(f"{word}ry")


def test_words_that_say_something_about_media() -> None:
    words = (
        "id index idx has is num number count size width height shape ratio resolution length duration fps format type "
        "source dataset split caption title description alt text label category quality score hash md5 sha license "
        "author"
    )
    for word in words.split():
        assert not names_media(f"image_{word}"), word


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("HTTPS://a/b.jpg", Kind.url), ("s3://a/b.jpg", Kind.url), ("DATA:image/png", Kind.url),
        ("a/..", Kind.path_outside), ("/a.jpg", Kind.path_outside), ("a/b/", Kind.bad_form),
        ("a\0b", Kind.bad_form), ("\ud83d.jpg", Kind.bad_form),
        ("a/data:b.jpg", None), ("a:b.jpg", None), ("..a/b..jpg", None), ("x/http://y.jpg", None),
        ("größe/a b.jpg", None),
    ],
)  # fmt: skip
def test_names_of_images(name: str, kind: Kind | None) -> None:
    if kind is None:
        check_name(name, "here")
        return
    with pytest.raises(DataError) as caught:
        check_name(name, "here")
    assert caught.value.kind == kind


def test_other_names_of_templates() -> None:
    assert ALIASES == {
        "v0_plain": "plain", "default": "v0", "llava_v0": "v0", "vicuna_v1": "v1", "v0.5": "v1",
        "chatml_direct": "chatml", "mistral_direct": "chatml",
    }  # fmt: skip
    assert all(template(alias) is template(name) for alias, name in ALIASES.items())


def test_the_longest_special_token_is_found() -> None:
    assert any_of(["<a>", "<a><b>", "b", "+"]).findall("<a><b>b+<a>") == ["<a><b>", "b", "+", "<a>"]


def test_tokens_that_the_model_has_no_rows_for_are_refused() -> None:
    frozen = json.loads((TINY / "tokenizer.json").read_text())
    last = max(frozen["added_tokens"], key=lambda token: token["id"])
    assert open_tokenizer(TINY, last["id"] + 1).special(last["content"]) == last["id"]
    with pytest.raises(ModelError, match=re.escape(last["content"])):
        open_tokenizer(TINY, last["id"])


CONFIG: dict[str, Any] = {
    "size": {"shortest_edge": 30}, "crop_size": {"height": 28, "width": 28}, "do_center_crop": True,
    "image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.4, 0.3], "resample": 2,
}  # fmt: skip


def test_what_a_preprocessor_says() -> None:
    """A crop counts where the short side is resized; without one the short side is the square."""
    read = parse_preprocessor(CONFIG, Path("a"))
    assert (read.size, read.keep_ratio, read.resample) == (28, True, Image.Resampling.BILINEAR)
    assert (read.mean, read.std) == ((0.5, 0.4, 0.3), (0.5, 0.4, 0.3))
    assert parse_preprocessor(CONFIG | {"do_center_crop": False}, Path("a")).size == 30
    squeezed = parse_preprocessor(CONFIG | {"size": {"height": 32, "width": 32}}, Path("a"))
    assert (squeezed.size, squeezed.keep_ratio) == (32, False)
    silent = {key: value for key, value in CONFIG.items() if key != "resample"}
    assert parse_preprocessor(silent, Path("a")).resample is Image.Resampling.BICUBIC
    assert parse_preprocessor({**CONFIG, "crop_size": 8192}, Path("a")).size == 8192


@pytest.mark.parametrize(
    "wrong",
    [
        {"crop_size": {"height": 28, "width": 30}}, {"crop_size": {"height": 30, "width": 28}}, {"size": None},
        {"crop_size": 0}, {"crop_size": 8193}, {"crop_size": {"height": 28.0, "width": 28.0}},
        {"image_mean": [0.5, 0.4]}, {"image_std": [0.5] * 4}, {"image_mean": [0.5, float("nan"), 0.5]},
        {"image_std": [0.5, float("inf"), 0.5]}, {"image_std": [0.5, 0.0, 0.5]}, {"image_std": [0.5, 0.5, -1.0]},
    ],
)  # fmt: skip
def test_preprocessors_that_are_none(wrong: dict[str, Any]) -> None:
    with pytest.raises(ModelError):
        parse_preprocessor(CONFIG | wrong, Path("a"))


def test_as_many_pixels_as_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the file, of the square around it, and of what it is enlarged to before it is cut."""
    monkeypatch.setattr(check, "MAX_PIXELS", 12)
    check.check_pixels(Image.new("L", (3, 4)), Path("a"), "x")
    with pytest.raises(ImageError):
        check.check_pixels(Image.new("L", (13, 1)), Path("a"), "x")
    for aspect, most in ((AspectRatio.pad, 50 * 50), (AspectRatio.square, 28 * 28 * 50 // 10)):
        monkeypatch.setattr(preprocess, "MAX_PIXELS", most)
        for shape in ((10, 50), (50, 10)):
            check_enlarged(shape, CLIP, aspect, "x")
        monkeypatch.setattr(preprocess, "MAX_PIXELS", most - 1)
        with pytest.raises(ImageError):
            check_enlarged((50, 10), CLIP, aspect, "x")


@pytest.mark.parametrize("kind", ["PPM", "TGA", "ICO", "PCX"])
def test_formats_that_are_not_read(kind: str, tmp_path: Path) -> None:
    assert check.FORMATS == ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png", kind)
    with pytest.raises(ImageError) as caught:
        check.examine(tmp_path / "a.png", "x", full=True)
    assert caught.value.kind == Kind.image_unreadable


@pytest.mark.parametrize(
    ("mode", "least", "most", "white"),
    [
        ("I;16", 0, 9, 65535), ("I;16B", 0, 65535, 65535), ("F", 0, 1, 1), ("F", 0, 1.5, 255), ("F", 0, 255, 255),
        ("F", 0, 256, 65535), ("I", 0, 1, 255), ("I", 0, 255, 255), ("I", 3, 256, 65535), ("I", 0, 65535, 65535),
        ("I", 0, 65536, None), ("I", -1, 9, None), ("F", -0.1, 0.5, None), ("F", 0, 65535.5, None),
    ],
)  # fmt: skip
def test_the_value_that_is_white(mode: str, least: float, most: float, white: float | None) -> None:
    values = np.array([least, most])
    if white is not None:
        assert check.white_of(mode, values, "x") == white
        return
    with pytest.raises(ImageError):
        check.white_of(mode, values, "x")


@pytest.mark.parametrize(("wide", "narrower"), [(124, False), (125, True), (250, True), (100, False), (90, False)])
def test_the_narrower_filter_from_a_quarter_on(wide: int, narrower: bool) -> None:
    """By the side that is reduced least; a filter that is not the bicubic one stays."""
    noise = np.random.default_rng(0).integers(0, 256, (400, wide, 3), dtype=np.uint8)
    picture = Image.fromarray(noise)
    lean = Decoded(picture, picture.size, 1, 0, 0)
    for given, used in (
        (Image.Resampling.BICUBIC, Image.Resampling.HAMMING if narrower else Image.Resampling.BICUBIC),
        (Image.Resampling.BILINEAR, Image.Resampling.BILINEAR),
    ):
        plain = picture.resize((100, 100), used, (0, 0, wide, 400), 2.0)
        assert np.array_equal(np.asarray(lean.resize((100, 100), given)), np.asarray(plain))
