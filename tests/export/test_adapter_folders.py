"""Folders of adapters: peft loads them, export merges them, and what cannot be right is said."""

import json
import logging
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from forged import forge_manifest, forge_notes
from harness import RankPool, alone
from reference import EXPORTED, run_ranks
from safetensors.torch import load_file, save_file
from saves import interrupted
from small import conversion, make_config, write_json, write_parts, write_wide_parts
from tiers import slow_after
from transformers import AutoModelForCausalLM, LlavaForConditionalGeneration
from weights import same, weights

from llava_fsdp.chat.assistant import Assistant
from llava_fsdp.checkpoint.manifest import STATE_FILE
from llava_fsdp.checkpoint.reader import saved_weights
from llava_fsdp.checkpoint.verify import verify
from llava_fsdp.config import AspectRatio
from llava_fsdp.data.batching.batch import MicroBatch
from llava_fsdp.export import peft_folder
from llava_fsdp.export.check_folders import check_artifacts
from llava_fsdp.export.main import export
from llava_fsdp.export.peft_folder import in_class
from llava_fsdp.export.prove import verify_logits
from llava_fsdp.export.prove.logit_distance import CLOSE
from llava_fsdp.export.prove.verify_logits import CLOSE_MERGED, Adapted, prove_merge, relative_difference
from llava_fsdp.export.source_model import Opened, open_source
from llava_fsdp.export.write.adapter_folder import whole_rows
from llava_fsdp.model.adapters.lora_files import find_adapter, open_adapter
from llava_fsdp.model.adapters.lora_merge import merge_adapters
from llava_fsdp.model.adapters.lora_names import is_adapter, without_base
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.model.sources.pretrained_config import check_named_base, read_model
from llava_fsdp.model.weights.weight_names import in_adapter, ours
from llava_fsdp.runtime.errors import CheckpointError, ConfigError, ModelError
from llava_fsdp.runtime.files.provenance import check_folder
from llava_fsdp.train import main as train
from llava_fsdp.train.checkpoints.resume import resume
from llava_fsdp.train.final_export import plain_model
from llava_fsdp.train.state import TrainState

SMALL = [
    "model.lora.r=4", "model.lora.alpha=12", "model.lora.dropout=0", "global_batch_size=4", "micro_batch_size=4",
    "optim.warmup_ratio=0", "optim.lr=0.1", "data.max_length=128", "max_steps=2",
]  # fmt: skip
QWEN = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
KINDS = {
    "plain": [],
    "dora": ["model.lora.use_dora=true"],
    "rslora": ["model.lora.use_rslora=true"],
    "biases of adapted layers": ["model.lora.bias=lora_only"],
    "all biases": ["model.lora.bias=all", "model.lora.alpha=12.5"],
}
COVERING = slow_after(2, ["plain", "all biases", "dora", "rslora", "biases of adapted layers"])
ADAPTER_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
OTHERS = ("non_lora_trainables.safetensors", "non_lora_trainables.bin")


@dataclass(frozen=True)
class Made:
    """A run with adapters, and what its model is made of."""

    run: Path
    parts: Path
    opened: Opened

    @property
    def adapter(self) -> Path:
        return self.run / "adapter"


def train_adapters(parts: Path, dataset: Path, run: Path, *values: str) -> None:
    train.train(make_config(parts, dataset, run, *SMALL, *EXPORTED, *values, stage="finetune_lora"))


def write_biased_parts(folder: Path) -> Path:
    """A language model whose queries, keys and values have biases."""
    file = write_parts(folder) / "language" / "config.json"
    write_json(file, json.loads(file.read_text()) | QWEN)
    return folder


@pytest.fixture(scope="module")
def made(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """Two steps of each kind, exported in fp32; made when asked for, and once."""
    known: dict[str, Made] = {}

    def make(kind: str) -> Made:
        if kind not in known:
            folder = tmp_path_factory.mktemp("adapters")
            parts = write_biased_parts(folder / "parts") if "biases" in kind else write_parts(folder / "parts")
            train_adapters(parts, dataset, folder / "run", "checkpoint.every=1", *KINDS[kind])
            opened = open_source(conversion(folder / "run" / "adapter", folder / "to"))
            known[kind] = Made(folder / "run", parts, opened)
        return known[kind]

    return make


@pytest.fixture
def folder(made: Callable[[str], Made], tmp_path: Path) -> Path:
    """A copy of a plain run's adapter, to be damaged."""
    return Path(shutil.copytree(made("plain").adapter, tmp_path / "adapter"))


def base_alone(made: Made) -> Any:
    """transformers' own language model, with the weights that the run began with: its biases were 0."""
    assert made.opened.adapted is not None
    sources = {without_base(n): t for n, t in made.opened.adapted.sources.items() if not is_adapter(n)}
    model = AutoModelForCausalLM.from_config(made.opened.source.model.parts.language, dtype=torch.float32)
    began = {
        n: torch.zeros_like(t) if n.endswith("bias") else whole_rows(sources[ours(n)]) for n, t in named(model).items()
    }
    model.load_state_dict(began)
    return model.eval()


def named(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    """float32 [rows, length, vocabulary], of text alone"""
    return model(torch.arange(5, 45).view(2, 20)).logits


@pytest.mark.parametrize("kind", slow_after(1, COVERING))
@pytest.mark.slow
def test_peft_loads_and_merges_it_as_we_do(kind: str, made: Callable[[str], Made]) -> None:
    """On transformers' language model alone: the merged weights are ours to the bit, or to fp32's last digits where
    rows are divided by their lengths."""
    ours_merged = {n: whole_rows(t) for n, t in made(kind).opened.sources.items()}
    base = base_alone(made(kind))
    before = logits(base)
    found = peft.PeftModel.from_pretrained(base, made(kind).adapter).eval()
    adapted = sum(isinstance(m, peft.tuners.lora.LoraLayer) for m in found.modules())
    assert adapted == 3 * 7, "every linear layer of every block, and nothing else"
    side_by_side = logits(found)
    assert relative_difference(before, side_by_side) > 0.01, "the adapter changes something"
    merged = named(found.merge_and_unload())
    for name, tensor in merged.items():
        if kind == "dora":
            torch.testing.assert_close(ours_merged[ours(name)], tensor, rtol=1e-6, atol=1e-7)
        else:
            assert torch.equal(ours_merged[ours(name)], tensor), name
    assert relative_difference(logits(base), side_by_side) < 1e-5
    if "biases" in kind:
        biases = [t for n, t in merged.items() if n.endswith("bias")]
        assert len(biases) == 9 and all(t.abs().max() > 0 for t in biases), "they have trained, and were loaded"


@pytest.mark.parametrize("kind", slow_after(0, ["dora", "all biases"]))
def test_what_peft_writes_has_our_names_and_keys(kind: str, made: Callable[[str], Made], tmp_path: Path) -> None:
    """Of the same model, loaded by peft and saved by it again: the same tensors under the same names."""
    own = load_file(made(kind).adapter / ADAPTER_FILE)
    peft.PeftModel.from_pretrained(base_alone(made(kind)), made(kind).adapter).save_pretrained(tmp_path)
    theirs = load_file(tmp_path / ADAPTER_FILE)
    assert same(theirs, own)
    settings = json.loads((made(kind).adapter / CONFIG_FILE).read_text())
    written = json.loads((tmp_path / CONFIG_FILE).read_text())
    changed = {n for n in settings if settings[n] != written[n]} - {"target_modules", "base_model_name_or_path"}
    assert not changed - {"auto_mapping", "inference_mode"}, changed


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dora", "all biases"])
def test_run_checkpoint_and_folder_give_one_model(kind: str, made: Callable[[str], Made], tmp_path: Path) -> None:
    """The run's own export, and what is made of its last checkpoint and of both folders, to the bit."""
    run = made(kind).run
    expected = weights(run / "export")
    step = run / "checkpoints" / "step-000002"
    for number, source in enumerate((step, run / "adapter", step / "adapter")):
        merged = export(conversion(source, tmp_path / str(number), "verify=false"))
        assert same(weights(merged), expected), source
    first = export(conversion(run / "checkpoints" / "step-000001", tmp_path / "first", "verify=false"))
    assert not same(weights(first), expected)


@pytest.mark.parametrize("kind", slow_after(1, ["all biases", "plain", "dora", "rslora"]))
def test_peft_over_the_llava_class_has_the_logits_of_the_merged_model(
    kind: str, made: Callable[[str], Made], tmp_path: Path
) -> None:
    """`format=peft`: the base with the trained projector as a model of transformers, and the adapters with the names of
    its class, which are those that vLLM knows. The tower's layers of the same names get no adapters."""
    run = made(kind)
    folder = export(conversion(run.adapter, tmp_path / "to", "format=peft"))
    check_folder(folder)
    own = load_file(folder / "adapter" / ADAPTER_FILE)
    prefix = "base_model.model.model.language_model.layers."
    assert all(re.fullmatch(re.escape(prefix) + r"\d\.(self_attn|mlp)\.\w+_proj\.lora_.*", name) for name in own)
    settings = json.loads((folder / "adapter" / CONFIG_FILE).read_text())
    assert {"q_proj", "down_proj"} <= set(settings["target_modules"]) and settings["modules_to_save"] is None
    base = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    projector = {n: t.clone() for n, t in base.named_parameters() if "multi_modal_projector" in n}
    merged = LlavaForConditionalGeneration.from_pretrained(run.run / "export", dtype=torch.float32).eval()
    assert len(projector) == 4 and all(torch.equal(dict(merged.named_parameters())[n], t) for n, t in projector.items())
    dice = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 90, (2, 19), generator=dice)
    ids[:, 3:7] = base.config.image_token_id
    given = {"input_ids": ids, "pixel_values": torch.randn((2, 3, 28, 28), generator=dice)}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # peft warns of missing weights
        before, expected = base(**given).logits, merged(**given).logits
        found = peft.PeftModel.from_pretrained(base, folder / "adapter").eval()
        adapted = [n for n, m in found.named_modules() if isinstance(m, peft.tuners.lora.LoraLayer)]
        assert len(adapted) == 3 * 7 and not any("vision" in name for name in adapted)
        assert relative_difference(found(**given).logits, expected) < 1e-5
        assert relative_difference(before, expected) > 0.01


@pytest.mark.slow
def test_a_run_whose_export_is_merged_gives_its_adapters_apart(made: Callable[[str], Made], tmp_path: Path) -> None:
    """From the run, from its checkpoint, and from a copy without checkpoints: what its adapter folder gives."""
    run = made("plain").run
    shutil.copytree(run, tmp_path / "moved", ignore=shutil.ignore_patterns("checkpoints"))
    own = export(conversion(run / "adapter", tmp_path / "to", "format=peft", "verify=false"))
    for number, source in enumerate((run, run / "checkpoints" / "step-000002", tmp_path / "moved")):
        made_of = export(conversion(source, tmp_path / str(number), "format=peft", "verify=false"))
        assert same(weights(made_of), weights(own))
        assert same(load_file(made_of / "adapter" / ADAPTER_FILE), load_file(own / "adapter" / ADAPTER_FILE))


@pytest.mark.slow
def test_adapters_of_the_tower_have_the_names_of_the_class(
    parts: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the layers of the tower that the model uses have adapters; an export that lacks one is refused."""
    values = ["model.train=[projector,language,vision]", "max_steps=1", "export.merge=false"]
    train_adapters(parts, dataset, tmp_path / "run", *values)
    folder = export(conversion(tmp_path / "run", tmp_path / "to", "format=peft", "dtype=bf16"))
    names = {name.rpartition(".lora_")[0] for name in load_file(folder / "adapter" / ADAPTER_FILE)}
    assert len(names) == 3 * 7 + 2 * 6 and "base_model.model.model.language_model.layers.2.mlp.up_proj" in names
    monkeypatch.setattr(peft_folder, "in_class", lambda name: in_class(name).replace("layers.1.", "layers.9."))
    with pytest.raises(ModelError, match="with its adapters its logits differ"):
        export(conversion(tmp_path / "run", tmp_path / "other", "format=peft"))
    assert not (tmp_path / "other").exists()


def test_only_adapters_are_written_beside_their_base(noise: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has none"):
        export(conversion(noise / "export", tmp_path / "to", "format=peft"))


def test_an_adapter_folder_says_where_it_has_no_effect(
    made: Callable[[str], Made], parts: Path, dataset: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every folder says it, and the run once, at its end. The file may be changed."""
    caplog.set_level(logging.INFO)
    run = tmp_path / "run"
    train_adapters(parts, dataset, run, "max_steps=1", "export.merge=false")
    for folder in (run / "adapter", run / "checkpoints" / "step-000001" / "adapter"):
        text = (folder / "README.md").read_text()
        assert "vLLM ignores these adapters" in text and "format=peft" in text
        (folder / "README.md").write_text("another card")
        check_folder(folder)
    assert sum("vLLM ignores their names" in record.getMessage() for record in caplog.records) == 1


class MergedTwice(Adapted):
    """Another scale than the adapters': what a mistake in merging would look like."""

    @property
    def merged(self) -> dict[str, Any]:
        return merge_adapters(self.sources, 2 * self.lora.scaling)


@pytest.mark.parametrize("kind", slow_after(1, COVERING))
def test_merged_weights_are_those_that_peft_merges(kind: str, made: Callable[[str], Made]) -> None:
    """The bound is above what is found."""
    opened = made(kind).opened
    assert opened.adapted is not None
    assert prove_merge(opened.adapted) < CLOSE_MERGED / 3


def test_another_scale_is_not_merged(made: Callable[[str], Made]) -> None:
    opened = made("plain").opened
    assert opened.adapted is not None
    own = opened.adapted
    with pytest.raises(ModelError, match=r"the merged weights of language_model.*differ by"):
        prove_merge(MergedTwice(own.lora, own.modules, own.sources))


def test_merged_weights_are_rounded_once(made: Callable[[str], Made], tmp_path: Path) -> None:
    exact = {n: whole_rows(t) for n, t in made("plain").opened.sources.items()}
    merged = export(conversion(made("plain").adapter, tmp_path / "to", "dtype=bf16"))
    rows = made("plain").opened.source.vocabulary
    for name, tensor in weights(merged).items():
        assert torch.equal(tensor[:rows], exact[ours(name)].bfloat16()[:rows]) and tensor.dtype is torch.bfloat16, name


@pytest.mark.slow
def test_only_the_adapter_where_nothing_is_merged(made: Callable[[str], Made], dataset: Path, tmp_path: Path) -> None:
    """export.merge=false; the run still exports when it is asked."""
    run = made("plain")
    train_adapters(run.parts, dataset, tmp_path / "run", "export.merge=false")
    assert not (tmp_path / "run" / "export").exists()
    assert (tmp_path / "run" / "adapter" / ADAPTER_FILE).read_bytes() == (run.adapter / ADAPTER_FILE).read_bytes()
    merged = export(conversion(tmp_path / "run", tmp_path / "merged", "verify=false"))
    assert same(weights(merged), weights(run.run / "export"))


@pytest.mark.slow
@pytest.mark.ranks
def test_checkpoints_of_several_ranks_hold_what_they_trained(
    parts: Path, dataset: Path, pools: dict[int, RankPool], tmp_path: Path
) -> None:
    """The folder has the ranks' own rows; the one at the end is the last checkpoint's."""
    values = [*SMALL, *EXPORTED, "checkpoint.every=1", "sharding=zero3", "micro_batch_size=2", "export.merge=false"]
    pools[2].run(run_ranks, make_config(parts, dataset, tmp_path, *values, stage="finetune_lora"))
    for number in (1, 2):
        found = verify(tmp_path / "checkpoints" / f"step-00000{number}")
        assert len([f for f in found.manifest.files if f.startswith("rank-")]) == 2
        trained = {in_adapter(n, "mlp2x_gelu"): whole_rows(t) for n, t in saved_weights(found).items()}
        own = load_file(found.folder / "adapter" / ADAPTER_FILE) | load_file(found.folder / "adapter" / OTHERS[0])
        assert same(own, trained)
        pickled = torch.load(found.folder / "adapter" / OTHERS[1], weights_only=True)
        assert all(torch.equal(pickled[n], trained[n]) for n in pickled) and len(pickled) == 4
    last = found.folder / "adapter"
    for file in (path for path in last.rglob("*") if path.is_file()):
        assert (tmp_path / "adapter" / file.relative_to(last)).read_bytes() == file.read_bytes(), file
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.slow
def test_merged_after_a_stop_is_merged_without_one(made: Callable[[str], Made], dataset: Path, tmp_path: Path) -> None:
    run = made("plain")
    folder = interrupted(run.run, tmp_path / "run", 1)
    shutil.rmtree(folder / "adapter", ignore_errors=True)
    shutil.rmtree(folder / "export", ignore_errors=True)
    train_adapters(run.parts, dataset, folder)
    whole_one = weights(run.run / "export")
    assert same(weights(folder / "export"), whole_one)


@pytest.mark.slow
def test_another_run_continues_from_it(made: Callable[[str], Made], dataset: Path, tmp_path: Path) -> None:
    """A run, a checkpoint or a folder; what it brought and this run does not train is in the new folder too."""
    run = made("all biases")
    step = run.run / "checkpoints" / "step-000002"
    for source, found in ((run.run, run.adapter), (step, step / "adapter"), (run.adapter, run.adapter)):
        assert find_adapter(str(source), "model.lora.checkpoint") == found
    more = ["model.projector=auto", "model.train=[language]", "max_steps=1", "model.lora.alpha=12.5"]
    train_adapters(run.parts, dataset, tmp_path / "run", *more, f"model.lora.checkpoint={step}")
    new = tmp_path / "run" / "adapter"
    for name in (ADAPTER_FILE, OTHERS[0]):
        before, after = load_file(run.adapter / name), load_file(new / name)
        assert before.keys() == after.keys()
        assert {torch.equal(t, after[n]) for n, t in before.items() if "lora_" not in n} == {True}
        assert not any(torch.equal(t, after[n]) for n, t in before.items() if "lora_" in n)
    merged = export(conversion(new, tmp_path / "merged", "verify=false"))
    assert same(weights(merged), weights(tmp_path / "run" / "export"))


@pytest.mark.slow
def test_a_random_projector_is_not_the_adapters(made: Callable[[str], Made], dataset: Path, tmp_path: Path) -> None:
    """`model.projector=random` beside an adapter: the adapter's weights, and a projector that is drawn."""
    run = made("all biases")
    values = ["model.projector=random", f"model.lora.checkpoint={run.adapter}", "optim.lr=0", "max_steps=1"]
    train_adapters(run.parts, dataset, tmp_path, *values, "model.lora.alpha=12.5", "export.merge=false")
    assert same(load_file(tmp_path / "adapter" / ADAPTER_FILE), load_file(run.adapter / ADAPTER_FILE))
    before, drawn = (load_file(folder / OTHERS[0]) for folder in (run.adapter, tmp_path / "adapter"))
    assert before.keys() == drawn.keys()
    assert not any(torch.equal(t, drawn[n]) for n, t in before.items() if n.endswith("weight"))


def test_a_run_that_has_not_finished_names_its_checkpoints(tmp_path: Path) -> None:
    write_json(tmp_path / "run" / "checkpoints" / "step-000004" / "adapter" / CONFIG_FILE, {})
    with pytest.raises(ConfigError, match=r"give a checkpoint of it: model\.lora\.checkpoint=.*step-000004$"):
        find_adapter(str(tmp_path / "run"), "model.lora.checkpoint")
    with pytest.raises(ConfigError, match=f"has no {CONFIG_FILE}; give the folder of an adapter, or a run"):
        find_adapter(str(tmp_path), "model.lora.checkpoint")


@pytest.mark.slow
def test_adapter_of_a_whole_model(made: Callable[[str], Made], dataset: Path, tmp_path: Path) -> None:
    """The base by its bits: a copy of it elsewhere is as good, another model is none."""
    start = Path(shutil.copytree(made("plain").run / "export", tmp_path / "start"))
    values = [
        f"model.checkpoint={start}",
        "model.random_weights=false",
        "model.projector=auto",
        "model.train=[language]",
    ]
    run = tmp_path / "run"
    train_adapters(made("plain").parts, dataset, run, *values)
    assert not load_file(run / "adapter" / OTHERS[0]), "the projector is the base's"
    shutil.copytree(start, tmp_path / "copy")
    shutil.rmtree(start)
    expected = weights(run / "export")
    merged = export(conversion(run / "adapter", tmp_path / "to", f"base={tmp_path / 'copy'}", "verify=false"))
    assert same(weights(merged), expected)
    with pytest.raises(ModelError, match=r"is for another base: the weights of .*export have the fingerprint"):
        export(conversion(run / "adapter", tmp_path / "no", f"base={run / 'export'}"))
    with pytest.raises(ConfigError, match=r"start is not a folder"):
        export(conversion(run / "adapter", tmp_path / "no"))


def test_adapter_that_peft_has_saved(made: Callable[[str], Made], tmp_path: Path) -> None:
    """It knows its language model alone: vision tower and projector come from a whole model."""
    peft.PeftModel.from_pretrained(base_alone(made("plain")), made("plain").adapter).save_pretrained(tmp_path / "a")
    whole_model = made("plain").run / "export"
    merged = export(conversion(tmp_path / "a", tmp_path / "to", f"base={whole_model}", "verify=false"))
    base, got = load_file(whole_model / "model.safetensors"), load_file(merged / "model.safetensors")
    adapters = load_file(tmp_path / "a" / ADAPTER_FILE)
    for name, tensor in got.items():
        stem = "base_model.model." + name.removeprefix("language_model.").removesuffix(".weight")
        added = [adapters.get(f"{stem}.lora_{letter}.weight") for letter in "AB"]
        change = 3 * added[1] @ added[0] if added[0] is not None and added[1] is not None else torch.zeros(())
        torch.testing.assert_close(tensor, base[name] + change, rtol=0, atol=2**-22)
    language = made("plain").parts / "language"
    with pytest.raises(ConfigError, match="nothing says which tower and projector go with them"):
        export(conversion(tmp_path / "a", tmp_path / "no", f"base={language}"))


def test_a_folder_without_its_notes_is_told_once(
    made: Callable[[str], Made], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As a warning where llava_fsdp surely wrote it: in a run, or with files of its own. Folders of a language model or
    a tower have none, and nothing is said."""
    caplog.set_level(logging.INFO)
    run = made("plain")
    shutil.copytree(run.run, tmp_path / "run")
    for form in ("llava", "projector"):
        export(conversion(run.run / "export", tmp_path / form, f"format={form}", "verify=false"))
    shutil.copytree(run.adapter, tmp_path / "lora")
    shutil.copytree(run.run / "export", tmp_path / "model")
    step = tmp_path / "run" / "checkpoints" / "step-000002"
    surely = [tmp_path / name for name in ("llava", "projector", "lora", "run/adapter", "run/export")]
    for folder in (*surely, step / "adapter", tmp_path / "model", run.parts / "language", run.parts / "vision"):
        (folder / "llava_fsdp.json").unlink(missing_ok=True)
        caplog.clear()
        check_artifacts([folder, *folder.glob("mm_projector.safetensors")][:1])
        level = logging.WARNING if folder in (*surely, step / "adapter") else logging.INFO
        told = [record for record in caplog.records if "has no llava_fsdp.json" in record.getMessage()]
        assert [record.levelno for record in told] == ([] if folder.parent == run.parts else [level]), folder
    caplog.clear()
    export(conversion(tmp_path / "model", tmp_path / "to", "verify=false"))
    assert caplog.text.count("has no llava_fsdp.json") == 1


def mistral_like(run: Path, folder: Path) -> Path:
    """A whole model of another type with the same shapes, and attention of another kind."""
    shutil.copytree(run / "export", folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    write_json(folder / "config.json", config)
    forge_notes(folder)
    return folder


def test_an_adapter_is_not_used_with_a_base_of_another_type(
    made: Callable[[str], Made], dataset: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In a folder without our notes, each place that names the base; by the commands that merge it, and by a training
    that continues. A base that cannot be compared is named."""
    run = made("plain")
    other, saved, named = mistral_like(run.run, tmp_path / "mistral"), tmp_path / "saved", tmp_path / "named"
    peft.PeftModel.from_pretrained(base_alone(run), run.adapter).save_pretrained(saved)
    write_json(named / "config.json", {"model_type": "llama"})
    library = {"base_model_class": "LlamaForCausalLM", "parent_library": "transformers.models.llama.modeling_llama"}
    plain = json.loads((saved / CONFIG_FILE).read_text()) | {"auto_mapping": None, "base_model_name_or_path": None}
    original = json.loads((run.adapter / "config.json").read_text())
    for said, beside in (
        ({"auto_mapping": library}, None),
        ({"base_model_name_or_path": str(named)}, None),
        ({"base_model_name_or_path": str(run.run / "export")}, None),
        ({}, {"model_type": "llama"}),
        ({}, original),
    ):
        write_json(saved / CONFIG_FILE, plain | said)
        (saved / "config.json").unlink(missing_ok=True)
        check_named_base(open_adapter(saved), find_parts(read_model(run.run / "export")), "x", "base=PATH")
        if beside is not None:
            write_json(saved / "config.json", beside)
        with pytest.raises(ModelError, match=r"says that it is a llama, and .*mistral is a mistral"):
            check_named_base(open_adapter(saved), find_parts(read_model(other)), str(other), "base=PATH")
    (saved / "config.json").unlink()
    write_json(saved / CONFIG_FILE, plain | {"auto_mapping": {"parent_library": "transformers.models"}})
    check_named_base(open_adapter(saved), find_parts(read_model(other)), str(other), "base=PATH")
    write_json(saved / CONFIG_FILE, plain | {"auto_mapping": library})
    shutil.copy(run.adapter / OTHERS[0], saved)
    with pytest.raises(ModelError, match="is for another base"):
        export(conversion(saved, tmp_path / "to", f"base={other}"))
    values = [f"model.lora.checkpoint={saved}", f"model.checkpoint={other}", "model.random_weights=false"]
    with pytest.raises(ModelError, match=r"is for another base.*model\.checkpoint"):
        train_adapters(run.parts, dataset, tmp_path / "run", *values, "model.projector=auto")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    write_json(saved / CONFIG_FILE, plain | {"base_model_name_or_path": "lmsys/vicuna-7b-v1.5"})
    export(conversion(saved, tmp_path / "to", f"base={other}", "verify=false"))
    assert "names lmsys/vicuna-7b-v1.5 as its base, and is used with" in caplog.text


@pytest.mark.slow
def test_tower_with_all_its_biases(made: Callable[[str], Made], parts: Path, dataset: Path, tmp_path: Path) -> None:
    """Adapters in the tower's blocks too; norms' biases are no adapted layer's, and come along."""
    values = ["model.train=[projector,language,vision]", "model.lora.bias=all", "export.verify=true", "max_steps=1"]
    train_adapters(parts, dataset, tmp_path / "run", *values)
    own = load_file(tmp_path / "run" / "adapter" / ADAPTER_FILE)
    tower = "base_model.model.model.vision_tower.vision_tower.vision_model."
    assert f"{tower}pre_layrnorm.bias" in own and f"{tower}encoder.layers.0.layer_norm1.bias" in own
    assert f"{tower}encoder.layers.0.self_attn.q_proj.base_layer.bias" in own
    assert f"{tower}encoder.layers.0.self_attn.q_proj.lora_B.weight" in own
    assert not any(n.startswith(f"{tower}encoder.layers.2") for n in own), "behind the layer that is selected"
    export(conversion(tmp_path / "run" / "adapter", tmp_path / "merged", "verify=false"))
    assert same(weights(tmp_path / "merged"), weights(tmp_path / "run" / "export"))


@torch.no_grad()
def probed(state: TrainState) -> tuple[MicroBatch, torch.Tensor]:
    """A micro-batch of a run's loader, and the run's logits of it."""
    micro = state.loader.to_device(state.loader.steps.probe()[0])
    return micro, state.model.eval()(**micro.inputs, return_logits=True)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["nf4", pytest.param("int8", marks=pytest.mark.slow)])
def test_a_quantised_run_merges_into_the_base_in_full(mode: str, dataset: Path, tmp_path: Path) -> None:
    """What it is compared with has that base: the run's own logits are further off."""
    parts = write_wide_parts(tmp_path / "parts")
    values = [*SMALL, *EXPORTED, f"model.quantize.mode={mode}", "export.verify=true", "max_steps=1"]
    cfg = make_config(parts, dataset, tmp_path / "run", *values, stage="finetune_qlora")
    train.train(cfg)
    export(conversion(tmp_path / "run" / "adapter", tmp_path / "to", "verify=false"))
    assert same(weights(tmp_path / "to"), weights(tmp_path / "run" / "export"))
    opened = open_source(conversion(tmp_path / "run" / "checkpoints" / "step-000001", tmp_path / "no")).adapted
    assert opened is not None
    state = train.build_state(cfg, alone(cfg))
    resume(state, cfg)
    micro, live = probed(state)
    in_full = verify_logits.logits(verify_logits.load_copy(plain_model(state), opened.merged, torch.float32), micro)
    assert relative_difference(in_full, live) > 10 * CLOSE


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Other tensors, and notes that agree."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    forge_notes(path.parent)


def settle(folder: Path, **values: object) -> None:
    write_json(folder / CONFIG_FILE, json.loads((folder / CONFIG_FILE).read_text()) | values)
    forge_notes(folder)


def zero(tensors: dict[str, torch.Tensor], where: str = "lora_B") -> None:
    for name in (n for n in tensors if where in n and "lora_B" in n):
        tensors[name] = torch.zeros_like(tensors[name])


def first(tensors: dict[str, torch.Tensor], end: str) -> str:
    return min(name for name in tensors if name.endswith(end))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing learnt": (
        lambda f: rewrite(f / ADAPTER_FILE, zero), r"not changed by training: B is 0 in all 21 .*; train it for more"
    ),
    "no weights": (lambda f: (f / ADAPTER_FILE).unlink(), f"{ADAPTER_FILE} is missing; .*copy the whole folder"),
    "no weights, no notes": (
        lambda f: [(f / n).unlink() for n in (ADAPTER_FILE, "llava_fsdp.json")], "but none of adapter_model.safetensors"
    ),
    "weights cut off": (lambda f: cut(f / ADAPTER_FILE), "is not what was written: it has [0-9,]+ bytes"),
    "no LoRA": (lambda f: settle(f, peft_type="IA3"), "is a IA3 adapter; only LoRA is read"),
    "half of a pair": (
        lambda f: rewrite(f / ADAPTER_FILE, lambda t: t.pop(first(t, "lora_A.weight"))), "the file is incomplete"
    ),
    "a module that the base lacks": (
        lambda f: rewrite(f / ADAPTER_FILE, lambda t: t.update({
            n.replace("layers.0.", "layers.9."): v.clone() for n, v in list(t.items()) if "layers.0.mlp" in n
        })),
        r"adapts language_model\.layers\.9\.mlp\.down_proj, which base=.* has not; give its own base",
    ),
    "no projector": (
        lambda f: [[(f / n).unlink() for n in OTHERS], settle(f)], r"has no multi_modal_projector.*non_lora_trainables"
    ),
    "base of other weights": (
        lambda f: note(f, seed=43), r"is for another base: .* have the fingerprint \w{32}, and .* has \w{32}; give the"
    ),
    "a weight of nobody": (
        lambda f: rewrite(f / OTHERS[0], lambda t: t.update({"base_model.model.model.extra": torch.ones(3)})),
        "has no such weight; give base=PATH",
    ),
    "no tensors of LoRA": (
        lambda f: rewrite(f / ADAPTER_FILE, lambda t: [t.pop(n) for n in list(t)]), "has no LoRA weights"
    ),
}  # fmt: skip


def note(folder: Path, **values: object) -> None:
    forge_notes(folder, **values)


@pytest.mark.parametrize("damage", BROKEN)
def test_what_cannot_be_right_is_said_in_one_line(damage: str, folder: Path, tmp_path: Path) -> None:
    harm, said = BROKEN[damage]
    harm(folder)
    with pytest.raises(ModelError, match=said) as raised:
        export(conversion(folder, tmp_path / "to"))
    assert "\n" not in str(raised.value) and str(folder) in str(raised.value)
    assert not (tmp_path / "to").exists() and not (tmp_path / "to.tmp").exists()


def test_modules_that_learnt_nothing_are_named(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Some of the language model's: a warning."""
    rewrite(folder / ADAPTER_FILE, lambda tensors: zero(tensors, "layers.1.self_attn"))
    logging.getLogger("llava_fsdp").propagate = True
    export(conversion(folder, tmp_path / "to", "verify=false"))
    assert any("in 4 of 21 modules (B is 0): language_model.layers.1.self_attn.k_proj, " in t for t in caplog.messages)


def add_idle_tower(tensors: dict[str, torch.Tensor]) -> None:
    tower = "base_model.model.model.vision_tower.vision_tower.vision_model.encoder.layers.0.self_attn.q_proj"
    tensors |= {f"{tower}.lora_A.weight": torch.ones(4, 20), f"{tower}.lora_B.weight": torch.zeros(20, 4)}


def test_idle_adapters_of_the_tower_are_left_out(
    folder: Path, made: Callable[[str], Made], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The original puts them into towers that run without gradients."""
    rewrite(folder / ADAPTER_FILE, add_idle_tower)
    logging.getLogger("llava_fsdp").propagate = True
    merged = export(conversion(folder, tmp_path / "to", "verify=false"))
    assert any("adapters of 1 modules" in text and "are ignored" in text for text in caplog.messages)
    assert same(weights(merged), weights(made("plain").run / "export"))
    rewrite(folder / ADAPTER_FILE, zero)
    with pytest.raises(ModelError, match="B is 0 in all 21 adapted modules"):
        export(conversion(folder, tmp_path / "none"))


@pytest.mark.slow
def test_a_run_that_learnt_nothing_says_so(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """The only step's learning rate is 0: an error with the cure, and nothing of that name."""
    values = ["max_steps=1", "optim.warmup_ratio=0.5"]
    with pytest.raises(ModelError, match=r"after step 1 was not changed by training: .*\(?export\.enabled=false"):
        train_adapters(parts, dataset, tmp_path / "run", *values)
    assert not (tmp_path / "run" / "adapter").exists() and not (tmp_path / "run" / "export").exists()
    with pytest.raises(ModelError, match=r"was not changed by training: .*export a later checkpoint"):
        export(conversion(tmp_path / "run", tmp_path / "to"))


def test_a_checkpoint_without_the_folder_still_counts(made: Callable[[str], Made], tmp_path: Path) -> None:
    """As those from before there was one; what the manifest lists must be there."""
    step = Path(shutil.copytree(made("plain").run / "checkpoints" / "step-000002", tmp_path / "step-000002"))
    shutil.rmtree(step / "adapter")
    with pytest.raises(CheckpointError, match="adapter is missing, or not a folder"):
        verify(step)
    forge_manifest(step, lambda m: [m["files"].pop(n) for n in list(m["files"]) if n.startswith("adapter/")])
    assert STATE_FILE in verify(step).manifest.files
    merged = export(conversion(step, tmp_path / "to", "verify=false"))
    assert same(weights(merged), weights(made("plain").run / "export"))


def same_weights(one: Assistant, other: Assistant) -> bool:
    """Bit for bit, of models that can be asked."""
    pairs = zip(one.model.state_dict().items(), other.model.state_dict().items(), strict=True)
    return all(a == b and torch.equal(p, q) for (a, p), (b, q) in pairs)


def test_an_adapter_is_no_model(made: Callable[[str], Made], dataset: Path, tmp_path: Path) -> None:
    """Whoever takes it for one is told what to do with it."""
    run = made("plain")
    cures = (
        rf"is an adapter, not a whole model; [\s\S]*model.lora.checkpoint={run.adapter}"
        rf"[\s\S]*export source={run.adapter}"
    )
    start = [f"model.checkpoint={run.adapter}", "model.random_weights=false", "model.projector=auto"]
    with pytest.raises(ModelError, match=cures):
        train.train(make_config(run.parts, dataset, tmp_path / "run", *start))
    merged = Assistant(str(run.run), "v1", AspectRatio.pad)
    assert same_weights(Assistant(str(run.adapter), "v1", AspectRatio.pad), merged), "but it can be asked as it is"
    shutil.copytree(run.adapter, tmp_path / "moved")
    (tmp_path / "moved" / "llava_fsdp.json").unlink()
    settings = json.loads((tmp_path / "moved" / "adapter_config.json").read_text())
    write_json(tmp_path / "moved" / "adapter_config.json", settings | {"base_model_name_or_path": "/gone"})
    with pytest.raises(ConfigError, match=r"base=PATH; run llava-fsdp export source=.*moved to=FOLDER"):
        Assistant(str(tmp_path / "moved"), "v1", AspectRatio.pad)
