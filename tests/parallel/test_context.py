"""Training with context parallelism equals the plain loop: several ranks process each packed row together."""

import contextlib
import itertools
import json
import random
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import CPU, RankPool
from reference import (
    EXPORTED,
    TOLERANCE,
    Outcome,
    assert_near,
    difference,
    outcome,
    plain_outcomes,
    train_on,
    trained_weights,
    vocabulary,
)
from saves import interrupted
from small import Configure, make_config, with_heads
from test_adapters import EVERY_ROW, LORA
from tiers import slow_after
from transformers import LlamaConfig

from llava_fsdp.config import Config, ContextHow, ParallelConfig
from llava_fsdp.data.batching.context_cut import ContextCut
from llava_fsdp.data.batching.sampler import Sampler
from llava_fsdp.data.index.dataset import Records
from llava_fsdp.data.loader import Loader, ModelShape, build_loader
from llava_fsdp.data.validation_set import open_held_out
from llava_fsdp.model.packed_attention.attention import AttentionForm, Boundaries, Lengths, PackedRow, each_alone
from llava_fsdp.parallel.check_torch import check_torch
from llava_fsdp.parallel.context.context_attention import GatheredKeys, Ulysses, plan_context, row_chunks_of
from llava_fsdp.parallel.ranks.rank_layout import RankLayout
from llava_fsdp.runtime.errors import ConfigError

BATCH = "global_batch_size=16"
HYBRID = ("hybrid", "hybrid2")
STRATEGIES = ("zero0", "zero1", "zero2", "zero3", *HYBRID)
TOWER = "model.train=[projector,language,vision]"
VARIANTS = {"full": (), "tower": (TOWER,), "lora": (*LORA, "model.lora.dropout=0.1")}
VARIANTS |= {"blocks": ("model.train=[language:-2]",)}
CASES = [
    ("full", "zero3", 2, 2),
    *((variant, "zero2", 2, 2) for variant in ("lora", "tower", "blocks")),
    *(("full", strategy, 4, context) for strategy in STRATEGIES for context in (2, 4)),
    *((variant, strategy, 4, 2) for variant in ("lora", "tower") for strategy in ("zero3", "hybrid")),
]


@pytest.fixture(scope="module")
def model(parts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model with heads that four ranks can share."""
    return with_heads(parts, tmp_path_factory.mktemp("heads"), 4, 2)


@pytest.fixture(scope="module")
def reference(model: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    """The plain loop's outcome with a variant, of what trains; computed when it is first asked for."""
    return plain_outcomes(model, dataset, tmp_path_factory.mktemp("start"), (BATCH,), VARIANTS)


@pytest.mark.ranks
@pytest.mark.parametrize("how", slow_after(1, ["ulysses", "gather"]))
@pytest.mark.parametrize(("variant", "strategy", "size", "context"), slow_after(1, CASES))
def test_training_is_that_of_the_plain_loop(
    variant: str, strategy: str, size: int, context: int, how: str, reference: Callable[[str], Outcome], model: Path,
    dataset: Path, tmp_path: Path, pools: dict[int, RankPool],
) -> None:  # fmt: skip
    """Several rows a step on each group of ranks, with recomputation where the strategy's place is odd."""
    recompute = ("none", "full")[STRATEGIES.index(strategy) % 2]
    cfg = make_config(
        model, dataset, tmp_path, f"sharding={strategy}", BATCH, "pack=true",
        f"sharding.shard_size={2 if strategy in HYBRID else 'null'}", f"activation_checkpointing={recompute}",
        f"parallel.context={context}", f"parallel.context_how={how}", f"tokens_per_micro_batch={300 // context}",
        *VARIANTS[variant], *(EXPORTED if variant != "lora" else ()),
    )  # fmt: skip
    folder = train_on(size, cfg, pools)
    if variant == "lora":
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        got = Outcome([r["loss"] for r in rows], [r["grad_norm"] for r in rows], trained_weights(folder))
    else:
        got = outcome(folder)
    assert_near(got, reference(variant), EVERY_ROW if variant == "lora" else vocabulary(cfg), f"{strategy} {how}")


@pytest.mark.slow
@pytest.mark.ranks
def test_a_run_continues_with_any_number_of_ranks_a_row(
    model: Path, dataset: Path, tmp_path: Path, pools: dict[int, RankPool]
) -> None:
    """One rank a row, then two, then four, then one."""
    more = (BATCH, "pack=true", "max_steps=8", "checkpoint.every=2", "checkpoint.keep=9", *EXPORTED)
    whole = outcome(train_on(1, make_config(model, dataset, tmp_path / "whole", *more), pools))
    before = tmp_path / "whole"
    ways = {2: (2, 2, "zero3"), 4: (4, 4, "zero2"), 6: (2, 1, "zero1")}
    for step, (size, context, strategy) in ways.items():
        folder = tmp_path / f"{size}-{context}"
        interrupted(before, folder, step)
        tokens = f"tokens_per_micro_batch={300 // context}"
        own = f"sharding={strategy}", f"parallel.context={context}", tokens
        cfg = make_config(model, dataset, folder, *more, *own)
        got = outcome(train_on(size, cfg, pools))
        assert got.losses == pytest.approx(whole.losses, rel=TOLERANCE)
        assert difference(got.weights, whole.weights, vocabulary(cfg)) < TOLERANCE
        before = folder


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("how", ["ulysses", "gather"])
def test_validation_sources_and_broken_images_are_those_of_one_rank_per_row(
    how: str, model: Path, dataset: Path, tmp_path: Path, pools: dict[int, RankPool]
) -> None:
    """Two sources, validation with answers before and after, and an image whose pixels turn out to be broken."""
    shutil.copytree(dataset / "images", tmp_path / "images")
    broken = tmp_path / "images" / "1.png"
    content = broken.read_bytes()
    broken.write_bytes(content[:60] + bytes(len(content) - 60))  # its header is whole
    found = {}
    for context in (1, 2):
        cfg = make_config(
            model, dataset, tmp_path / f"{context}", BATCH, "pack=true", "sharding=zero2",
            f"parallel.context={context}", f"parallel.context_how={how}", f"tokens_per_micro_batch={300 // context}",
            "data.path=null",
            *(f"++data.sources.{name}.path={dataset / f'{name}.json'}" for name in ("mixed", "captions")),
            f"data.images={tmp_path / 'images'}", "data.examine=head", "data.bad_records=skip",
            "data.max_bad_records=20", f"val.path={dataset / 'captions.json'}", f"val.images={dataset / 'images'}",
            "val.every=2", "val.answers=7", "val.max_new_tokens=5", "val.shown=7",
        )  # fmt: skip
        folder = train_on(2, cfg, pools)
        names = "metrics.jsonl", "validation.jsonl", "skipped_records.jsonl"
        found[context] = [[json.loads(line) for line in (folder / name).read_text().splitlines()] for name in names]
    (steps, validations, skipped), (expected, wanted, left_out) = found[2], found[1]
    assert sorted({row["record"] for row in skipped}) == sorted({row["record"] for row in left_out}) and left_out
    assert len(steps) == len(expected) > 2 and len(validations) == len(wanted) > 1
    for row, other in zip([*steps, *validations], [*expected, *wanted], strict=True):
        assert row["step"] == other["step"] and row["label_tokens"] == other["label_tokens"]
        assert row["loss"] == pytest.approx(other["loss"], rel=TOLERANCE)
        assert row["sources"].keys() == other["sources"].keys()
        for name, own in row["sources"].items():
            assert own["label_tokens"] == other["sources"][name]["label_tokens"]
            assert own["loss"] == pytest.approx(other["sources"][name]["loss"], rel=TOLERANCE)
    for row, other in zip(validations, wanted, strict=True):
        assert row["questions"] == 7 and row["answers"] == other["answers"]


def test_a_question_must_fit_on_one_rank(model: Path, dataset: Path, tmp_path: Path) -> None:
    """Each answer is generated by one rank, which may be too small for it where ranks share rows."""
    more = "pack=true", "data.max_length=256", f"val.path={dataset / 'captions.json'}", "val.every=1"

    def questions(*overrides: str) -> int:
        cfg = make_config(model, dataset, tmp_path, *more, "val.answers=3", *overrides)
        return len(open_held_out(cfg, partial(opened, model), 512).questions)

    shared = "parallel.context=8", "tokens_per_micro_batch=32"
    with pytest.raises(ConfigError, match=r"val\.answers=3.*captions\.json.*32 tokens"):
        questions(*shared, "val.max_new_tokens=30")
    assert questions(*shared, "val.max_new_tokens=30", "val.answers=0") == 0
    assert questions("parallel.context=1", "tokens_per_micro_batch=256", "val.max_new_tokens=250") == 3
    wider = "parallel.context=4", "tokens_per_micro_batch=64"
    length = max(len(question) for question in question_ids(model, dataset, tmp_path, *more))
    assert questions(*wider, f"val.max_new_tokens={64 - length}") == 3
    with pytest.raises(ConfigError, match=r"val\.answers"):
        questions(*wider, f"val.max_new_tokens={65 - length}")


def opened(model: Path, cfg: Config, choose: Callable[[Records], Sampler] | None) -> Loader:
    shape = ModelShape(image_tokens=4, image_size=28, max_length=512, vocab_size=10_000)
    return build_loader(cfg, model / "language", model / "vision", shape, 0, 1, CPU, choose=choose)


def question_ids(model: Path, dataset: Path, tmp_path: Path, *overrides: str) -> list[np.ndarray]:
    cfg = make_config(model, dataset, tmp_path, *overrides, "val.answers=3")
    return [asked.sample.input_ids for asked in open_held_out(cfg, partial(opened, model), 512).questions]


def test_ranks_share_heads_or_gather_keys() -> None:
    language = LlamaConfig(hidden_size=36, num_attention_heads=6)
    assert plan_context(ContextHow.auto, language, 3, 1).how is ContextHow.ulysses
    gathers = plan_context(ContextHow.auto, language, 4, 1)
    assert gathers.how is ContextHow.gather and gathers.cut.paired and "6" in gathers.reason
    with pytest.raises(ConfigError, match="does not divide them"):
        plan_context(ContextHow.ulysses, language, 4, 1)


class Ranks:
    """Collectives between threads, one for each rank of a row."""

    def __init__(self, size: int):
        self.barrier = threading.Barrier(size)
        self.given: dict[int, torch.Tensor] = {}
        self.size = size

    def all(self, rank: int, own: torch.Tensor) -> list[torch.Tensor]:
        self.given[rank] = own
        self.barrier.wait(20)
        found = [self.given[other] for other in range(self.size)]
        self.barrier.wait(20)
        return found

    def exchange(self, rank: int, parts: torch.Tensor) -> torch.Tensor:
        return torch.stack([other[rank] for other in self.all(rank, parts)])

    def gather(self, rank: int, own: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.all(rank, own))


FORMS = [
    AttentionForm(), AttentionForm(window=3), AttentionForm(scaling=0.3, softcap=2.0),
    AttentionForm(sinks=torch.linspace(-1, 1, 12)), AttentionForm(window=4, sinks=torch.linspace(-1, 1, 12)),
]  # fmt: skip


@pytest.mark.parametrize("how", ["ulysses", "gather"])
@pytest.mark.parametrize("form", FORMS, ids=["plain", "window", "softcap", "sinks", "window-sinks"])
@pytest.mark.parametrize(("size", "keys"), [(2, 3), (3, 4), (4, 2), (4, 12), (6, 4)])
def test_attention_of_the_parts_is_that_of_the_row(size: int, keys: int, form: AttentionForm, how: str) -> None:
    """Twelve heads; samples of one token, over borders, and one that is longer than a rank's part."""
    torch.manual_seed(size)
    lengths = (1, 31, 1, 2, 9, 4)
    query, key, value = (torch.randn(1, heads, sum(lengths), 8, dtype=torch.float64) for heads in (12, keys, keys))
    begins = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    row = PackedRow(Boundaries(begins, Lengths(lengths, max(lengths))), form)
    whole = each_alone(torch.nn.Module(), query, key, value, row)
    ranks = Ranks(size)

    def part(index: int) -> tuple[np.ndarray, torch.Tensor]:
        cut = ContextCut(size, index, paired=how == "gather")
        here = cut.positions(sum(lengths))
        own = (tensor[:, :, here] for tensor in (query, key, value))
        if how == "ulysses":
            attend = Ulysses(each_alone, cut, partial(ranks.exchange, index))
        else:
            attend = GatheredKeys(each_alone, partial(ranks.gather, index), size, row_chunks_of(row.queries, cut))
        return here, attend(torch.nn.Module(), *own, row)

    with ThreadPoolExecutor(size) as pool:
        for here, found in pool.map(part, range(size)):
            assert torch.allclose(found, whole[:, here], atol=1e-12 if form.is_plain else 1e-6)


@pytest.mark.parametrize(("size", "context"), [(6, 2), (6, 3), (5, 1), (4, 4)])
def test_consecutive_ranks_share_a_row(size: int, context: int) -> None:
    parallel = ParallelConfig(context=context)
    groups = [RankLayout(parallel, size).row_group(rank) for rank in range(size)]
    assert groups == [(group, size // context) for group in range(size // context) for _ in range(context)]


def test_chunks_have_the_samples_that_they_overlap() -> None:
    """Random rows: samples of one token, over several chunks, and borders of samples that are borders of chunks."""
    rng = random.Random(0)
    for _ in range(200):
        size, paired = rng.randint(1, 5), rng.random() < 0.7
        lengths = [rng.choice((1, 2, 3, 7, 40)) for _ in range(rng.randint(1, 12))]
        padding = ContextCut(size, 0, paired).padding(sum(lengths))
        lengths += [padding] * (padding > 0)
        sample_of = [number for number, length in enumerate(lengths) for _ in range(length)]
        begins = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        row = Boundaries(begins, Lengths(tuple(lengths), max(lengths)))
        for index in range(size):
            cut = ContextCut(size, index, paired)
            chunks = row_chunks_of(row, cut).each
            for chunk, (begin, end) in zip(chunks, cut.chunks(sum(lengths)), strict=True):
                first = sample_of.index(sample_of[begin])
                assert (chunk.keys, chunk.tokens) == (slice(first, end), end - begin)
                for found, low in ((chunk.queries_at, begin), (chunk.keys_at, first)):
                    own = tuple(len(list(same)) for _, same in itertools.groupby(sample_of[low:end]))
                    assert (found.lengths.each, found.lengths.longest) == (own, max(own))
                    assert found.cu_seqlens.tolist() == [0, *itertools.accumulate(own)]
                    assert found.cu_seqlens.dtype == torch.int32


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["pack=false", "tokens_per_micro_batch=null"], "pack"),
        (["sampler=llava_v1_5", "tokens_per_micro_batch=null"], "sampler"),
        (["tokens_per_micro_batch=100"], "tokens_per_micro_batch"),
        (["parallel.context=0"], "parallel.context"),
        (["parallel.context=some"], "parallel.context"),
    ],
)
def test_what_does_not_go_together_is_refused(overrides: list[str], key: str, configure: Configure) -> None:
    with pytest.raises(ConfigError, match=key):
        configure("parallel.context=2", *overrides)


def test_an_older_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, refused in (("2.12.1+cpu", True), ("2.13.0+cpu", False), ("3.0", False)):
        monkeypatch.setattr(torch, "__version__", version)
        with pytest.raises(ConfigError, match="torch 2") if refused else contextlib.nullcontext():
            check_torch()


@pytest.mark.ranks
def test_ranks_that_do_not_divide_are_refused(configure: Configure, pools: dict[int, RankPool]) -> None:
    cfg = configure("parallel.context=3", "tokens_per_micro_batch=256")
    with pytest.raises(Exception, match="3 does not divide 2,"):
        train_on(2, cfg, pools)
