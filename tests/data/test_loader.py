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

from llava_fsdp.data.batching.batch import SkippedSample, Step
from llava_fsdp.data.loader import Loader, ModelShape, build_loader
from llava_fsdp.data.records.record import Turn
from llava_fsdp.data.records.record_file import RecordFile
from llava_fsdp.data.text.conversation import asked_turns
from llava_fsdp.data.validation_prompts import ask
from llava_fsdp.model.llava import Llava
from llava_fsdp.runtime.errors import ConfigError, DataError, ImageError
from llava_fsdp.train.validation_answers import AnswerGenerator


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
        images = sorted(int(i.long().sum()) for m in micros for i in m.images)
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
            assert len(micro.images) > 1 and micro.image_rows.tolist() == list(range(4 * len(micro.images)))


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
        assert len(micro.image_positions) == 4 * len(micro.images)
        assert not flat[micro.image_positions].any(), "image tokens have id 0"
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
    assert torch.equal(exact.input_ids, fast.input_ids) and torch.equal(exact.image_rows, fast.image_rows)
    assert exact.images.shape == fast.images.shape and not torch.equal(exact.images, fast.images)
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
    assert steps.facts(0, [0, 5, 5]).pairs == 3 * 60_001**2


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
        assert len(micro.image_positions) == len(micro.image_rows)
        rows = 4 * len(micro.images)
        inside = micro.image_rows[micro.image_rows < rows]
        assert len(inside.unique()) == len(inside) <= rows
        assert (micro.image_rows[micro.image_rows >= rows] == rows).all()
        assert ((micro.image_rows == rows).any() == (merge == "spatial_unpad")) or not len(micro.images)
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
        model.parts = cast(Any, SimpleNamespace(language=SimpleNamespace(eos_token_id=2)))
        held_out = cast(Any, SimpleNamespace(loader=loader, questions=[]))
        answers = AnswerGenerator(model, held_out, cfg, lambda: False, lambda: None)
        found.append((sample.input_ids.tolist(), question, answers.stop))
    assert found[0] == found[1]
    (whole, question, stop), _ = found
    assert whole[: len(question)] == question and stop == "</s>"


def test_images_without_a_folder_are_refused(parts: Path, dataset: Path) -> None:
    with pytest.raises(DataError, match=r"has image .*, but data\.images is not set"):
        open_loader(parts, dataset, "data.images=null")
