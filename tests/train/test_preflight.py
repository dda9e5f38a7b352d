"""What a training refuses before it reads anything, and that a named backbone is not trained by the toy's recipe."""

import logging
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from chat_templates import published, write_tokenizer
from forged import forge_notes
from small import Configure, changed_parts, config_of, make_config, write_json
from tiers import slow_after

from llava_fsdp.config import Config, Examine, PrepareConfig, load
from llava_fsdp.config.command_line import cli
from llava_fsdp.data.text.chat_template.jinja_template import own_name
from llava_fsdp.doctor.checks import CHECKS, run_check
from llava_fsdp.doctor.context import DoctorContext
from llava_fsdp.doctor.findings import Finding, Level, result_and_cure
from llava_fsdp.model.sources.pretrained import NoProjector, find_parts
from llava_fsdp.prepare.main import prepare
from llava_fsdp.runtime.errors import ConfigError, LlavaFsdpError, ModelError
from llava_fsdp.train import main as train
from llava_fsdp.train.setup import preflight as checks
from llava_fsdp.train.setup.preflight import (
    check_run,
    few_steps,
    find_sources,
    foreign_prompts,
    preflight,
    warn_if_refused,
    with_template,
)


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
def test_another_models_prompts_are_told(kind: str, vocabulary: int, template: str, named: str) -> None:
    told = foreign_prompts(config_of([f"data.template={template}"]), kind, vocabulary)
    assert [named in warning for warning in told] == ([True] if named else [])


def parts_of(kind: str, folder: Path, whole: bool, tiles: bool = False) -> Any:
    return SimpleNamespace(
        class_config=None,
        language=SimpleNamespace(model_type=kind),
        whole=folder if whole else None,
        language_folder=folder,
        grid_pinpoints=[[672, 336]] if tiles else None,
    )


@pytest.mark.parametrize(("words", "whole", "tiles", "trained", "template"), [
    ([], False, False, None, "own"), (["labels=llava_v1_5"], False, False, None, "chatml"),
    ([], True, False, None, "chatml"), ([], True, False, "plain", "chatml"), ([], True, False, "v0", "v0"),
    ([], True, True, None, "own"), ([], True, True, "plain", "chatml"), ([], True, True, "v0", "v0"),
    (["data.template=chat_template"], True, False, "v0", "own"),
])  # fmt: skip
def test_a_model_brings_its_own_chat_template(
    words: list[str], whole: bool, tiles: bool, trained: str | None, template: str, tmp_path: Path
) -> None:
    """A language model and a LLaVA-NeXT do; an original LLaVA-1.5 does not, nor does what stage 1 has exported."""
    write_tokenizer(published()["llama3"], tmp_path)
    if trained is not None:
        write_json(tmp_path / "llava_fsdp.json", {"template": trained})
    cfg = with_template(config_of(["data.template=auto", *words]), parts_of("qwen2", tmp_path, whole, tiles))
    assert cfg.data.template == (own_name(tmp_path) if template == "own" else template)


@pytest.mark.parametrize("kind", ["llava", "llava_next", "llava_onevision", "internvl"])
def test_a_whole_model_of_transformers_brings_its_own_template(kind: str, tmp_path: Path) -> None:
    """If it can be trained with; that of LLaVA-1.5 writes nothing that ends an answer."""
    write_tokenizer(published()["llama3"], tmp_path)
    write_json(tmp_path / "config.json", {"model_type": kind})
    parts = parts_of("llama", tmp_path, whole=True)
    assert with_template(config_of(["data.template=auto"]), parts).data.template == own_name(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message['role'].upper() + ': '}}{% for content in message['content'] %}"
        "{{ '<image>\n' if content['type'] == 'image' else content['text'] + ' ' }}{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
    )
    assert with_template(config_of(["data.template=auto"]), parts).data.template == "v1"


def test_an_unfit_chat_template_of_a_whole_model_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With a line in the log; asked for by its name, it is refused, and so is one that is missing."""
    code = "{% for m in messages %}{{ m.role + ': ' + m.content + ' ' }}{% endfor %}"
    write_tokenizer(code + "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}", tmp_path)
    parts = parts_of("llama", tmp_path, whole=True, tiles=True)
    with caplog.at_level(logging.INFO, "llava_fsdp"):
        assert with_template(config_of(["data.template=auto"]), parts).data.template == "v1"
    assert "no special token after the last answer" in caplog.text
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="has no chat template"):
        with_template(config_of(["data.template=chat_template"]), parts)


@pytest.mark.parametrize(("kind", "trained", "template"), [
    ("qwen3", None, "chatml"), ("mistral", None, "mistral_instruct"), ("llama", None, "v1"),
    ("gemma3_text", None, "v1"), ("qwen2", "v1", "v1"), ("qwen2", "plain", "chatml"),
])  # fmt: skip
def test_parts_choose_the_template(kind: str, trained: str | None, template: str, tmp_path: Path) -> None:
    """Unless it is given; a whole model brings the one that it was trained with."""
    if trained is not None:
        write_json(tmp_path / "llava_fsdp.json", {"template": trained})
    parts = parts_of(kind, tmp_path, whole=trained is not None)
    assert with_template(config_of(["data.template=auto"]), parts).data.template == template
    given = config_of(["data.template=v0"])
    assert with_template(given, parts) is given


@pytest.mark.parametrize(("stage", "template"), [
    ("pretrain", "plain"), ("finetune", "auto"), ("finetune_qlora", "auto"), ("finetune_task_lora", "auto"),
])  # fmt: skip
def test_named_parts_have_their_own_template(stage: str, template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert typed(monkeypatch, "model.language=some/lm", f"stage={stage}").data.template == template


def test_a_run_records_the_template_that_it_used(
    parts: Path, dataset: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In its configuration and its checkpoints; and it continues, if the same may be meant."""
    own = changed_parts(parts, tmp_path / "qwen", {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]})
    with caplog.at_level(logging.INFO, "llava_fsdp"):
        train.train(make_config(own, dataset, tmp_path / "out", "data.template=auto", "max_steps=1"))
    assert "auto: data.template=chatml, for the language model qwen2" in caplog.text
    assert "template: chatml" in (tmp_path / "out" / "config.yaml").read_text()
    for word in ("auto", "chatml"):
        check_run(make_config(own, dataset, tmp_path / "out", f"data.template={word}"))
    with pytest.raises(ConfigError, match=r"data.template: chatml -> v1"):
        check_run(make_config(own, dataset, tmp_path / "out", "data.template=v1"))


@pytest.mark.parametrize(
    ("words", "steps", "told"),
    [
        (["max_steps=null"], 5, "5 steps of 12 samples will hardly change the model.* for 1 of them; .*epochs"),
        (["max_steps=null"], 20, ""),
        (["max_steps=5"], 5, ""),
        (["max_steps=1"], 1, "1 step of 12 .*; raise max_steps"),
        (["max_steps=1", "optim.warmup_ratio=0"], 1, ""),
    ],
)
def test_few_steps_are_told(words: list[str], steps: int, told: str, configure: Configure) -> None:
    warnings = few_steps(configure(*words), steps)
    assert len(warnings) == bool(told)
    assert all(re.search(told, warning) for warning in warnings)


def test_doctor_warns_as_train_does(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """Of another model's prompts, and of few steps: its file of records is small and can be counted."""
    own = changed_parts(parts, tmp_path / "qwen", {"model_type": "qwen2"})
    rows = doctor_rows(make_config(own, dataset, tmp_path / "out", "max_steps=null"))
    assert [(row.level.value, row.name) for row in rows] == [("WARN", "train"), ("WARN", "train"), ("OK", "train")]
    assert rows[0].cure == "data.template=chatml has those of its instruct models"
    assert rows[1].result.startswith("12 steps of 12 samples"), "three epochs of 44 records"


@pytest.mark.slow
def test_a_projector_of_other_parts_names_them(
    noise: Path, parts: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it does not fit. One that fits is taken, wherever its parts were."""
    shutil.copytree(noise / "export", tmp_path / "stage1" / "export")
    forge_notes(tmp_path / "stage1" / "export", language="old/lm", vision="old/tower")
    words = [f"model.projector={tmp_path / 'stage1'}", "model.random_weights=true"]
    preflight(make_config(parts, dataset, tmp_path / "out", *words), torch.device("cpu"))
    wide = changed_parts(parts, tmp_path / "wide", None, {"hidden_size": 24})
    with pytest.raises(ModelError, match=r"has shape .* was trained with model.language=old/lm model.vision=old/tower"):
        preflight(make_config(wide, dataset, tmp_path / "out", *words), torch.device("cpu"))

    def fails(*_: object) -> None:
        raise ModelError("the language model has no weights")

    monkeypatch.setattr(checks, "find_weights", fails)
    model: Any = SimpleNamespace(parts=None)
    with pytest.raises(ModelError, match=r"has no weights$"):
        find_sources(make_config(parts, dataset, tmp_path / "out", *words), model, tmp_path / "stage1" / "export")


def doctor_rows(cfg: Any) -> list[Finding]:
    context = DoctorContext.__new__(DoctorContext)
    context.cfg, context.is_missing = cfg, False
    context.__dict__["torch"] = type("NoGpus", (), {"devices": []})()
    (check,) = [check for check in CHECKS if check.name == "train"]
    return run_check(check, context)


WRONG = [
    ["model.projector=gone"],
    ["model.random_weights=false"],
    ["data.path=gone.json"],
    ["model.select_feature=full", "model.checkpoint=gone/for/good"],
    ["track.wandb=offline", "track.project=${model.name}", "model.language=gone"],
]


@pytest.mark.parametrize("words", slow_after(2, WRONG), ids=[words[0] for words in WRONG])
def test_doctor_says_what_train_says(
    words: list[str], parts: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = make_config(parts, dataset, tmp_path / "out", *words)
    with pytest.raises(LlavaFsdpError) as refused:
        train.train(cfg)
    with pytest.raises(LlavaFsdpError) as at_preflight:
        preflight(cfg, torch.device("cpu"))
    assert (type(at_preflight.value), str(at_preflight.value)) == (type(refused.value), str(refused.value))
    (found,) = doctor_rows(cfg)
    assert (found.level, found.result, found.cure) == (Level.FAIL, *result_and_cure(refused.value))


def test_a_configuration_that_trains(configure: Configure, caplog: pytest.LogCaptureFixture) -> None:
    preflight(configure(), torch.device("cpu"))
    warn_if_refused(configure())
    assert not caplog.text
    for words in (["precision=fp8"], ["attention=varlen", "precision=bf16", "pack=true"]):
        warn_if_refused(configure(*words), is_for_this_machine=False)
        assert not caplog.text, "another machine may have what this one lacks"
        warn_if_refused(configure(*words))
        assert caplog.text
        caplog.clear()


@pytest.mark.parametrize("words", WRONG, ids=[words[0] for words in WRONG])
def test_plan_prepare_and_dry_run_say_what_train_says(
    words: list[str], parts: Path, dataset: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A missing path is an error for them, too, but for that of a projector, which they mention; of anything else they
    warn."""
    cfg = make_config(parts, dataset, tmp_path / "out", *words)
    with pytest.raises(LlavaFsdpError) as refused:
        train.train(cfg)
    try:
        remark = warn_if_refused(cfg)
        assert remark or f"{type(refused.value).__name__}: {refused.value}" in caplog.text
    except LlavaFsdpError as error:
        assert (type(error), str(error)) == (type(refused.value), str(refused.value))


@pytest.mark.parametrize("words", [["data.template=chat_template"], ["data.images=gone"], ["data.path=gone.json"]])
def test_an_error_that_ends_prepare_is_not_printed_before(
    words: list[str], parts: Path, dataset: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = [f"model.{part}={parts / part}" for part in ("language", "vision")] + ["model.random_weights=true"]
    data = ["data=llava_json", f"data.path={dataset / 'mixed.json'}", f"data.index={tmp_path}", *words]
    cfg = config_of([*own, *data], "prepare")
    assert isinstance(cfg, PrepareConfig)
    with pytest.raises(ConfigError):
        prepare(cfg)
    assert "train refuses" not in caplog.text


def test_a_stopped_stage_1_is_told_before_data_are_read(configure: Configure, tmp_path: Path) -> None:
    run = tmp_path / "stage1"
    run.mkdir()
    (run / "run_status.json").write_text('{"status": "stopped", "class": "stopped", "exit_code": 75, "step": 7}')
    with pytest.raises(NoProjector, match="stopped at step 7"):
        check_run(configure(f"model.projector={run}", "model.random_weights=false"))


def test_a_training_that_waits_for_stage_1_is_planned_without_a_warning(
    configure: Configure, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for projector in ("auto", str(tmp_path / "outputs" / "pretrain")):
        keys = f"model.projector={projector}", "model.random_weights=false"
        cfg = configure(*keys, to="runs/finetune")
        with pytest.raises(NoProjector):
            preflight(cfg, torch.device("cpu"))
        with caplog.at_level(logging.INFO):
            line = warn_if_refused(cfg)
        assert not caplog.messages, "the command logs the remark after its own results"
        assert f"model.projector={projector}" in line and "stage=pretrain" in line and "\n" not in line
    assert not warn_if_refused(configure())


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize(
    ("module", "more"), [("plan", "gpus=1"), ("prepare", "prepare.workers=1"), ("train", "dry_run=1")]
)
def test_plan_prepare_and_dry_run_check_first(
    module: str, more: str, parts: Path, dataset: Path, tmp_path: Path
) -> None:
    """Each of them warns of what train refuses, and does its work."""
    words = [f"model.language={parts / 'language'}", f"model.vision={parts / 'vision'}", "data=llava_json"]
    words += ["data.max_length=256", "global_batch_size=2", "tokens_per_micro_batch=512", "model.projector=random"]
    words += [
        f"data.path={dataset / 'mixed.json'}",
        f"data.images={dataset / 'images'}",
        f"data.index={tmp_path / 'i'}",
    ]
    command = [sys.executable, "-m", f"llava_fsdp.{module}", *words, f"output_dir={tmp_path / 'out'}", more]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path, timeout=200)
    assert done.stderr.count("train would refuse this configuration") == 1, done.stderr
    assert done.returncode == 0 and done.stdout, done.stderr


@pytest.mark.parametrize(
    "words",
    slow_after(
        1,
        [
            ["data.examine=sample", "data.examine_images=2"],
            ["stage=finetune_lora", "val.every=1", "offload=optimizer", "data.template=v0", "labels=llava_v1_5"],
        ],
    ),
)
def test_the_first_screen_has_fifteen_lines(
    words: list[str], parts: Path, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of this width; it has the learning rate, each share by name, and the template that training uses."""
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
    assert f"rate {cfg.optim.lr:g}" in screen and "%" in screen and ", template v1" in screen
    assert ("images were decoded before training" in " ".join(screen.split())) is (cfg.data.examine is Examine.sample)


def test_a_stage_whose_model_the_stage_before_has_not_made_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And does not look for it on the hub. Other paths that do not exist are hub names, as ever."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    cfg = config_of(["stage=onevision_2", "model=llava_onevision_7b"])
    with pytest.raises(ConfigError, match=r"model\.checkpoint=.*\n.*train stage=onevision_2_single_image"):
        find_parts(cfg.model)
    for other in ("outputs/mine", "mine/onevision_1_5"):
        with pytest.raises(ModelError, match="the hub did not give it"):
            find_parts(replace(cfg.model, checkpoint=other))
