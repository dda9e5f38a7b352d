"""Packed rows against padded ones: how much of the work is padding, how even the ranks' work is, and what it costs.

    python benchmarks/packing.py

What is measured and how to read it is in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import importlib.util
import io
import json
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from hydra import compose, initialize_config_dir
from PIL import Image
from provenance import REPOSITORY, commit, machine
from rich.console import Console
from rich.table import Table

from llava_fsdp.config import Config, Normalize, config_dir, load
from llava_fsdp.data.batching.batch import MicroBatch, Step, StepFacts
from llava_fsdp.data.batching.collate import Collator, Row
from llava_fsdp.data.batching.llava_samplers import chunked, modality_grouped
from llava_fsdp.data.batching.packing import Assignment, pack_step, split_step
from llava_fsdp.data.text.tokenizer import open_tokenizer
from llava_fsdp.parallel.ranks.mesh import World
from llava_fsdp.parallel.zero import SHARD_PLANS
from llava_fsdp.train.loop import train_step
from llava_fsdp.train.setup.build_state import build_state
from llava_fsdp.train.state import TrainState

ASSETS = REPOSITORY / "src" / "llava_fsdp" / "assets"
PICTURE = 576
LONGEST = 2048
TEXT_ONLY = 0.061
"""Share of LLaVA-1.5's 665k records without a picture (haotian-liu/LLaVA#657)."""
MEAN_TEXT, MEAN_TEXT_ONLY = 265, 700
"""Positions. Guesses: LLaVA published no lengths, and nobody else has; hence three tails."""
TAILS = {"light": 0.5, "medium": 0.65, "heavy": 0.8}
"""Standard deviation of the logarithm of a text's length, at one mean."""
RANKS, SAMPLES, ROWS = 8, 128, 16
"""LLaVA's second stage: 8 GPUs of 16 rows."""
STEPS = 50
TOLERANCE = 1e-5


def draw_lengths(tail: str, count: int, seed: int) -> list[tuple[int, bool]]:
    """(positions, has a picture) of samples like LLaVA's: a picture of 576 and a text of any length."""
    dice, sigma = random.Random(f"{tail} {seed}"), TAILS[tail]
    found = []
    for _ in range(count):
        shown = dice.random() >= TEXT_ONLY
        mean = MEAN_TEXT if shown else MEAN_TEXT_ONLY
        # a lognormal's mean is exp(mu + sigma^2 / 2)
        text = mean * dice.lognormvariate(-(sigma**2) / 2, sigma)
        found.append((max(8, min(LONGEST, int(text) + PICTURE * shown)), shown))
    return found


# How samples can be laid out; each gives micro-batches of the same samples


def as_they_come(lengths: list[tuple[int, bool]], rows: int) -> list[list[int]]:
    """The original's plain sampler, as in its first stage: micro-batches in random order."""
    return chunked(list(range(len(lengths))), rows)


def by_length(lengths: list[tuple[int, bool]], rows: int) -> list[list[int]]:
    """Ours with pack=false: sorted by length."""
    (rank,) = split_step([n for n, _ in lengths], 1, rows)
    return rank


PADDED: dict[str, Callable[[list[tuple[int, bool]], int], list[list[int]]]] = {
    "padded, random order": as_they_come,
    "padded, sorted by length (pack=false)": by_length,
}
PACKED = "packed (pack=true)"


def padding_share(lengths: list[tuple[int, bool]], micro_batches: list[list[int]]) -> float:
    """Of the positions that are computed, those that nobody asked for."""
    run = sum(len(m) * max(lengths[i][0] for i in m) for m in micro_batches if m)
    return 1 - sum(n for n, _ in lengths) / run


GROUPED = "padded, grouped by modality and length"
TIMED = (GROUPED, *PADDED, PACKED)


def grouped(tail: str, ranks: int = RANKS, rows: int = ROWS) -> tuple[list[tuple[int, bool]], list[list[int]]]:
    """An epoch's lengths, and its micro-batches by the original's `group_by_modality_length`, as in its second stage.

    It sorts a megabatch, which is a step, by words and deals it over the ranks, so that each has long and short ones.
    """
    lengths = draw_lengths(tail, SAMPLES * STEPS, seed=0)
    words = [length - PICTURE if shown else -length for length, shown in lengths]
    dice = [torch.Generator().manual_seed(seed) for seed in range(2)]
    kept = len(words) - 2 * ranks * rows  # the last two steps are set aside, mixed
    order = modality_grouped(words, rows, ranks, *dice)[:kept]
    return lengths, chunked(order, rows)


def step_of_original(tail: str, samples: int) -> list[tuple[int, bool]]:
    """Of that epoch the first steps with pictures (a step is of one modality, 19 of 20 have them), in its order."""
    lengths, order = grouped(tail)
    first = next(n for n in range(0, len(order), RANKS) if lengths[order[n][0]][1])
    return [lengths[i] for m in order[first : first + samples // ROWS] for i in m]


def measure_padding(tail: str) -> dict[str, float]:
    """Mean over 50 steps of 128 samples."""
    found = {}
    drawn = [draw_lengths(tail, SAMPLES, seed) for seed in range(STEPS)]
    for name, cut in PADDED.items():
        found[name] = statistics.mean(padding_share(lengths, cut(lengths, ROWS)) for lengths in drawn)
    found["padded, random order, 4 rows"] = statistics.mean(padding_share(n, as_they_come(n, 4)) for n in drawn)
    lengths, order = grouped(tail)
    run = sum(len(m) * max(lengths[i][0] for i in m) for m in order)
    found[GROUPED] = 1 - sum(lengths[i][0] for m in order for i in m) / run
    return {**found, PACKED: 0.0}  # a packed row is as long as its samples; the timed ones are counted


# Balance


def cost(length: int) -> int:
    """MFLOPs of LLaVA-1.5-7B's second stage: 6 x 6.48e9 weights, and attention."""
    return round(38_856 * length + 0.7864 * length**2)


def excess(cuts: Assignment, costs: list[int]) -> float:
    totals = [sum(costs[i] for micro in rank for i in micro) for rank in cuts]
    return max(totals) / (sum(totals) / len(totals))


def longest_first(costs: list[int], ranks: int) -> Assignment:
    """Longest processing time alone, to compare with."""
    totals, cuts = [0] * ranks, [[[]] for _ in range(ranks)]
    for sample in sorted(range(len(costs)), key=lambda i: -costs[i]):
        least = totals.index(min(totals))
        totals[least] += costs[sample]
        cuts[least][0].append(sample)
    return cuts


def as_original(tail: str) -> list[float]:
    """By step, the heaviest rank over the mean where each rank pads its own rows."""
    lengths, order = grouped(tail)
    work = [len(m) * cost(max(lengths[i][0] for i in m)) for m in order]
    return [max(work[n : n + RANKS]) * RANKS / sum(work[n : n + RANKS]) for n in range(0, len(work), RANKS)]


def measure_balance(tail: str) -> dict[str, dict[str, float]]:
    """Of 50 steps of 128 samples over 8 ranks: mean and worst of the heaviest rank's work over the mean."""
    found: dict[str, list[float]] = {
        "original, padded": as_original(tail),
        "longest first": [],
        "ours": [],
        "ours, 4096 a row": [],
    }
    seconds = []
    for seed in range(STEPS):
        lengths = draw_lengths(tail, SAMPLES, seed)
        only = [n for n, _ in lengths]
        costs = [cost(n) for n in only]
        found["longest first"].append(excess(longest_first(costs, RANKS), costs))
        started = time.process_time()
        found["ours"].append(excess(pack_step(only, costs, RANKS, ROWS * LONGEST), costs))
        seconds.append(time.process_time() - started)
        found["ours, 4096 a row"].append(excess(pack_step(only, costs, RANKS, 4096), costs))
    report = {name: {"mean": statistics.mean(v), "worst": max(v)} for name, v in found.items()}
    report["ours"]["seconds"] = statistics.median(seconds)
    return report


# Speed: a model in which arithmetic dominates, on samples a quarter as long


def write_model(folder: Path, hidden: int, layers: int, side: int, vocabulary: int | None = None) -> None:
    """A llama and a CLIP tower of `side` x `side` patches; without `vocabulary` it is the tokenizer's."""
    language = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocabulary or open_tokenizer(ASSETS / "tiny-llama").size, "hidden_size": hidden,
        "intermediate_size": hidden * 11 // 4, "num_hidden_layers": layers, "num_attention_heads": hidden // 32,
        "num_key_value_heads": hidden // 32, "max_position_embeddings": LONGEST, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
    }  # fmt: skip
    vision = json.loads((ASSETS / "tiny-clip" / "config.json").read_text())
    vision |= {"image_size": 14 * side, "patch_size": 14}
    preprocessor = json.loads((ASSETS / "tiny-clip" / "preprocessor_config.json").read_text())
    for key in ("size", "crop_size"):
        value = preprocessor[key]
        preprocessor[key] = dict.fromkeys(value, 14 * side) if isinstance(value, dict) else 14 * side
    for name, files in {
        "language": {"config.json": language},
        "vision": {"config.json": vision, "preprocessor_config.json": preprocessor},
    }.items():
        (folder / name).mkdir(parents=True)
        for file, values in files.items():
            (folder / name / file).write_text(json.dumps(values))
    for file in (ASSETS / "tiny-llama").glob("*token*"):
        (folder / "language" / file.name).write_bytes(file.read_bytes())


def write_records(
    folder: Path, lengths: list[tuple[int, bool]], picture: int, scale: int, captions: bool = False
) -> None:
    """Records of nearly these lengths over `scale`, half of each text the answer.

    Args:
        captions: for the plain template, which writes the answer and nothing around it.
    """
    tokenizer = open_tokenizer(ASSETS / "tiny-llama")
    word = next(w for w in (" red", " the", " is", " a", " left") if len(tokenizer.encode(w * 50)) <= 51)
    overhead = len(tokenizer.encode("\n" if captions else "A chat. USER: ASSISTANT: </s>"))
    (folder / "images").mkdir(parents=True)
    Image.effect_noise((96, 72), 60).convert("RGB").save(folder / "images" / "0.png")
    records = []
    for number, (length, shown) in enumerate(lengths):
        words = max(2, length // scale - picture * shown - overhead)
        answered = words if captions else words // 2
        asked, answer = (word * (words - answered)).strip(), (word * answered).strip()
        turns = [
            {"from": "human", "value": "<image>\n" * shown + asked},
            {"from": "gpt", "value": answer},
        ]
        records.append({"id": str(number), **({"image": "0.png"} if shown else {}), "conversations": turns})
    (folder / "records.json").write_text(json.dumps(records))


def configure(work: Path, samples: int, scale: int) -> Config:
    overrides = [
        "stage=finetune", f"model.language={work / 'language'}", f"model.vision={work / 'vision'}",
        "model.projector=random", "data=llava_json", f"data.path={work / 'records.json'}",
        f"data.images={work / 'images'}", f"data.max_length={LONGEST // scale + 64}",
        "data.workers=0", f"output_dir={work / 'run'}", "precision=fp32", "activation_checkpointing=none",
        "export.enabled=false",
        f"global_batch_size={samples}", f"micro_batch_size={ROWS}", "max_steps=1000",
        "optim.lr=0", "optim.projector_lr=0",  # every step is the first one again, so that all must agree
    ]  # fmt: skip
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return load(Config, compose("train", overrides))


def micro_batches(state: TrainState, cfg: Config, layout: str) -> Step:
    """All samples as one step, laid out in one of the ways."""
    steps = state.loader.steps
    if layout == PACKED:
        return steps.prepare(0)
    numbers = steps.sampler.samples(0)
    rows: list[Row] = [steps.load(number) for number in numbers]
    facts = StepFacts(0, samples=len(rows), label_tokens=sum(s.num_labels for s, _ in rows))
    collate = Collator(steps.image_reader, Normalize.step, pack=False)
    lengths = [
        (len(s.input_ids) + (PICTURE - steps.image_reader.tokens.features) * bool(s.images), bool(s.images))
        for s, _ in rows
    ]
    if layout == GROUPED:  # the records were written in its order
        cut = chunked(sorted(range(len(rows)), key=lambda place: numbers[place]), ROWS)
    else:
        cut = PADDED[layout](lengths, ROWS)
    assert sorted(i for m in cut for i in m) == list(range(len(rows)))
    return Step(facts, [collate([rows[i] for i in m], facts, len(cut)) for m in cut])


def measure_speed(tail: str, options: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """CPU seconds of a training step of the same samples in every layout, interleaved, forwards and backwards."""
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stderr(io.StringIO()):
        work = Path(name)
        side = 12
        write_model(work, options.hidden, options.layers, side)
        write_records(work, step_of_original(tail, options.samples), side * side, options.scale)
        cfg = configure(work, options.samples, options.scale)
        state = build_state(cfg, World(0, 1, 0, 1, torch.device("cpu")), SHARD_PLANS[cfg.sharding.strategy], None)
        state.model.train()
        steps = {layout: micro_batches(state, cfg, layout) for layout in TIMED}
        results = {layout: run(state, cfg, step) for layout, step in steps.items()}
        check_equal(results)
        seconds: dict[str, list[float]] = {layout: [] for layout in steps}
        for repeat in range(options.repeats):
            order = list(steps) if repeat % 2 == 0 else list(reversed(steps))
            for layout in order:
                gc.collect()
                started = time.process_time()
                run(state, cfg, steps[layout])
                seconds[layout].append(time.process_time() - started)
    real = results[PACKED][2]
    rows = []
    for layout, step in steps.items():
        computed = sum(m.input_ids.numel() for m in step.micro_batches)
        fastest = min(seconds[layout])
        rows.append({
            "tail": tail, "layout": layout, "micro_batches": len(step.micro_batches), "real_tokens": real,
            "computed_positions": computed, "padding_share": 1 - real / computed,
            "cpu_seconds": {"min": fastest, "median": statistics.median(seconds[layout]), "all": seconds[layout]},
            "real_tokens_per_cpu_second": real / fastest,
            "packed_is_times": fastest / min(seconds[PACKED]),
            "loss": results[layout][0], "gradient_norm": results[layout][1],
        })  # fmt: skip
    console.print(f"{tail}: timed")
    return rows


def run(state: TrainState, cfg: Config, step: Step) -> tuple[float, float, int]:
    """Loss, gradient norm, and positions of samples where rows are packed."""
    state.step = 0
    result = train_step(state, step, SHARD_PLANS[cfg.sharding.strategy], cfg, 0.0)
    return result.loss, result.grad_norm, positions(step.micro_batches)


def positions(micro: list[MicroBatch]) -> int:
    return sum(sum(m.lengths) for m in micro)


def check_equal(results: dict[str, tuple[float, float, int]]) -> None:
    """Every layout computed the same: else no time is worth printing."""
    loss, norm, _ = results[PACKED]
    for layout, (other, other_norm, _) in results.items():
        if abs(other - loss) > TOLERANCE * loss or abs(other_norm - norm) > TOLERANCE * norm:
            raise SystemExit(f"{layout}: loss {other} and gradient norm {other_norm}, packed {loss} and {norm}")


# What is shown


def speed_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="one training step of the same samples, CPU", title_justify="left")
    for head in ("tail", "layout", "padding", "CPU s min", "median", "real tokens / CPU s", "packed is"):
        table.add_column(head, justify="left" if head in ("tail", "layout") else "right")
    for row in rows:
        seconds = row["cpu_seconds"]
        table.add_row(
            row["tail"], row["layout"], f"{row['padding_share']:.1%}", f"{seconds['min']:.2f}",
            f"{seconds['median']:.2f}", f"{row['real_tokens_per_cpu_second']:,.0f}", f"{row['packed_is_times']:.2f} x",
        )  # fmt: skip
    return table


def balance_table(balance: dict[str, Any], padding: dict[str, Any]) -> Table:
    table = Table(title=f"{STEPS} steps of {SAMPLES} samples over {RANKS} ranks", title_justify="left")
    for head in ("tail", "what", "mean", "worst"):
        table.add_column(head, justify="left" if head in ("tail", "what") else "right")
    for tail, found in balance.items():
        for name, values in found.items():
            table.add_row(tail, f"heaviest rank / mean: {name}", f"{values['mean']:.5f}", f"{values['worst']:.5f}")
        for name, share in padding[tail].items():
            table.add_row(tail, f"padding: {name}", f"{share:.1%}", "")
    return table


def draw(report: dict[str, Any], path: Path) -> bool:
    """Padding, balance and speed by tail. False without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    tails = list(TAILS)
    speed = {(r["layout"], r["tail"]): r["real_tokens_per_cpu_second"] for r in report["speed"]}
    panels: list[tuple[str, list[str], Callable[[str, str], float]]] = [
        ("share of computed positions that is padding", list(report["padding"][tails[0]]),
         lambda n, t: report["padding"][t][n]),
        ("heaviest rank's work over the mean, less 1 (worst step)", list(report["balance"][tails[0]]),
         lambda n, t: report["balance"][t][n]["worst"] - 1),
        ("real tokens a CPU second", list(TIMED),
         lambda n, t: speed[n, t]),
    ]  # fmt: skip
    for axis, (title, names, value) in zip(axes, panels, strict=True):
        width = 0.8 / len(names)
        for number, name in enumerate(names):
            axis.bar(
                [p + number * width for p in range(len(tails))], [value(name, t) for t in tails], width, label=name
            )
        axis.set_xticks([p + 0.4 - width / 2 for p in range(len(tails))], tails)
        axis.set_title(title, fontsize="medium")
        axis.legend(fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.08))
    axes[1].set_yscale("log")
    figure.suptitle(f"{report['machine']['device']}, torch {report['torch']}, fp32, {report['date'][:10]}")
    figure.savefig(path, dpi=90)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256, help="width of the language model, a multiple of 32")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--samples", type=int, default=128, help=f"of a timed step, a multiple of {ROWS}")
    parser.add_argument("--scale", type=int, default=4, help="timed samples are as many times shorter than LLaVA's")
    parser.add_argument("--repeats", type=int, default=4, help="of every layout; the fastest counts")
    parser.add_argument("--out", type=Path, help="JSON file; the picture is written beside it")
    options = parser.parse_args()
    if options.out is not None and Path(options.out).is_dir():
        parser.error(f"--out={options.out} is a folder; give a JSON file")
    if options.samples % ROWS or options.hidden % 32:
        parser.error(f"--samples must be a multiple of {ROWS}, --hidden one of 32")
    ran = commit()  # now: the checkout may move on while this runs
    torch.set_num_threads(1)  # threads that wait for each other burn CPU seconds
    console = Console(width=140)
    balance = {tail: measure_balance(tail) for tail in TAILS}
    padding = {tail: measure_padding(tail) for tail in TAILS}
    console.print(balance_table(balance, padding))
    speed = [row for tail in TAILS for row in measure_speed(tail, options, console)]
    console.print(speed_table(speed))
    today = datetime.date.today().isoformat()
    path = options.out or REPOSITORY / "benchmarks" / "results" / f"packing-cpu-{today}.json"
    report = {
        "question": "what does packing save, and is the ranks' work even?",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": ran,
        "command": " ".join(["python", "benchmarks/packing.py", *without_out(sys.argv[1:])]),
        "options": {k: v for k, v in vars(options).items() if k != "out"},
        "machine": machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "lengths": {
            "picture": PICTURE, "longest": LONGEST, "text_only_share": TEXT_ONLY, "mean_text": MEAN_TEXT,
            "mean_text_only": MEAN_TEXT_ONLY, "sigma_of_log": TAILS,
        },
        "balance": balance,
        "padding": padding,
        "speed": speed,
    }  # fmt: skip
    path.write_text(json.dumps(report, indent=1) + "\n")
    drawn = draw(report, path.with_suffix(".png"))
    console.print(f"wrote {path}" + (f" and {path.with_suffix('.png')}" if drawn else "; no picture: no matplotlib"))


def without_out(arguments: list[str]) -> list[str]:
    kept = list(arguments)
    if "--out" in kept:
        at = kept.index("--out")
        del kept[at : at + 2]
    return kept


if __name__ == "__main__":
    main()
