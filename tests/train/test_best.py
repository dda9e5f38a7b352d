"""The best checkpoint is kept and exported, and a training ends early, on any number of ranks and after any stop."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from harness import RankPool
from reference import run_ranks
from safetensors.torch import load_file
from small import Configure, command_config, config_of, write_json

from llava_fsdp.checkpoint.retention import BEST
from llava_fsdp.config import BestBy, Config, ConversionConfig
from llava_fsdp.export.main import export
from llava_fsdp.runtime.errors import CheckpointError, ConfigError
from llava_fsdp.runtime.files.provenance import read_notes
from llava_fsdp.train import main as train
from llava_fsdp.train.events.held_out.best import MEASURED, BestValidation, best_validation
from llava_fsdp.train.events.held_out.validation import Validation

RISES = (
    "optim.lr=3e-2", "optim.schedule=constant", "optim.warmup_ratio=0", "global_batch_size=4", "max_steps=16",
    "epochs=20", "val.every=2", "val.answers=0", "checkpoint.every=4", "checkpoint.keep=2", "checkpoint.best=loss",
    "export.enabled=true", "export.dtype=fp32", "export.verify=false", "export.which=best",
)  # fmt: skip
"""With four records, the loss of others falls, and rises again."""


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "validation.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("by", "values", "expected"),
    [
        (BestBy.loss, [3.0, 2.0, 2.0, 2.5], (4, 2.0, 2)),
        (BestBy.score, [0.1, None, 0.3, 0.3], (6, 0.3, 1)),
        (BestBy.loss, [None, math.nan], (None, None, 0)),
        (BestBy.margin, [-2, -1.5], (4, -1.5, 0)),
        (BestBy.loss, [], (None, None, 0)),
    ],
)
def test_the_best_of_some_validations(
    by: BestBy, values: list[float | None], expected: tuple[int | None, float | None, int]
) -> None:
    rows = [{"step": 2 * n, by.value: value} for n, value in enumerate(values, start=1)]
    found = best_validation(rows, by, range(99))
    assert (found.step, None if math.isnan(found.value) else found.value, found.validations_since) == expected


def test_only_validations_count_that_can_be_compared_and_exported() -> None:
    """Those of other records, and those whose checkpoint is gone, do not."""
    rows = [{"step": n, "loss": float(n), MEASURED: "a" if n > 1 else "b"} for n in range(1, 6)]
    assert best_validation(rows, BestBy.loss, range(99)).step == 2
    assert best_validation(rows, BestBy.loss, [1, 4, 5]) == BestValidation(step=4, value=4.0, validations_since=1)


@pytest.mark.parametrize(
    "overrides",
    [
        ["val.patience=2"],
        ["export.which=best"],
        ["checkpoint.best=loss"],
        ["checkpoint.best=accuracy", "val.every=2"],
        ["checkpoint.best=score", "val.every=2", "val.answers=0"],
        ["checkpoint.best=loss", "val.every=2", "val.patience=0"],
    ],
)
def test_what_needs_a_number_to_compare_is_refused_without(overrides: list[str]) -> None:
    with pytest.raises(ConfigError):
        config_of(overrides)


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("step-*"))


def best_of(folder: Path) -> BestValidation:
    return best_validation(rows_of(folder), BestBy.loss, range(99))


@pytest.fixture(scope="module")
def held_out(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Four records to learn by heart, and others to validate with."""
    path = tmp_path_factory.mktemp("few") / "few.json"
    write_json(path, json.loads((dataset / "captions.json").read_text())[:4])
    return f"data.path={path}", f"val.path={dataset / 'mixed.json'}", f"val.images={dataset / 'images'}"


def test_the_best_checkpoint_is_kept_and_exported(
    configure: Configure, held_out: tuple[str, ...], tmp_path: Path
) -> None:
    """It is none of the newest, and is exported as by a run that ends there; also by the command."""
    train.train(configure(*RISES, *held_out, to=tmp_path / "run"))
    best = best_of(tmp_path / "run")
    assert best.step is not None and 2 <= best.step <= 10, rows_of(tmp_path / "run")
    name = f"step-{best.step:06}"
    assert (tmp_path / "run" / "checkpoints" / BEST).read_text().strip() == name
    assert checkpoints(tmp_path / "run") == sorted({name, "step-000012", "step-000016"})
    train.train(configure(*RISES, *held_out, f"max_steps={best.step}", "export.which=last", to=tmp_path / "short"))
    found, wanted = (load_file(tmp_path / run / "export" / "model.safetensors") for run in ("run", "short"))
    assert found.keys() == wanted.keys() and all(found[key].equal(wanted[key]) for key in found)
    words = f"source={tmp_path / 'run'}", f"to={tmp_path / 'made'}", "which=best", "dtype=fp32", "verify=false"
    made = load_file(export(command_config(ConversionConfig, "export", *words)) / "model.safetensors")
    assert all(made[key].equal(wanted[key]) for key in wanted)
    (tmp_path / "run" / "checkpoints" / BEST).unlink()
    with pytest.raises(CheckpointError):
        export(command_config(ConversionConfig, "export", *words, "overwrite=true"))


def test_a_training_ends_early_at_the_same_step_after_a_stop_and_on_other_ranks(
    configure: Configure, held_out: tuple[str, ...], pools: dict[int, RankPool], tmp_path: Path
) -> None:
    def cfg(folder: str, *more: str) -> Config:
        return configure(*RISES, *held_out, "val.patience=2", *more, to=tmp_path / folder)

    train.train(cfg("whole"))
    whole = rows_of(tmp_path / "whole")
    best = best_of(tmp_path / "whole")
    assert best.step is not None and best.validations_since == 2 and whole[-1]["step"] == best.step + 4 < 16
    assert checkpoints(tmp_path / "whole")[-1] == f"step-{whole[-1]['step']:06}", "it is saved although it is not due"
    train.train(cfg("parts", f"max_steps={best.step}", "export.enabled=false"))
    pools[2].run(run_ranks, cfg("parts"))
    found = rows_of(tmp_path / "parts")
    assert [row["step"] for row in found] == [row["step"] for row in whole]
    pointers = [(tmp_path / run / "checkpoints" / BEST).read_text() for run in ("whole", "parts")]
    assert pointers[0] == pointers[1] == f"step-{best.step:06}\n"
    metrics = (tmp_path / "whole" / "metrics.jsonl").read_text()
    train.train(cfg("whole"))
    assert (tmp_path / "whole" / "metrics.jsonl").read_text() == metrics, "it has ended"
    train.train(cfg("whole", "val.patience=3"))
    assert (
        rows_of(tmp_path / "whole")[: len(whole)] == whole
        and rows_of(tmp_path / "whole")[-1]["step"] > whole[-1]["step"]
    )


def test_a_run_that_stops_in_its_last_validation_still_finds_its_best(
    configure: Configure, held_out: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing is left to train then, and the checkpoint of the last step is the best."""
    keys = *RISES, *held_out, "max_steps=6"
    with monkeypatch.context() as patched:
        patched.setattr(Validation, "measure_losses", stopped_at(6, Validation.measure_losses))
        with pytest.raises(KeyboardInterrupt):
            train.train(configure(*keys, to=tmp_path))
    train.train(configure(*keys, to=tmp_path))
    assert best_of(tmp_path).step == 6
    assert (tmp_path / "checkpoints" / BEST).read_text() == "step-000006\n"
    assert read_notes(tmp_path / "export")["step"] == 6


def stopped_at(step: int, measure: Any) -> Any:
    def measured(self: Validation) -> Any:
        if self.state.step == step:
            raise KeyboardInterrupt
        return measure(self)

    return measured


def test_a_run_that_keeps_its_best_from_now_on_compares_what_it_has(
    configure: Configure, held_out: tuple[str, ...], tmp_path: Path
) -> None:
    """The checkpoints of better steps are gone: they count no more, and the pointer names one that is there."""
    first = [key for key in RISES if "best" not in key] + ["max_steps=12", "export.enabled=false", *held_out]
    train.train(configure(*first, to=tmp_path))
    assert best_of(tmp_path).step == 6 and checkpoints(tmp_path) == ["step-000008", "step-000012"]
    train.train(configure(*RISES, *held_out, to=tmp_path))
    assert (tmp_path / "checkpoints" / BEST).read_text() == "step-000008\n"
    assert read_notes(tmp_path / "export")["step"] == 8
    assert checkpoints(tmp_path) == ["step-000008", "step-000012", "step-000016"]
