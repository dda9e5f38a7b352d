"""What a command line and a --config-dir may set of Hydra's own, and what is refused before Hydra reads it."""

from pathlib import Path

import pytest

from llava_fsdp.config.command_line.hydra_guard import check_command_line
from llava_fsdp.runtime.errors import ConfigError


def check(tmp_path: Path, name: str, text: str, *words: str) -> None:
    path = tmp_path / "conf" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    check_command_line(["--config-dir", str(tmp_path / "conf"), *words])


@pytest.mark.parametrize(
    "word",
    [
        "optim.lr=interval(1e-5,1e-3)", "hydra.sweep.dir=x", "hydra.sweep.subdir=${model.name}/${hydra.job.num}",
        "hydra/launcher=joblib", "hydra.launcher.n_jobs=4", "hydra/sweeper=optuna", "hydra/sweeper/sampler=random",
        "hydra.sweeper.storage=sqlite:///search.db", "hydra.sweeper.params.optim.lr=1,2", "hydra.mode=MULTIRUN",
        "hydra/job_logging=none", "data.path=/data/my_target_set/a.json",
    ],
)  # fmt: skip
def test_words_that_are_taken(word: str) -> None:
    check_command_line(["-m", word])


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("hydra.sweeper.sampler._target_=os.system", "Python to call"),
        ("+hydra.callbacks.x._target_=os.system", "Python to call"),
        ("+evil={_target_: os.system}", "Python to call"),
        ("hydra.launcher=${oc.decode:'{a: b}'}", "Python to call"),
        ("hydra.sweeper.custom_search_space=mine.search", "Python to call"),
        ("hydra.sweeper.params.hydra.job_logging=x", "is fixed"),
        ("hydra.callbacks=${launcher}", "is fixed"),
        ("hydra={callbacks: {}}", "is fixed"),
        ("hydra/job_logging=default", "is fixed"),
        ("hydra.job_logging.handlers.a.class=logging.FileHandler", "is fixed"),
        ("+extra@hydra.job_logging=mine", "is fixed"),
        ("hydra.run.dir=x", "is fixed"),
        ("~hydra.output_subdir", "is fixed"),
        ("+hydra.job.env_set.LD_PRELOAD=x.so", "is fixed"),
        ("hydra.searchpath=[file:///x]", "--config-dir"),
        ("--config-path=x", "--config-dir"),
    ],
)
def test_words_that_are_refused(word: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_command_line([word])


def test_a_text_may_hold_anything_but_an_interpolation() -> None:
    """As a question does: Hydra gets it quoted. Without quotes it would be an object."""
    word = "question={_target_: os.system}"
    check_command_line([word, "question=what does _target_ mean?"], {"question"})
    for words, texts in (
        ([word], ()),
        (["question=${oc.create:{_target_: a}}"], {"question"}),
        (["_target_=x"], {"_target"}),
    ):
        with pytest.raises(ConfigError, match="Python to call"):
            check_command_line(words, texts)


GOOD = {
    "extra/mine.yaml": "# @package _global_\nseed: 7\n",
    "sweep/lr.yaml": "# @package _global_\nhydra:\n  sweeper:\n    params:\n      optim.lr: 1e-4,2e-4\n",
    "mine.yaml": "defaults:\n  - train\n  - override hydra/launcher: joblib\n  - override hydra/job_logging: none\n"
    "hydra:\n  launcher:\n    n_jobs: 2\n",
    "hydra/launcher/four.yaml": "defaults:\n  - joblib\nn_jobs: 4\n",
}


@pytest.mark.parametrize("name", GOOD)
def test_files_that_are_taken(name: str, tmp_path: Path) -> None:
    check(tmp_path, name, GOOD[name])


GLOBAL = "# @package _global_\n"
BAD = {
    "target deep": (f"{GLOBAL}a:\n  - b:\n      _target_: os.system\n", "Python to call"),
    "target escaped": (f'{GLOBAL}a:\n  "\\x5ftarget_": os.system\n', "Python to call"),
    "target as a job's override": (f"{GLOBAL}hydra:\n  sweeper:\n    params:\n      a._target_: os.system\n", "Python"),
    "target decoded": (f"{GLOBAL}a: '{{_tar'\nb: 'get_: x}}'\nc: '${{oc.decode:${{a}}${{b}}}}'\n", "Python to call"),
    "sampler": (f"{GLOBAL}hydra:\n  sweeper:\n    sampler:\n      _target_: os.system\n", "Python to call"),
    "search space": (f"{GLOBAL}hydra:\n  sweeper:\n    custom_search_space: mine.search\n", "Python to call"),
    "logging": (f"{GLOBAL}hydra:\n  job_logging:\n    handlers:\n      a:\n        class: x\n", "is fixed"),
    "logging of jobs": (f"{GLOBAL}hydra:\n  sweeper:\n    params:\n      hydra.job_logging: x\n", "is fixed"),
    "whole node": (f"{GLOBAL}x: {{}}\nhydra: ${{x}}\n", "is fixed"),
    "under a key called defaults": (f"{GLOBAL}hydra:\n  run:\n    defaults:\n      dir: x\n", "is fixed"),
    "search path": (f"{GLOBAL}hydra:\n  searchpath: [file:///x]\n", "--config-dir"),
    "environment": (f"{GLOBAL}hydra:\n  job:\n    env_set:\n      LD_PRELOAD: x.so\n", "is fixed"),
    "package": ("# @package hydra.job_logging\nhandlers: {a: {class: x}}\n", "package is Hydra's"),
    "default": ("defaults:\n  - override hydra/job_logging: default\n", "is fixed"),
    "default of several": ("defaults:\n  - /hydra/job_logging: [default]\n", "is fixed"),
    "default by path": ("defaults:\n  - /hydra/job_logging/default\n", "is fixed"),
    "default's package": ("defaults:\n  - extra@hydra.job_logging: mine\n", "is fixed"),
    "aliases": ("a: &a [1]\nb: [*a, *a]\n", "part of itself"),
    "no YAML": ("a: [1", "is not YAML"),
}


@pytest.mark.parametrize("name", BAD)
def test_files_that_are_refused(name: str, tmp_path: Path) -> None:
    text, said = BAD[name]
    with pytest.raises(ConfigError, match=said) as caught:
        check(tmp_path, "extra/mine.yaml", text)
    assert "mine.yaml" in str(caught.value) or name == "search path"


@pytest.mark.parametrize("name", ["hydra/job_logging/mine.yaml", "hydra/callbacks/mine.yaml", "hydra.yaml"])
def test_groups_of_hydra_s_own(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is fixed"):
        check(tmp_path, name, "version: 1\n")


def test_files_behind_links(tmp_path: Path) -> None:
    """As a mounted ConfigMap has them; a link back to the folder ends."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "extra").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "again").symlink_to(tmp_path / "conf")
    check(tmp_path, "a.yaml", "seed: 1\n")
    (tmp_path / "elsewhere" / "evil.yaml").write_text("_target_: os.system\n")
    with pytest.raises(ConfigError, match="Python to call"):
        check_command_line([f"--config-dir={tmp_path / 'conf'}"])
