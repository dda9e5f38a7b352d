"""Choose values for `pack`, `sharding`, `parallel.context`, `activation_checkpointing` and `tokens_per_micro_batch`
where the configuration says `auto`."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from transformers import PretrainedConfig

from llava_fsdp.config import (
    AUTO,
    ActivationCheckpointing,
    ActivationCheckpointingConfig,
    Config,
    ContextHow,
    ParallelConfig,
    PipelineSchedule,
    Strategy,
)
from llava_fsdp.config.command_line.renamed import present_tree
from llava_fsdp.model.build import why_not_packed
from llava_fsdp.model.parts import Parts
from llava_fsdp.parallel.check_torch import check_torch
from llava_fsdp.parallel.compile import splits_blocks
from llava_fsdp.parallel.context.context_attention import plan_context
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.parallel.sharding_strategies import SHARD_PLANS, Mesh
from llava_fsdp.plan.planner import Choice, Planner, PlanRow
from llava_fsdp.plan.rank_counts import RankCounts
from llava_fsdp.plan.search.layouts import LayoutChoices, Searcher
from llava_fsdp.plan.search.search import checkpointing_modes, distinct_strategies, is_allowed, plan_rows, splits_to_try
from llava_fsdp.plan.time.hardware import Machine, this_machine
from llava_fsdp.plan.workload import Samples
from llava_fsdp.runtime.errors import ConfigError, LlavaFsdpError
from llava_fsdp.runtime.files.safe_load import refuse_yaml_bombs
from llava_fsdp.runtime.text.log import log
from llava_fsdp.runtime.text.progress import watch

C = TypeVar("C", bound=Config)
GB = 1e9


def settle_packing(cfg: C, parts: Parts) -> tuple[C, str | None]:
    """Replace `pack=auto` by true, or by false if this model cannot keep apart the samples that are packed into one
    row. For a model that is trained as its class in transformers (`parts.class_config`), two more defaults are settled:
    `compile=auto` becomes false, and `parallel.context_how=auto` `ulysses` if ranks may share rows.

    Returns:
        The configuration, and the reason in one line if `pack=auto` became false; else None.

    Raises:
        ConfigError: rows must be padded, but another key is set that only works with packed rows.
    """
    if parts.class_config is not None and cfg.compile == AUTO:
        cfg = replace(cfg, compile=False)
    if parts.class_config is not None and cfg.parallel.context != 1 and cfg.parallel.context_how is ContextHow.auto:
        cfg = replace(cfg, parallel=replace(cfg.parallel, context_how=ContextHow.ulysses))
    if cfg.pack != AUTO:
        return cfg, None
    refused = why_not_packed(parts)
    if refused is None:
        return replace(cfg, pack=True), None
    # ranks cannot share padded rows, so parallel.context=auto becomes 1
    alone = replace(cfg.parallel, context=1) if cfg.parallel.context == AUTO else cfg.parallel
    try:
        return replace(cfg, pack=False, parallel=alone), f"pack=false, rows are padded: {refused}"
    except ConfigError as error:
        raise ConfigError(f"pack=auto: rows must be padded, as {refused}; {error}") from error


@dataclass(frozen=True)
class Decision:
    """The values chosen for the keys that are `auto`, and the reason."""

    strategy: Strategy
    activation_checkpointing: ActivationCheckpointingConfig
    tokens: int | None
    """Value for `tokens_per_micro_batch`; None stands for null."""
    parallel: ParallelConfig
    reason: str

    def applied(self, cfg: Config) -> Config:
        """Return `cfg` with these values. `sharding.shard_size` becomes null if the strategy is not a hybrid one."""
        is_hybrid = SHARD_PLANS[self.strategy].mesh is Mesh.HYBRID
        shard_size = cfg.sharding.shard_size if is_hybrid else None
        return replace(
            cfg,
            sharding=replace(cfg.sharding, strategy=self.strategy, shard_size=shard_size),
            parallel=self.parallel,
            activation_checkpointing=self.activation_checkpointing,
            tokens_per_micro_batch=self.tokens if cfg.plans_tokens else cfg.tokens_per_micro_batch,
        )

    def summary(self, cfg: Config) -> str:
        """Return a line with the value of each key that is `auto` in `cfg`, and the reason."""
        values = []
        if cfg.sharding.strategy is Strategy.auto:
            values.append(f"sharding={SHARD_PLANS[self.strategy].zero}")
        values += chosen_overrides(cfg.parallel, self.parallel)
        if has_auto_checkpointing(cfg):
            values.append(f"activation_checkpointing={self.activation_checkpointing.mode.value}")
        if cfg.plans_tokens:
            values.append(f"tokens_per_micro_batch={'null' if self.tokens is None else self.tokens}")
        return f"auto: {', '.join(values)}: {self.reason}"


def chosen_overrides(before: ParallelConfig, chosen: ParallelConfig) -> list[str]:
    """Return command-line overrides, with the values in `chosen`, of the keys that are auto or searched in `before`."""
    searched = ["tensor", "expert", "pipeline"] * before.search
    keys = [*["context"] * (before.search or before.context == AUTO), *searched]
    overrides = [f"parallel.{key}={getattr(chosen, key)}" for key in keys]
    if before.search and chosen.pipeline > 1:
        overrides.append(f"parallel.schedule={chosen.schedule.value}")
    return overrides


def decide(cfg: Config, world: World, parts: Parts, samples: Samples, continues: bool = False) -> Decision:
    """Choose values for the keys that are `auto`: the fastest ones that fit into memory, as the planner predicts. A run
    that `continues` keeps the values that it recorded when it began, if they fit. Raise ConfigError if none fit."""
    machine = this_machine(world.local_size, world.device.type)

    def planner_of(tried: Config) -> Planner:
        return Planner(tried, machine, samples, parts)

    before = recorded_decision(cfg) if continues else None
    if before is not None and keeps_recorded(before, cfg, world, parts, planner_of):
        return before
    try:
        planner, rows = best_layout(cfg, world, parts.language, planner_of)
    except LlavaFsdpError:
        raise
    except Exception as error:  # a model that does not run on the meta device, such as a mixture of experts in fp32
        # values that need little memory, with the largest number of ranks for a row (`context`)
        return without_plan(with_each_context(cfg, world.size, parts.language)[-1], error)
    best, parallel = rows[0], planner.cfg.parallel
    if not best.fits:
        sizes = {key: getattr(parallel, key) for key in ("context", "tensor", "expert", "pipeline")}
        kinds = "".join(f", parallel.{key}={size}" for key, size in sizes.items() if size > 1)
        mode = best.choice.activation_checkpointing.mode.value
        shares = "parallel.context=auto, " * (cfg.can_share_rows and cfg.parallel.context != AUTO and world.size > 1)
        raise ConfigError(
            f"auto: the planner predicts that nothing fits; nearest is {best.choice.zero}, activation checkpointing "
            f"{mode}, {best.tokens:,} tokens in the largest micro-batch"
            f"{kinds}: {cost_as_text(best, machine)}. {shares}activation_checkpointing=full, "
            "offload=params, precision=bf16_pure or more ranks need less; sharding=zero3 and a number for "
            "tokens_per_micro_batch would try it all the same"
        )
    reason = f"{cost_as_text(best, machine)} are predicted; llava-fsdp plan compares all values"
    tokens = best.tokens if cfg.plans_tokens else None
    return Decision(best.choice.strategy, best.choice.activation_checkpointing, tokens, parallel, reason)


def keeps_recorded(
    before: Decision, cfg: Config, world: World, parts: Parts, planner_of: Callable[[Config], Planner]
) -> bool:
    """Return whether a resumed run keeps the values that it recorded for keys set to `auto` (`before`). They must be
    possible with the present configuration and number of ranks, and fit into memory by the prediction of a planner,
    which `planner_of` makes. Values of a model that no planner can compute are kept: they were chosen without one."""
    try:
        settled = before.applied(cfg)
        with_each_context(settled, world.size, parts.language)  # called for its ConfigError
        rows = rows_for(planner_of(settled), settled, world)  # predictions, here a single one
    except ConfigError:  # a value contradicts the present keys; if the keys contradict each other, choosing raises it
        return False
    except LlavaFsdpError:
        raise
    except Exception:  # the planner cannot compute this model, so the values were chosen without it
        return True
    # no recorded number of tokens: the values were chosen without a planner
    return rows[0].fits and (before.tokens is not None or not cfg.plans_tokens)


def best_layout(
    cfg: Config, world: World, language: PretrainedConfig, planner_of: Callable[[Config], Planner]
) -> tuple[Planner, list[PlanRow]]:
    """Plan with the layout of ranks that the configuration sets, or with the best one that it leaves open. Return the
    planner of that layout and its predictions, the best first. `planner_of` makes the planner of a configuration.

    Raises:
        ConfigError: no layout is possible.
    """

    def plan(tried: Config) -> tuple[Planner, list[PlanRow]]:
        planner = planner_of(tried)
        return planner, rows_for(planner, tried, world)

    if not cfg.parallel.search:  # only the number of ranks that share a row (`parallel.context`) may be open
        return smallest_context(cfg, world.size, language, plan)
    searcher = Searcher(planner_of, lambda planner, tried: ways_for(planner, tried, world))
    result = searcher.search(cfg, world.size, world.local_size)
    log().log(logging.INFO if world.is_first else logging.DEBUG, "auto: %s", result)
    return result.rows[0].planner, [one.row for one in result.rows]


def smallest_context(
    cfg: C, world_size: int, language: PretrainedConfig, plan: Callable[[C], tuple[Planner, list[PlanRow]]]
) -> tuple[Planner, list[PlanRow]]:
    """Plan with the smallest `parallel.context` with which the training fits into memory or, if it fits with none, with
    the one that needs the fewest bytes. A value other than `auto` is kept. `plan` returns a configuration's planner and
    its rows: the ways to train with their predicted memory, the best first.

    Raises:
        ConfigError: no value is possible.
    """
    nearest: tuple[Planner, list[PlanRow]] | None = None
    for tried in with_each_context(cfg, world_size, language):
        planner, rows = plan(tried)
        if rows[0].fits:
            return planner, rows
        if nearest is None or rows[0].bytes["total"] < nearest[1][0].bytes["total"]:
            nearest = planner, rows
    assert nearest is not None, "with_each_context returns at least one"
    return nearest


def with_each_context(cfg: C, world_size: int, language: PretrainedConfig) -> list[C]:
    """Return one configuration for each value, ascending, that `parallel.context=auto` may take. A value must divide
    the number of ranks, and a row must have room for a sample of `data.max_length`. If it is not `auto`, return `cfg`
    alone. If the installed torch is too old to share rows, the only value is 1.

    Raises:
        ConfigError: no such number is large enough, or `parallel.context` or `parallel.expert` is impossible.
    """
    tensor = cfg.parallel.tensor
    cfg.parallel.check_divides(world_size)
    if cfg.parallel.context != AUTO:
        plan_context(cfg.parallel.context_how, language, cfg.parallel.num_context, 0, tensor)
        return [cfg]
    possible: list[C] = []
    error: ConfigError | None = None
    for size in (n for n in range(1, world_size // tensor + 1) if world_size // tensor % n == 0):
        try:
            if size > 1:
                check_torch()
            plan_context(cfg.parallel.context_how, language, size, 0, tensor)  # of the first rank; only checked
            # `replace` checks the keys again, such as whether a row has room for a sample
            possible.append(replace(cfg, parallel=replace(cfg.parallel, context=size)))
        except ConfigError as refused:
            error = refused
    if not possible:
        raise ConfigError(f"parallel.context=auto: no number of ranks is possible, up to all {world_size}: {error}")
    return possible


def without_plan(cfg: Config, error: Exception) -> Decision:
    """Choose values that need little memory, for a model that the planner cannot compute. `cfg` has the largest
    possible `parallel.context`, and `error` becomes the decision's reason."""
    strategy, checkpointing = cfg.sharding.strategy, cfg.activation_checkpointing
    if strategy is Strategy.auto:
        strategy = Strategy.FULL_SHARD
    if has_auto_checkpointing(cfg):
        checkpointing = ActivationCheckpointingConfig(mode=ActivationCheckpointing.full, budget=None)
    why = f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
    reason = f"the planner cannot compute this model ({why})"
    return Decision(strategy, checkpointing, None, replace(cfg.parallel, search=False), reason)


def expected_peak(cfg: Config, world: World, parts: Parts, samples: Samples) -> int:
    """Predict the device memory at the peak of a step in bytes, for a configuration without `auto`."""
    planner = Planner(cfg, this_machine(world.local_size, world.device.type), samples, parts)
    return int(rows_for(planner, cfg, world)[0].bytes["total"])


def rows_for(planner: Planner, cfg: Config, world: World) -> list[PlanRow]:
    """Predict every combination of values that the `auto` keys may take, the best first."""
    ways = ways_for(planner, cfg, world)
    return plan_rows(planner, ways.choices, ways.ranks, ways.splits, lambda what, count: watch(f"auto: {what}", count))


def ways_for(planner: Planner, cfg: Config, world: World) -> LayoutChoices:
    """Return the combinations of strategy, activation checkpointing and size of micro-batches that the `auto` keys
    leave open, with the layout of ranks and the offload that `cfg` sets."""
    # ranks of a node that have the same part of each layer; ranks that divide one copy of the model among them
    of_node, divides = max(1, world.local_size // cfg.parallel.tensor), cfg.parallel.tensor * cfg.parallel.pipeline
    ranks = RankCounts(world.size, cfg.sharding.shard_size or of_node, world.local_size)
    strategies = [cfg.sharding.strategy]
    if cfg.sharding.strategy is Strategy.auto:
        distinct = distinct_strategies(ranks, divides, cfg.parallel.expert > 1)
        strategies = [one for one in distinct if is_allowed(cfg, one, cfg.offload.mode)]
    modes = [cfg.activation_checkpointing]
    if has_auto_checkpointing(cfg):  # all modes but `budget`, which needs a compiler and changes numerical results
        modes = checkpointing_modes(cfg, planner.machine)
        modes = [one for one in modes if one.mode is not ActivationCheckpointing.budget]
        if cfg.compile is True:  # compile=true fails with modes whose blocks cannot compile
            modes = [one for one in modes if not splits_blocks(one.mode, planner.kernel and planner.kernel.attention)]
    choices = [Choice(strategy, mode, cfg.offload.mode) for strategy in strategies for mode in modes]
    splits = splits_to_try(planner, cfg, world.size, is_free=cfg.plans_tokens)
    # micro_batch_size samples of the longest length are the upper limit, as with tokens_per_micro_batch=null; if no
    # split is that small, the one with the smallest micro-batches stays
    if cfg.plans_tokens:
        most = cfg.micro_batch_size * cfg.data.sample_tokens
        splits = [split for split in splits if split[0].tokens * split[0].context <= most] or splits[-1:]
    return LayoutChoices(planner, choices, ranks, splits)


def recorded_decision(cfg: Config) -> Decision | None:
    """Return the values that the run's config.yaml has for the keys that are `auto` in `cfg`; None if there is no such
    file, or its values cannot be used."""
    path = Path(cfg.output_dir) / "config.yaml"
    if not path.is_file():
        return None
    try:
        written = yaml.safe_load(refuse_yaml_bombs(path))
        if not isinstance(written, dict):
            return None
        tree = OmegaConf.create(present_tree(written))
        strategy = Strategy(str(OmegaConf.select(tree, "sharding.strategy")))
        activation_checkpointing = cfg.activation_checkpointing
        if has_auto_checkpointing(cfg):
            mode = ActivationCheckpointing(OmegaConf.select(tree, "activation_checkpointing.mode") or "auto")
            budget = OmegaConf.select(tree, "activation_checkpointing.budget")
            activation_checkpointing = ActivationCheckpointingConfig(mode=mode, budget=budget)
        tokens = OmegaConf.select(tree, "tokens_per_micro_batch")
        parallel = recorded_kinds(cfg.parallel, tree)
        has_auto = strategy is Strategy.auto or activation_checkpointing.mode is ActivationCheckpointing.auto
        if has_auto or parallel is None or not isinstance(tokens, int | None):
            return None
        if cfg.sharding.strategy is not Strategy.auto:
            strategy = cfg.sharding.strategy
        return Decision(strategy, activation_checkpointing, tokens, parallel, "as when this run began")
    except (OmegaConfBaseException, yaml.YAMLError, ConfigError, ValueError, LookupError, OSError, AssertionError):
        return None  # resuming reports a damaged file


def recorded_kinds(parallel: ParallelConfig, tree: DictConfig) -> ParallelConfig | None:
    """Return `parallel` with the keys that the planner chooses (those that are `auto` or searched) set as in `tree`,
    the content of a config.yaml; None if a value in it is wrong."""
    chosen: dict[str, Any] = {"search": False}
    for key, is_chosen in {
        "context": parallel.search or parallel.context == AUTO,
        "tensor": parallel.search,
        "expert": parallel.search,
        "pipeline": parallel.search,
    }.items():
        if is_chosen:
            chosen[key] = OmegaConf.select(tree, f"parallel.{key}") or 1
            if not isinstance(chosen[key], int):
                return None
    if parallel.search:
        chosen["schedule"] = PipelineSchedule[OmegaConf.select(tree, "parallel.schedule") or "1f1b"]
    return replace(parallel, **chosen)


def has_auto_checkpointing(cfg: Config) -> bool:
    return cfg.activation_checkpointing.mode is ActivationCheckpointing.auto


def cost_as_text(row: PlanRow, machine: Machine) -> str:
    """Return the predicted memory and, on a GPU, the seconds of a step, as text. On a CPU machine the seconds are left
    out: the speed that is assumed for its cores is only good enough to compare ways to train."""
    seconds = f", {row.step.seconds:.2g} s a step" if machine.gpu is not None else ""
    return f"{row.bytes['total'] / GB:.3g} of {row.usable / GB:.3g} GB{seconds}"
