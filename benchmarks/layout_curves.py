"""How fast would a training be on 8 to 1,024 GPUs, by the planner? Half an hour of two cores.

    python benchmarks/layout_curves.py --jobs 2
    python benchmarks/layout_curves.py FOLDER --models 7B --nodes 16

Runs `llava-fsdp plan parallel=auto` for models of five sizes, each with CLIP's ViT-L/14-336 and 1,024 samples a step.
Nothing is measured: all values are predictions. benchmarks/README.md explains the result.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

from bench import Report, command_line, facts, run_json, write
from transformers import CLIPVisionConfig, LlamaConfig, MixtralConfig, PretrainedConfig, Qwen2Config

TOWER = CLIPVisionConfig(
    hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16, image_size=336,
    patch_size=14, projection_dim=768,
)  # fmt: skip


def decoder(kind: Any, hidden: int, inner: int, layers: int, heads: int, keys: int, ids: int) -> Any:
    return kind(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=keys, vocab_size=ids, max_position_embeddings=4096,
    )  # fmt: skip


MODELS = {
    "7B": decoder(LlamaConfig, 4096, 11008, 32, 32, 32, 32000),  # Vicuna
    "13B": decoder(LlamaConfig, 5120, 13824, 40, 40, 40, 32000),
    "34B": decoder(LlamaConfig, 7168, 20480, 60, 56, 8, 64000),  # Yi
    "72B": decoder(Qwen2Config, 8192, 29568, 80, 64, 8, 152064),
    "8x7B": decoder(MixtralConfig, 4096, 14336, 32, 32, 8, 32000),
}
"""Name -> configuration of the language model, in the sizes of published ones."""


def planned(config: PretrainedConfig, folder: Path, nodes: int, gpu: str) -> Report:
    """Return the plan of training a language model on so many nodes of 8 GPUs."""
    for part, own in (("language", config), ("vision", TOWER)):
        (folder / part).mkdir(parents=True)
        (folder / part / "config.json").write_text(json.dumps(own.to_dict(), default=str))
    keys = [
        "stage=finetune", f"model.language={folder / 'language'}", f"model.vision={folder / 'vision'}",
        "model.projector=random", "global_batch_size=1024", "parallel=auto", "gpus=8", f"nodes={nodes}", f"gpu={gpu}",
        f"page={folder / 'page.html'}", "format=json",
    ]  # fmt: skip
    found = run_json([sys.executable, "-m", "llava_fsdp.plan", *keys], timeout=3600)
    if "failed" in found:
        raise SystemExit(f"llava-fsdp plan failed: {found['failed']}")
    return found


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--nodes", type=int, default=128, help="of 8 GPUs")
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--jobs", type=int, default=1, help="models that are planned at the same time")
    options = parser.parse_args()
    report = facts("how fast would a training be on 8 to 1,024 GPUs, by the planner?", options) | {"models": {}}
    with tempfile.TemporaryDirectory() as made, ThreadPoolExecutor(options.jobs) as pool:
        folders = [Path(made, name) for name in options.models]
        args = [MODELS[name] for name in options.models], folders, repeat(options.nodes), repeat(options.gpu)
        note(report, options, pool.map(planned, *args))


def note(report: Report, options: argparse.Namespace, plans: Iterable[Report]) -> None:
    """Write the plans of all models into the result, each as soon as it and those before it are there."""
    for name, plan in zip(options.models, plans, strict=True):
        report["assumptions"] = plan["assumptions"]
        report["models"][name] = {"points": plan["scaling"], "search": plan["search"]["layouts"]}
        write(report, f"layout-curves-{options.gpu}", options.folder, draw)
        for point in plan["scaling"]:
            if point["fits"]:
                print(
                    name, 8 * point["nodes"], point["sharding"], point["layout"], f"{point['tokens_per_second']:,.0f}"
                )


def draw(pyplot: Any, report: Report) -> None:
    _, axes = pyplot.subplots(figsize=(10, 6), layout="constrained")
    styles = {"fastest layout": "-o", "zero3": "--", "hybrid": ":"}
    for colour, (name, model) in enumerate(report["models"].items()):
        for sharding, style in styles.items():
            points = [p for p in model["points"] if p["sharding"] == sharding and p["fits"]]
            label = name if sharding == "fastest layout" else None
            places = [8 * p["nodes"] for p in points], [p["tokens_per_second"] / 8 / p["nodes"] for p in points]
            axes.plot(*places, style, color=f"C{colour}", label=label)
    axes.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="tokens a second and GPU, predicted")
    axes.legend(title="line: fastest layout; dashed: zero3; dotted: hybrid")


if __name__ == "__main__":
    main()
