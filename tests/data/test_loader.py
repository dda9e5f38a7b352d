"""Steps are sets of samples: the same on any number of ranks, resumable at any step, each sample once an epoch."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from harness import CPU
from loaders import agreed_steps
from small import make_config, write_json

from llava_fsdp.config import AspectRatio, Config
from llava_fsdp.data import loader as module
from llava_fsdp.data.batching.batch import SkippedSample, Step
from llava_fsdp.data.batching.step_dataset import Steps
from llava_fsdp.data.loader import Loader, ModelShape, build_loader, open_encoding
from llava_fsdp.data.records.record import Turn
from llava_fsdp.data.records.record_file import RecordFile
from llava_fsdp.data.text.conversation import asked_turns
from llava_fsdp.data.text.encode import OriginalEncoder
from llava_fsdp.data.text.tokens.tokenizer import open_tokenizer
from llava_fsdp.data.validation_prompts import ask
from llava_fsdp.model.llava.llava import Llava
from llava_fsdp.runtime.errors import ConfigError, DataError, ImageError, SourceError
from llava_fsdp.train.events.held_out.validation_answers import AnswerGenerator


def open_loader(parts: Path, dataset: Path, *overrides: str, size: int = 1, **shape: int) -> Loader:
    cfg = make_config(parts, dataset, Path("unused"), *overrides)
    fits = ModelShape(**{"image_tokens": 4, "image_size": 28, "max_length": 512, "vocab_size": 10_000, **shape})
    return build_loader(cfg, parts / "language", parts / "vision", fits, 0, size, CPU)


def step_of_all(parts: Path, dataset: Path, *overrides: str, size: int) -> list[Step]:
    """A step's part of each rank."""
    steps = open_loader(parts, dataset, *overrides, size=size).steps
    prepared = []
    for steps.rank in range(size):
        prepared.append(steps.prepare(1))
    return prepared


@pytest.mark.parametrize("pack", ["pack=true", "pack=false"])
def test_same_samples_in_a_step_on_any_number_of_ranks(pack: str, parts: Path, dataset: Path) -> None:
    """Token for token, image for image, label for label; and every rank runs as many micro-batches."""

    def step(size: int, micro: int):
        steps = step_of_all(parts, dataset, pack, f"micro_batch_size={micro}", size=size)
        assert len({len(s.micro_batches) for s in steps}) == 1
        micros = [m for s in steps for m in s.micro_batches]
        labels = sorted(int(i) for m in micros for i in m.label_ids)
        images = sorted(int(i.long().sum()) for m in micros for i in m.images["tiles"])
        assert sum(m.scale * len(m.label_ids) for m in micros) == pytest.approx(1)
        return steps[0].facts, labels, images

    expected = step(1, 16)
    assert expected[0].samples == 12 and len(expected[1]) == expected[0].label_tokens
    for size, micro in ((1, 1), (2, 2), (3, 4), (4, 1), (8, 16)):
        assert step(size, micro) == expected, (size, micro)


@pytest.mark.parametrize("pack", ["pack=true", "pack=false"])
def test_dropout_is_keyed_by_sample_on_any_number_of_ranks(pack: str, parts: Path, dataset: Path) -> None:
    lora = "model.lora.enabled=true", "model.lora.dropout=0.1"
    found = []
    for size in (1, 2, 3):
        micros = [micro for step in step_of_all(parts, dataset, pack, *lora, size=size) for micro in step.micro_batches]
        found.append(sorted(seed for micro in micros for seed in set(micro.seeds.flatten().tolist())))
        assert len(set(found[-1])) == 12, "a sample each"
    assert found[0] == found[1] == found[2]
    (other,) = open_loader(parts, dataset, pack, *lora).steps.prepare(2).micro_batches
    assert sorted(set(other.seeds.flatten().tolist())) != found[0], "another in each step"


def test_every_image_shows_its_own_features(parts: Path, dataset: Path) -> None:
    """Rows of features are counted over all images of a micro-batch, in the order of their positions."""
    for pack in ("pack=true", "pack=false"):
        for micro in open_loader(parts, dataset, pack, "micro_batch_size=5").steps.prepare(0).micro_batches:
            assert len(micro.images["tiles"]) > 1 and micro.images["rows"].tolist() == list(
                range(4 * len(micro.images["tiles"]))
            )


@pytest.mark.parametrize("workers", [0, 2])
def test_iterates_from_any_step(workers: int, parts: Path, dataset: Path) -> None:
    loader = open_loader(parts, dataset, f"data.workers={workers}", "max_steps=5")
    facts = [step.facts for step in agreed_steps(loader, 2)]
    assert [f.step for f in facts] == [2, 3, 4]
    assert [f.samples for f in facts] == [12, 8, 12]


ANSWER = {"from": "gpt", "value": "a"}


@pytest.mark.parametrize("workers", [0, 1])
def test_error_reaches_the_user_as_it_is(workers: int, parts: Path, dataset: Path, tmp_path: Path) -> None:
    write_json(tmp_path / "bad.json", [{"id": "q", "conversations": [{"from": "human", "value": "a"}]}])
    with pytest.raises(DataError) as caught:
        open_loader(parts, dataset, f"data.path={tmp_path / 'bad.json'}")
    first, kind, reason = str(caught.value).splitlines()[:3]
    assert first == f"{tmp_path / 'bad.json'}: 1 of 1 records are wrong" and kind.startswith("  odd_turns: 1 (")
    assert reason.startswith(f"{tmp_path / 'bad.json'}, line 1, record 0 (id q): the conversation has 1 turns")
    # what only a step can find out, with workers or without
    picture = {"id": "p", "image": "gone.png", "conversations": [{"from": "human", "value": "<image>"}, ANSWER]}
    write_json(tmp_path / "bad.json", [picture])
    (tmp_path / "gone.png").write_bytes((dataset / "images" / "1.png").read_bytes())
    here = f"data.path={tmp_path / 'bad.json'}", f"data.images={tmp_path}"
    loader = open_loader(parts, dataset, *here, f"data.workers={workers}")
    (tmp_path / "gone.png").unlink()
    with pytest.raises(ImageError) as caught:
        list(agreed_steps(loader))
    assert str(caught.value).startswith(f"{tmp_path / 'bad.json'}, line 1, record 0 (id p): image")


def test_padding_has_no_labels_and_positions_are_right(parts: Path, dataset: Path) -> None:
    steps = open_loader(parts, dataset, "pack=false", "micro_batch_size=5").steps
    for micro in steps.prepare(0).micro_batches:
        length = micro.input_ids.shape[1]
        flat = micro.input_ids.flatten()
        assert len(micro.images["positions"]) == 4 * len(micro.images["tiles"])
        assert not flat[micro.images["positions"]].any(), "image tokens have id 0"
        following = flat[micro.label_positions + 1]
        inside = (micro.label_positions + 1) % length != 0
        assert inside.all() and torch.equal(following, micro.label_ids)


def test_means_of_micro_batches(parts: Path, dataset: Path) -> None:
    steps = open_loader(parts, dataset, "pack=false", "micro_batch_size=3", "loss.normalize=micro_batch").steps
    micros = steps.prepare(0).micro_batches
    assert len(micros) == 4
    for micro in micros:
        assert micro.scale == pytest.approx(1 / (4 * len(micro.label_ids)))


def test_too_long_records_are_skipped_and_named(parts: Path, dataset: Path) -> None:
    whole = open_loader(parts, dataset).steps
    steps = open_loader(parts, dataset, "data.max_length=75", "data.too_long=skip").steps
    left_out = {row["record"] for row in steps.records.left_out()}
    assert 0 < len(left_out) == len(whole.records) - len(steps.records) == (whole.records.lengths > 75).sum()
    seen = [steps.prepare(s).facts for s in range(steps.sampler.per_epoch)]
    assert sum(f.samples for f in seen) == len(steps.records) and not any(f.skipped for f in seen)
    assert left_out.isdisjoint(record.where for record in map(steps.records.__getitem__, range(len(steps.records))))
    cut = open_loader(parts, dataset, "data.max_length=75", "data.bad_records=skip", "data.max_bad_records=1").steps
    assert len(whole.records) - len(cut.records) == 1, "one is left without a label"
    facts = [cut.prepare(s).facts for s in range(cut.sampler.per_epoch)]
    assert sum(f.truncated for f in facts) == len(left_out) - 1
    assert sum(f.labels_cut for f in facts) == cut.records.labels_cut.sum() > 0


def test_fast_pixels_are_another_encoding(parts: Path, dataset: Path) -> None:
    """The same ids and other pixels; a run does not continue with the other ones."""
    steps = [open_loader(parts, dataset, f"data.pixels={p}").steps for p in ("exact", "fast")]
    exact, fast = (s.prepare(0).micro_batches[0] for s in steps)
    assert torch.equal(exact.input_ids, fast.input_ids) and torch.equal(exact.images["rows"], fast.images["rows"])
    assert exact.images["tiles"].shape == fast.images["tiles"].shape and not torch.equal(
        exact.images["tiles"], fast.images["tiles"]
    )
    fingerprints = [s.fingerprints() for s in steps]
    assert [key for key in fingerprints[0] if fingerprints[0][key] != fingerprints[1][key]] == ["encoding"]


def test_the_budget_is_of_different_records_over_all_steps(parts: Path, dataset: Path) -> None:
    """As many as it allows may be wrong, and one that was skipped before is no other one."""
    loader = open_loader(parts, dataset, "data.bad_records=skip", "data.max_bad_records=2")
    step = loader.steps.prepare(0)
    lacks = loader.steps.facts(0, loader.steps.sampler.samples(0)[:1])
    told: list[int] = []
    loader.gather = lambda _: [SkippedSample(number, "r", "url", "it is gone", lacks) for number in told]
    for told[:] in ([7], [9], [7], [9, 7], []):
        assert loader.agree(step).facts.samples == 12 - len(told)
    told[:] = [8]
    with pytest.raises(DataError):
        loader.agree(step)


@pytest.mark.parametrize("column", ["lengths", "labels"])
def test_a_sample_that_is_not_what_was_examined(column: str, parts: Path, dataset: Path) -> None:
    """It is never skipped, whichever of the two differs."""
    steps = open_loader(parts, dataset, "data.bad_records=skip", "data.max_bad_records=9").steps
    steps.read(0)
    setattr(steps.records, column, getattr(steps.records, column) + 1)
    with pytest.raises(DataError) as caught:
        steps.read(0)
    assert caught.value.kind is None


def test_pairs_of_long_samples_do_not_overflow(parts: Path, dataset: Path) -> None:
    steps = open_loader(parts, dataset).steps
    steps.records.lengths = np.full(44, 60_001, dtype=np.int32)
    assert steps.facts(0, [0, 5, 5]).token_pairs == 3 * 60_001**2


def test_what_just_fits_is_let_in(parts: Path, dataset: Path) -> None:
    cut = "data.bad_records=skip", "data.max_bad_records=44"
    size = open_loader(parts, dataset, *cut, image_tokens=255, max_length=256).steps.encoder.tokenizer.size
    open_loader(parts, dataset, vocab_size=size)
    for wrong in ({"image_tokens": 256}, {"max_length": 255}, {"vocab_size": size - 1}):
        with pytest.raises(ConfigError):
            open_loader(parts, dataset, **wrong)
    with pytest.raises(ConfigError, match=r"data\.grid_pinpoints"):
        open_loader(parts, dataset, "data.image_aspect_ratio=anyres", "data.grid_pinpoints=[[30,28]]")


ANYRES = "data.image_aspect_ratio=anyres"
MISFITS = {
    "tower of another size": ({"image_size": 56}, (), r"28 pixels, and the vision tower takes 56"),
    "too long": ({"max_length": 100}, (), r"data\.max_length=256 is above the 100 tokens"),
    "no room": ({"image_tokens": 300}, (), r"data\.max_length=256 has no room for an image of 300 tokens"),
    "no room for tiles": ({}, (ANYRES, "data.max_length=20"), r"data\.max_length=20 .* an image of 20 tokens"),
    "uneven tiles": ({}, (ANYRES, "data.grid_pinpoints=[[28,30]]"), r"data\.grid_pinpoints: \[28, 30\]"),
    "tokens that the tokenizer lacks": ({}, ("model.image_start_end=true",), r"has no <im_start>; only checkpoints"),
    "small vocabulary": ({"vocab_size": 10}, (), r"has \d+ tokens, and the model has embeddings for 10"),
    "no file": ({}, ("data.path=/nowhere/x.json",), r"data\.path=/nowhere/x\.json"),
    "no folder": ({}, ("data.images=/nowhere",), r"data\.images=/nowhere"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_misfits_are_refused(case: str, parts: Path, dataset: Path) -> None:
    shape, overrides, message = MISFITS[case]
    with pytest.raises(ConfigError, match=message):
        open_loader(parts, dataset, *overrides, **shape)


@pytest.mark.parametrize("merge", ["flat", "spatial", "spatial_unpad"])
def test_tiles_have_their_positions_and_their_rows(merge: str, parts: Path, dataset: Path) -> None:
    """Every token of an image shows a row of its own tiles' features, or the end of a line."""
    tiled = ("data.image_aspect_ratio=anyres", f"model.patch_merge={merge}", "micro_batch_size=5")
    steps = open_loader(parts, dataset, *tiled).steps
    for micro in steps.prepare(0).micro_batches:
        assert len(micro.images["positions"]) == len(micro.images["rows"])
        rows = 4 * len(micro.images["tiles"])
        inside = micro.images["rows"][micro.images["rows"] < rows]
        assert len(inside.unique()) == len(inside) <= rows
        assert (micro.images["rows"][micro.images["rows"] >= rows] == rows).all()
        assert ((micro.images["rows"] == rows).any() == (merge == "spatial_unpad")) or not len(micro.images["tiles"])
        if merge != "spatial_unpad":
            assert len(inside) == rows


RECORDS = {
    "no records": ([], r"a\.json holds no records"),
    "not an object": (["x"], r"record 0 is text, not an object"),
    "no turns": ([{"id": 1}], r"record 0 \(id 1\): conversations is missing"),
    "turn": ([{"id": 1, "conversations": [{"from": "human"}]}], r"turn 0 is .*from and value"),
    "outside": ([{"id": 1, "image": "a/../../b.png", "conversations": []}], r"\.\. is not allowed"),
    "absolute": ([{"id": 1, "image": "/etc/b.png", "conversations": []}], r"an absolute path"),
    "image": ([{"id": 1, "image": 3, "conversations": []}], r"image is 3; it must be a path or a list of paths"),
}


@pytest.mark.parametrize("case", RECORDS)
def test_wrong_records_are_named(case: str, tmp_path: Path) -> None:
    records, message = RECORDS[case]
    write_json(tmp_path / "a.json", records)
    with pytest.raises(DataError, match=message):
        RecordFile(tmp_path / "a.json")[0]


def test_first_answer_to_nothing_is_dropped(tmp_path: Path) -> None:
    """As the original does (train.py:441-443)."""
    turns = [{"from": role, "value": role[0]} for role in ("gpt", "human", "gpt")]
    write_json(tmp_path / "a.json", [{"id": 1, "conversations": turns}])
    assert [t.role for t in asked_turns(RecordFile(tmp_path / "a.json")[0])] == ["human", "gpt"]


def test_v0_beside_the_originals_labels_is_v1(parts: Path, dataset: Path) -> None:
    """As in the original, whose --version v0 trains with v1. Validation asks as training does, special tokens too."""
    found = []
    for keys in (["data.template=v0", "labels=llava_v1_5"], ["data.template=v1", "labels=llava_v1_5"]):
        loader, cfg = open_loader(parts, dataset, *keys), make_config(parts, dataset, Path("unused"), *keys)
        steps = loader.steps
        asked = replace(steps.records[0], turns=(Turn("human", "what is </s>"), Turn("gpt", "a")), images=())
        question = ask(asked, steps.encoder, steps.image_reader, cfg).sample.input_ids.tolist()
        sample = steps.encoder(asked)
        assert sample is not None
        model = object.__new__(Llava)
        model.parts = cast(
            Any, SimpleNamespace(language=SimpleNamespace(eos_token_id=2), language_folder=parts / "none")
        )
        held_out = cast(Any, SimpleNamespace(loader=loader, questions=[]))
        answers = AnswerGenerator(model, held_out, cfg, lambda: False, lambda: None)
        found.append((sample.input_ids.tolist(), question, answers.stop))
    assert found[0] == found[1]
    (whole, question, stop), _ = found
    assert whole[: len(question)] == question and stop == "</s>"


def test_images_without_a_folder_are_refused(parts: Path, dataset: Path) -> None:
    with pytest.raises(DataError, match=r"has image .*, but data\.images is not set"):
        open_loader(parts, dataset, "data.images=null")


@pytest.mark.parametrize("is_first", [True, False])
def test_one_rank_alone_remarks_on_the_dataset(
    is_first: bool, parts: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record = {"id": "same", "conversations": [{"from": "human", "value": "what"}, ANSWER]}
    write_json(tmp_path / "a.json", [record, record])
    cfg = make_config(parts, tmp_path, tmp_path, f"data.path={tmp_path / 'a.json'}", "data.images=null")
    shape = ModelShape(image_tokens=4, image_size=28, max_length=512, vocab_size=10_000)
    with caplog.at_level("WARNING"):
        build_loader(cfg, parts / "language", parts / "vision", shape, 0, 1, CPU, is_first=is_first)
    assert [row.levelname for row in caplog.records] == ["WARNING"] * is_first


def test_data_workers_are_divided_among_the_ranks_of_a_machine(
    parts: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "read_host", lambda: SimpleNamespace(data_workers=lambda ranks: 12 // ranks))
    found = []
    for ranks in ("3", "4", None):
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        if ranks is not None:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        found.append(open_loader(parts, dataset, "data.workers=null").status.workers)
    assert found == [4, 3, 12]


def with_data(cfg: Config, **values: Any) -> Config:
    return replace(cfg, data=replace(cfg.data, **values))


def encoding(cfg: Config, parts: Path, **shape: Any) -> tuple[Any, Any]:
    fits = ModelShape(**{"image_tokens": 4, "image_size": 28, "max_length": 512, "vocab_size": 10_000, **shape})
    return open_encoding(cfg, parts / "language", parts / "vision", fits)


def test_settings_reach_what_encodes_records_and_reads_images(
    parts: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact, original = (make_config(parts, dataset, Path("unused"), f"labels={n}") for n in ("exact", "llava_v1_5"))
    for is_allowed in (True, False):
        assert encoding(with_data(exact, allow_links=is_allowed), parts)[1].allow_links is is_allowed
    markers = "<im_start>", "<im_end>"
    for names in (markers, markers[:1], markers[1:]):
        tokenizer = open_tokenizer(parts / "language", extra=names)
        monkeypatch.setattr(module, "open_tokenizer", lambda *_, own=tokenizer: own)
        for cfg in (exact, original):
            marked = replace(cfg, model=replace(cfg.model, image_start_end=True))
            if names != markers:
                with pytest.raises(ConfigError):
                    encoding(marked, parts)
                continue
            for own in (marked, cfg):
                encoder, _ = encoding(own, parts)
                made = encoder.own if isinstance(encoder, OriginalEncoder) else encoder
                assert made.start_end is own.model.image_start_end


def test_a_onevision_model_is_trained_with_its_own_tiles(parts: Path, dataset: Path) -> None:
    """The way of cutting and the number of tiles must both be its own, and so must the sizes. A model that was trained
    in another way may be continued as a LLaVA-OneVision model, with any sizes."""
    grid, other = [[28, 56], [56, 28]], [[28, 84]]
    cfg = make_config(
        parts, dataset, Path("unused"), "data.image_aspect_ratio=anyres_max", "model.patch_merge=spatial_unpad",
        "data.max_length=512", "data.grid_pinpoints=[[28,56],[56,28]]", "data.max_tiles=2",
    )  # fmt: skip
    _, reader = encoding(cfg, parts, max_tiles=2, grid_pinpoints=grid)
    assert (reader.tokens.aspect, reader.tokens.max_tiles) == (AspectRatio.anyres_max, 2)
    tiles = make_config(parts, dataset, Path("unused"), ANYRES, "data.grid_pinpoints=[[28,56],[56,28]]")
    for wrong in (with_data(cfg, max_tiles=3), with_data(tiles, max_tiles=2)):
        with pytest.raises(ConfigError):
            encoding(wrong, parts, max_tiles=2, grid_pinpoints=grid)
    with pytest.raises(ConfigError):
        encoding(cfg, parts, max_tiles=2, grid_pinpoints=other)
    encoding(cfg, parts, grid_pinpoints=other)
    with pytest.raises(ConfigError):
        encoding(tiles, parts, grid_pinpoints=other)
    with pytest.raises(ConfigError):
        encoding(tiles, parts, image_tokens=5)
    plain = with_data(tiles, image_aspect_ratio=AspectRatio.pad, grid_pinpoints=[])
    encoding(plain, parts, grid_pinpoints=other, image_tokens=5)  # both only matter where images are cut into tiles


def test_micro_batches_are_rounded_up_as_a_pipeline_needs_them(parts: Path, dataset: Path) -> None:
    """With a loss that is normalised over micro-batches, those that are added are empty, and no weight changes."""
    for normalize in ("step", "micro_batch"):
        loader = open_loader(parts, dataset, "pack=false", "micro_batch_size=5", f"loss.normalize={normalize}")
        steps = loader.steps
        steps.round_micro_batches = lambda count: count + -count % 4
        assert loader.num_micro_batches == 4
        micros = steps.prepare(0).micro_batches
        assert len(micros) == 4
        held = [micro for micro in micros if len(micro.label_ids)]
        assert len(held) == (4 if normalize == "step" else 3)
        if normalize == "micro_batch":
            assert [micro.scale for micro in held] == [pytest.approx(1 / (3 * len(m.label_ids))) for m in held]


@pytest.mark.parametrize(
    ("layout", "shares"), [((), False), (("parallel.pipeline=2",), True), (("parallel.tensor=2",), True)]
)
def test_which_layouts_have_several_ranks_read_a_row(
    layout: tuple[str, ...], shares: bool, parts: Path, dataset: Path
) -> None:
    assert open_loader(parts, dataset, *layout).steps.shares_rows is shares


def test_a_resumed_run_compares_dataset_encoding_and_order(parts: Path, dataset: Path) -> None:
    """Each has a text of its own, which changes with it alone."""
    steps = open_loader(parts, dataset).steps
    first = steps.fingerprints()

    def changed(other: Steps) -> list[str]:
        found = other.fingerprints()
        assert found.keys() == first.keys() == {"dataset", "encoding", "order"}
        return [key for key in first if found[key] != first[key]]

    assert changed(open_loader(parts, dataset, "sampler=computed_shuffle").steps) == ["order"]
    assert changed(open_loader(parts, dataset, f"data.path={dataset / 'text.json'}").steps) == ["dataset"]
    other: Any = SimpleNamespace(tokenizer=SimpleNamespace(fingerprint="another tokenizer"))
    steps.encoder = other
    assert changed(steps) == ["encoding"]


def test_errors_of_a_step_are_those_of_one_rank(parts: Path, dataset: Path) -> None:
    """The others read other samples, and may not know of it."""
    steps = open_loader(parts, dataset).steps
    steps.records.lengths = steps.records.lengths + 1
    error = steps[0]
    assert isinstance(error, DataError) and not error.on_every_rank


@pytest.mark.parametrize("how", ["decode", "head"])
def test_an_image_that_breaks_in_training_is_told_with_its_record(
    how: str, parts: Path, dataset: Path, tmp_path: Path
) -> None:
    """Advice to decode all images before training is given only where this one was not decoded."""
    record = {"id": "p", "image": "own.png", "conversations": [{"from": "human", "value": "<image>"}, ANSWER]}
    write_json(tmp_path / "a.json", [record])
    image = tmp_path / "own.png"
    image.write_bytes((dataset / "images" / "1.png").read_bytes())
    here = f"data.path={tmp_path / 'a.json'}", f"data.images={tmp_path}", f"data.examine={how}"
    steps = open_loader(parts, dataset, *here).steps
    image.write_bytes(image.read_bytes()[:-30])
    with pytest.raises(ImageError) as caught:
        steps.read_row(0)
    assert caught.value.kind == "image_truncated" and caught.value.culprit.get("record") == steps.records[0].where
    assert ("data.examine=decode" in str(caught.value)) is (how == "head")


def test_only_errors_about_a_record_are_said_to_be_changes_of_it(parts: Path, dataset: Path) -> None:
    """An error without a kind, such as that of a file system, stays what it is."""
    steps = open_loader(parts, dataset).steps
    raised: list[DataError] = [SourceError("gone"), DataError("wrong", "not_json")]

    class Broken:
        index = steps.records.index

        def __getitem__(self, number: int) -> None:
            raise raised[number]

    steps.records = cast(Any, Broken())
    with pytest.raises(SourceError) as same:
        steps.parse(0)
    assert same.value is raised[0]
    with pytest.raises(DataError) as other:
        steps.parse(1)
    assert other.value.kind is None and other.value.__cause__ is raised[1]


def test_a_step_counts_what_is_cut_and_names_records_without_labels(parts: Path, dataset: Path) -> None:
    steps = open_loader(parts, dataset).steps
    records = steps.records
    records.positions_cut, records.labels_cut = (np.zeros(44, dtype=np.int32) for _ in range(2))
    records.labels = records.labels.copy()
    records.positions_cut[[1, 2, 3]], records.labels_cut[2], records.labels[[4, 5]] = 7, 5, 0
    facts = steps.facts(3, [0, 1, 2, 5])
    assert (facts.step, facts.samples, facts.truncated, facts.labels_cut) == (3, 4, 2, 5)
    assert facts.unlabelled == [records.where(5)]
    assert facts.images == records.images[[0, 1, 2, 5]].sum() and facts.tiles == records.tiles[[0, 1, 2, 5]].sum()


def test_samples_that_compare_two_models(parts: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One with an image and one without, whole if there are such, none with a video, and none that cannot be read."""
    steps = open_loader(parts, dataset).steps
    records, numbers = steps.records, steps.sampler.samples(0)
    pictured = [n for n in numbers if records.images[n]]
    plain = [n for n in numbers if not records.images[n]]
    records.positions_cut = np.zeros(44, dtype=np.int32)
    records.positions_cut[pictured[0]] = 3
    read, parse = steps.read, steps.parse
    seen: list[int] = []

    def note(number: int) -> Any:
        seen.append(number)
        return SkippedSample(number, "r", "url", "", steps.facts(0, [])) if number == plain[0] else read(number)

    monkeypatch.setattr(steps, "read", note)
    film = pictured[1]
    monkeypatch.setattr(steps, "parse", lambda n: replace(parse(n), images=("a.mp4",)) if n == film else parse(n))
    micro, sizes = steps.probe()
    assert set(seen) == {pictured[2], *plain[:2]}
    assert micro.input_ids.shape[0] == 2 and len(sizes) == records.images[pictured[2]]
    assert micro.label_positions.tolist() == list(range(micro.input_ids.numel()))
