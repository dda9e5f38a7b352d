"""The reported cost of a step is that of its tokens, however it is split and padded."""

import json
from pathlib import Path

import pytest
import torch
from harness import CPU
from packed import build, write_every_kind
from small import make_config
from transformers import LlamaConfig

from llava_fsdp.config import ActivationCheckpointing, ActivationCheckpointingConfig, DType
from llava_fsdp.data.batching.batch import StepFacts
from llava_fsdp.data.loader import ModelShape, build_loader
from llava_fsdp.model.flops import Flops
from llava_fsdp.model.llava.llava import Llava
from llava_fsdp.plan.time.mfu import Utilization, peak_of, recomputed_flops_share, utilization_of
from llava_fsdp.train import main as train
from llava_fsdp.train.events.reporting.console import Console
from llava_fsdp.train.events.reporting.metrics import MetricsFile
from llava_fsdp.train.events.reporting.reports import Reports
from llava_fsdp.train.state import StepResult

ANYRES = "data.image_aspect_ratio=anyres", "export.enabled=false", "data.max_length=512"


@pytest.mark.parametrize("overrides", [(), ("pack=false",), ANYRES], ids=["packed", "padded", "anyres"])
def test_facts_are_the_sums_over_all_ranks(
    overrides: tuple[str, ...], parts: Path, dataset: Path, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    data = write_every_kind(dataset, tmp_path / "data")
    cfg = make_config(parts, data, tmp_path, "micro_batch_size=2", *overrides)
    shape = ModelShape(image_tokens=4, image_size=28, max_length=512, vocab_size=10_000)
    loaders = [build_loader(cfg, parts / "language", parts / "vision", shape, r, 3, CPU) for r in range(3)]
    for number in (0, 1):
        steps = [loader.steps.prepare(number) for loader in loaders]
        facts = steps[0].facts
        assert all(step.facts == facts for step in steps)
        samples = [loaders[0].steps.read_row(n)[0] for n in loaders[0].steps.sampler.samples(number)]
        assert facts.token_pairs == sum(len(s.input_ids) ** 2 for s in samples) < facts.tokens**2
        micros = [micro for step in steps for micro in step.micro_batches]
        assert facts.tiles == sum(len(micro.images["tiles"]) for micro in micros) >= facts.images > 0
        assert facts.tokens == sum(len(s.input_ids) for s in samples)
        if cfg.packs:
            lengths = [length for micro in micros for length in micro.lengths]
            assert facts.token_pairs == sum(length**2 for length in lengths)
        else:
            assert facts.tokens < sum(micro.input_ids.numel() for micro in micros), "nothing was padded"
        alone = loaders[0].steps.facts(0, loaders[0].steps.sampler.samples(number)[:1])
        assert facts.without([]) == facts and 0 < alone.token_pairs < facts.token_pairs


def test_shares_of_the_peak() -> None:
    """Two ranks of 1000 FLOPs a second, half a second."""
    found = Utilization(Flops(2, 1, 4, 8), LlamaConfig(), Flops(1, 0, 0, 2), 2000.0, "").of(
        StepFacts(0, tokens=10, token_pairs=50, label_tokens=5, tiles=3), 0.5
    )
    assert found == {"flops": 114, "mfu": 0.114, "hfu": 0.13}


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", DType.bf16, 989e12),
        ("NVIDIA H100 80GB HBM3", DType.fp32, 67e12),
        ("Tesla T4", DType.fp16, 65e12),
        ("Tesla T4", DType.bf16, None),
        ("NVIDIA H100 PCIe", DType.bf16, None),  # has the name of a row within its own, and another peak
        ("NVIDIA GH200 480GB", DType.bf16, None),
        ("a CPU", DType.fp32, None),
    ],
)
def test_only_devices_of_the_table_have_a_peak(name: str, dtype: DType, peak: float | None) -> None:
    found, source = peak_of(name, dtype)
    assert found == peak and name in source and ("unknown hardware: no MFU" in source) == (peak is None)


def test_the_peak_is_that_of_all_devices(
    parts: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    cfg = make_config(parts, dataset, tmp_path, "precision=bf16")
    model = build(make_config(parts, dataset, tmp_path)).model
    assert isinstance(model, Llava)
    assert utilization_of(model, cfg, torch.device("cuda"), 3).peak == 3 * 989e12


def test_selective_checkpointing_runs_no_product_again() -> None:
    shares = {"none": 0.0, "full": 1.0, "selective": 0.0, "budget": 0.75, "offload": 1.0}
    for name, share in shares.items():
        mode = ActivationCheckpointing(name)
        cfg = ActivationCheckpointingConfig(mode=mode, budget=0.25 if name == "budget" else None)
        assert recomputed_flops_share(cfg) == share, name


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_a_compiled_block_that_runs_again_does_so_to_the_end(
    mode: str, parts: Path, dataset: Path, tmp_path: Path
) -> None:
    """Its forward graph is one piece (test_compile.py counts its products); one that is not compiled stops early."""
    model = build(make_config(parts, dataset, tmp_path)).model
    assert isinstance(model, Llava)
    plain, compiled = (
        utilization_of(
            model, make_config(parts, dataset, tmp_path, f"activation_checkpointing={mode}", f"compile={on}"), CPU, 1
        )
        for on in ("false", "true" if mode != "selective" else "auto")
    )
    last = 3 * 36 * 50  # three layers' down projections
    forward = plain.flops.token / 3
    assert compiled.flops == plain.flops and plain.recomputed.token == (forward - 2 * last if mode == "full" else 0)
    assert compiled.recomputed.token - plain.recomputed.token == (2 * last if mode == "full" else 0)


def test_a_run_on_a_cpu_has_no_mfu(parts: Path, dataset: Path, tmp_path: Path) -> None:
    train.train(make_config(parts, dataset, tmp_path, "max_steps=2"))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(row["flops"] > 0 and row["mfu"] is None and row["hfu"] is None for row in rows)


def test_the_line_of_a_step_has_mfu(
    parts: Path, dataset: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    known = Utilization(Flops(1, 0, 0, 0), LlamaConfig(), Flops(1, 0, 0, 0), 400.0, "")
    cfg = make_config(parts, dataset, tmp_path, "log_every=1")
    reports = Reports([MetricsFile(tmp_path, 4), Console(cfg, 4, 9)], known)
    with caplog.at_level("INFO"):
        reports.after_step(StepResult(StepFacts(4, samples=1, tokens=100, label_tokens=1), 1.0, 0.1, 1.0, 0.5))
    assert "MFU 50.0%, HFU 100.0%" in caplog.text
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (row["flops"], row["mfu"], row["hfu"]) == (100, 0.5, 1.0)
