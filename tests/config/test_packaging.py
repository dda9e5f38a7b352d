"""What is installed from a wheel works without the checkout, and importing it has no effects."""

import json
import os
import subprocess
import sys
import zipfile
from itertools import cycle
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STAGES = sorted(p.stem for p in (ROOT / "conf" / "stage").glob("*.yaml"))
MODELS = sorted(p.stem for p in (ROOT / "conf" / "model").glob("*.yaml"))

COMPOSE = """
import json, sys
from hydra import compose, initialize_config_dir
import llava_fsdp
from llava_fsdp.config import Config, config_dir, load
with initialize_config_dir(str(config_dir()), version_base="1.3"):
    names = []
    for stage, model in json.loads(sys.argv[1]):
        cfg = load(Config, compose("train", overrides=[f"stage={stage}", f"model={model}", "model.language=lm"]))
        names.append([cfg.stage.name, cfg.model.name])
print(json.dumps({"package": llava_fsdp.__file__, "conf": str(config_dir()), "names": names}))
"""

IMPORT_ONLY = """
import json, logging, os, sys
before = dict(os.environ), list(logging.root.handlers), logging.root.level
import llava_fsdp
after = dict(os.environ), list(logging.root.handlers), logging.root.level
heavy = sorted({"torch", "transformers", "hydra", "omegaconf", "numpy"} & set(sys.modules))
json.dump({"same": before == after, "heavy": heavy}, open(sys.argv[1], "w"))
"""


def run(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    done = subprocess.run(
        command, check=False, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A wheel made from the checkout, and one made from the source distribution."""
    found = {}
    for source, options in {"checkout": ["--wheel"], "sdist": []}.items():
        folder = tmp_path_factory.mktemp(source)
        run(sys.executable, "-m", "build", "--no-isolation", *options, "--outdir", str(folder), str(ROOT), cwd=folder)
        (found[source],) = folder.glob("*.whl")
    return found


@pytest.mark.parametrize("source", ["checkout", pytest.param("sdist", marks=pytest.mark.slow)])
def test_every_stage_and_model_composes_from_an_installed_wheel(
    source: str, wheels: dict[str, Path], tmp_path: Path
) -> None:
    target = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--target", str(target)]
    run(*pip, str(wheels[source]), cwd=tmp_path)
    pairs = [*zip(STAGES, cycle(MODELS), strict=False), *zip(cycle(STAGES), MODELS, strict=False)]
    done = run(sys.executable, "-c", COMPOSE, json.dumps(pairs), cwd=tmp_path, PYTHONPATH=str(target))
    answer = json.loads(done.stdout)
    assert answer["package"] == str(target / "llava_fsdp" / "__init__.py")  # not the checkout's
    assert answer["conf"] == str(target / "llava_fsdp" / "conf")
    assert answer["names"] == [list(pair) for pair in pairs]


@pytest.mark.parametrize("source", ["checkout", "sdist"])
def test_wheel_holds_every_file_of_conf_and_of_the_package(source: str, wheels: dict[str, Path]) -> None:
    def files(folder: Path, prefix: str) -> set[str]:
        paths = (p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
        return {prefix + p.relative_to(folder).as_posix() for p in paths}

    expected = files(ROOT / "conf", "llava_fsdp/conf/") | files(ROOT / "src" / "llava_fsdp", "llava_fsdp/")
    packed = {name for name in zipfile.ZipFile(wheels[source]).namelist() if name.startswith("llava_fsdp/")}
    assert packed == expected


def test_import_has_no_effects(tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    report = tmp_path / "report.json"
    done = run(sys.executable, "-c", IMPORT_ONLY, str(report), cwd=folder)
    assert json.loads(report.read_text()) == {"same": True, "heavy": []}
    assert (done.stdout, done.stderr) == ("", "")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    "module", ["config", "config.command_line.cli", "runtime.errors", "runtime.text.log", "sweep.main", "migrate.main"]
)
def test_what_runs_beside_a_training_is_light(module: str, tmp_path: Path) -> None:
    """The import contract sees our own modules; this one also sees what they import from elsewhere."""
    code = f"import llava_fsdp.{module}, sys; print(sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    assert run(sys.executable, "-c", code, cwd=tmp_path).stdout == "[]\n"
    assert list(tmp_path.iterdir()) == []
