"""Train a LLaVA model: `torchrun -m llava_fsdp.train stage=pretrain`, then `stage=finetune`.

`train` reads from top to bottom as what happens; `fit` (loop.py) calls `train_step`, which calls `backward`.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from torch.distributed.device_mesh import DeviceMesh

from llava_fsdp.config import Config, Format, Source, cli
from llava_fsdp.config.paths import check_places, check_same_settings
from llava_fsdp.data.loader import Loader, build_loader
from llava_fsdp.data.toy_shapes import draw_shapes
from llava_fsdp.data.validation_set import Choose, HeldOut, open_held_out, warn_of_trained
from llava_fsdp.distributed import mesh as ranks
from llava_fsdp.distributed.consensus import on_first_rank
from llava_fsdp.distributed.local_shards import local_shards
from llava_fsdp.distributed.mesh import World, distributed, first_rank_first, gather_lists, make_mesh
from llava_fsdp.distributed.offload import clear_memory_errors
from llava_fsdp.distributed.parallelize import weights_of
from llava_fsdp.distributed.precision import DTYPES, MasterWeights
from llava_fsdp.distributed.zero import SHARD_PLANS, ShardPlan
from llava_fsdp.export import adapter_folder
from llava_fsdp.export.check_folders import check_artifacts
from llava_fsdp.export.processor import rehearse_tokenizer
from llava_fsdp.model.llava import Llava, build_llava
from llava_fsdp.model.load_weights import find_weights, fingerprint, frozen_digests, load_weights
from llava_fsdp.model.pretrained import artifacts_of, find_parts, find_projector
from llava_fsdp.model.quantization import quantized_weights
from llava_fsdp.plan.auto import Decision, decide
from llava_fsdp.plan.mfu import utilization_of
from llava_fsdp.plan.workload import samples_in
from llava_fsdp.report.run_reader import CONFIG_FILE, REPORT_FILE
from llava_fsdp.runtime.durable_files import replace_file
from llava_fsdp.runtime.errors import ConfigError, DataError, StorageError
from llava_fsdp.runtime.heartbeat import Phase
from llava_fsdp.runtime.log import log
from llava_fsdp.runtime.os_errors import why
from llava_fsdp.runtime.progress import watch_loading
from llava_fsdp.runtime.run_dir import FOLDER, claimed, restored_umask
from llava_fsdp.runtime.run_dir_watch import Hold
from llava_fsdp.runtime.status_file import Outcome, last_word, write_ending
from llava_fsdp.runtime.watchdog import Life
from llava_fsdp.train import final_export
from llava_fsdp.train.build_model import build_model, shape_of
from llava_fsdp.train.dry_run import dry_run
from llava_fsdp.train.live_page import rewrite_page
from llava_fsdp.train.loop import fit
from llava_fsdp.train.metrics import Reporter
from llava_fsdp.train.profiler import open_recorder
from llava_fsdp.train.replica_check import check_replicas
from llava_fsdp.train.resume import check_settings, continues, resume
from llava_fsdp.train.run_info import about_run
from llava_fsdp.train.same_software import check_same_software
from llava_fsdp.train.save_and_stop import Keeper, open_saver
from llava_fsdp.train.state import StepResult, TrainState, assemble
from llava_fsdp.train.summary import show_run
from llava_fsdp.train.trackers import check_installed
from llava_fsdp.train.validation import open_validation


@dataclass
class AtEnd:
    """What shows how the run ended, once that has been written; None: it has not come to its first step."""

    show: Callable[[], None] | None = None


def main() -> None:
    at_end = AtEnd()

    def on_exit(folder: Path, outcome: Outcome) -> dict[str, Any] | None:
        first = write_ending(folder, outcome)
        with last_word(folder / REPORT_FILE):
            if at_end.show is not None:
                at_end.show()
            elif ranks.own_rank() == 0:
                rewrite_page(folder)
        return first

    cli.run("train", Config, partial(train, at_end=at_end), on_exit)


def train(cfg: Config, at_end: AtEnd | None = None) -> None:
    """One run, from its configuration to its export."""
    at_end = at_end or AtEnd()
    if cfg.dry_run is not None:
        return dry_run(cfg)
    if cfg.format is Format.json:
        raise ConfigError("format=json is for dry_run=N; a training writes metrics.jsonl into output_dir")
    check_places(cfg)
    check_installed(cfg.track)
    check_settings(cfg)
    folder, rank = Path(cfg.output_dir), ranks.own_rank()
    with (
        claimed(folder, rank, cfg.private) as lock,
        restored_umask(),
        Life(folder, rank, cfg.comm.init_timeout, cfg.comm.warn_after) as life,
        distributed(cfg) as world,
        life.among(ranks.meet()),
        clear_memory_errors(cfg, world.device),
    ):
        hold = Hold(folder, lock, cfg.private) if lock is not None else None
        if hold is not None:
            life.look = hold.look
        if world.is_first:
            life.last_words = partial(rewrite_page, folder)
        check_same_software(cfg, world.device, gather_lists)
        check_same_settings(cfg, gather_lists)
        cfg = settle_auto(cfg, world)
        plan = SHARD_PLANS[cfg.sharding.strategy]
        mesh = make_mesh(world, plan, cfg)
        life.work = ranks.num_collectives(mesh)
        state = build_state(cfg, world, plan, mesh)
        if cfg.private:  # from here on alone: a dataset's index, made before, is for whoever may read the dataset
            os.umask(0o077)
        last_step = state.loader.total_steps
        resumed = resume(state, cfg)
        check_replicas(state, folder / FOLDER)
        if state.step >= last_step:
            log().info("this run has finished after step %d; a larger max_steps or epochs continues it", state.step)
        elif resumed:
            log().info("continuing after step %d of %d", state.step, last_step)
        write_config(cfg, world)
        folder_of_adapters = final_export.in_checkpoints(state, cfg)
        saver = open_saver(state, cfg, resumed, folder_of_adapters) if state.step < last_step else None
        left_out = state.loader.steps.records.left_out()
        told = state.utilization, state.run, state.about
        reporter = Reporter(cfg, state.step, last_step, world.is_first, left_out, *told)
        at_end.show, life.last_words = reporter.end, reporter.last_words

        recorder = open_recorder(cfg, world.rank, world.device, state.step, last_step)
        keeper = Keeper(state, saver, cfg, last_step, life, hold)
        validation = open_validation(state, cfg, last_step, life, keeper.between_steps, reporter.note)
        life.detail = lambda: state.loader.watch.late(state.step)
        first_step = state.step

        def after_step(result: StepResult) -> None:
            life.step_done()
            if keeper.loss() is None:  # what lies there else is not ours to write into
                reporter(result)
            keeper.after_step(result)
            if state.step == first_step + 1:  # weights are loaded and kernels compiled
                ranks.shorten_timeout(mesh, cfg.comm.timeout)
                life.limit = cfg.comm.timeout
            validation.after_step()

        with life.steps():
            validation.catch_up()
            fit(state, plan, cfg, after_step, keeper.between_steps, life, recorder)
            keeper.close()
        reporter.close()
        life.at(Phase.EXPORT)
        with keeper.explained():
            if cfg.export.enabled and not final_export.is_current(state, cfg):
                log().info("exported to %s", final_export.export(state, cfg, world.is_first))
        keeper.stop_if_lost()


def settle_auto(cfg: Config, world: World) -> Config:
    """What is left to the planner, settled by rank 0 for all: nothing behind it sees auto, config.yaml neither."""
    if not cfg.has_auto:
        return cfg
    parts = find_parts(cfg.model)
    shapes = build_llava(parts, cfg.model, DTYPES[cfg.precision.param_dtype])
    records = open_data(replace(cfg, tokens_per_micro_batch=None), world, shapes).steps.records

    def choose() -> Decision:
        return decide(cfg, world, parts, samples_in(records), continues(cfg))

    decision = on_first_rank(choose, "cannot plan")
    log().info("%s", decision.told(cfg))
    return decision.applied(cfg)


def build_state(cfg: Config, world: World, plan: ShardPlan, mesh: DeviceMesh | None) -> TrainState:
    """Model, weights, optimizer and data, sharded, at step 0."""
    parts = find_parts(cfg.model)
    projector = find_projector(cfg)
    model = build_model(cfg, parts, world.device)
    if cfg.exports_model:
        said = parts.language_folder, parts.language, cfg.trained_template, cfg.model.image_start_end
        on_first_rank(lambda: rehearse_tokenizer(*said), "cannot write the tokenizer of an export")
    loader = open_data(cfg, world, model)
    cfg.check_profile(loader.total_steps)
    check_same_records(loader)
    held_out = open_held_out_data(cfg, world, model) if cfg.val.every is not None else None
    check_artifacts(artifacts_of(parts, projector, cfg.model), world.local_rank, world.local_size, world.is_first)
    sources = find_weights(model, parts, cfg.model, projector, cfg.seed)
    watch = watch_loading(world.is_first, "fingerprint of frozen weights")
    digests = frozen_digests(model, sources, world.rank, world.size, gather_lists, watch)
    adapter_folder.check_base(model, cfg.model, digests)
    fingerprints = {**loader.steps.fingerprints(), "model": fingerprint(model, digests)}
    utilization = utilization_of(model, cfg, world.device, world.size)
    about: dict[str, Any] = {}
    if world.is_first:
        weights = weights_of(model, model.blocks(), model.whole_while_frozen(), cfg.precision)
        show_run(
            cfg, world, loader, held_out, weights, describe_projector(cfg, projector), model.kernel, utilization.source
        )
        about = about_run(cfg, world, model, loader.steps.records, weights)

    packed = quantized_weights(model)

    def load(model: Llava, masters: MasterWeights) -> None:
        load_weights(sources, local_shards(model, masters), watch_loading(world.is_first), packed)

    state = assemble(model, loader, load, cfg, world, plan, mesh)
    known = {"sources": sources, "fingerprints": fingerprints, "digests": digests, "about": about}
    return replace(state, **known, utilization=utilization, held_out=held_out)


def describe_projector(cfg: Config, projector: Path | None) -> str:
    if projector is None and cfg.model.projector == "auto" and cfg.model.lora.checkpoint is not None:
        return f"of the adapter {cfg.model.lora.checkpoint}"
    if cfg.model.checkpoint is not None:
        return "of the checkpoint"
    if projector is None and cfg.model.projector == "auto":
        return "random: there is no stage=pretrain run beside output_dir"
    return str(projector or "random")


def open_data(cfg: Config, world: World, model: Llava, choose: Choose | None = None) -> Loader:
    """The dataset; the embedded one is drawn first, by one rank.

    Args:
        choose: gives the order of its records; None: the run's.
    """
    if cfg.data.source is Source.shapes:
        with first_rank_first(world):
            draw_shapes(cfg.data)
    folders = model.parts.language_folder, model.parts.vision_folder
    return build_loader(cfg, *folders, shape_of(model), world.rank, world.size, world.device, gather_lists, choose)


def open_held_out_data(cfg: Config, world: World, model: Llava) -> HeldOut:
    """What the run is measured on, examined before its first step as its own records are."""
    positions = model.parts.language.max_position_embeddings
    held_out = open_held_out(cfg, lambda own, choose: open_data(own, world, model, choose), positions)
    check_same_records(held_out.loader, "val.path, val.images")
    if world.is_first:
        warn_of_trained(cfg)
    return held_out


def check_same_records(loader: Loader, keys: str = "data.path, data.images") -> None:
    """Ranks of several machines may read copies of the files, and one may have looked before a picture was mended.

    Raises:
        DataError: on every rank alike.
    """
    found = gather_lists([loader.steps.fingerprints()])
    differing = [rank for rank, other in enumerate(found) if other != found[0]]
    if differing:
        raise DataError(
            f"ranks {differing} have other records, tokenizers or pictures' preparation than rank 0: are {keys} "
            "and the model the same files on every machine, and unchanged while the run began? Run it again"
        )


def write_config(cfg: Config, world: World) -> None:
    if world.is_first:
        path = Path(cfg.output_dir) / CONFIG_FILE
        try:
            replace_file(path, OmegaConf.to_yaml(OmegaConf.structured(cfg)).encode())
        except OSError as error:
            raise StorageError(f"{path} cannot be written ({why(error, path)})") from error
