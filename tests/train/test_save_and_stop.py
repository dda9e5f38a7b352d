"""When a training saves, stops and gives up: the decisions after a step and between two, without a model."""

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llava_fsdp.checkpoint.saver import SavedState
from llava_fsdp.config import OffloadMode
from llava_fsdp.runtime.errors import CheckpointError, NumericError, Stopped
from llava_fsdp.runtime.files.heartbeat import Phase
from llava_fsdp.runtime.process.watchdog import Watchdog
from llava_fsdp.train.events import save_and_stop as module
from llava_fsdp.train.events.save_and_stop import RunController


class FakeSaver:
    """Notes what is asked of it."""

    def __init__(self, state: Any):
        self.state, self.saved_step, self.failed = state, None, False
        self.saves: list[int] = []
        self.is_closed, self.forgiven = False, None

    def save(self) -> None:
        self.saves.append(self.state.step)
        self.saved_step = self.state.step

    def raise_if_failed(self) -> None:
        if self.failed:
            raise CheckpointError("the disk is full")

    def close(self) -> None:
        self.is_closed = True


Make = Callable[..., RunController]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def made(step: int = 0, every: int | None = 3, last: int = 9, exports: bool = True) -> RunController:
        def record_names_of_ranks(step: int, ranks: list[int]) -> list[str]:
            return [f"record {step}.{rank}" for rank in ranks or range(10)]

        loader = SimpleNamespace(steps=SimpleNamespace(record_names_of_ranks=record_names_of_ranks))
        state: Any = SimpleNamespace(step=step, consecutive=0, loader=loader, routers=None)
        cfg: Any = SimpleNamespace(
            output_dir=str(tmp_path), checkpoint=SimpleNamespace(every=every), export=SimpleNamespace(enabled=exports),
            numeric=SimpleNamespace(max_consecutive_skips=2),
        )  # fmt: skip
        saver: Any = FakeSaver(state)
        return RunController(state, saver, cfg, last, Watchdog(tmp_path))

    return made


RESULT: Any = SimpleNamespace(loss=1.5, grad_norm=float("inf"), own_loss_is_finite=True)


def saves(controller: RunController) -> list[int]:
    saver: Any = controller.saver
    return saver.saves


@pytest.mark.parametrize(
    ("skipped", "expected"),
    [((), [3, 6, 8]), ((3,), [4, 6, 8]), ((2, 3), [4, 6, 8]), ((3, 4), [5, 6, 8]), ((6, 7), [3, 8]), ((8,), [3, 6, 8])],
)
def test_a_checkpoint_that_is_due_waits_for_a_step_that_counts(
    skipped: tuple[int, ...], expected: list[int], make: Make
) -> None:
    """But not behind the last step; and what was postponed is saved once."""
    controller = make(last=8)
    for step in range(1, 9):
        controller.state.step = step
        controller.state.consecutive = controller.state.consecutive + 1 if step in skipped else 0
        controller.after_step(RESULT)
    assert saves(controller) == expected and controller.watchdog.phase is Phase.CHECKPOINT


def test_as_many_skips_as_are_allowed_go_on(make: Make, tmp_path: Path) -> None:
    """One more ends the run, with the samples of the ranks whose own loss is not finite, or of all."""
    controller = make()
    controller.state.step, controller.state.consecutive = 7, 2
    controller.after_step(RESULT)
    controller.state.step, controller.state.consecutive = 8, 3
    with pytest.raises(NumericError) as caught:
        controller.after_step(RESULT)
    said = str(caught.value)
    assert said.startswith("step 6 to 8: loss 1.5, gradient norm inf; the weights are those of step 5")
    assert "checkpoint is none" in said and "those of step 8: record 7.0, " in said
    assert "record 7.7 and 2 more." in said and caught.value.culprit["records"][-1] == "record 7.9"
    (tmp_path / "checkpoints" / "step-000003").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-000005").mkdir()
    controller.state.consecutive, controller.cfg.numeric.max_consecutive_skips = 1, 0
    own: Any = SimpleNamespace(**{**vars(RESULT), "own_loss_is_finite": False})
    with pytest.raises(NumericError) as caught:
        controller.after_step(own)
    said = str(caught.value)
    assert said.startswith("step 8: ") and "those of step 7" in said and "step-000005" in said
    assert "those of step 8 on rank 0: record 7.0." in said and caught.value.culprit["records"] == ["record 7.0"]


def test_a_checkpoint_under_way_is_waited_for_before_a_run_is_given_up(make: Make) -> None:
    """The message names the last checkpoint, and one that could not be written is told first."""
    controller = make()
    controller.state.step, controller.state.consecutive = 8, 3
    saver: Any = controller.saver
    saver.failed = True
    with pytest.raises(CheckpointError):
        controller.after_step(RESULT)


def test_a_request_is_answered_once_and_nothing_is_saved_twice(make: Make) -> None:
    controller = make(step=4)
    watchdog = controller.watchdog
    watchdog.saves = 1
    controller.before_step()
    assert saves(controller) == [], "the state that the run continued from is on the disk"
    controller.state.step = 5
    controller.before_step()
    assert saves(controller) == [], "that request was answered"
    watchdog.saves = 2
    controller.before_step()
    controller.before_step()
    assert saves(controller) == [5]
    watchdog.stop = "SIGTERM"
    with pytest.raises(Stopped, match="SIGTERM: stopped after step 5; the same command continues there") as caught:
        controller.before_step()
    assert saves(controller) == [5] and caught.value.asked_here
    controller.state.step = 6
    with pytest.raises(Stopped, match="after step 6"):
        controller.before_step()
    assert saves(controller) == [5, 6]


def test_what_another_rank_wants_is_done_here(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    controller = make()
    controller.state.step = 2
    monkeypatch.setattr(module.Votes, "agreed", lambda votes: module.Votes(stop=True))
    with pytest.raises(Stopped, match="a signal on another rank: stopped after step 2") as caught:
        controller.before_step()
    assert saves(controller) == [2] and not caught.value.asked_here
    monkeypatch.setattr(module.Votes, "agreed", lambda votes: module.Votes(failed=True))
    saver: Any = controller.saver
    saver.failed = True
    with pytest.raises(CheckpointError, match="the disk is full"):
        controller.before_step()


def test_waiting_for_the_last_checkpoint_is_said_if_it_is_long(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "llava_fsdp")
    make().on_end()
    assert not caplog.messages
    controller, said = make(), threading.Event()
    controller.state.step = 7
    monkeypatch.setattr(module, "SLOW_SECONDS", 0.0)
    heard: list[tuple[object, ...]] = []
    monkeypatch.setattr(module, "log", lambda: SimpleNamespace(info=lambda *words: heard.append(words) or said.set()))
    monkeypatch.setattr(controller, "finish", lambda: said.wait(10) or pytest.fail("nothing was said"))
    controller.on_end()
    assert [words[-1] for words in heard] == [7]


@pytest.mark.parametrize(("stop", "exports", "stops"), [
    ("", True, False), ("SIGTERM", True, True), ("SIGTERM", False, False),
])  # fmt: skip
def test_a_stop_in_the_last_step_is_one_where_an_export_is_left(
    stop: str, exports: bool, stops: bool, make: Make
) -> None:
    controller = make(exports=exports)
    controller.watchdog.stop = stop
    saver: Any = controller.saver
    if stops:
        with pytest.raises(Stopped, match="the same command exports the model"):
            controller.on_end()
    else:
        controller.on_end()
    assert saver.is_closed and controller.saver is None
    controller.on_end()


@pytest.mark.parametrize(
    ("resumed", "good"),
    [(None, []), ("run/checkpoints/step-000004", ["step-000004"]), ("other/checkpoints/step-000004", [])],
)
def test_a_checkpoint_of_this_run_that_was_read_counts_as_good(
    resumed: str | None, good: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of another run is not of those that are kept and deleted here. Replicas are compared before each save, and
    offloaded states in files are written in place."""
    made: list[tuple[SavedState, list[Path]]] = []
    compared: list[tuple[Any, Path]] = []

    def saver(parent: Path, cfg: Any, saved: SavedState, good: list[Path], **_: Any) -> Any:
        made.append((saved, good))
        return SimpleNamespace(before_update=lambda: None)

    monkeypatch.setattr(module, "Saver", saver)
    monkeypatch.setattr(module, "check_replicas", lambda state, parent: compared.append((state, parent)))
    optimizer = SimpleNamespace(param_groups=[], register_step_pre_hook=lambda hook: None)
    for mode, equal_ranks in ((OffloadMode.nvme, None), (OffloadMode.params, (1, 2))):
        state: Any = SimpleNamespace(optimizer=optimizer, parallelism=SimpleNamespace(equal_ranks=equal_ranks))
        offload = SimpleNamespace(mode=mode)
        cfg: Any = SimpleNamespace(output_dir=str(tmp_path / "run"), checkpoint="settings", offload=offload)
        module.open_saver(state, cfg, None if resumed is None else tmp_path / resumed)
        saved, given = made.pop()
        assert [path.name for path in given] == good
        assert saved.in_place is (mode is OffloadMode.nvme)
        assert saved.equal_ranks == equal_ranks
        saved.check()
        assert compared.pop() == (state, tmp_path / "run" / "checkpoints")
