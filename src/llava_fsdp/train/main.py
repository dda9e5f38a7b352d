"""Train a LLaVA model: `torchrun -m llava_fsdp.train stage=pretrain`, then `stage=finetune`.

The function `train` runs a training from top to bottom. It calls `fit` (loop.py), which calls `train_step` for each
step.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from omegaconf import OmegaConf

from llava_fsdp.config import AUTO, Config, DType, Format, PairReference, Which
from llava_fsdp.config.command_line.tree import tree_of
from llava_fsdp.config.paths import check_same_settings
from llava_fsdp.data.images.preprocess import ImageReader
from llava_fsdp.data.text.chat_template.jinja_template import OWN
from llava_fsdp.model.llava.own_parts import NONE, OwnParts
from llava_fsdp.parallel.memory.offload import explained_memory_errors
from llava_fsdp.parallel.parallelism import Parallelism
from llava_fsdp.parallel.precision.fast_dtype import has_bf16, settle_precision, slow_dtype
from llava_fsdp.parallel.ranks import mesh as ranks
from llava_fsdp.parallel.ranks.consensus import on_first_rank
from llava_fsdp.parallel.ranks.mesh import distributed, gather_lists
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.plan.search.auto import Decision, decide, settle_packing
from llava_fsdp.plan.workload import samples_in
from llava_fsdp.report.run_reader import CONFIG_FILE
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.runtime.files.durable_files import replace_file
from llava_fsdp.runtime.files.heartbeat import Phase
from llava_fsdp.runtime.files.run_dir import FOLDER, claiming_folder, restoring_umask, step_of
from llava_fsdp.runtime.process.run_dir_watch import RunDirLock
from llava_fsdp.runtime.process.watchdog import Watchdog, WatchedRun
from llava_fsdp.runtime.text.log import log
from llava_fsdp.train import final_export
from llava_fsdp.train.checkpoints.replica_check import check_replicas
from llava_fsdp.train.checkpoints.resume import continues, find_best, load_weights_of, recorded_dtype, resume
from llava_fsdp.train.events.event_order import Observed, open_events
from llava_fsdp.train.events.held_out.answer_metric import ScoreFunction, choose_metric
from llava_fsdp.train.events.reporting.live_page import rewrite_page
from llava_fsdp.train.events.reporting.metrics import storage_errors
from llava_fsdp.train.events.reporting.reports import Reports
from llava_fsdp.train.events.reporting.trackers import HURRY
from llava_fsdp.train.events.run_events import RunEvents, check_own_events
from llava_fsdp.train.loop import fit
from llava_fsdp.train.setup.build_model import build_model
from llava_fsdp.train.setup.build_state import build_state, open_data
from llava_fsdp.train.setup.dry_run import dry_run
from llava_fsdp.train.setup.own_source import RecordSource, with_source
from llava_fsdp.train.setup.pair_reference import open_references
from llava_fsdp.train.setup.preflight import check_run, find_parts_of_run, with_template
from llava_fsdp.train.setup.same_software import check_same_software
from llava_fsdp.train.state import TrainState


@dataclass
class RunParts(WatchedRun):
    """The parts of a training that the watchdog uses while it runs, and that are used when the process ends. A part is
    None until it is built."""

    ends_process: bool = True
    folder: Path = Path()
    dir_lock: RunDirLock | None = None
    count_collectives: Callable[[], int] = int
    state: TrainState | None = None
    reports: Reports | None = None

    def check_folder(self) -> None:
        if self.dir_lock is not None:
            self.dir_lock.check_folder()

    def collectives(self) -> int:
        return self.count_collectives()

    def data_position(self) -> str:
        return self.state.loader.status.describe_step(self.state.step) if self.state is not None else ""

    def report_end(self) -> None:
        """Write the run's last page and end the trackers; if there are no reports yet, rewrite the page on rank 0."""
        if self.reports is not None:
            self.reports.end(HURRY)  # maximum seconds that it waits for trackers
        elif ranks.own_rank() == 0:
            rewrite_page(self.folder)


def train(
    cfg: Config,
    parts: RunParts | None = None,
    metric: ScoreFunction | None = None,
    events: Sequence[RunEvents] = (),
    own_parts: OwnParts = NONE,
    source: RecordSource | None = None,
) -> None:
    """Run a training, from its configuration to its export.

    Args:
        parts: gets the state, the reports and others as they are built, for a caller that needs them when the process
            ends.
        metric: function of the calling program that scores the answers of validations, in place of `val.metric`.
        events: observers of the calling program, which are told of each moment after those of the trainer.
        own_parts: parts of the model that the calling program gives.
        source: records that the calling program gives in place of `data.path`.
    """
    parts = parts or RunParts()
    if cfg.dry_run is not None:
        return dry_run(cfg)
    if cfg.format is Format.json:
        raise ConfigError("format=json is for dry_run=N; a training writes metrics.jsonl into output_dir")
    own_parts.check(cfg)
    cfg = with_source(cfg, source)
    check_run(cfg)
    answer_metric = choose_metric(cfg, metric)
    check_own_events(events)
    folder, rank = Path(cfg.output_dir), ranks.own_rank()
    parts.folder = folder
    with (
        claiming_folder(folder, rank, cfg.private) as lock,
        restoring_umask(),
        Watchdog(folder, rank, cfg.comm.init_timeout, cfg.comm.warn_after, parts) as watchdog,
        distributed(cfg) as world,
        watchdog.watching_peers(ranks.rank_identities(), is_guarded=world.device.type == "cuda"),
        explained_memory_errors(lambda: cfg, world.device),
    ):
        parts.dir_lock = RunDirLock(folder, lock, cfg.private) if lock is not None else None
        check_same_software(cfg, world.device, gather_lists)
        check_same_settings(cfg, gather_lists)
        cfg = agree_on_precision(cfg, world, has_bf16(world.device))
        cfg = settle_auto(cfg, world)
        own_parts.check(cfg)  # again, because `settle_auto` may have divided the model among ranks
        parallelism = Parallelism.of(cfg, world)
        parts.count_collectives = ranks.num_collectives(parallelism.meshes, world.device)
        continues_run = continues(cfg)
        state = parts.state = build_state(cfg, parallelism, own_parts)
        if cfg.private:  # not set earlier: everybody who may read the dataset may also read the index written for it
            os.umask(0o077)
        last_step = state.loader.total_steps
        resumed = resume(state, cfg, continues_run)
        check_replicas(state, folder / FOLDER)
        if cfg.data.pairs and cfg.pair_reference is PairReference.stored:
            open_references(state, cfg, resumed is not None, lambda: watchdog.at(Phase.VALIDATION, state.step))
        if state.step >= last_step:
            log().info("this run has finished after step %d; a larger max_steps or epochs continues it", state.step)
        elif resumed:
            log().info("continuing after step %d of %d", state.step, last_step)
        write_config(cfg, world)
        observers = open_events(Observed(cfg, state, watchdog, parts.dir_lock), answer_metric, resumed, events)
        parts.reports, controller = observers.reports, observers.controller
        with watchdog.steps():
            fit(state, cfg, observers.all, watchdog)
        watchdog.at(Phase.EXPORT)
        with controller.lost_folder_explained():
            if cfg.export.enabled:
                export_model(state, cfg, world)
        controller.stop_if_lost()


def export_model(state: TrainState, cfg: Config, world: World) -> None:
    """Export the trained model, or with `export.which` that of the best checkpoint or the average of the weights,
    unless the export is there already. Collective."""
    last_step = state.step
    best = find_best(cfg) if cfg.export.which is Which.best else None
    if best is not None:
        state.step = step_of(best) or last_step  # the export has this step
    if not final_export.is_current(state, cfg):
        if best is not None and state.step != last_step:
            load_weights_of(state, best)
        if cfg.export.which is Which.average:
            assert state.average is not None
            state.average.replace_weights()
        log().info("exported to %s", final_export.export(state, cfg, world.is_first))
    state.step = last_step


def agree_on_precision(cfg: Config, world: World, has_bf16_here: bool) -> Config:
    """Replace `precision.param_dtype=auto` by the same dtype on all ranks: that of the run that is resumed or, in a new
    run, bf16 if the devices of all ranks have instructions for it, else fp32. If another key of `precision` needs bf16,
    it is bf16. Log the choice, and a warning if a rank's device emulates the dtype. `has_bf16_here`: whether this
    rank's device has instructions for bf16. Collective."""
    ranks_with_bf16 = gather_lists([has_bf16_here])
    dtype_of_run = None
    if cfg.precision.param_dtype is DType.auto:
        dtype_of_run = on_first_rank(lambda: recorded_dtype(cfg), "cannot read the precision of the run to resume")
    cfg, chosen = settle_precision(cfg, ranks_with_bf16, world.device.type, dtype_of_run)
    if chosen is not None:
        log().info("%s", chosen)
    slowest = ranks_with_bf16.index(False) if False in ranks_with_bf16 else 0
    if world.rank == slowest and (warning := slow_dtype(cfg, world.device, has_bf16_here)):
        log().warning("%s", warning)
    return cfg


def settle_auto(cfg: Config, world: World) -> Config:
    """Replace every value `auto` in the configuration. `data.template=auto` becomes the conversation template that fits
    the model, `pack=auto` becomes true if the language model supports rows of packed samples, and a planner of memory
    and time, on rank 0, chooses the other values. Collective."""
    if not cfg.has_auto and cfg.data.template not in (AUTO, OWN) and AUTO not in (cfg.pack, cfg.compile):
        return cfg
    parts = find_parts_of_run(cfg)
    cfg, reason_for_padding = settle_packing(cfg, parts)
    if reason_for_padding is not None:
        log().info("auto: %s", reason_for_padding)
    cfg_with_template = with_template(cfg, parts)
    if cfg_with_template.data.template != cfg.data.template:
        cfg = cfg_with_template
        log().info("auto: data.template=%s, for the language model %s", cfg.data.template, parts.language.model_type)
    if not cfg.has_auto:
        return cfg
    shapes = build_model(cfg, parts, world.device)  # refuses what the model does not support before records are read
    # the loader is opened only for its records, so that it needs no `tokens_per_micro_batch`, which may still be `auto`
    steps = open_data(replace(cfg, tokens_per_micro_batch=None), world, shapes).steps

    # gives the tokens of an image if the index of the records does not count them
    rule = steps.image_reader.tokens if isinstance(steps.image_reader, ImageReader) else None

    def choose() -> Decision:
        return decide(cfg, world, parts, samples_in(steps.records, rule), continues(cfg))

    decision = on_first_rank(choose, "cannot plan")
    log().info("%s", decision.summary(cfg))
    return decision.applied(cfg)


def write_config(cfg: Config, world: World) -> None:
    """Write `config.yaml` into the run's folder, on rank 0."""
    if world.is_first:
        path = Path(cfg.output_dir) / CONFIG_FILE
        with storage_errors(path):
            replace_file(path, OmegaConf.to_yaml(OmegaConf.create(tree_of(cfg))).encode())
