"""A mixture of Parquet, tar and JSON sources: every record once an epoch, as transformers reads it; one order and one
training on one rank, on two, and after a resume. On the first 4 blocks of each model."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from containers import write_container
from harness import CPU, RankPool
from packed import Noted
from real_parts import PRETRAINED, Theirs
from reference import TOLERANCE, open_steps, train_on, trained
from saves import interrupted
from small import make_config

from llava_fsdp.config import Config
from llava_fsdp.data.batching.tile_inputs import normalize
from llava_fsdp.data.text.tokens.constants import IGNORE, IMAGE_ID
from llava_fsdp.model.llava.llava import build_llava
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.train.setup.build_state import open_data

KINDS = {"questions": "parquet with images", "shapes": "tar", "colours": "json"}
"""Name of a source and kind of its files. pyarrow writes the Parquet file, and tarfile the tar, as WebDataset does."""
SAMPLES = 6
STEPS = 4


@pytest.fixture(scope="module")
def run(short: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Config]:
    folder = tmp_path_factory.mktemp("mixture")
    records = json.loads((dataset / "mixed.json").read_text())
    words = ["data.path=null", f"data.index={folder / 'index'}"]
    for number, (name, kind) in enumerate(KINDS.items()):
        write_container(kind, folder / name, records[number :: len(KINDS)], dataset / "images", files=2)
        words.append(f"++data.sources.{name}.path={folder / name}")
    words += [f"global_batch_size={SAMPLES}", "sharding=zero3", f"max_steps={STEPS}", "checkpoint.every=2"]

    def make(name: str, *values: str) -> Config:
        return make_config(short, dataset, folder / name, *PRETRAINED, *words, "checkpoint.keep=9", *values)

    return make


def names_of_an_epoch(cfg: Config, size: int) -> list[list[str]]:
    """The ids of the records of each step, of all ranks together, sorted."""
    model = build_llava(find_parts(cfg.model), cfg.model, torch.float32)
    steps = open_data(cfg, World(0, size, 0, size, CPU), model).steps
    noted, found = Noted(steps), []
    for step in range(-(-len(steps.records) // SAMPLES)):
        noted.ids = []
        for rank in range(size):
            steps.rank = rank
            steps.prepare(step)
        found.append(sorted(name for row in noted.ids for name in row))
    return found


def test_every_record_once_an_epoch(run: Callable[..., Config], theirs: dict[str, Theirs]) -> None:
    alone = names_of_an_epoch(run("none"), 1)
    assert Counter(name for step in alone for name in step) == Counter([*theirs])
    assert names_of_an_epoch(run("none"), 2) == alone


def test_every_source_is_read_as_transformers_reads_it(run: Callable[..., Config], theirs: dict[str, Theirs]) -> None:
    steps = open_steps(run("none"))
    table = torch.from_numpy(steps.image_reader.preprocessor.pixel_table())
    for number in range(len(steps.records)):
        sample, tiles = steps.read_row(number)
        expected = theirs[steps.records[number].id]
        ids, labels = torch.from_numpy(sample.input_ids), torch.from_numpy(sample.labels)
        assert torch.equal(ids[ids != IMAGE_ID], expected.ids[ids != IMAGE_ID]) and len(ids) == len(expected.ids)
        assert torch.equal(labels, expected.labels) and int((labels != IGNORE).sum()) > 0
        if expected.pixels is not None:
            pixels = normalize(torch.cat([torch.from_numpy(tile) for tile in tiles]), table)
            torch.testing.assert_close(pixels, expected.pixels, rtol=0, atol=1e-6)


def counts(folder: Path) -> list[list[float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [[row[key] for key in ("step", "samples", "tokens", "label_tokens", "images")] for row in rows]


@pytest.mark.ranks
def test_one_training_on_any_number_of_ranks_and_after_a_resume(
    run: Callable[..., Config], pools: dict[int, RankPool]
) -> None:
    """A run that ended after its second step and continues on one rank has the same bits; on two ranks the same losses,
    to the last digits."""
    whole = train_on(1, run("whole"), pools)
    expected = trained(whole)
    assert len(expected.losses) == STEPS and expected.losses[-1] < expected.losses[0]
    for name, size, begun in (("two", 2, False), ("resumed", 1, True), ("resumed-two", 2, True)):
        cfg = run(name)
        if begun:
            interrupted(whole, Path(cfg.output_dir), 2)
        got = trained(train_on(size, cfg, pools, timeout=550))
        assert counts(Path(cfg.output_dir)) == counts(whole), name
        if size == 1:
            assert got.losses == expected.losses
            assert all(torch.equal(got.weights[n], expected.weights[n]) for n in expected.weights)
        assert got.losses == pytest.approx(expected.losses, rel=TOLERANCE), name
