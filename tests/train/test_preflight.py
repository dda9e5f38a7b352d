"""What a training refuses before it reads anything, and that a named backbone is not trained by the toy's recipe."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small import Configure, config_of, make_config

from llava_fsdp.config import Config, cli, load
from llava_fsdp.doctor.checks import CHECKS, run_check
from llava_fsdp.doctor.context import Context
from llava_fsdp.doctor.findings import Level, result_and_cure
from llava_fsdp.runtime.errors import ConfigError, LlavaFsdpError
from llava_fsdp.train import main as train
from llava_fsdp.train.preflight import preflight, warn_if_refused, warn_of_template


def typed(monkeypatch: pytest.MonkeyPatch, *words: str, schema: type = Config, name: str = "train"):
    monkeypatch.setattr(sys, "argv", [name, *words])
    node = cli.compose(name, schema)
    assert node is not None
    return load(schema, node)


@pytest.mark.parametrize("words", [
    ["model.language=some/lm", "model.vision=some/tower"], ["model.language=some/lm"], ["model.checkpoint=some/llava"],
])  # fmt: skip
@pytest.mark.parametrize(("stage", "rate"), [("pretrain", 1e-3), ("finetune", 2e-5), ("finetune_lora", 2e-4)])
def test_a_named_backbone_has_the_neutral_recipe(
    words: list[str], stage: str, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = typed(monkeypatch, *words, f"stage={stage}")
    assert (cfg.model.name, cfg.model.random_weights, cfg.optim.lr) == ("own", False, rate)
    assert cfg.global_batch_size == (256 if stage == "pretrain" else 128)
    assert cfg.model.language == words[0].partition("=")[2]


def test_what_is_typed_wins_and_the_embedded_default_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert typed(monkeypatch).model.name == "tiny"
    assert typed(monkeypatch, "model.checkpoint=null").model.name == "tiny"
    assert typed(monkeypatch, "model.vision=package:tiny-clip").model.name == "tiny"
    cfg = typed(monkeypatch, "model=llava_v1_5_7b", "model.language=mine", "optim.lr=0.5")
    assert (cfg.model.name, cfg.model.language, cfg.optim.lr) == ("llava_v1_5_7b", "mine", 0.5)
    with pytest.raises(ConfigError, match=r"model\.language=DIR"):
        typed(monkeypatch, "model.vision=some/tower")
    with pytest.raises(ConfigError, match=r"model\.language is not set"):
        typed(monkeypatch, "model=own")


@pytest.mark.parametrize(("kind", "vocabulary", "template", "named"), [
    ("llama", 32000, "v1", ""), ("llama", 128256, "v1", "Llama 3"), ("qwen3", 151936, "v1", "chatml"),
    ("gemma3_text", 9, "v1", "gemma3_text"), ("qwen3", 9, "chatml", ""), ("qwen3", 9, "plain", ""),
])  # fmt: skip
def test_another_models_prompts_are_told(
    kind: str, vocabulary: int, template: str, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        warn_of_template(config_of([f"data.template={template}"]), kind, vocabulary)
    assert (named in caplog.text) if named else not caplog.text


WRONG = [
    ["model.projector=gone"],
    ["model.random_weights=false"],
    ["data.path=gone.json"],
    ["model.select_feature=full", "model.checkpoint=gone/for/good"],
    ["track.wandb=offline", "track.project=${model.name}", "model.language=gone"],
]


@pytest.mark.parametrize("words", WRONG, ids=[words[0] for words in WRONG])
def test_doctor_says_what_train_says(
    words: list[str], parts: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = make_config(parts, dataset, tmp_path / "out", *words)
    with pytest.raises(LlavaFsdpError) as refused:
        train.train(cfg)
    with pytest.raises(LlavaFsdpError) as at_preflight:
        preflight(cfg, torch.device("cpu"))
    assert (type(at_preflight.value), str(at_preflight.value)) == (type(refused.value), str(refused.value))
    context = Context.__new__(Context)
    context.cfg, context.is_missing = cfg, False
    context.__dict__["torch"] = type("NoGpus", (), {"devices": []})()
    (check,) = [check for check in CHECKS if check.name == "train"]
    (found,) = run_check(check, context)
    assert (found.level, found.result, found.cure) == (Level.FAIL, *result_and_cure(refused.value))


def test_a_configuration_that_trains(configure: Configure, caplog: pytest.LogCaptureFixture) -> None:
    preflight(configure(), torch.device("cpu"))
    warn_if_refused(configure())
    assert not caplog.text


@pytest.mark.parametrize("words", WRONG, ids=[words[0] for words in WRONG])
def test_plan_prepare_and_dry_run_say_what_train_says(
    words: list[str], parts: Path, dataset: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A missing path is an error for them, too; of anything else they warn."""
    cfg = make_config(parts, dataset, tmp_path / "out", *words)
    with pytest.raises(LlavaFsdpError) as refused:
        train.train(cfg)
    try:
        warn_if_refused(cfg)
        assert f"{type(refused.value).__name__}: {refused.value}" in caplog.text
    except LlavaFsdpError as error:
        assert (type(error), str(error)) == (type(refused.value), str(refused.value))


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("module", "more"), [("plan", "gpus=1"), ("prepare", "prepare.workers=1"), ("train", "dry_run=1")]
)
def test_plan_prepare_and_dry_run_check_first(
    module: str, more: str, parts: Path, dataset: Path, tmp_path: Path
) -> None:
    """Each of them warns of what train refuses, and does its work."""
    words = [f"model.language={parts / 'language'}", f"model.vision={parts / 'vision'}", "data=llava_json"]
    words += ["data.max_length=256", "global_batch_size=2", "tokens_per_micro_batch=512"]
    words += [
        f"data.path={dataset / 'mixed.json'}",
        f"data.images={dataset / 'images'}",
        f"data.index={tmp_path / 'i'}",
    ]
    command = [sys.executable, "-m", f"llava_fsdp.{module}", *words, f"output_dir={tmp_path / 'out'}", more]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path, timeout=200)
    assert done.stderr.count("train refuses this configuration: ") == 1, done.stderr
    assert done.returncode == 0 and done.stdout, done.stderr


@pytest.mark.parametrize("words", [[], ["stage=finetune_lora", "val.every=1", "offload=optimizer"]])
def test_the_first_screen_has_fifteen_lines(
    words: list[str], parts: Path, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of this width; it has the learning rate, and each share by name."""
    stage = [word.partition("=")[2] for word in words if word.startswith("stage=")]
    more = [word for word in words if not word.startswith("stage=")]
    more += [f"val.path={dataset / 'mixed.json'}", f"val.images={dataset / 'images'}"] if more else []
    cfg = make_config(
        parts, dataset, tmp_path / "out", "max_steps=1", "export.enabled=false", *more, stage=(stage or ["finetune"])[0]
    )
    train.train(cfg)
    screen = capsys.readouterr().err.partition("step 1/1")[0]
    lines = [line for line in screen.splitlines() if line.strip()]
    first = next(n for n, line in enumerate(lines) if line.startswith(cfg.stage.name))
    last = next(n for n, line in enumerate(lines) if line.startswith("unlike LLaVA"))
    names = [line.split("  ")[0] for line in lines[first : last + 1] if line[:1].strip()]
    assert len(names) <= 15 and {"trains", "data", "steps", "learning", "sharding", "saves", "output"} <= set(names)
    assert f"rate {cfg.optim.lr:g}" in screen and "%" in screen
