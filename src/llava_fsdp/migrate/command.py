"""A run of somebody else's as one llava_fsdp command, as short as the stage and the recipe allow."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from llava_fsdp.config import Config, config_dir, load
from llava_fsdp.config.cli import taken_literally
from llava_fsdp.migrate.bash_script import is_open, open_mark, quoted, shown
from llava_fsdp.migrate.context import Context, written
from llava_fsdp.migrate.key_outcome import REFUSED, Row, Verdict
from llava_fsdp.migrate.overrides import Overrides, decide
from llava_fsdp.migrate.source_run import Options, Run
from llava_fsdp.migrate.table import rows_of
from llava_fsdp.runtime.errors import ConfigError

FRAME = ("stage", "model", "data")
GROUPS = ("sharding", "precision", "activation_checkpointing", "offload")


@dataclass(frozen=True)
class Migration:
    run: Run
    decided: Overrides
    kept: Overrides
    """The overrides that the command has to say."""
    rows: list[Row]
    refused: str
    """What llava_fsdp says against the command; empty where it composes."""

    @property
    def words(self) -> list[str]:
        return [*launcher(self.run), *assignments(self.kept)]

    @property
    def unknown(self) -> list[Row]:
        return [row for row in self.rows if not row.known]

    @property
    def cautions(self) -> list[str]:
        """Why the command is another training than the files say, or these are none."""
        run = self.run
        found = [f"{row.key}: {row.text}" for row in self.rows if row.text.startswith(REFUSED)]
        if run.launch and run.hf("bits") != 16 and "model.quantize.mode" not in self.decided:
            found.append(f"--bits {shown(run.hf('bits'))}: this command trains without quantized weights")
        said = replace(run, options=Options()).gpus
        if run.options.gpus and said and said != run.options.gpus:
            found.append(f"gpus={run.options.gpus} was given, and the files say {said}")
        for block, whose in ((run.deepspeed, "DeepSpeed"), (run.accelerate, "Accelerate")):
            if block and block.values and all(not r.known for r in self.rows if r.source == block.name):
                found.append(f"no key of {block.name} is one of {whose}'s; is it another file?")
        return found

    def count(self, verdict: Verdict) -> int:
        return sum(row.verdict is verdict for row in self.rows)


def migrate(run: Run) -> Migration:
    decided = decide(run)
    kept = reduce(decided) if run.launch else decided
    context = Context(run, decided, frozenset(decided) - frozenset(kept))
    return Migration(run, decided, kept, rows_of(context), refusal(kept))


def reduce(decided: Overrides) -> Overrides:
    """Without what the stage, the model and their recipe say already."""
    frame = {key: value for key, value in decided.items() if key in FRAME}
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        base = compose("train", assignments(frame))
    groups = {key: decided[key] for key in GROUPS if key in decided and not chooses(base, key, decided[key])}
    rest = {k: v for k, v in decided.items() if k not in (*FRAME, *GROUPS) and not says(base, k, v)}
    return frame | groups | rest


def chooses(base: DictConfig, group: str, choice: object) -> bool:
    """The group has this choice's values already."""
    return OmegaConf.select(base, group) == OmegaConf.load(config_dir() / group / f"{choice}.yaml")


def says(base: DictConfig, key: str, value: object) -> bool:
    parent, _, name = key.rpartition(".")
    node = OmegaConf.select(base, parent) if parent else base
    if is_open(value) or OmegaConf.is_missing(node, name):
        return False
    return OmegaConf.select(base, key) == value


def refusal(kept: Overrides) -> str:
    """What the configuration's own checks say; words that the shell has yet to fill in are left out."""
    known = {key: value for key, value in kept.items() if not is_open(value)}
    stand_in = ["data.path=records.json"] if is_open(kept.get("data.path")) else []
    try:
        with initialize_config_dir(str(config_dir()), version_base="1.3"):
            load(Config, compose("train", [taken_literally(word) for word in assignments(known)] + stand_in))
    except ConfigError as error:
        return str(error)
    return ""


def assignments(overrides: Mapping[str, object]) -> list[str]:
    """`key=value`, still with marks where the shell has to fill something in."""
    return [f"{key}={value if isinstance(value, str) else written(value)}" for key, value in overrides.items()]


def launcher(run: Run) -> list[str]:
    per_node, nodes = run.rank_factors
    prefix = [f"CUDA_VISIBLE_DEVICES={run.devices}"] if run.devices else []
    if nodes == 1:
        place = ["--standalone"]
    else:
        flags = run.launch.flags if run.launch else {}
        endpoint = flags.get("rdzv_endpoint")
        address = flags.get("master_addr", run.launched("main_process_ip")) or open_mark("$MASTER_ADDR")
        port = flags.get("master_port", run.launched("main_process_port")) or "29500"
        place = ["--nnodes", str(nodes), "--rdzv-backend", "c10d"]
        place += ["--rdzv-endpoint", str(endpoint or f"{address}:{port}")]
    return [*prefix, "torchrun", *place, "--nproc-per-node", str(per_node), "-m", "llava_fsdp.train"]


def lines(words: list[str], width: int = 100) -> str:
    """Ready to paste: quoted for the shell, a line for about every `width` characters."""
    made = [""]
    for word in map(quoted, words):
        if "=" in word and len(made[-1]) + len(word) >= width:
            made.append("   ")
        made[-1] += (" " if made[-1] else "") + word
    return " \\\n".join(made)
