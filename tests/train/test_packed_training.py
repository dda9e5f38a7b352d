"""Packed rows are the same training: as padded ones, on any number of ranks, and no sample sees another."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import CPU, RankPool
from packed import Noted, build, gradients, write_every_kind
from reference import EXPORTED, TOLERANCE, ZERO_GRADIENT, difference, outcome, run_ranks, vocabulary
from small import make_config

from llava_fsdp.data.batching.batch import MicroBatch
from llava_fsdp.data.batching.collate import boundaries, packed
from llava_fsdp.data.text.sample import Sample
from llava_fsdp.data.text.tokens.constants import IGNORE
from llava_fsdp.model.llava.llava import build_llava
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.train import main as train
from llava_fsdp.train.setup.build_state import open_data
from llava_fsdp.train.state import TrainState

SAMPLES = 16
STEPS = 9
ROOMS = [1200, 500, 260]
"""tokens_per_micro_batch: a step is one micro-batch on a rank, or several"""
COMMON = ["data.max_length=256", f"global_batch_size={SAMPLES}"]


@pytest.fixture(scope="module")
def kinds(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_every_kind(dataset, tmp_path_factory.mktemp("kinds"))


TRAINED = ["[projector]", "[projector,language]", "[projector,language,vision]"]
QUICK = list(zip(ROOMS, TRAINED, strict=True))


@pytest.mark.parametrize(
    ("room", "train_parts"),
    [own if own in QUICK else pytest.param(*own, marks=pytest.mark.slow) for own in itertools.product(ROOMS, TRAINED)],
)
def test_loss_and_every_gradient_are_those_of_padded_rows(
    room: int, train_parts: str, parts: Path, kinds: Path, tmp_path: Path
) -> None:
    found = []
    for overrides in (["pack=false"], [f"tokens_per_micro_batch={room}"]):
        cfg = make_config(parts, kinds, tmp_path, *COMMON, f"model.train={train_parts}", *overrides)
        state = build(cfg)
        step = state.loader.steps.prepare(0)
        total = 0.0
        for micro in step.micro_batches:
            assert bool(micro.lengths) == cfg.packs
            assert not cfg.packs or micro.input_ids.numel() == sum(micro.lengths) <= room, "padding, or too much"
            loss = micro.scale * state.model(**state.loader.to_device(micro).inputs)
            loss.backward()
            total += float(loss.detach())
        found.append((total, gradients(state), step.facts))
    (loss, expected, facts), (packed_loss, got, packed_facts) = found
    assert facts == packed_facts and facts.images > facts.samples / 2
    assert packed_loss == pytest.approx(loss, rel=TOLERANCE)
    assert got.keys() == expected.keys() and got
    for name, gradient in expected.items():
        if not name.endswith(ZERO_GRADIENT):
            assert (got[name] - gradient).norm() <= TOLERANCE * gradient.norm(), name


CUTS = list(itertools.product(((1, "zero3"), (2, "zero2"), (4, "zero3")), ROOMS))


@pytest.mark.ranks
@pytest.mark.slow
def test_trajectory_is_that_of_padded_rows(
    parts: Path, kinds: Path, pools: dict[int, RankPool], tmp_path: Path
) -> None:
    """On 1, 2 and 4 ranks in three sizes of rows; every third step has two samples."""
    common = [*COMMON, f"max_steps={STEPS}", *EXPORTED]
    cfg = make_config(parts, kinds, tmp_path / "padded", *common, "pack=false", "micro_batch_size=4")
    train.train(cfg)
    expected = outcome(tmp_path / "padded")
    assert min(expected.losses) < 0.95 * expected.losses[0], "nothing was learnt"
    for (size, sharding), room in CUTS:
        folder = tmp_path / f"{size}-{room}"
        overrides = (
            f"sharding={sharding}",
            f"tokens_per_micro_batch={room}",
            f"activation_checkpointing={'full' if size > 1 else 'none'}",
        )
        cfg = make_config(parts, kinds, folder, *common, *overrides)
        if size == 1:
            train.train(cfg)
        else:
            pools[size].run(run_ranks, cfg, timeout=120)
        got = outcome(folder)
        assert len(got.losses) == STEPS
        assert got.losses == pytest.approx(expected.losses, rel=TOLERANCE), folder.name
        assert difference(got.weights, expected.weights, vocabulary(cfg)) < TOLERANCE, folder.name


def test_a_step_has_the_same_samples_however_it_is_cut(parts: Path, kinds: Path, tmp_path: Path) -> None:
    cfg = make_config(parts, kinds, tmp_path)
    model = build_llava(find_parts(cfg.model), cfg.model, torch.float32)

    def ids(size: int, *overrides: str) -> list[list[str]]:
        """By step; one that is full, and one that has fewer samples than ranks."""
        cfg = make_config(parts, kinds, tmp_path, *COMMON, *overrides)
        steps = open_data(cfg, World(0, size, 0, size, CPU), model).steps
        noted, found = Noted(steps), []
        for step in (0, 2):
            rows: list[list[list[str]]] = []
            for rank in range(size):
                steps.rank, noted.ids = rank, []
                steps.prepare(step)
                rows.append(noted.ids)
            assert len({len(own) for own in rows}) == 1, "ranks run different numbers of micro-batches"
            found.append(sorted(i for own in rows for row in own for i in row))
        return found

    expected = ids(1, "pack=false", "micro_batch_size=4")
    assert [len(step) for step in expected] == [SAMPLES, 2]
    for size, room in itertools.product((1, 2, 4), ROOMS):
        assert ids(size, f"tokens_per_micro_batch={room}") == expected, (size, room)


def one_row(state: TrainState) -> MicroBatch:
    """All samples of the first step in one row."""
    (micro,) = state.loader.steps.prepare(0).micro_batches
    assert len(micro.lengths) == SAMPLES
    return state.loader.to_device(micro)


def with_heads(parts: Path, key_value_heads: int, folder: Path) -> Path:
    shutil.copytree(parts, folder)
    path = folder / "language" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_key_value_heads": key_value_heads}))
    return folder


class Leak:
    """A packed row, what a model makes of every sample in it, and the row with one sample changed."""

    def __init__(self, state: TrainState, count: int):
        self.state = state
        whole = one_row(state)
        ends = list(itertools.accumulate(whole.lengths))[:count]
        self.bounds = list(itertools.pairwise([0, *ends]))
        shown = int((whole.images["positions"] < ends[-1]).sum())
        self.tiles = shown // 4
        self.row = replace(
            whole,
            input_ids=whole.input_ids[:, : ends[-1]],
            position_ids=whole.position_ids[:, : ends[-1]],
            cu_seqlens=whole.cu_seqlens[: count + 1],
            lengths=whole.lengths[:count],
            images=whole.images
            | {name: whole.images[name][:shown] for name in ("positions", "rows")}
            | {"tiles": whole.images["tiles"][: self.tiles]},
        )

    @torch.no_grad()
    def logits(self, row: MicroBatch) -> list[torch.Tensor]:
        """Of every sample, at all its positions."""
        everywhere = torch.arange(row.input_ids.numel())
        return [
            logits.clone()
            for logits in self.state.model(**replace(row, label_positions=everywhere).inputs, return_logits=True).split(
                row.lengths
            )
        ]

    def gradients_of(self, row: MicroBatch, sample: int) -> dict[str, torch.Tensor]:
        """Of the loss of one sample alone, at every position that has a next one."""
        begin, end = self.bounds[sample]
        positions = torch.arange(begin, end - 1)
        own = replace(row, label_positions=positions, label_ids=self.row.input_ids.flatten()[positions + 1])
        self.state.model(**own.inputs).backward()
        return gradients(self.state)

    def changes(self, sample: int) -> dict[str, MicroBatch]:
        """The row with something of one sample changed: each of its texts' tokens, and each of its images."""
        begin, end = self.bounds[sample]
        inside = (self.row.images["positions"] >= begin) & (self.row.images["positions"] < end)
        numbers = sorted({int(r) // 4 for r in self.row.images["rows"][inside]})
        text = [p for p in range(begin, end) if p not in set(self.row.images["positions"].tolist())]
        found = {}
        for name, places in {"first": text[:1], "last": text[-1:], "every": text}.items():
            ids = self.row.input_ids.clone()
            ids[0, places] = (ids[0, places] + 7) % 100 + 3
            found[f"{name} token"] = replace(self.row, input_ids=ids)
        for tile in numbers:
            tiles = self.row.images["tiles"].clone()
            tiles[tile] = tiles[tile].flip(-1) + 0.5
            found[f"image {tile}"] = replace(self.row, images=self.row.images | {"tiles": tiles})
        return found


def count_images(leak: Leak) -> list[int]:
    return [sum(name.startswith("image") for name in leak.changes(n)) for n in range(len(leak.bounds))]


def test_positions_begin_anew_with_every_sample() -> None:
    held = boundaries((3, 1, 4))
    assert held["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1, 2, 3]]
    assert held["cu_seqlens"].tolist() == [0, 3, 4, 8] and held["lengths"] == (3, 1, 4)


def test_no_position_predicts_the_token_of_another_sample() -> None:
    """Whatever is packed: each label is the next token of its own sample, and a sample's last position has none."""
    samples = []
    for first, length in ((10, 4), (20, 1), (30, 3)):
        ids = np.arange(first, first + length)
        samples.append(Sample(ids, ids, (), (), 0, 0))
    ids, labels = packed(samples)
    assert ids.tolist() == [[10, 11, 12, 13, 20, 30, 31, 32]]
    assert labels.tolist() == [[11, 12, 13, IGNORE, IGNORE, 31, 32, IGNORE]]


LEAKS = [
    pytest.param(6, "none", "[projector,language]", id="heads of their own", marks=pytest.mark.slow),
    pytest.param(3, "none", "[projector,language]", id="grouped heads", marks=pytest.mark.slow),
    pytest.param(
        1, "full", "[projector,language,vision]", id="one key head, recomputed, vision", marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize(("key_value_heads", "activation_checkpointing", "train_parts"), LEAKS)
def test_no_sample_sees_another(
    key_value_heads: int, activation_checkpointing: str, train_parts: str, parts: Path, kinds: Path, tmp_path: Path
) -> None:
    """Bit for bit: no change of one sample changes a logit or a gradient of another, wherever in the row they are."""
    parts = with_heads(parts, key_value_heads, tmp_path / "parts")
    overrides = [
        *COMMON,
        "tokens_per_micro_batch=4000",
        f"activation_checkpointing={activation_checkpointing}",
        f"model.train={train_parts}",
    ]
    leak = Leak(build(make_config(parts, kinds, tmp_path / "run", *overrides)), 5)
    assert leak.tiles >= 3 and min(count_images(leak)) == 0 and max(count_images(leak)) > 1
    logits = leak.logits(leak.row)
    own = [leak.gradients_of(leak.row, n) for n in range(len(leak.bounds))]
    images_seen = 0
    for changed in range(len(leak.bounds)):
        for name, row in leak.changes(changed).items():
            images_seen += name.startswith("image")
            for other, found in enumerate(leak.logits(row)):
                same = torch.equal(found, logits[other])
                assert same != (other == changed), f"{name} of {changed} in logits of {other}"
            for other in range(len(leak.bounds)) if "every" in name or "image" in name else ():
                found = leak.gradients_of(row, other)
                assert found.keys() == own[other].keys()
                same = all(torch.equal(found[n], own[other][n]) for n in found)
                assert same != (other == changed), f"{name} of {changed} in gradients of {other}"
    assert images_seen == leak.tiles
