"""`precision=auto`: bf16 where the devices of all ranks have instructions for it, else fp32."""

import json
import logging
from pathlib import Path

import pytest
import torch
import yaml
from harness import CPU, RankPool, single_world
from saves import interrupted
from small import Configure, command_config, config_of

from llava_fsdp.config import Config, DType, PlanConfig, PrecisionConfig
from llava_fsdp.parallel.precision.fast_dtype import has_bf16, settle_precision, slow_dtype, slowdown
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.plan.main import with_fp16, with_precision
from llava_fsdp.plan.time.hardware import GPUS, Machine, machine_named
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.runtime.process.host import cpu_has_bf16, gpu_has_bf16
from llava_fsdp.train.main import agree_on_precision, train

X86 = "processor : 0\nflags\t\t: fpu avx2 avx512f {}\n\nprocessor : 1\nflags\t\t: fpu avx2 avx512f {}\n"
ARM = "processor : 0\nBogoMIPS : 50\nFeatures\t: fp asimd {}\n"


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        (X86.format("avx512_bf16", "avx512_bf16"), True),
        (X86.format("amx_bf16 amx_tile", "amx_bf16"), True),
        (X86.format("avx512_vnni", "avx512_vnni"), False),
        (X86.format("avx512_bf16", ""), False),
        (X86.format("avx512_bf16_more", "avx512_bf16_more"), False),
        (ARM.format("i8mm bf16"), True),
        (ARM.format("ebf16"), False),
        ("processor : 0\ncpu : POWER10\nmodel name : bf16 avx512_bf16\n", False),
        (None, False),
    ],
)
def test_a_cpu_has_bf16_if_every_core_has_instructions_for_it(
    cpuinfo: str | None, expected: bool, tmp_path: Path
) -> None:
    if cpuinfo is not None:
        (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert cpu_has_bf16(tmp_path, {}) is expected


def test_what_onednn_may_not_use_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(ARM.format("bf16"))
    found = {isa: cpu_has_bf16(tmp_path, {"ONEDNN_MAX_CPU_ISA": isa}) for isa in ("avx2", "AVX512_CORE", "ALL", "")}
    assert found == {"avx2": False, "AVX512_CORE": False, "ALL": True, "": True}


def test_a_gpu_has_bf16_since_ampere() -> None:
    assert [gpu_has_bf16(major, False) for major in (6, 7, 8, 9, 12)] == [False, False, True, True, True]
    assert gpu_has_bf16(0, True), "AMD's"


@pytest.mark.parametrize(
    ("words", "able", "kind", "recorded", "expected"),
    [
        ([], [True], "cpu", None, "bf16 fp32 fp32"),
        ([], [False], "cpu", None, "fp32 fp32 fp32"),
        ([], [True] * 3, "cuda", None, "bf16 fp32 fp32"),
        ([], [False] * 3, "cuda", None, "fp32 fp32 fp32"),
        ([], [True, False, True], "cuda", None, "fp32 fp32 fp32"),
        ([], [False], "cpu", DType.bf16, "bf16 fp32 fp32"),
        ([], [True], "cpu", DType.fp32, "fp32 fp32 fp32"),
        ([], [True], "cuda", DType.fp16, "fp16 fp32 fp32"),
        (["precision.norm_dtype=bf16"], [False], "cpu", None, "bf16 bf16 fp32"),
        (["precision.norm_dtype=auto"], [False], "cpu", None, "fp32 fp32 fp32"),
        (["precision.reduce_dtype=auto"], [True], "cpu", None, "bf16 fp32 bf16"),
        (["precision.linear=fp8"], [False], "cuda", None, "bf16 fp32 fp32"),
        (["precision.master_dtype=bf16"], [False], "cpu", DType.fp32, "bf16 fp32 fp32"),
        (["precision=fp32"], [True], "cpu", DType.bf16, "fp32 fp32 fp32"),
        (["precision=bf16"], [False], "cpu", DType.fp32, "bf16 fp32 fp32"),
        (["compat=llava_v1_5"], [False], "cpu", None, "bf16 bf16 bf16"),
        (["compat=llava_v1_5", "precision=fp32"], [True], "cpu", None, "fp32 fp32 fp32"),
        (["compat=llava_v1_5", "precision=auto"], [False], "cpu", None, "fp32 fp32 fp32"),
        (["model=llava_v1_5_7b"], [False], "cpu", None, "bf16 fp32 fp32"),
        (["model=llava_v1_5_13b", "precision=auto"], [False], "cpu", None, "fp32 fp32 fp32"),
        (["model=llava_onevision_0_5b"], [False], "cpu", None, "bf16 fp32 fp32"),
    ],
)
def test_what_auto_stands_for(
    words: list[str], able: list[bool], kind: str, recorded: DType | None, expected: str
) -> None:
    cfg = config_of(["data.path=x.json", *words])
    settled, said = settle_precision(cfg, able, kind, recorded)
    precision = settled.precision
    assert f"{precision.param_dtype.value} {precision.norm_dtype.value} {precision.reduce_dtype.value}" == expected
    assert (said is None) == (cfg.precision.param_dtype is not DType.auto)
    assert settle_precision(settled, able, kind, recorded) == (settled, None)


@pytest.mark.parametrize(
    "word",
    ["precision.norm_dtype=fp16", "precision.reduce_dtype=fp16", "precision.scaler.window=7", "export.dtype=auto"],
)
def test_what_goes_with_no_dtype_that_auto_may_be_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match=word.partition("=")[0].removesuffix(".window")):
        config_of([word])


def test_only_auto_goes_with_auto() -> None:
    with pytest.raises(ConfigError, match=r"precision\.norm_dtype=auto"):
        config_of(["precision=bf16", "precision.norm_dtype=auto"])


def chosen_on(world: World, cfg: Config) -> PrecisionConfig:
    return agree_on_precision(cfg, world, has_bf16_here=world.rank != 1).precision


def test_all_ranks_take_the_dtype_for_which_all_have_instructions(
    configure: Configure, pools: dict[int, RankPool]
) -> None:
    first, second = pools[2].run(chosen_on, configure("precision=auto"))
    assert first == second and first.param_dtype is DType.fp32


def lines_of(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == level]


@pytest.mark.parametrize("isa", ["AVX2", pytest.param("ALL", marks=pytest.mark.slow)])
def test_a_run_records_what_it_trained_with_and_keeps_it(
    isa: str, configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Begun on one kind of CPU, and continued on the other kind."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", isa)
    caplog.set_level(logging.INFO)
    first = "bf16" if has_bf16(CPU) else "fp32"
    words = ["precision=auto", "checkpoint.every=1", "max_steps=2"]
    train(configure(*words, to="run"))
    said = [line for line in lines_of(caplog, logging.INFO) if "precision.param_dtype=" in line]
    assert len(said) == 1 and f"precision.param_dtype={first}" in said[0]
    run = tmp_path / "run"
    assert yaml.safe_load((run / "config.yaml").read_text())["precision"]["param_dtype"] == first
    state = next((run / "checkpoints").glob("step-*1/state.json"))
    assert json.loads(state.read_text())["config"]["precision"]["param_dtype"] == first
    for name in ("starts.jsonl", "run_status.json", "metrics.jsonl"):
        assert "precision=auto" not in (run / name).read_text()

    folder = interrupted(run, tmp_path / "again", 1)
    other = "bf16" if first == "fp32" else "fp32"
    cfg = configure(*words, to=folder)
    kept = agree_on_precision(cfg, single_world(), has_bf16_here=first == "fp32").precision.param_dtype
    assert kept.value == first
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2" if isa == "ALL" else "ALL")
    train(cfg)
    assert yaml.safe_load((folder / "config.yaml").read_text())["precision"]["param_dtype"] == first
    never = configure(*words, "checkpoint.resume=never", to=folder)
    assert agree_on_precision(never, single_world(), has_bf16_here=other == "bf16").precision.param_dtype.value == other


def test_another_dtype_at_a_resume_is_said(
    configure: Configure, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    train(configure("checkpoint.every=1", "max_steps=2", to="run"))
    folder = interrupted(tmp_path / "run", tmp_path / "again", 1)
    train(configure("precision=bf16", "checkpoint.every=1", "max_steps=2", to=folder))
    assert sum("precision.param_dtype: fp32 -> bf16" in line for line in lines_of(caplog, logging.INFO)) == 1


def test_an_emulated_dtype_is_said_with_the_factor_that_was_measured(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And drawing no random numbers."""
    state = torch.get_rng_state()
    assert slowdown(torch.float32, CPU) > 0.05
    assert torch.equal(torch.get_rng_state(), state)
    for factor, dtype, able, said in (
        (21.94, "bf16", False, "21.9 times"), (0.7, "bf16", False, None), (21.9, "bf16", True, None),
        (40.0, "fp16", True, "40.0 times"), (9.0, "fp32", False, None),
    ):  # fmt: skip
        monkeypatch.setattr("llava_fsdp.parallel.precision.fast_dtype.slowdown", lambda *_, factor=factor: factor)
        found = slow_dtype(configure(f"precision={dtype}"), CPU, able)
        assert said is None if found is None else said is not None and said in found
    monkeypatch.setattr("llava_fsdp.parallel.precision.fast_dtype.slowdown", lambda *_: 21.94)
    agree_on_precision(configure("precision=bf16"), single_world(), has_bf16_here=False)
    assert len(lines_of(caplog, logging.WARNING)) == 1


def planned(*words: str) -> PlanConfig:
    return command_config(PlanConfig, "plan", "data.path=x.json", *words)


@pytest.mark.parametrize("gpu", GPUS)
def test_a_plan_for_a_gpu_follows_that_gpu(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine's CPU is; with V100 and T4 the command says precision=fp16."""
    dtypes = set()
    for isa in ("AVX2", "ALL"):
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", isa)
        machine = machine_named(gpu, 8)
        cfg, also = with_fp16(planned(f"gpu={gpu}"), machine, [f"gpu={gpu}"])
        dtypes.add((with_precision(cfg, machine).precision.param_dtype.value, *also))
    assert dtypes == {("fp16", "precision=fp16") if gpu in ("v100", "t4") else ("bf16",)}
    if gpu in ("v100", "t4"):
        cfg, also = with_fp16(planned("precision=auto"), machine, ["precision=auto"])
        assert (with_precision(cfg, machine).precision.param_dtype.value, also) == ("fp32", [])


def test_a_cpu_is_as_fast_as_its_instructions() -> None:
    able, unable = (Machine(None, "2 CPU cores", 1 << 34, 6e10, cores_have_bf16=has) for has in (True, False))
    assert able.peak(DType.bf16) > able.peak(DType.fp32) == unable.peak(DType.fp32) > 5 * unable.peak(DType.bf16)
    assert able.peak(DType.fp16) < able.peak(DType.fp32)
    found = {with_precision(planned(), machine).precision.param_dtype for machine in (able, unable)}
    assert found == {DType.bf16, DType.fp32}
    assert machine_named("auto", 2).has_bf16 == has_bf16(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
