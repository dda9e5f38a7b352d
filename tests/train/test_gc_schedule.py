"""Garbage is collected at the steps of the plan, and nowhere else."""

import gc
from types import SimpleNamespace
from typing import Any, cast

import pytest
from harness import alone
from small import Configure
from steps import Calls
from tiers import slow_after
from torch.utils.data import Dataset

from llava_fsdp.data.batching.workers import WorkerStatus, steps_from_workers
from llava_fsdp.train.events.gc_schedule import GarbageCollection
from llava_fsdp.train.events.run_events import EventList, RunStart
from llava_fsdp.train.loop import fit
from llava_fsdp.train.setup.build_state import build_state


@pytest.mark.parametrize(("every", "expected"), slow_after(1, [("2", [2, 4]), ("50", []), ("null", None)]))
def test_a_run_collects_at_its_steps(every: str, expected: list[int] | None, configure: Configure) -> None:
    cfg = configure(f"gc_every={every}", "max_steps=5")
    state = build_state(cfg, alone(cfg))
    collected: list[tuple[int, int]] = []
    enabled: list[bool] = []
    collection = GarbageCollection(cfg.gc_every)
    events = EventList([Calls(lambda result: enabled.append(gc.isenabled())), collection])

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and state.step and not gc.isenabled():
            collected.append((state.step, info["generation"]))

    gc.callbacks.append(note)
    try:
        fit(state, cfg, events)
    finally:
        gc.callbacks.remove(note)
    assert gc.isenabled()
    assert enabled == [expected is None] * 5
    if expected is not None:
        assert collected == [(step, 1) for step in expected]


def start(every: int | None) -> GarbageCollection:
    collection, run = GarbageCollection(every), object()
    collection.on_start(cast(RunStart, run))
    return collection


def test_the_collector_is_back_whatever_happens() -> None:
    """A run that ends in an error closes its observers."""
    collection = start(3)
    assert not gc.isenabled()
    collection.close()
    assert gc.isenabled()
    gc.disable()
    try:
        start(3).close()
        assert not gc.isenabled(), "as it was"
    finally:
        gc.enable()


class Enabled(Dataset):
    """Whether the collector of the process that prepares a step is on."""

    def __getitem__(self, step: int) -> bool:
        return gc.isenabled()


def test_data_workers_keep_pythons_own_way() -> None:
    collection = start(3)
    try:
        cfg: Any = SimpleNamespace(prefetch=1, stall=10)
        assert list(steps_from_workers(Enabled(), range(2), WorkerStatus(1), cfg, False)) == [True, True]
    finally:
        collection.close()
