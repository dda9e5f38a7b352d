"""The observers of a training, in the order in which each moment reaches them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llava_fsdp.config import Config
from llava_fsdp.runtime.process.run_dir_watch import RunDirLock
from llava_fsdp.runtime.process.watchdog import Watchdog
from llava_fsdp.train import final_export
from llava_fsdp.train.events.gc_schedule import GarbageCollection
from llava_fsdp.train.events.held_out.answer_metric import AnswerMetric
from llava_fsdp.train.events.held_out.validation import open_validation
from llava_fsdp.train.events.profiler import open_profiler
from llava_fsdp.train.events.reporting.reports import Reports, open_reports
from llava_fsdp.train.events.reporting.step_warnings import CompileWarnings
from llava_fsdp.train.events.run_events import EventList, OwnEvent, RunEvents
from llava_fsdp.train.events.save_and_stop import RunController, open_saver
from llava_fsdp.train.events.timeouts import Timeouts
from llava_fsdp.train.state import TrainState


@dataclass(frozen=True)
class Observed:
    """What the observers of a training are made of."""

    cfg: Config
    state: TrainState
    """The state after it was resumed; its step is the one at which this start of the run begins."""
    watchdog: Watchdog
    dir_lock: RunDirLock | None
    """On rank 0 the lock on the run's folder; None on other ranks."""


@dataclass(frozen=True)
class TrainingEvents:
    """The observers of a training, and those that are needed by name."""

    all: EventList
    controller: RunController
    reports: Reports


def open_events(
    observed: Observed, metric: AnswerMetric, resumed: Path | None, own_events: Sequence[RunEvents] = ()
) -> TrainingEvents:
    """Make the observers of a training, whose methods `fit` calls at each moment (start, step, end). Collective.

    Args:
        metric: scores the answers of validations.
        resumed: folder of the verified checkpoint from which the run continues; None if it begins at step 0.
        own_events: observers that the calling program gives.

    Raises:
        CheckpointError: the disk has no room for a checkpoint, or the folder is not writable.
        ConfigError: the model cannot generate answers.
        StorageError: output_dir cannot be written.
    """
    cfg, state, world = observed.cfg, observed.state, observed.state.parallelism.world
    last_step = state.loader.total_steps
    adapters = final_export.adapter_in_checkpoints(state, cfg)
    saver = open_saver(state, cfg, resumed, adapters) if state.step < last_step else None
    controller = RunController(state, saver, cfg, last_step, observed.watchdog, observed.dir_lock)
    reports = open_reports(state, cfg, controller.is_lost) if world.is_first else Reports()
    events = EventList()
    ordered = [
        CompileWarnings(),
        reports,  # before the controller: a step that ends the run, by its loss or a full disk, has its row
        controller,  # before all that takes long: a step is saved first, and a request to stop is answered first
        # behind the first save, which may take long
        Timeouts(state.parallelism.meshes, cfg.comm.timeout, observed.watchdog),
        # behind the save, so that a run that stops while it validates has the step's checkpoint, and validates later
        open_validation(state, cfg, observed.watchdog, events, metric),
        *map(OwnEvent, own_events),  # behind ours: their errors cost no row, checkpoint or validation of the step
        GarbageCollection(cfg.gc_every),  # behind all that makes garbage
        # last: the next step's profile begins here, without what was done after the step before
        open_profiler(cfg, world.rank, world.device, state.step, last_step),
    ]
    events.events = [event for event in ordered if event is not None]
    return TrainingEvents(events, controller, reports)
