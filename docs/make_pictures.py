"""Draws docs/pictures/zero.svg and writes the table beside it: `python docs/make_pictures.py`. What each of four ranks
holds of LLaVA-1.5-7B under every row of the ZeRO table, by the arithmetic that training, planner and screen use."""

import sys
from dataclasses import dataclass, replace

from hydra import compose, initialize_config_dir
from pages import DOCS, replaced, table

from llava_fsdp.config import Config, Strategy, config_dir, load
from llava_fsdp.model.llava.llava import build_llava
from llava_fsdp.parallel.fsdp.parts import ModelParts
from llava_fsdp.parallel.fsdp.weights import weights_of
from llava_fsdp.parallel.memory.memory import NORMS, ROOT, Bytes, Weight, bytes_per_rank
from llava_fsdp.parallel.precision.precision import DTYPES
from llava_fsdp.parallel.ranks.rank_layout import mesh_shape
from llava_fsdp.parallel.sharding_strategies import SHARD_PLANS, Sync
from llava_fsdp.plan.memory.fsdp_units import units_of
from llava_fsdp.plan.model_shapes import shapes_of

RANKS, SHARD_SIZE = 4, 2
GB = 1e9
COLORS = {"weights": "#4e79a7", "gradients": "#f28e2b", "moments": "#59a14f", "gathered": "#b07aa1"}
WORDS = {
    "weights": "fp32 master weights",
    "gradients": "gradients",
    "moments": "Adam's two moments",
    "gathered": "weights gathered in bf16",
}
BOX, GAP, HEIGHT, RANK_GAP = 22, 3, 60, 20
LEFT, TOP, ROW = 150, 112, 108


@dataclass(frozen=True)
class Held:
    """One row of the table, for every rank of the image."""

    strategy: Strategy
    shards: int
    rest: Bytes
    gathered: int
    """Bytes of whole weights in the compute dtype while a block computes."""
    whole: bool
    """Those of the whole model, not of the blocks at work alone."""
    gradients: int
    """Bytes of gradients between two micro-batches."""

    @property
    def between_steps(self) -> int:
        return self.rest.parameters + self.rest.gradients + self.rest.optimizer

    @property
    def computing(self) -> int:
        return self.rest.parameters + self.rest.optimizer + self.gathered + self.gradients


def the_model() -> tuple[Config, list[Weight]]:
    """LLaVA-1.5-7B in full finetuning, in bf16, by its shapes alone."""
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        node = compose("train", ["stage=finetune", "model=llava_v1_5_7b", "data=llava_json", "data.path=x"])
    cfg = load(Config, node)
    model = build_llava(shapes_of(replace(cfg.model)), cfg.model, DTYPES[cfg.precision.param_dtype])
    return cfg, list(weights_of(model, ModelParts(model.blocks(), model.whole_while_frozen()), cfg.precision).values())


def held(strategy: Strategy, cfg: Config, weights: list[Weight]) -> Held:
    """What rank 0 holds; ranks differ by a row for each parameter."""
    plan = SHARD_PLANS[strategy]
    shards = mesh_shape(plan, RANKS, SHARD_SIZE)[1]
    found = bytes_per_rank(weights, strategy, cfg.precision, RANKS, SHARD_SIZE)
    units = units_of(weights, plan, cfg.precision, shards)
    if plan.reshard_after_forward:  # the block at work and the next one, and what stays gathered: root unit and norms
        blocks = sorted((u.gathered for name, u in units.items() if name.startswith("language")), reverse=True)
        gathered = sum(blocks[:2]) + sum(u.gathered for name, u in units.items() if name in (ROOT, NORMS))
    else:
        gathered = sum(u.gathered for u in units.values())
    return Held(strategy, shards, found, gathered, not plan.reshard_after_forward, found.gradients_between)


def text(x: float, y: float, words: str, size: int = 12, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}">{words}</text>'


def box(x: float, y: float, kind: str, place: int = 0, parts: int = 1, stripes: tuple[float, ...] = ()) -> list[str]:
    """The whole of something as an outline, and the part of it that is held, filled; or stripes of it."""
    height = HEIGHT / parts
    filled = [(y + place * height, height)] if not stripes else [(y + at * HEIGHT, 4.0) for at in stripes]
    return [
        *(
            f'<rect x="{x:g}" y="{top:g}" width="{BOX}" height="{high:g}" fill="{COLORS[kind]}"/>'
            for top, high in filled
        ),
        f'<rect x="{x:g}" y="{y:g}" width="{BOX}" height="{HEIGHT}" fill="none" stroke="{COLORS[kind]}"/>',
    ]


def rank_between_steps(x: float, y: float, rank: int, row: Held) -> list[str]:
    place = rank % row.shards
    kinds = ("weights", "gradients", "moments")
    return [line for k, kind in enumerate(kinds) for line in box(x + k * (BOX + GAP), y, kind, place, row.shards)]


def rank_computing(x: float, y: float, rank: int, row: Held) -> list[str]:
    place = rank % row.shards
    late = SHARD_PLANS[row.strategy].gradient_sync is Sync.LAST_MICRO_BATCH
    step = BOX + GAP
    return [
        *box(x, y, "weights", place, row.shards),
        *(box(x + step, y, "gradients") if late else box(x + step, y, "gradients", place, row.shards)),
        *box(x + 2 * step, y, "moments", place, row.shards),
        *box(x + 3 * step, y, "gathered", stripes=() if row.whole else (0.0, 0.45, 0.55)),
    ]


def picture(rows: list[Held]) -> str:
    rest_width = 3 * BOX + 2 * GAP + RANK_GAP
    work_width = 4 * BOX + 3 * GAP + RANK_GAP
    work_left = LEFT + RANKS * rest_width + 30
    width, height = work_left + RANKS * work_width + 6, TOP + ROW * len(rows) + 4
    title = "What each rank holds of LLaVA-1.5-7B, all of the language model and the projector training, in bf16"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{title}" '
        'font-family="sans-serif" fill="#222">',
        f"<title>{title}</title>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        text(10, 24, f"{title}, on {RANKS} ranks", 15, weight="bold"),
    ]
    x = 10
    for kind, words in WORDS.items():
        lines += [f'<rect x="{x}" y="38" width="14" height="14" fill="{COLORS[kind]}"/>', text(x + 20, 50, words)]
        x += 20 + 7 * len(words) + 24
    lines += [text(x, 50, "outline: the whole; filled: what this rank has")]
    lines += [text(LEFT, 78, "between steps, after an update", 13, weight="bold")]
    lines += [text(work_left, 78, "while a block computes, before the last micro-batch", 13, weight="bold")]
    for rank in range(RANKS):
        lines += [
            text(LEFT + rank * rest_width, 98, f"rank {rank}"),
            text(work_left + rank * work_width, 98, f"rank {rank}"),
        ]
    for number, row in enumerate(rows):
        y = TOP + number * ROW
        lines += [
            text(10, y + 24, SHARD_PLANS[row.strategy].zero, 16, weight="bold"),
            text(10, y + 42, row.strategy.name, 10),
            text(LEFT, y + HEIGHT + 20, f"{row.between_steps / GB:.1f} GB on each rank"),
            text(work_left, y + HEIGHT + 20, f"{row.computing / GB:.1f} GB on each rank, without activations"),
        ]
        for rank in range(RANKS):
            lines += rank_between_steps(LEFT + rank * rest_width, y, rank, row)
            lines += rank_computing(work_left + rank * work_width, y, rank, row)
    return "\n".join([*lines, "</svg>"]) + "\n"


def numbers(rows: list[Held]) -> str:
    head = (
        "GB on each of 4 ranks",
        "weights",
        "gradients",
        "moments",
        "between steps",
        "gathered",
        "gradients in between",
        "while a block computes",
    )
    cells = (
        (row.rest.parameters, row.rest.gradients, row.rest.optimizer, row.between_steps,
         row.gathered, row.gradients, row.computing)
        for row in rows
    )  # fmt: skip
    names = [f"`{SHARD_PLANS[row.strategy].zero}`" for row in rows]
    return table(
        head, ([name, *(f"{v / GB:.1f}" for v in own)] for name, own in zip(names, cells, strict=True)), "l" + "r" * 7
    )


def files() -> dict[str, str]:
    """The image and the page with the table, by their paths below docs/."""
    cfg, weights = the_model()
    rows = [held(strategy, cfg, weights) for strategy in SHARD_PLANS]
    page = "sharding.md"
    return {"pictures/zero.svg": picture(rows), page: replaced((DOCS / page).read_text(), "bytes", numbers(rows))}


if __name__ == "__main__":
    for name, written in files().items():
        (DOCS / name).parent.mkdir(exist_ok=True)
        (DOCS / name).write_text(written)
        sys.stdout.write(f"{DOCS / name}\n")
