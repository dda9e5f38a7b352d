"""How fast are the kernels of which a step of LLaVA-1.5-7B consists, without a model? Less than a minute on a GPU.

    python benchmarks/kernels.py FOLDER
    python benchmarks/kernels.py FOLDER --tiny     # small sizes, to try the script itself; a CPU will do

The result is written after every case. A case that this machine or this torch cannot run has its reason as `not_run`.
"""

from __future__ import annotations

import statistics
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from bench import Report, clock, command_line, facts, reason, write_json
from speed_peers import Work, samples_of_steps
from torch.nn.functional import scaled_dot_product_attention

from llava_fsdp.parallel.precision.fp8 import FP8, LARGEST, weight_storer
from llava_fsdp.parallel.precision.precision import gradient_adder

LAYERS = 32
WEIGHTS = {"attention": (4096, 4096, 4), "gate, up": (11008, 4096, 2), "down": (4096, 11008, 1)}
"""Rows and columns of a block's weights, and how many there are of each."""
TOKENS = (4154, 4224, 4608)
"""The mean of packed rows, the next multiple of 128, and the limit of a row with which a 7B fits."""
HEADS, HEAD = 32, 128
Case = Callable[[], Report]


class NotRun(Exception):
    """A case cannot run here; the message says why."""


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--tiny", action="store_true", help="small sizes and few repeats")
    options = parser.parse_args()
    report = facts("how fast are the kernels of a step of LLaVA-1.5-7B?", options) | {"cases": []}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    for name, case in cases(Bench(device, options.tiny)):
        row: Report = {"name": name}
        try:
            row |= case()
        except NotRun as why:
            row["not_run"] = str(why)
        except Exception as error:
            traceback.print_exc()
            row["failed"] = reason(error)
        report["cases"].append(row)
        write_json(report, "kernels", options.folder)
        print(describe(row), flush=True)
    if any("failed" in row for row in report["cases"]):
        raise SystemExit(1)


def describe(row: Report) -> str:
    if "not_run" in row:
        return f"NOT RUN: {row['name']}: {row['not_run']}"
    numbers = (f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items())
    return f"{row['name']}: {', '.join(list(numbers)[1:])}"


class Bench:
    """The device, the sizes, and the clock."""

    def __init__(self, device: torch.device, tiny: bool):
        self.device = device
        self.shrink = 16 if tiny else 1
        self.repeats = 2 if tiny else 20

    def random(self, *sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Random numbers: a GPU multiplies zeros faster."""
        return torch.randn(sizes, device=self.device, dtype=torch.float32).to(dtype)

    def seconds(self, action: Callable[[], Any]) -> float:
        """Seconds of an action, of which the host queues many: the median of three rounds."""
        for _ in range(2):
            action()
        rounds = []
        for _ in range(3):
            started = clock(self.device)
            for _ in range(self.repeats):
                action()
            rounds.append((clock(self.device) - started) / self.repeats)
        return statistics.median(rounds)

    def needs_gpu(self, does: bool = True) -> None:
        if does and self.device.type != "cuda":
            raise NotRun("needs a GPU, and torch sees none")


def cases(bench: Bench) -> Iterator[tuple[str, Case]]:
    weights = {name: (n // bench.shrink, k // bench.shrink) for name, (n, k, _) in WEIGHTS.items()}
    for tokens in TOKENS:
        for name, (n, k) in weights.items():
            for kind in ("forward", "input gradient", "weight gradient"):
                of = f"product, {tokens} tokens, {name}, {kind}"
                yield of, lambda t=tokens, n=n, k=k, kind=kind: product(bench, t // bench.shrink, n, k, kind)
    for name, (n, k) in weights.items():
        yield f"addmm into fp32, {name}", lambda n=n, k=k: addmm(bench, TOKENS[0] // bench.shrink, n, k)
    n, k = weights["gate, up"]
    for compiled in (False, True):
        of = f"gradients added, {'compiled' if compiled else 'by torch'}"
        yield of, lambda compiled=compiled: add_gradients(bench, n, k, compiled)
    for name, attend in (("flash", flash), ("cuDNN", cudnn)):
        yield f"attention, {name}", lambda attend=attend: attention(bench, attend)
    for compiled in (False, True):
        of = f"fp8 cast of a weight in both layouts, {'compiled' if compiled else 'by torch'}"
        yield of, lambda compiled=compiled: fp8_cast(bench, n, k, compiled)


def product(bench: Bench, tokens: int, n: int, k: int, kind: str) -> Report:
    """One of a linear layer's three products, with the layouts that autograd gives it."""
    x, weight, grad = bench.random(tokens, k), bench.random(n, k), bench.random(tokens, n)
    left, right = {"forward": (x, weight.T), "input gradient": (grad, weight), "weight gradient": (grad.T, x)}[kind]
    seconds = bench.seconds(lambda: left @ right)
    return {"ms": 1e3 * seconds, "TFLOPs/s": 2 * tokens * n * k / seconds / 1e12}


def addmm(bench: Bench, tokens: int, n: int, k: int) -> Report:
    """A weight's gradient added to a sum in fp32 within the product, beside the product and the compiled adder."""
    bench.needs_gpu()
    into = getattr(torch.ops.aten.addmm, "dtype_out", None)
    if into is None:
        raise NotRun(f"torch {torch.__version__} has no addmm with out_dtype")
    x, grad, total = bench.random(tokens, k), bench.random(tokens, n), bench.random(n, k, dtype=torch.float32)
    exact, separate = torch.addmm(total, grad.T.float(), x.float()), total + grad.T @ x
    add = gradient_adder(True)
    into(total, grad.T, x, torch.float32, out=total)
    found = {"error": far(total, exact), "error of product and adder": far(separate, exact)}
    seconds = bench.seconds(lambda: into(total, grad.T, x, torch.float32, out=total))
    both = bench.seconds(lambda: add(total, grad.T @ x))
    rate = 2 * tokens * n * k / seconds / 1e12
    return {"ms": 1e3 * seconds, "TFLOPs/s": rate, "ms of product and adder": 1e3 * both, **found}


def add_gradients(bench: Bench, n: int, k: int, compiled: bool) -> Report:
    bench.needs_gpu(compiled)
    total, gradient = bench.random(n, k, dtype=torch.float32), bench.random(n, k)
    expected, add = total + gradient, gradient_adder(compiled)
    add(total, gradient)
    assert torch.equal(total, expected), "the sum has other bits than torch's"
    seconds = bench.seconds(lambda: add(total, gradient))
    return {"ms": 1e3 * seconds, "TB/s": 10 * n * k / seconds / 1e12, "ms of 7B": 1e3 * seconds * of_model(n * k)}


def fp8_cast(bench: Bench, n: int, k: int, compiled: bool) -> Report:
    """A weight scaled by its largest element and cast to fp8, in the layouts of forward and backward pass."""
    bench.needs_gpu(compiled)

    weight, store = bench.random(n, k), weight_storer(compiled)
    layouts = (torch.empty(shape, dtype=FP8, device=bench.device) for shape in ((n, k), (k, n)))
    stored = *layouts, torch.empty((), device=bench.device)
    store(weight, *stored)
    largest = float(stored[0].float().abs().max())
    assert largest == LARGEST, f"the largest element is {largest}, not {LARGEST}"
    seconds = bench.seconds(lambda: store(weight, *stored))
    return {"ms": 1e3 * seconds, "TB/s": 4 * n * k / seconds / 1e12, "ms of 7B": 1e3 * seconds * of_model(n * k)}


def of_model(elements: int) -> float:
    """How many times that many elements the blocks of a 7B have."""
    return LAYERS * sum(n * k * count for n, k, count in WEIGHTS.values()) / elements


def far(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.float() - exact.float()).norm() / exact.float().norm())


# Attention


def attention(bench: Bench, attend: Callable[..., Report]) -> Report:
    """Forward and backward pass of a row of samples, and how far the results are from those of each sample alone in
    fp32. The lengths are those of the first samples of speed.py."""
    bench.needs_gpu()
    work = Work("finetune", None, Path(), 64, 16, 1, 0, 2048, TOKENS[-1], 265, True)
    lengths: list[int] = []
    for text in samples_of_steps(work, 576, 32000)[0]:
        if sum(lengths) + 576 + len(text) <= TOKENS[-1]:
            lengths.append(576 + len(text))
    q, k, v, grad = (bench.random(sum(lengths), HEADS, HEAD) for _ in range(4))
    bounds = torch.tensor([0, *lengths], device=bench.device).cumsum(0).to(torch.int32)
    found = attend(bench, q, k, v, grad, bounds, max(lengths))
    results = found.pop("results")
    exact = reference(q, k, v, grad, lengths)
    flops = 2 * 2 * HEADS * HEAD * sum(n * n for n in lengths) / 2  # the causal half of two products
    names = ("output", "query", "key", "value")
    return found | {
        "lengths": lengths,
        "forward TFLOPs/s": flops / found["forward ms"] / 1e9,
        "backward TFLOPs/s": 2.5 * flops / found["backward ms"] / 1e9,
        "errors": {name: far(*both) for name, *both in zip(names, results, exact, strict=True)},
    }


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, lengths: list[int]
) -> list[torch.Tensor]:
    """Output and gradients of queries, keys and values, a sample at a time in fp32."""
    inputs = [part.float().requires_grad_() for part in (q, k, v)]
    samples = zip(*(part.transpose(0, 1).split(lengths, 1) for part in inputs), strict=True)
    output = torch.cat([scaled_dot_product_attention(*one, is_causal=True) for one in samples], 1).transpose(0, 1)
    return [output.detach(), *torch.autograd.grad(output, inputs, grad.float())]


def flash(bench: Bench, q: Any, k: Any, v: Any, grad: Any, bounds: torch.Tensor, longest: int) -> Report:
    """torch's FlashAttention, which varlen_attn calls."""
    ops, rows = torch.ops.aten, (bounds, bounds, longest, longest, 0.0, True)

    def forward() -> Any:
        return ops._flash_attention_forward(q, k, v, *rows, False)

    output, stats, state, unused, _ = forward()

    def backward() -> Any:
        return ops._flash_attention_backward(grad, q, k, v, output, stats, *rows, state, unused)

    return timed(bench, output, forward, backward)


def cudnn(bench: Bench, q: Any, k: Any, v: Any, grad: Any, bounds: torch.Tensor, longest: int) -> Report:
    ops, ends = torch.ops.aten, (bounds, bounds, longest, longest)
    if not hasattr(ops, "_cudnn_attention_forward"):
        raise NotRun(f"torch {torch.__version__} has no _cudnn_attention_forward")

    def forward() -> Any:
        return ops._cudnn_attention_forward(q, k, v, None, *ends, True, 0.0, True)

    output, stats, *_, seed, offset, _ = forward()

    def backward() -> Any:
        return ops._cudnn_attention_backward(grad, q, k, v, output, stats, seed, offset, None, *ends, 0.0, True)

    return timed(bench, output, forward, backward)


def timed(bench: Bench, output: torch.Tensor, forward: Callable[[], Any], backward: Callable[[], Any]) -> Report:
    found: Report = {"forward ms": 1e3 * bench.seconds(forward), "backward ms": 1e3 * bench.seconds(backward)}
    return found | {"results": [output, *backward()]}


if __name__ == "__main__":
    main()
