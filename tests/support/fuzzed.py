"""Run a model whose configuration has another value of one field, in transformers' own class and in ours."""

import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from config_fields import other_values, tries_all
from small import make_config
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PretrainedConfig

from llava_fsdp.config import Config
from llava_fsdp.model.llava.llava import Llava
from llava_fsdp.model.load_weights import load_weights
from llava_fsdp.model.packed_attention.attention import RowSegments
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.model.weights.init_weights import computed_buffers, restore_buffers
from llava_fsdp.parallel.fsdp.materialize import materialize
from llava_fsdp.parallel.local_shards import local_shards
from llava_fsdp.parallel.precision.precision import MasterWeights
from llava_fsdp.plan.search.auto import settle_packing
from llava_fsdp.runtime.errors import LlavaFsdpError
from llava_fsdp.train.setup.preflight import check_parts_and_export, check_run, find_sources, open_model, with_template

CLOSE = 1e-5
LENGTHS = (13, 22)
"""Lengths of two texts; both are longer than the windows, and one is longer than the first length of longrope."""
KEYS = ["model.random_weights=false", "model.select_feature=auto", "data.max_length=64"]
EQUAL, REFUSED, NOTHING, DIFFERENT = "equal", "refused", "without effect", "DIFFERENT"
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Outcome:
    """What became of a value of a field: `equal`, `refused` or `without effect`; else `DIFFERENT`, and why."""

    kind: str
    field: str
    value: str
    result: str
    why: str = ""


@dataclass
class Table:
    """The outcomes of all fields of all models."""

    rows: list[Outcome] = field(default_factory=list)
    impossible: list[str] = field(default_factory=list)
    """Fields of which no other value was found that transformers runs with."""

    def write(self, path: Path) -> None:
        """Write a table with a line for each model, and the refused fields."""
        lines = ["| model | fields | equal | refused | without effect | refused are |", "|---|---|---|---|---|---|"]
        for kind in dict.fromkeys(row.kind for row in self.rows):
            own = [row for row in self.rows if row.kind == kind]
            counts = Counter(row.result for row in own)
            names = ", ".join(sorted({f"`{row.field}`" for row in own if row.result == REFUSED}))
            numbers = [len({row.field for row in own}), *(counts[key] for key in (EQUAL, REFUSED, NOTHING))]
            lines.append(f"| `{kind}` | {' | '.join(map(str, numbers))} | {names} |")
        idle = sorted({f"{row.kind}.{row.field}" for row in self.rows if row.result == NOTHING})
        lines += [
            "",
            f"Without effect: {', '.join(idle)}",
            "",
            f"Not changed: {', '.join(sorted(self.impossible))}",
            "",
        ]
        path.write_text("\n".join(lines))

    def silent(self) -> list[Outcome]:
        """Return the outcomes that neither agree with transformers nor are refused."""
        return [row for row in self.rows if row.result == DIFFERENT]


class Fuzz:
    """Saves models as transformers does, and compares what transformers and we compute with them."""

    def __init__(self, parts: Path, dataset: Path, folder: Path):
        """`parts` are folders of a language model and a vision tower with weights."""
        self.parts, self.dataset, self.folder = parts, dataset, folder
        self.cfg = make_config(folder / "changed", dataset, folder / "run", *KEYS)

    def save(self, config: PretrainedConfig, part: str) -> Path:
        """Return parts in which transformers has saved a model of this configuration, with drawn weights."""
        target = self.folder / "changed"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(self.parts, target)
        auto: Any = AutoModelForCausalLM if part == "language" else AutoModel
        model = auto.from_config(config, dtype=torch.float32, attn_implementation="eager")
        draw(model)
        model.save_pretrained(target / part)
        return target


def draw(model: torch.nn.Module) -> None:
    """Draw weights by their names, about as large as those of trained models, so that no value hides behind others."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            dice = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            if parameter.ndim > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=dice)
                if name.endswith(("q_proj.weight", "k_proj.weight", "qkv_proj.weight")):
                    parameter.mul_(2)
            else:
                parameter.normal_(1 if "norm" in name and "bias" not in name else 0, 0.3, generator=dice)


def loaded(cfg: Config) -> Llava:
    """Return the model that a training with this configuration starts from, after all checks before its first step."""
    check_run(cfg)  # what `preflight` does, which does not return the model
    cfg, _ = settle_packing(cfg, find_parts(cfg.model))
    model, projector = open_model(cfg, CPU)
    check_parts_and_export(with_template(cfg, model.parts), model)
    sources, buffers = find_sources(cfg, model, projector), computed_buffers(model)
    materialize(model, lambda own: own.to_empty(device="cpu"))
    load_weights(sources, local_shards(model, MasterWeights({})))
    restore_buffers(model, buffers)
    return model.eval()


def texts() -> list[torch.Tensor]:
    dice = torch.Generator().manual_seed(3)
    return [torch.randint(3, 100, (1, length), generator=dice) for length in LENGTHS]


@torch.no_grad()
def our_logits(model: Llava, samples: list[torch.Tensor]) -> torch.Tensor:
    """Return the logits of all tokens of texts in one micro-batch, which is packed if the model can be packed."""
    none = torch.zeros(0, dtype=torch.int64)
    lengths = [sample.shape[1] for sample in samples]
    if model.kernel is not None:
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
        ids, segments, labels = (
            torch.cat(samples, 1),
            RowSegments(positions, ends, tuple(lengths)),
            torch.arange(sum(lengths)),
        )
    else:
        longest, segments = max(lengths), None
        ids = torch.cat([torch.nn.functional.pad(own, (0, longest - own.shape[1])) for own in samples])
        labels = torch.cat([torch.arange(length) + row * longest for row, length in enumerate(lengths)])
    return model(ids, segments, {}, none, labels, return_logits=True)


@torch.no_grad()
def their_logits(model: Any, samples: list[torch.Tensor]) -> torch.Tensor:
    """Return transformers' logits of all tokens of texts, each text alone."""
    return torch.cat([model(input_ids=own, use_cache=False, return_dict=True).logits[0] for own in samples]).float()


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max()) if found.shape == expected.shape else torch.inf


class Languages(Fuzz):
    """Compares logits of language models, of text alone."""

    part = "language"

    def theirs(self, parts: Path, implementation: str) -> Callable[[], torch.Tensor]:
        model: Any = AutoModelForCausalLM.from_pretrained(
            parts / "language", dtype=torch.float32, attn_implementation=implementation
        )
        self.model = model
        return lambda: their_logits(model, texts())

    def ours(self, model: Llava) -> torch.Tensor:
        return our_logits(model, texts())


class Towers(Fuzz):
    """Compares features of vision towers: of the last layer but one, without the CLS token if there is one."""

    part = "vision"

    def theirs(self, parts: Path, implementation: str) -> Callable[[], torch.Tensor]:
        keys = {"output_attentions": False} if implementation == "sdpa" else {}  # which has none to give
        model: Any = AutoModel.from_pretrained(
            parts / "vision", dtype=torch.float32, attn_implementation=implementation, **keys
        )
        self.model = model
        config = getattr(model.config, "vision_config", model.config)
        tower = model if config is model.config else model.vision_model
        side = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
        patch = config.patch_size if isinstance(config.patch_size, int) else config.patch_size[0]
        self.pixels = torch.randn((2, 3, side, side), generator=torch.Generator().manual_seed(4))

        @torch.no_grad()
        def features() -> torch.Tensor:
            states = tower(pixel_values=self.pixels, output_hidden_states=True, return_dict=True).hidden_states[-2]
            if len(states) < len(self.pixels):  # Pixtral puts the patches of all images into one row
                return states.flatten(0, 1)
            return (states if states.shape[1] == (side // patch) ** 2 else states[:, 1:]).flatten(0, 1)

        return features

    def ours(self, model: Llava) -> torch.Tensor:
        with torch.no_grad():
            return model.image_features(self.pixels).flatten(0, 1)


def changed_outcomes(fuzz: Any, kind: str, values: dict[str, Any], table: Table, only: str | None = None) -> None:
    """Set each field of a model's configuration to other legal values, one at a time, and add the outcomes to a table.

    Args:
        fuzz: `Languages` or `Towers`.
        kind: the model's `model_type`.
        values: values of the configuration that make it small.
        only: the only field to try; None: all.
    """
    base = AutoConfig.for_model(kind, **values)
    expected = reference(fuzz, base)
    table.rows.append(outcome(fuzz, kind, "(unchanged)", "", expected))
    for name, candidates in other_values(base):
        if only is not None and name.removeprefix("rope_parameters.") != only and name != only:
            continue
        tried = False
        for value, config in legal(kind, values, name, candidates):
            try:
                found = reference(fuzz, config)
            except Exception:  # transformers cannot run it: not a legal value
                continue
            tried = True
            own = outcome(fuzz, kind, name, str(value)[:60], found)
            if own.result == EQUAL and found.shape == expected.shape and torch.equal(found, expected):
                own = Outcome(kind, name, own.value, NOTHING)
            table.rows.append(own)
            if not tries_all(candidates):
                break
        if not tried:
            table.impossible.append(f"{kind}.{name}")


def legal(
    kind: str, values: dict[str, Any], name: str, candidates: list[Any]
) -> Iterator[tuple[Any, PretrainedConfig]]:
    for value in candidates:
        try:
            config = AutoConfig.for_model(kind, **{**values, name.partition(".")[0]: value})
        except Exception:  # transformers refuses the value
            continue
        yield value, config


def reference(fuzz: Any, config: PretrainedConfig) -> torch.Tensor:
    """Return what transformers computes with its eager attention, after saving a model of this configuration."""
    parts = fuzz.save(config, fuzz.part)
    found = fuzz.theirs(parts, "eager")()
    assert found.isfinite().all()
    return found


def outcome(fuzz: Any, kind: str, name: str, value: str, expected: torch.Tensor) -> Outcome:
    """Compare what we compute with the model that `fuzz` has saved last with what transformers computes."""
    try:
        model = loaded(fuzz.cfg)
        found = fuzz.ours(model)
    except LlavaFsdpError as error:
        leaf = name.rpartition(".")[2].partition("=")[0]
        named = leaf in str(error) or kind.replace("_", "") in str(error).lower().replace("_", "")
        return Outcome(kind, name, value, REFUSED if named else DIFFERENT, str(error))
    gap = difference(found, expected)
    if gap > CLOSE and getattr(fuzz.model, "_supports_sdpa", False) and model.attention != "eager":
        # transformers' own implementations differ for a window of 0 tokens, and where eager attention is unmasked
        gap = min(gap, difference(found, fuzz.theirs(fuzz.folder / "changed", "sdpa")()))
    if gap <= CLOSE:
        return Outcome(kind, name, value, EQUAL)
    return Outcome(kind, name, value, DIFFERENT, f"differs by {gap:.2g} of the largest")


def drops(fuzz: Any, config: PretrainedConfig) -> tuple[bool, bool | None]:
    """Return whether transformers' class and our model compute something else in training mode than in evaluation mode,
    with a configuration that has dropout; None if the training is refused."""
    parts = fuzz.save(config, fuzz.part)
    compute = fuzz.theirs(parts, "eager")
    still = compute()
    fuzz.model.train()
    theirs = not torch.allclose(compute(), still, rtol=1e-4)
    try:
        model = loaded(fuzz.cfg)
    except LlavaFsdpError:
        return theirs, None
    still = fuzz.ours(model)
    model.train()
    return theirs, not torch.allclose(fuzz.ours(model), still, rtol=1e-4)
