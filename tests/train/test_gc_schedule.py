"""Garbage is collected at the steps of the plan, and nowhere else."""

import gc

import pytest
from harness import single_world
from small import Configure
from tiers import slow_after
from torch.utils.data import Dataset

from llava_fsdp.data.batching.workers import WorkerStatus, from_workers
from llava_fsdp.parallel.zero import SHARD_PLANS
from llava_fsdp.train.events.gc_schedule import scheduled_gc
from llava_fsdp.train.loop import fit
from llava_fsdp.train.setup.build_state import build_state
from llava_fsdp.train.state import StepResult


@pytest.mark.parametrize(("every", "expected"), slow_after(1, [("2", [2, 4]), ("50", []), ("null", None)]))
def test_a_run_collects_at_its_steps(every: str, expected: list[int] | None, configure: Configure) -> None:
    cfg = configure(f"gc_every={every}", "max_steps=5")
    plan = SHARD_PLANS[cfg.sharding.strategy]
    state = build_state(cfg, single_world(), plan, None)
    collected: list[tuple[int, int]] = []
    enabled: list[bool] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and state.step and not gc.isenabled():
            collected.append((state.step, info["generation"]))

    def after_step(result: StepResult) -> None:
        enabled.append(gc.isenabled())

    gc.callbacks.append(note)
    try:
        fit(state, plan, cfg, after_step)
    finally:
        gc.callbacks.remove(note)
    assert gc.isenabled()
    assert enabled == [expected is None] * 5
    if expected is not None:
        assert collected == [(step, 1) for step in expected]


def test_the_collector_is_back_whatever_happens() -> None:
    with pytest.raises(ValueError), scheduled_gc(3):
        assert not gc.isenabled()
        raise ValueError
    assert gc.isenabled()
    gc.disable()
    try:
        with scheduled_gc(3):
            pass
        assert not gc.isenabled(), "as it was"
    finally:
        gc.enable()


class Enabled(Dataset):
    """Whether the collector of the process that prepares a step is on."""

    def __getitem__(self, step: int) -> bool:
        return gc.isenabled()


def test_data_workers_keep_pythons_own_way() -> None:
    with scheduled_gc(3):
        assert list(from_workers(Enabled(), range(2), WorkerStatus(1), 1, 10, False)) == [True, True]
