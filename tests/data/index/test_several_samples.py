"""Records that give several samples, because the chat template writes earlier turns in another way: each sample is a
row of the index, and sampler, epochs, packing, the report and skipped records count exactly."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import CPU
from small import make_config
from test_build import FITS, open_again

from llava_fsdp.data.batching.sampler import open_sampler
from llava_fsdp.data.batching.step_dataset import Steps
from llava_fsdp.data.index import build as index_module
from llava_fsdp.data.index.statistics import make_report
from llava_fsdp.data.loader import build_loader
from llava_fsdp.data.problems import Kind
from llava_fsdp.data.text.tokens.constants import IGNORE

CODE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content and loop.last %}({{ m.reasoning_content }})"
    "{% endif %}{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""A template that shows the thought of the last answer alone."""


@pytest.fixture(scope="module")
def thinking(parts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("thinking") / "parts"
    shutil.copytree(parts, folder)
    (folder / "language" / "chat_template.jinja").write_text(CODE)
    return folder


def record(number: int, answers: int, **keys: Any) -> dict[str, Any]:
    """A record with an image, and with thoughts if it has several answers."""
    turns: list[dict[str, Any]] = []
    for place in range(answers):
        turns.append({"from": "human", "value": f"{'<image>' * (not place)}what {number} {place}?"})
        thought = {"reasoning_content": f"hm {place}"} if answers > 1 else {}
        turns.append({"from": "gpt", "value": f"it is {number} {place}", **thought})
    return {"id": f"r{number}", "image": ("0.png", "1.png")[number % 2], "conversations": turns, **keys}


COUNTS = [1, 3, 2, 1, 1, 4, 2, 1, 3]
BAD = 2
"""Number of the record whose image is missing."""


def config(parts: Path, dataset: Path, folder: Path, *words: str) -> Any:
    rows = [record(number, count) for number, count in enumerate(COUNTS)]
    images = sorted(path.name for path in (dataset / "images").iterdir() if path.is_file())
    for number, row in enumerate(rows):
        row["image"] = "none.png" if number == BAD else images[number % len(images)]
    path = folder / "a.json"
    path.write_text(json.dumps(rows))
    bad = "data.bad_records=skip", "data.max_bad_records=50%"
    keys = "data.template=chat_template", "data.thoughts=train", "global_batch_size=5", "micro_batch_size=2"
    return make_config(parts, dataset, folder, f"data.path={path}", *keys, *bad, *words)


def steps(cfg: Any, parts: Path, rank: int = 0, world_size: int = 1) -> Steps:
    return build_loader(cfg, parts / "language", parts / "vision", FITS, rank, world_size, CPU).steps


KEPT = [count for number, count in enumerate(COUNTS) if number != BAD]


def test_each_sample_is_a_row(thinking: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks of a few records; all samples of a record that is skipped are."""
    monkeypatch.setattr(index_module, "CHUNKS", dict.fromkeys(index_module.CHUNKS, 2))
    made = steps(config(thinking, dataset, tmp_path), thinking)
    records = made.records
    assert (len(records), records.num_records, records.num_wrong) == (sum(KEPT), len(KEPT), 1)
    assert records.source_counts == [sum(KEPT)] and records.counts[Kind.image_missing] == 1
    owners = [records.number_in_index(number) for number in range(len(records))]
    assert Counter(owners) == {n: count for n, count in enumerate(COUNTS) if n != BAD}
    seen = []
    for number, owner in enumerate(owners):
        sample, images = made.read_row(number)
        assert len(sample.input_ids) == records.lengths[number] and sample.num_labels == records.labels[number] > 0
        assert len(images) == 1 and records.pictures[number] == 1
        text = made.encoder.tokenizer.decode(sample.labels[sample.labels != IGNORE].tolist())
        place = owners[:number].count(owner)
        assert f"it is {owner} {place}" in text and records.is_first(number) is (place == 0)
        expected = None if COUNTS[owner] == 1 else (2 * place + 1, 2 * place + 1)
        assert records.turns(number) == expected
        seen.append((owner, place))
    assert seen == [(n, place) for n, count in enumerate(COUNTS) if n != BAD for place in range(count)]


def test_one_sample_a_record_needs_no_columns(thinking: Path, dataset: Path, tmp_path: Path) -> None:
    cfg = config(thinking, dataset, tmp_path, "data.answers=last")
    records = open_again(cfg, thinking)
    assert len(records) == records.num_records == len(KEPT) and records.index.first_sample is None
    names = {path.stem for path in records.index.encoded.glob("*.npy")}
    assert not names & {"samples", "first_turn", "last_turn", "first_row"}


@pytest.mark.parametrize("sampler", ["shuffle", "computed_shuffle"])
def test_an_epoch_has_each_sample_once_on_any_number_of_ranks(
    sampler: str, thinking: Path, dataset: Path, tmp_path: Path
) -> None:
    cfg = config(thinking, dataset, tmp_path, f"sampler={sampler}", "tokens_per_micro_batch=300")
    alone, pair = steps(cfg, thinking), [steps(cfg, thinking, rank, 2) for rank in range(2)]
    used: Counter[int] = Counter()
    for step in range(alone.sampler.per_epoch):
        numbers = alone.sampler.samples(step)
        used.update(numbers)
        for ranks, owner in ((1, alone), (2, pair[0])):
            given = owner.assignment(step, owner.sampler.samples(step))
            assert sorted(n for rank in given for micro in rank for n in micro) == sorted(numbers), ranks
        whole = alone[step]
        parts = [own[step] for own in pair]
        assert whole.facts.label_tokens == parts[0].facts.label_tokens == alone.records.labels[numbers].sum()
        labels = [sum(len(micro.label_ids) for micro in own.micro_batches) for own in (whole, *parts)]
        assert labels[0] == labels[1] + labels[2] == whole.facts.label_tokens
    assert used == dict.fromkeys(range(sum(KEPT)), 1)
    assert alone.fingerprints() == pair[1].fingerprints()


def test_sources_count_samples(thinking: Path, dataset: Path, tmp_path: Path) -> None:
    cfg = config(thinking, dataset, tmp_path)
    other = tmp_path / "b.json"
    other.write_text(json.dumps([record(9, 2) | {"image": None, "conversations": [
        {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}]))  # fmt: skip
    sources = [f"+data.sources.x.path={tmp_path / 'a.json'}", "+data.sources.x.epochs=2",
               f"+data.sources.y.path={other}", "+data.sources.y.epochs=3"]  # fmt: skip
    cfg = config(thinking, dataset, tmp_path, *sources, "data.path=null", f"data.index={tmp_path / 'two'}")
    records = open_again(cfg, thinking)
    assert records.source_counts == [sum(KEPT), 1]
    sampler: Any = open_sampler(records, cfg, 1)
    assert sampler.samples_per_epoch == 2 * sum(KEPT) + 3


def test_the_report_counts_records_and_samples(thinking: Path, dataset: Path, tmp_path: Path) -> None:
    cfg = config(thinking, dataset, tmp_path)
    records = open_again(cfg, thinking)
    report = make_report(records, cfg)
    assert (report["records"], report["kept"], report["samples"]) == (len(COUNTS), len(KEPT), sum(KEPT))
    ((source,), (file,)) = report["sources"], report["files"]
    assert (source["records"], source["left_out"], source["samples"]) == (len(COUNTS), 1, sum(KEPT)) and file["samples"]
    taught = source["taught"]
    assert taught["answers"] == taught["proven"] == sum(COUNTS), "also of the record whose image is missing"
    assert taught["split"] == sum(count > 1 for count in COUNTS)
    assert taught["thought"] + taught["text"] > records.labels.sum() and taught["thought"] and not taught["calls"]
    assert 0 < taught["repeated"] < records.lengths.sum() and source["tokens"] == records.lengths.sum()


def test_a_sample_that_is_cut_before_its_answer_is_left_out_alone(
    thinking: Path, dataset: Path, tmp_path: Path
) -> None:
    """The later samples of a long record lose their labels; the earlier ones stay."""
    whole = open_again(config(thinking, dataset, tmp_path), thinking)
    limit = int(np.sort(whole.lengths)[-2]) - 12
    cfg = config(thinking, dataset, tmp_path, f"data.max_length={limit}")
    records = open_again(cfg, thinking)
    assert 0 < len(records) < len(whole) and records.num_records == whole.num_records
    assert (records.labels > 0).all() and records.counts[Kind.no_labels] == 0
    assert records.labels.sum() + records.labels_cut.sum() == whole.labels.sum()


def test_the_fingerprint_knows_the_samples(thinking: Path, dataset: Path, tmp_path: Path) -> None:
    records = open_again(config(thinking, dataset, tmp_path), thinking)
    last = open_again(config(thinking, dataset, tmp_path, "data.answers=last"), thinking)
    assert records.fingerprint != last.fingerprint
