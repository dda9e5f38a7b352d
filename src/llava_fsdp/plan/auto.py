"""What is `auto` in `sharding`, `activation_checkpointing` and `tokens_per_micro_batch`: the planner's choice."""

from dataclasses import dataclass, replace
from pathlib import Path

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from llava_fsdp.config import AUTO, ActivationCheckpointing, ActivationCheckpointingConfig, Config, Strategy
from llava_fsdp.config.renamed import present_tree
from llava_fsdp.distributed.compile import is_cut
from llava_fsdp.distributed.mesh import World
from llava_fsdp.distributed.zero import SHARD_PLANS
from llava_fsdp.model.pretrained import Parts
from llava_fsdp.plan.hardware import this_machine
from llava_fsdp.plan.planner import Choice, Planner, PlanRow
from llava_fsdp.plan.search import allowed, checkpointings, plan_rows, rows_of, ways_to_cut
from llava_fsdp.plan.workload import Samples
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.runtime.safe_load import refuse_yaml_bombs

GB = 1e9


@dataclass(frozen=True)
class Decision:
    """What stands for auto, and why."""

    strategy: Strategy
    activation_checkpointing: ActivationCheckpointingConfig
    tokens: int | None
    """null stays null."""
    reason: str

    def applied(self, cfg: Config) -> Config:
        tokens = self.tokens if cfg.tokens_per_micro_batch == AUTO else cfg.tokens_per_micro_batch
        shard_size = cfg.sharding.shard_size if self.strategy in HYBRID else None
        sharding = replace(cfg.sharding, strategy=self.strategy, shard_size=shard_size)
        return replace(
            cfg,
            sharding=sharding,
            activation_checkpointing=self.activation_checkpointing,
            tokens_per_micro_batch=tokens,
        )

    def told(self, cfg: Config) -> str:
        """One line: what stands for each auto, and why."""
        values = []
        if cfg.sharding.strategy is Strategy.auto:
            values.append(f"sharding={SHARD_PLANS[self.strategy].zero}")
        if asks_activation_checkpointing(cfg):
            values.append(f"activation_checkpointing={self.activation_checkpointing.mode.value}")
        if cfg.tokens_per_micro_batch == AUTO:
            values.append(f"tokens_per_micro_batch={'null' if self.tokens is None else self.tokens}")
        return f"auto: {', '.join(values)}: {self.reason}"


HYBRID = (Strategy.HYBRID_SHARD, Strategy._HYBRID_SHARD_ZERO2)


def decide(cfg: Config, world: World, parts: Parts, samples: Samples, continues: bool = False) -> Decision:
    """The fastest of what fits.

    Args:
        continues: a run that is continued keeps what it recorded, as long as that fits.

    Raises:
        ConfigError: by the plan, nothing fits.
    """
    planner = Planner(cfg, this_machine(world.local_size, world.device.type), samples, parts)
    shard_size = cfg.sharding.shard_size or world.local_size
    before = recorded(cfg) if continues else None
    if before is not None:
        rows = rows_for(planner, before, world, shard_size)
        if rows[0].fits:
            return Decision(
                rows[0].choice.strategy, before.activation_checkpointing, number(before), "as this run began"
            )
    rows = rows_for(planner, cfg, world, shard_size)
    best = rows[0]
    if not best.fits:
        raise ConfigError(
            f"auto: nothing fits by the plan; nearest is {said(best)}. activation_checkpointing=full, offload=params, "
            "precision=bf16_pure or more ranks need less; sharding=zero3 and a number for tokens_per_micro_batch would "
            "try it all the same"
        )
    reason = f"{cost(best)} by the plan; llava_fsdp.plan compares them all"
    tokens = best.tokens if cfg.tokens_per_micro_batch == AUTO else None
    return Decision(best.choice.strategy, best.choice.activation_checkpointing, tokens, reason)


def expected_peak(cfg: Config, world: World, parts: Parts, samples: Samples) -> int:
    """Bytes on the device at the worst moment of a step, by the plan of a configuration that leaves nothing open."""
    planner = Planner(cfg, this_machine(world.local_size, world.device.type), samples, parts)
    row = rows_for(planner, cfg, world, cfg.sharding.shard_size or world.local_size)[0]
    return int(row.bytes["total"])


def rows_for(planner: Planner, cfg: Config, world: World, shard_size: int) -> list[PlanRow]:
    """Rows of what a configuration leaves open, best first."""
    strategy = cfg.sharding.strategy
    open_ = rows_of(world.size, shard_size) if strategy is Strategy.auto else [strategy]
    takes = [one for one in open_ if one is strategy or allowed(cfg, one, cfg.offload.mode)]
    modes = [cfg.activation_checkpointing]
    if asks_activation_checkpointing(cfg):  # without a budget, which needs a compiler and changes numbers
        modes = [
            one for one in checkpointings(cfg, planner.machine.device) if one.mode is not ActivationCheckpointing.budget
        ]
        if cfg.compile is True:  # compile=auto does without instead
            modes = [one for one in modes if not is_cut(one.mode, planner.kernel and planner.kernel.attention)]
    choices = [Choice(one, mode, cfg.offload.mode) for one in takes for mode in modes]
    ways = ways_to_cut(planner, cfg, world.size, is_free=cfg.tokens_per_micro_batch == AUTO)
    return plan_rows(planner, choices, world.size, shard_size, world.local_size, ways)


def recorded(cfg: Config) -> Config | None:
    """With what the run in this folder began; None where it does not say, or had no number for what is auto now."""
    path = Path(cfg.output_dir) / "config.yaml"
    if not path.is_file():
        return None
    try:
        found = OmegaConf.create(present_tree(yaml.safe_load(refuse_yaml_bombs(path))))
        strategy = Strategy(str(OmegaConf.select(found, "sharding.strategy")))
        ours = cfg.activation_checkpointing
        if asks_activation_checkpointing(cfg):
            mode = ActivationCheckpointing(OmegaConf.select(found, "activation_checkpointing.mode") or "auto")
            ours = ActivationCheckpointingConfig(
                mode=mode, budget=OmegaConf.select(found, "activation_checkpointing.budget")
            )
        tokens = OmegaConf.select(found, "tokens_per_micro_batch")
        if (
            strategy is Strategy.auto
            or ours.mode is ActivationCheckpointing.auto
            or (cfg.tokens_per_micro_batch == AUTO and not isinstance(tokens, int))
        ):
            return None
        if cfg.sharding.strategy is not Strategy.auto:
            strategy = cfg.sharding.strategy
        if cfg.tokens_per_micro_batch != AUTO:
            tokens = number(cfg)
        return Decision(strategy, ours, tokens, "").applied(cfg)
    except (OmegaConfBaseException, yaml.YAMLError, ConfigError, ValueError, OSError, AssertionError):
        return None  # what it continues from says what is wrong; what goes with no key of today's is planned anew


def asks_activation_checkpointing(cfg: Config) -> bool:
    return cfg.activation_checkpointing.mode is ActivationCheckpointing.auto


def number(cfg: Config) -> int | None:
    return cfg.tokens_per_micro_batch if isinstance(cfg.tokens_per_micro_batch, int) else None


def said(row: PlanRow) -> str:
    mode = row.choice.activation_checkpointing.mode.value
    return (
        f"{SHARD_PLANS[row.choice.strategy].zero}, activation checkpointing {mode}, "
        f"{row.tokens:,} positions in the largest micro-batch: {cost(row)}"
    )


def cost(row: PlanRow) -> str:
    return f"{row.bytes['total'] / GB:.3g} of {row.usable / GB:.3g} GB, {row.step.seconds:.2g} s a step"
