"""`model.train` names blocks: which parameters train, where the backward pass ends, and what is refused."""

import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from packed import build
from safetensors.torch import load_file
from small import Configure, make_config
from steps import agreed_steps
from tiers import slow_after

from llava_fsdp.model.blocks import find_blocks
from llava_fsdp.model.llava.llava import Llava, build_llava
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.train import main as train
from llava_fsdp.train.setup.preflight import preflight

Build = Callable[..., Llava]
BLOCK = re.compile(r"(language|vision).*\.layers\.(\d+)\.")


@pytest.fixture
def built(configure: Configure) -> Build:
    def build_with(values: str, *overrides: str) -> Llava:
        cfg = configure(f"model.train={values}", *overrides)
        return build_llava(find_parts(cfg.model), cfg.model, torch.float32)

    return build_with


@pytest.mark.parametrize(
    ("values", "expected"),
    slow_after(3, [
        ("[language:-1]", {"language2"}),
        ("[vision:-1]", {"vision1"}),  # the last of three layers is not used
        ("[projector,language:1:2]", {"projector", "language1"}),
        ("[language:1]", {"language1", "language2"}),
        ("[language::1]", {"language0"}),
        ("[language:-3:-1]", {"language0", "language1"}),
        ("[vision:0,language:2:3]", {"vision0", "vision1", "language2"}),
    ]),
)  # fmt: skip
def test_the_named_blocks_train_and_nothing_else(values: str, expected: set[str], built: Build) -> None:
    """Neither embeddings, nor final norm, nor output layer, which are no blocks."""
    model = built(values)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    of = {name: BLOCK.match(name) for name in trained}
    found = {"projector" if found is None else found[1] + found[2] for found in of.values()}
    assert found == expected
    assert all(found or name.startswith("multi_modal_projector.") for name, found in of.items())
    for name, parameter in model.named_parameters():
        match = BLOCK.match(name)
        if match and match[1] + match[2] in expected:
            assert parameter.requires_grad, name


@pytest.mark.parametrize(
    "value", slow_after(1, ["language:-4", "language:4", "language:3", "language:1:4", "language:2:1"])
)
def test_blocks_that_there_are_not_are_refused_before_records_are_read(
    value: str, parts: Path, dataset: Path, tmp_path: Path
) -> None:
    index = tmp_path / "index"
    keys = f"model.train=[projector,{value}]", f"data.index={index}", "tokens_per_micro_batch=auto"
    cfg = make_config(parts, dataset, tmp_path / "run", *keys)
    for command in (partial(preflight, cfg, torch.device("cpu")), partial(train.train, cfg)):
        with pytest.raises(ConfigError, match=rf"{value} .*3 run, numbers 0 to 2"):
            command()
    assert not index.exists()


def test_blocks_of_the_tower_are_counted_up_to_the_selected_layer(built: Build) -> None:
    with pytest.raises(ConfigError, match=r"2 run, numbers 0 to 1, of 3, because of model\.select_layer=-2"):
        built("[vision:-3]").check_trained_blocks()
    built("[vision:-3]", "model.select_layer=-1").check_trained_blocks()


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ("[language:]", r"model\.train\[0\]=language:"),
        ("[vision::]", r"model\.train\[0\]=vision::"),
        ("[language,projector:-1]", r"model\.train\[1\]=projector:-1"),
        ("[language:last]", r"model\.train\[0\]=language:last"),
        ("[language:1:2:3]", r"model\.train\[0\]"),
        ("[language,language:-1]", "twice"),
    ],
)
def test_other_forms_are_refused(values: str, word: str, configure: Configure) -> None:
    with pytest.raises(ConfigError, match=word):
        configure(f"model.train={values}")


@pytest.mark.parametrize("more", [("lora.enabled=true",), ("quantize.mode=nf4",)])
def test_neither_adapters_nor_a_quantized_base(more: tuple[str, ...], configure: Configure) -> None:
    with pytest.raises(ConfigError, match=r"model\.(lora|quantize)"):
        configure("model.train=[projector,language:-1]", *(f"model.{key}" for key in more))


@pytest.mark.parametrize(
    ("values", "runs"),
    [("[language:-1]", [1, 1, 2]), ("[language:1:2]", [1, 2, 2]), ("[projector,language:-1]", [2, 2, 2])],
)
@pytest.mark.parametrize("mode", slow_after(1, ["full", "offload"]))
def test_the_backward_pass_ends_at_the_first_block_that_trains(
    values: str, runs: list[int], mode: str, configure: Configure
) -> None:
    """Blocks before it run once and keep nothing; with the projector, the gradient passes through all of them."""
    state = build(configure(f"model.train={values}", f"activation_checkpointing={mode}", "pack=false"))
    assert isinstance(state.model, Llava)
    calls: Counter[int] = Counter()
    needs: dict[int, bool] = {}

    def note(number: int, _: object, args: tuple[torch.Tensor, ...]) -> None:
        calls[number] += 1
        needs[number] = args[0].requires_grad

    for number, block in enumerate(find_blocks(state.model.language_model)):
        block.get_submodule("_checkpoint_wrapped_module").register_forward_pre_hook(partial(note, number))
    micro = state.loader.to_device(next(agreed_steps(state.loader)).micro_batches[0])
    state.model(**micro.inputs).backward()
    assert [calls[number] for number in range(3)] == runs
    assert needs[0] == ("projector" in values)
    missing = [name for name, p in state.model.named_parameters() if p.requires_grad and p.grad is None]
    assert not missing


@pytest.mark.slow
def test_a_run_resumes_and_exports_what_it_trained(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """Frozen weights are in the export bit for bit; other blocks do not continue the run."""
    start, run = tmp_path / "start", tmp_path / "run"
    common = ["export.enabled=true", "export.dtype=fp32", "optim.warmup_ratio=0"]
    train.train(make_config(parts, dataset, start, *common, "max_steps=1", "optim.lr=0"))
    keys = [*common, f"model.checkpoint={start}", "model.train=[language:-1]", "checkpoint.every=1"]
    train.train(make_config(parts, dataset, run, *keys, "max_steps=1"))
    train.train(make_config(parts, dataset, run, *keys, "max_steps=2"))
    before, after = (load_file(folder / "export" / "model.safetensors") for folder in (start, run))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if ".layers.2." in name and "vision" not in name}
    assert (run / "config.yaml").read_text().count("language:-1") == 1
    with pytest.raises(ConfigError, match=r"model\.train: \['language:-1'\] -> \['language:-2'\]"):
        train.train(make_config(parts, dataset, run, *keys, "max_steps=3", "model.train=[language:-2]"))
