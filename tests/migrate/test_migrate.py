"""Moving over: scripts of other systems are read as their shell and their parser read them."""

import contextlib
import io
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from small import compose_quickly, config_of
from tiers import slow_after

from llava_fsdp.data.text.templates import template
from llava_fsdp.migrate import command
from llava_fsdp.migrate import main as entry
from llava_fsdp.migrate.command import Migration, assignments, lines, migrate
from llava_fsdp.migrate.configs.accelerate import ACCELERATE
from llava_fsdp.migrate.configs.accelerate import rule_of as accelerate_rule
from llava_fsdp.migrate.configs.deepspeed import DEEPSPEED
from llava_fsdp.migrate.configs.deepspeed import rule_of as deepspeed_rule
from llava_fsdp.migrate.reading.inputs import read_runs
from llava_fsdp.migrate.reading.settings_files import flat
from llava_fsdp.migrate.source.shell import commands
from llava_fsdp.migrate.source.source_run import SourceRun
from llava_fsdp.migrate.table import rows_of
from llava_fsdp.migrate.to_keys.keys import RuleContext, TableRow, Verdict, written
from llava_fsdp.migrate.to_keys.overrides import TEMPLATES, decide
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.runtime.exit_codes import ExitCode

ZERO2 = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}}
# A stage-2 training with every value that matters; tests add to it, later flags win.
FINETUNE = (
    "--model_name_or_path lmsys/vicuna-7b-v1.5 --version v1 --data_path d.json --image_folder images "
    "--vision_tower openai/clip-vit-large-patch14-336 --pretrain_mm_mlp_adapter p/mm_projector.bin "
    "--mm_projector_type mlp2x_gelu --mm_vision_select_layer -2 --mm_use_im_patch_token False --image_aspect_ratio pad "
    "--bf16 True --output_dir out --num_train_epochs 1 --per_device_train_batch_size 4 --save_total_limit 2 "
    "--learning_rate 2e-5 --warmup_ratio 0.03 --lr_scheduler_type cosine --model_max_length 2048 "
    "--gradient_checkpointing True --dataloader_num_workers 4 "
)
mapped, implied, unsupported, no_effect = Verdict.mapped, Verdict.implied, Verdict.unsupported, Verdict.no_effect


def read(
    folder: Path, script: str, zero: dict | None = None, accelerate: str | None = None, gpus: int | None = None
) -> SourceRun:
    """The one run of these files' contents."""
    contents = {"run.sh": script, "zero.json": zero and json.dumps(zero), "accelerate.yaml": accelerate}
    paths = []
    for name, text in contents.items():
        if text is not None:
            (folder / name).write_text(text)
            paths.append(str(folder / name))
    (run,) = read_runs(paths, {}, gpus)
    return run


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands are composed as everywhere in the tests: each set of choices is read from files once."""
    monkeypatch.setattr(command, "compose", compose_quickly)
    monkeypatch.setattr(command, "initialize_config_dir", lambda *_, **__: contextlib.nullcontext())


def table_of(run: SourceRun) -> Migration:
    """The migration without composing its command, which takes most of the time."""
    decided = decide(run)
    return Migration(run, decided, decided, rows_of(RuleContext(run, decided)), "")


def finetune_run(folder: Path, flags: str = "", zero: dict | None = ZERO2, gpus: int = 8) -> SourceRun:
    named = "--deepspeed zero.json " if zero is not None else ""
    launcher = "deepspeed" if zero is not None else f"torchrun --nproc_per_node {gpus}"
    return read(folder, f"{launcher} llava/train/train_mem.py {named}{FINETUNE}{flags}", zero=zero, gpus=gpus)


def finetune(folder: Path, flags: str = "", zero: dict | None = ZERO2, gpus: int = 8) -> Migration:
    return table_of(finetune_run(folder, flags, zero, gpus))


def accelerated(folder: Path, text: str, flags: str = "") -> Migration:
    return table_of(read(folder, f"accelerate launch llava/train/train.py {FINETUNE}{flags}", accelerate=text))


def row(done: Migration, key: str) -> TableRow:
    (found,) = [r for r in done.rows if r.key == key]
    return found


def unknown_of(done: Migration) -> dict[str, str]:
    return {r.key: r.text for r in done.rows if not r.known}


def composes(done: Migration) -> Any:
    """The configuration of the whole command."""
    return config_of(assignments(done.all_overrides))


# --- shell ------------------------------------------------------------------------------------------------------------

SCRIPTS = [
    ("a b   c", ["a", "b", "c"]),
    ("a \\\n  b\\\nc", ["a", "bc"]),
    ("a 'b c' \"d e\"f", ["a", "b c", "d ef"]),
    ("a 'it'\"'\"'s' \\$X \"\\$X \\\\ \\n\"", ["a", "it's", "$X", "$X \\ \\n"]),
    ("a # b 'c", ["a"]),
    ("a b#c", ["a", "b#c"]),
    ("# don't\na b", ["a", "b"]),
    ("X=1; a $X ${X} \"$X\" '$X' X$X", ["a", "1", "1", "1", "$X", "X1"]),
    ("X='1 2'\na $X \"$X\"", ["a", "1", "2", "1 2"]),
    ("X='--b 1'\nY=$X\na $Y", ["a", "--b", "1"]),
    ("export X=v1 Y=2\na $X$Y", ["a", "v12"]),
    ('X=\'"q\\\'\na "$X"', ["a", '"q\\']),
    ("X='--b 1'\nX+=' --c 2'\na $X", ["a", "--b", "1", "--c", "2"]),
    ("X=1 true && a b", ["a", "b"]),
    ("a b\r\n", ["a", "b"]),
    ("a '' \"\"", ["a", "", ""]),
    ("a '|' x", None),
    ("mkdir -p o || true\nconda activate x; true\na --x=y.json", ["a", "--x=y.json"]),
    ("a b 2>&1 | tee -a log", ["a", "b"]),
    ("a b 2 > log.txt 2>&1 &", ["a", "b", "2"]),
    ("a 'b > c'", ["a", "b > c"]),
    ("a \\\n b >> log &", ["a", "b"]),
    ("D=$(dirname $0)\nN=$((1 + 2))\nnvidia-smi | head -1 > log\na b", ["a", "b"]),
]


@pytest.mark.parametrize(("text", "words"), [case for case in SCRIPTS if case[1]], ids=lambda v: repr(v)[:40])
def test_words_are_what_bash_makes_of_them(text: str, words: list[str], tmp_path: Path) -> None:
    """bash itself is the judge, with `a` a function that prints its arguments."""
    (ours,) = [c for c in commands(text, {}, "x.sh") if c.words[0] == "a"]
    assert (ours.words, ours.problems) == (words, ())
    program = 'a() { for w in a "$@"; do printf \'%s\\0\' "$w"; done >&9; }\n' + text.replace("\r", "")
    script = f"exec 9>&1 >/dev/null 2>&1; {program}"
    environment = {"PATH": os.environ["PATH"]}
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert done.stdout.decode().split("\0")[:-1] == words


NEEDS_BASH = [
    ("A=(--x 1)\ntorchrun t.py", "line 1: an array"),
    ("A=(\n --x 1)\ntorchrun t.py", "line 1: an array"),
    ("\nif [ $1 ]; then X=2; fi\ntorchrun train.py", "line 2: `if`"),
    ("for x in 1 2; do torchrun train.py; done", "line 1: `for`"),
    ("[ -d x ] && X=1", "line 1: `[`"),
    ("f() {\n torchrun train.py\n}", "line 1: a function"),
    ("cat <<EOF\nx\nEOF\ntorchrun train.py", "line 1: a here-document"),
    ("torchrun train.py --lr 1\n --bf16 True", "line 2: --bf16 stands alone"),
    ("torchrun train.py --x $X", "line 1: $X has no value"),
    ("X=$(nproc)\ntorchrun train.py --x $X", "line 2: $X has no value"),
    ("torchrun train.py --x ${X:-1}", "line 1: ${X:-1} has no value"),
    ("torchrun train.py --x \"${A[@]}\"", "line 1: ${A[@]} has no value"),
    ('torchrun train.py "$@"', "line 1: $@ has no value"),
    ("torchrun train.py --x `hostname`", "line 1: `hostname` has no value"),
    ("torchrun train.py --x $((2 * 3))", "line 1: $((2 * 3) has no value"),
    ("torchrun train.py | grep loss", "line 1: | around the command"),
    ("torchrun train.py < answers", "line 1: < around the command"),
    ('a "b', "line 1: a quote is not closed"),
    ("\na 'b", "line 2: a quote is not closed"),
]  # fmt: skip


@pytest.mark.parametrize(("script", "message"), NEEDS_BASH, ids=lambda v: repr(v)[:40])
def test_a_script_that_needs_bash_is_refused_by_line(script: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        read(tmp_path, script, gpus=1)
    assert f"run.sh, {message}" in str(error.value)


def test_numbers_are_written_as_hydra_reads_them() -> None:
    numbers = (2e-5, 3.0, 5e8, 123456789.0, 12345678.5)
    assert [written(number) for number in numbers] == ["2e-5", "3.0", "5e+8", "123456789.0", "12345678.5"]
    assert [config_of([f"optim.lr={written(number)}"]).optim.lr for number in numbers[:2]] == [*numbers[:2]]


def test_pasted_command_gives_bash_the_words_that_were_meant(tmp_path: Path) -> None:
    """Names with blanks, quotes and dollar signs, and the home folder."""
    names = '--data_path "it\'s \\$5 \\"a b\\".json" --output_dir ~/out --image_folder $HOME/i'
    done = migrate(finetune_run(tmp_path, names))
    pasted = "llava-fsdp() { printf '%s\\n' \"$@\"; }\n" + lines(done.words)
    printed = subprocess.run(["bash", "-c", pasted], capture_output=True, text=True, check=True).stdout.splitlines()
    home = Path.home()
    assert {'data.path=it\'s $5 "a b".json', f"output_dir={home}/out", f"data.images={home}/i"} <= set(printed)
    assert printed[:3] == ["train", "--nproc-per-node", "8"]
    assert done.lacks == []


# --- launchers --------------------------------------------------------------------------------------------------------

LAUNCHES = [
    ("deepspeed x/train.py", None),
    ("deepspeed --num_gpus 4 x/train.py", 4),
    ("deepspeed --num_gpus=4 --num_nodes 2 x/train.py", 8),
    ("deepspeed --include localhost:0,1,3 x/train.py", 3),
    ("deepspeed --include=a:0,1@b:2,3 --master_port 1 x/train.py", 4),
    ("deepspeed --include a@b x/train.py", None),
    ("deepspeed --include a:0@b:2,3 x/train.py", None),
    ("deepspeed --hostfile h x/train.py", None),
    ("deepspeed -H h x/train.py", None),
    ("CUDA_VISIBLE_DEVICES=0,1 deepspeed -e a:0 x/train.py", None),
    ("deepspeed -i localhost:0,1,2 x/train.py", 3),
    ("deepspeed --num_accelerators 4 x/train.py", 4),
    ("deepspeed --num_gpus 0 x/train.py", None),
    ("CUDA_VISIBLE_DEVICES='0, 2, ' torchrun --nproc-per-node auto x/train.py", 2),
    ("CUDA_VISIBLE_DEVICES=0,1, deepspeed x/train.py", 2),
    ("export CUDA_VISIBLE_DEVICES=0,1,2\ndeepspeed --module x.train", 3),
    ("torchrun x/train.py", 1),
    ("torchrun --nproc_per_node=8 --nnodes 2 --rdzv_endpoint h:1 x/train.py", 16),
    ("torchrun --nproc-per-node 8 --nnodes 1:4 x/train.py", None),
    ("torchrun --nproc-per-node gpu x/train.py", None),
    ("python -m torch.distributed.run --standalone --nproc_per_node 2 -m x.train", 2),
    ("python3.10 -u -m torch.distributed.launch --nproc_per_node 2 --use_env x/train.py", 2),
    ("accelerate launch --num_processes 8 --num_machines 2 --multi_gpu x/train.py", 8),
    ("python x/train.py", 1),
    ("pip install deepspeed x\necho deepspeed x/train.py\nnohup deepspeed --num_gpus 4 x/train.py", 4),
    ("python -u -m x.train", 1),
]


@pytest.mark.parametrize(("script", "gpus"), LAUNCHES)
def test_number_of_gpus(script: str, gpus: int | None, tmp_path: Path) -> None:
    flags = " --output_dir o --per_device_train_batch_size 2 --gradient_accumulation_steps 3 --mm_use_im_patch_token 0"
    if gpus is None:
        with pytest.raises(ConfigError, match="give gpus=N"):
            read(tmp_path, script + flags)
    else:
        done = table_of(read(tmp_path, script + flags))
        assert (done.run.gpus, done.all_overrides["global_batch_size"], unknown_of(done)) == (gpus, 6 * gpus, {})


@pytest.mark.parametrize(
    ("script", "devices"),
    [
        ("deepspeed --include h:1,3 x/train.py", "1,3"),
        ("deepspeed --include a:0,1@b:0,1 x/train.py", None),  # one value cannot be that of both machines
        ("CUDA_VISIBLE_DEVICES=2 accelerate launch --num_processes 2 --gpu_ids 0,3 x/train.py", "0,3"),
        ("CUDA_VISIBLE_DEVICES=2 accelerate launch --num_processes 2 --gpu_ids all x/train.py", "2"),
    ],
)
def test_which_gpus(script: str, devices: str | None, tmp_path: Path) -> None:
    assert read(tmp_path, script).devices == devices


def test_gpus_given_win(tmp_path: Path) -> None:
    done = table_of(read(tmp_path, f"deepspeed --num_gpus 8 train.py {FINETUNE}", gpus=2))
    assert (done.run.gpus, done.cautions) == (2, ["gpus=2 was given, and the files have 8"])
    done = table_of(read(tmp_path, f"deepspeed --num_gpus 8 train.py {FINETUNE}", gpus=16))
    assert (done.run.gpus, done.cautions) == (16, ["gpus=16 was given, and the files have 8"])


def test_what_a_script_adds_around_the_flags_is_noted(tmp_path: Path) -> None:
    script = f"cd /x\nexport A=1\nB=2 torchrun --nnodes 1 --nnodes 1 train.py {FINETUNE} extra --bf16 True"
    done = table_of(read(tmp_path, script))
    assert {
        "the script sets A=1, B=2: set the variables that the command needs",
        "--nnodes is given twice; the last one counts",
        "--bf16 is given twice; the last one counts",
        "the script starts from another folder: cd /x",
    } <= set(done.run.notes)
    assert not row(done, "(extra)").known and done.lacks


def test_several_machines(tmp_path: Path) -> None:
    script = "deepspeed --num_gpus 8 --num_nodes 2 {} llava/train/train.py " + FINETUNE
    done = table_of(read(tmp_path, script.format("--master_addr h --master_port 5")))
    command = " ".join(done.words)
    assert "--nnodes 2 --rdzv-endpoint h:5 --nproc-per-node 8" in command and not done.lacks
    assert "--rdzv-endpoint h:29500 " in " ".join(table_of(read(tmp_path, script.format("--master_addr h"))).words)
    torchrun = f"torchrun --nnodes 2 --nproc_per_node 8 --rdzv_endpoint g:7 train.py {FINETUNE}"
    assert "--nnodes 2 --rdzv-endpoint g:7 " in " ".join(table_of(read(tmp_path, torchrun)).words)
    file = "num_machines: 2\nnum_processes: 8\nmain_process_ip: a\nmain_process_port: 9\n"
    assert "--nnodes 2 --rdzv-endpoint a:9 --nproc-per-node 4" in " ".join(accelerated(tmp_path, file).words)
    (lack,) = table_of(read(tmp_path, script.format(""))).lacks
    assert "address of the first machine" in lack


def test_several_commands_are_several_runs(tmp_path: Path) -> None:
    (tmp_path / "both.sh").write_text(
        "echo train; python -m llava.eval.model_vqa --x 1\n"
        f"torchrun train.py {FINETUNE} --tune_mm_mlp_adapter True && torchrun train.py {FINETUNE}\n"
    )
    runs = read_runs([str(tmp_path / "both.sh")], {})
    assert [(run.stage, run.name) for run in runs] == [("pretrain", "both.sh:2"), ("finetune", "both.sh:2")]


# --- programs that are not the original's -----------------------------------------------------------------------------

OTHER = (
    "torchrun --nproc_per_node 4 train_vlm.py --use_peft True --lora_r 16 --max_seq_length 2048 "
    "--model_name_or_path llava-hf/llava-1.5-7b-hf "
)
WHOLE = OTHER + "--data_path d.json --lora_alpha 32 --lora_dropout 0.05 "


@pytest.mark.parametrize(
    ("script", "lacking"),
    slow_after(
        3,
        [
            (OTHER, {"data.path", "model.lora.alpha", "model.lora.dropout"}),
            (WHOLE, set()),
            (WHOLE + "--freeze_stuff 1", {"freeze_stuff"}),
            (WHOLE + "--lora_target_modules q_proj v_proj", {"lora_target_modules"}),
            (WHOLE + "--lora_target_modules all-linear", set()),
            (WHOLE.replace("llava-hf/llava-1.5-7b-hf", "Qwen/Qwen2-7B"), {"model_name_or_path", "model.checkpoint"}),
            (WHOLE + "--dataset_name HuggingFaceH4/llava", {"dataset_name"}),
        ],
    ),
)
def test_another_program(script: str, lacking: set[str], tmp_path: Path) -> None:
    """A Trainer script with peft is LoRA on the whole checkpoint; what it lacks is named, and the exit code says so."""
    done = migrate(read(tmp_path, script))
    assert {text.partition(":")[0] for text in done.lacks} == lacking
    cfg = config_of(assignments({"data.path": "d.json"} | done.printed_overrides))
    assert (cfg.model.lora.enabled, cfg.model.lora.r, cfg.data.max_length) == (True, 16, 2048)
    assert [str(part) for part in cfg.model.train] == ["language"]
    assert (cfg.model.projector_type, cfg.model.select_layer, cfg.export.enabled) == ("mlp2x_gelu", -2, True)
    assert (cfg.optim.lr, cfg.optim.schedule.value, cfg.epochs, cfg.global_batch_size) == (5e-5, "linear", 3, 32)
    if "llava-hf" in script:
        assert cfg.model.checkpoint == "llava-hf/llava-1.5-7b-hf"
    if not lacking:
        assert (cfg.model.lora.alpha, cfg.model.lora.dropout) == (32, 0.05)


def test_another_program_exits_with_an_error_where_its_command_is_not_complete(tmp_path: Path) -> None:
    (tmp_path / "other.sh").write_text(OTHER)
    done = run_entry("other.sh", cwd=tmp_path)
    assert done.returncode == ExitCode.USER
    assert "# incomplete: data.path: the script has no --data_path" in done.stdout
    assert "# caution: train_vlm.py: not the original LLaVA's program" in done.stdout
    assert "model.checkpoint=llava-hf/llava-1.5-7b-hf" in done.stdout and "model.lora.r=16" in done.stdout
    (tmp_path / "other.sh").write_text(WHOLE)
    assert run_entry("other.sh", cwd=tmp_path).returncode == ExitCode.DONE


def test_another_program_without_adapters(tmp_path: Path) -> None:
    given = "--model_name_or_path llava-hf/llava-1.5-7b-hf --data_path d.json --max_seq_length 2048"
    done = table_of(read(tmp_path, f"torchrun sft.py {given}"))
    assert (done.lacks, done.all_overrides["stage"]) == ([], "finetune_task")
    assert not [key for key in done.all_overrides if key.startswith(("model.lora", "model.train"))]


def test_a_base_in_four_bits_of_another_program(tmp_path: Path) -> None:
    flags = "--load_in_4bit True --bnb_4bit_quant_type fp4 --use_dora False --use_rslora True"
    done = migrate(read(tmp_path, WHOLE + flags))
    assert (done.all_overrides["model.lora.use_dora"], done.all_overrides["model.lora.use_rslora"]) == (False, True)
    assert done.lacks == []
    assert (done.all_overrides["model.quantize.mode"], done.all_overrides["model.quantize.double"]) == ("fp4", False)
    done = table_of(read(tmp_path, WHOLE + "--load_in_8bit True"))
    assert (done.all_overrides["model.quantize.mode"], row(done, "load_in_8bit").verdict) == ("int8", mapped)
    plain = WHOLE.replace("--use_peft True", "--load_in_8bit True")
    done = table_of(read(tmp_path, plain))
    assert "model.quantize.mode" not in done.all_overrides and row(done, "load_in_8bit").verdict is unsupported
    assert "8-bit weights: this command trains without quantized weights" in done.cautions


@pytest.mark.parametrize(
    ("program", "is_original"),
    [("llava/train/train_mem.py", True), ("/x/llava/train/train.py", True), ("-m llava.train.train_xformers", True),
     ("share4v/train/train_mem.py --mm_projector_type linear", True), ("train.py --vision_tower x", True),
     ("train.py --learning_rate 1", False), ("sft.py --vision_tower x", False),
     ("llava/eval/train_vqa.py", False)],
)  # fmt: skip
def test_which_program_a_script_runs(program: str, is_original: bool, tmp_path: Path) -> None:
    assert read(tmp_path, f"torchrun {program}").launch.is_original is is_original


# --- the original's flags ---------------------------------------------------------------------------------------------


def test_flags_as_argparse_takes_them(tmp_path: Path) -> None:
    done = finetune(
        tmp_path, "--learning_rate=1e-3 --weight-decay 0.5 --group_by_m yes --report_to wandb tensorboard "
        "--no_dataloader_pin_memory --tf32 --model_max_length 100 --adam_beta2 0.95",
    )  # fmt: skip
    keys = ("optim.lr", "optim.weight_decay", "optim.beta2", "data.max_length", "sampler.group_by_modality_length")
    assert [done.all_overrides[key] for key in keys] == [1e-3, 0.5, 0.95, 100, True]
    assert [done.run.trainer_value(name) for name in ("report_to", "dataloader_pin_memory", "tf32")] == [
        "wandb tensorboard", False, True,
    ]  # fmt: skip
    assert sum(r.key == "learning_rate" for r in done.rows) == 1


@pytest.mark.parametrize(
    ("flag", "message"),
    [("--learning_rate fast", "--learning_rate=fast is not a number"), ("--max_steps 1.5", "=1.5 is not a whole"),
     ("--bf16 maybe", "--bf16=maybe must be True or False"), ("--output_dir", "--output_dir has no value")],
)  # fmt: skip
def test_values_that_the_original_refuses_too(flag: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        finetune(tmp_path, flag)


def test_an_unknown_flag_is_named(tmp_path: Path) -> None:
    assert "no_fp16" in unknown_of(finetune(tmp_path, "--no_fp16"))  # only a flag that is true by default has a no_
    done = finetune(tmp_path, "--mm_projector_tpye linear --frob 3 stray")
    unknown = "not a name that migrate knows"
    expected = {"mm_projector_tpye": f"{unknown}; did you mean mm_projector_type?", "frob": unknown}
    assert unknown_of(done) == expected
    assert row(done, "frob").value == ["3", "stray"] and len(done.lacks) == 2


def test_what_the_script_leaves_to_defaults_is_given(tmp_path: Path) -> None:
    """The original's defaults are not ours: the command names every one that differs."""
    flags = "--output_dir o --model_name_or_path lmsys/vicuna-7b-v1.5 --data_path d.json"
    done = migrate(read(tmp_path, f"torchrun --nproc_per_node 4 llava/train/train.py {flags}"))
    cfg = config_of(assignments(done.printed_overrides))
    optim = cfg.optim
    assert (optim.schedule.value, optim.lr, optim.warmup_ratio, optim.clip) == ("linear", 5e-5, 0.0, 1.0)
    assert (cfg.epochs, cfg.data.max_length, cfg.data.image_aspect_ratio.value) == (3, 512, "square")
    assert (cfg.model.select_layer, cfg.model.projector_type, cfg.model.projector) == (-1, "linear", "random")
    assert (cfg.precision.param_dtype.value, cfg.activation_checkpointing.mode.value) == ("fp32", "none")
    assert (cfg.global_batch_size, cfg.micro_batch_size, cfg.data.template) == (32, 8, "v1")
    assert cfg.sharding.strategy.value == "NO_SHARD"
    silent = {r.key for r in done.rows if r.source == "not in the script"}
    assert "weight_decay" not in silent  # it is the recipe's own
    assert {"lr_scheduler_type", "learning_rate", "num_train_epochs", "model_max_length"} <= silent
    assert row(done, "mm_use_im_patch_token").verdict is row(done, "vision_tower").verdict is unsupported


STAGES = [
    ("--tune_mm_mlp_adapter True", "pretrain", None),
    ("", "finetune", "p/mm_projector.bin"),
    ("--pretrain_mm_mlp_adapter ''", "finetune", "random"),
    ("--model_name_or_path liuhaotian/llava-v1.5-7b --pretrain_mm_mlp_adapter ''", "finetune_task", None),
    ("--model_name_or_path ./ckpt/llava-x", "finetune", "p/mm_projector.bin"),
]


@pytest.mark.parametrize(("flags", "stage", "projector"), slow_after(2, STAGES))
def test_stage(flags: str, stage: str, projector: str | None, tmp_path: Path) -> None:
    done = migrate(finetune_run(tmp_path, flags))
    assert (done.all_overrides["stage"], done.all_overrides.get("model.projector")) == (stage, projector)
    cfg = config_of(assignments(done.printed_overrides))
    assert cfg.stage.name == stage
    assert (cfg.model.checkpoint is not None) == (stage == "finetune_task")


@pytest.mark.parametrize(
    ("version", "name", "verdict"),
    [("v0", "v1", mapped), ("v0.5", "v1", mapped), ("default", "v0", mapped),
     ("llava_llama_2", "llava_llama_2", mapped), ("vicuna_v1_1", None, unsupported)],
)  # fmt: skip
def test_templates(version: str, name: str | None, verdict: Verdict, tmp_path: Path) -> None:
    """v0 trains with vicuna_v1 in the original, and an unknown name silently does so too."""
    done = finetune(tmp_path, f"--version {version}")
    assert (done.all_overrides.get("data.template"), row(done, "version").verdict) == (name, verdict)
    assert {template(known) for known in TEMPLATES.values()}


SCHEDULES = [
    ("--lr_scheduler_type constant --warmup_ratio 0.1", ZERO2, ("constant", 0.0, None, 2e-5)),
    ("--lr_scheduler_type constant_with_warmup --warmup_ratio 0.1", ZERO2, ("constant", 0.1, None, 2e-5)),
    ("--warmup_steps 7 --warmup_ratio 0.1", ZERO2, ("cosine", 0.03, 7, 2e-5)),
    ("--lr_scheduler_type polynomial", ZERO2, ("cosine", 0.03, None, 2e-5)),
    ("", {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}, ("warmup_log", 0.03, None, 0.001)),
    ("", {"type": "WarmupLR", "params": {"warmup_num_steps": 9, "warmup_max_lr": "auto"}},
     ("warmup_log", 0.03, 9, 2e-5)),
    ("", {"type": "WarmupLR", "params": {"warmup_type": "linear", "warmup_max_lr": 2e-5}},
     ("constant", 0.03, 1000, 2e-5)),
    ("", {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto", "warmup_max_lr": "auto"}},
     ("warmup_decay", 0.03, None, 2e-5)),
    ("", {"type": "WarmupDecayLR", "params": {"warmup_type": "linear", "warmup_num_steps": 5, "warmup_max_lr": "auto"}},
     ("linear", 0.03, 5, 2e-5)),
    ("", {"type": "OneCycle", "params": {"cycle_min_lr": 1}}, ("cosine", 0.03, None, 2e-5)),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "block", "expected"), SCHEDULES)
def test_schedules(flags: str, block: dict, expected: tuple, tmp_path: Path) -> None:
    """The trainer's, and those of DeepSpeed, which replace them."""
    zero = block if block is ZERO2 else ZERO2 | {"scheduler": block}
    done = finetune(tmp_path, flags, zero)
    optim = composes(done).optim
    assert (optim.schedule.value, optim.warmup_ratio, optim.warmup_steps, optim.lr) == expected
    name = row(done, "lr_scheduler_type").verdict
    assert name is (no_effect if block is not ZERO2 else unsupported if "polynomial" in flags else mapped)
    if block is not ZERO2:
        assert (row(done, "scheduler.type").verdict is unsupported) == (block["type"] == "OneCycle")


LORA, BITS4 = "--lora_enable True ", "--bits 4 "
ABSENT = "absent"
"""Stands for the value of a key that is not decided."""
CHECKPOINT = "--model_name_or_path my/llava --pretrain_mm_mlp_adapter '' "
FLAGS_AND_VERDICTS = [
    ("--fp16 True --bf16 False", "fp16", mapped, {"precision": "fp16"}),
    ("--mm_projector_type linear", "mm_projector_type", mapped, {"export.enabled": False}),
    ("--mm_projector_type pixel_shuffle2x_mlp2x_gelu", "mm_projector_type", unsupported, {}),
    (LORA + "--lora_r 8", "lora_r", mapped, {"model.lora.r": 8, "model.lora.alpha": 16}),
    (LORA, "lora_enable", mapped, {"stage": "finetune_lora"}),
    (LORA + "--lora_bias all", "lora_bias", mapped, {"model.lora.bias": "all"}),
    ("--lora_r 8", "lora_r", no_effect, {}),
    (BITS4, "bits", unsupported, {"stage": "finetune"}),
    (LORA + "--bits 6", "bits", unsupported, {"stage": "finetune_lora"}),
    (LORA + BITS4, "bits", mapped, {"stage": "finetune_qlora", "model.quantize.mode": "nf4"}),
    (LORA + BITS4 + "--quant_type fp4", "quant_type", mapped, {"model.quantize.mode": "fp4"}),
    (LORA + BITS4 + "--double_quant False", "double_quant", mapped, {"model.quantize.double": False}),
    (LORA + "--bits 8", "bits", mapped, {"model.quantize.mode": "int8"}),
    (LORA + "--bits 8 --double_quant True", "double_quant", no_effect, {"stage": "finetune_qlora"}),
    (BITS4 + "--tune_mm_mlp_adapter True", "bits", mapped, {"stage": "pretrain", "model.quantize.mode": "nf4"}),
    ("--mm_use_im_start_end True", "mm_use_im_start_end", unsupported, {}),
    (CHECKPOINT + "--mm_use_im_start_end True", "mm_use_im_start_end", mapped, {"model.image_start_end": True}),
    ("--group_by_modality_length True", "group_by_modality_length", mapped, {}),
    ("", "group_by_modality_length", mapped, {"sampler.group_by_modality_length": False}),
    ("--freeze_backbone True", "freeze_backbone", unsupported, {"model.train": ["projector"]}),
    (LORA + "--freeze_backbone True", "freeze_backbone", unsupported, {"model.train": ["projector", "language"]}),
    (
        LORA + "--tune_mm_mlp_adapter True",
        "lora_enable",
        no_effect,
        {"stage": "pretrain", "model.train": ["projector"]},
    ),
    (LORA + BITS4 + CHECKPOINT, "bits", mapped, {"stage": "finetune_task_lora", "model.quantize.mode": "nf4"}),
    ("--num_train_epochs 2", "num_train_epochs", mapped, {"epochs": 2}),
    ("--num_train_epochs 1.5", "num_train_epochs", unsupported, {"epochs": ABSENT}),
    ("--max_steps 1", "max_steps", mapped, {"max_steps": 1}),
    ("--max_steps -1", "max_steps", implied, {"max_steps": ABSENT}),
    ("--save_steps 0.1", "save_steps", unsupported, {"checkpoint.every": ABSENT}),
    ("--save_steps 1", "save_steps", mapped, {"checkpoint.every": 1}),
    ("--logging_steps 7", "logging_steps", mapped, {"log_every": 7}),
    ("--logging_steps 0.5", "logging_steps", implied, {"log_every": ABSENT}),
    ("--logging_steps 7 --logging_strategy epoch", "logging_steps", implied, {"log_every": ABSENT}),
    ("--report_to tensorboard --run_name a", "run_name", implied, {"track.name": ABSENT}),
    ("", "bf16", mapped, {"compile": ABSENT}),
    ("--fp16 True", "fp16", mapped, {"precision": "bf16"}),
    (
        "--tune_mm_mlp_adapter True",
        "tune_mm_mlp_adapter",
        mapped,
        {"stage": "pretrain", "model.language": "lmsys/vicuna-7b-v1.5", "model.projector": ABSENT},
    ),
    ("--pretrain_mm_mlp_adapter ''", "pretrain_mm_mlp_adapter", mapped, {"model.projector": "random"}),
    (
        CHECKPOINT,
        "model_name_or_path",
        mapped,
        {"stage": "finetune_task", "model.checkpoint": "my/llava", "model.language": ABSENT},
    ),
    (
        "--model_name_or_path my/LLaVA-13b",
        "model_name_or_path",
        mapped,
        {"stage": "finetune", "model": "llava_v1_5_13b"},
    ),
    ("--model_name_or_path 13b/small", "model_name_or_path", mapped, {"model": "llava_v1_5_7b"}),
    ("--lr_scheduler_type constant --warmup_ratio 0.1", "warmup_ratio", no_effect, {"optim.warmup_ratio": 0.0}),
    ("--warmup_steps 0", "warmup_steps", implied, {"optim.warmup_steps": ABSENT, "optim.warmup_ratio": 0.03}),
    ("--no_save_safetensors", "save_safetensors", implied, {}),
    ("--report_to all mlflow", "report_to", unsupported, {"track.wandb": "online"}),
    ("--version v0.5", "version", mapped, {"data.template": "v1"}),
    ("--freeze_mm_mlp_adapter True", "freeze_mm_mlp_adapter", mapped, {"model.train": ["language"]}),
    ("--mm_vision_select_feature cls_patch", "mm_vision_select_feature", mapped, {"model.select_feature": "full"}),
    (
        "--image_aspect_ratio anyres --mm_patch_merge_type spatial_unpad",
        "image_aspect_ratio",
        mapped,
        {"data.image_aspect_ratio": "anyres", "model.patch_merge": "spatial_unpad", "data.grid_pinpoints": ABSENT},
    ),
    ("--save_strategy no", "save_strategy", mapped, {"checkpoint.every": None}),
    ("--save_strategy epoch", "save_strategy", unsupported, {"checkpoint.every": None}),
    ("--save_total_limit 1", "save_total_limit", mapped, {"checkpoint.keep": 2}),
    ("--save_total_limit 5", "save_total_limit", mapped, {"checkpoint.keep": 5}),
    ("--max_steps 10", "max_steps", mapped, {"max_steps": 10}),
    ("--num_train_epochs 0.5", "num_train_epochs", unsupported, {}),
    ("--ddp_timeout 60", "ddp_timeout", mapped, {"comm.timeout": 60}),
    ("--full_determinism True", "full_determinism", mapped, {"deterministic": True}),
    ("--optim adafactor", "optim", unsupported, {}),
    ("--torch_compile True", "torch_compile", mapped, {"compile": True}),
    ("--torch_compile_backend inductor", "torch_compile_backend", mapped, {"compile": True}),
    ("--torch_compile_backend tvm", "torch_compile_backend", unsupported, {"compile": True}),
    ("--torch_compile False", "torch_compile", mapped, {"compile": False}),
    ("--torch_compile False --torch_compile_mode default", "torch_compile", no_effect, {"compile": True}),
    ("--torch_compile_mode max-autotune", "torch_compile_mode", unsupported, {"compile": True}),
    ("--torch_compile_mode ''", "torch_compile_mode", implied, {"compile": ABSENT}),
    ("--mm_projector_lr 1e-4", "mm_projector_lr", mapped, {"optim.projector_lr": 1e-4}),
    ("--evaluation_strategy steps", "evaluation_strategy", unsupported, {}),
    ("--report_to none", "report_to", implied, {}),
    ("--report_to wandb --run_name a", "report_to", mapped, {"track.wandb": "online", "track.name": "a"}),
    ("--report_to all", "report_to", mapped, {"track.wandb": "online", "track.tensorboard": True}),
    ("--report_to tensorboard mlflow", "report_to", unsupported, {"track.tensorboard": True}),
]


@pytest.mark.parametrize(("flags", "key", "verdict", "decided"), FLAGS_AND_VERDICTS)
def test_flags(flags: str, key: str, verdict: Verdict, decided: dict, tmp_path: Path) -> None:
    done = finetune(tmp_path, flags)
    assert row(done, key).verdict is verdict
    assert {k: done.all_overrides.get(k, ABSENT) for k in decided} == decided
    assert not unknown_of(done)


@pytest.mark.parametrize("flags", slow_after(20, [flags for flags, *_ in FLAGS_AND_VERDICTS]))
def test_flags_make_a_whole_configuration(flags: str, tmp_path: Path) -> None:
    composes(finetune(tmp_path, flags))


# --- LLaVA-NeXT -------------------------------------------------------------------------------------------------------

TILES = "--image_aspect_ratio anyres_max_9 --mm_patch_merge_type spatial_unpad "
NEXT = [
    (TILES, "image_aspect_ratio", mapped, {"data.image_aspect_ratio": "anyres_max", "data.max_tiles": 9,
                                           "model.patch_merge": "spatial_unpad"}),
    (TILES + "--image_grid_pinpoints '(1x1),...,(6x6)'", "image_grid_pinpoints", implied,
     {"data.grid_pinpoints": ABSENT}),
    (TILES + "--image_grid_pinpoints '(1x1),...,(2x2)'", "image_grid_pinpoints", mapped,
     {"data.grid_pinpoints": [[336, 336], [336, 672], [672, 336], [672, 672]]}),
    (TILES + "--image_grid_pinpoints '[(336, 672), (672, 336)]'", "image_grid_pinpoints", mapped,
     {"data.grid_pinpoints": [[336, 672], [672, 336]]}),
    (TILES + "--image_grid_pinpoints '(1x1),...,(2x2)' --vision_tower some/tower", "image_grid_pinpoints", unsupported,
     {"data.grid_pinpoints": ABSENT}),
    (TILES + "--frames_upbound 32 --video_fps 2", "frames_upbound", mapped,
     {"data.video_frames": 32, "data.video_fps": 2.0}),
    (TILES + "--video_folder elsewhere", "video_folder", unsupported, {}),
    ("--image_aspect_ratio highres", "image_aspect_ratio", unsupported, {"data.image_aspect_ratio": "square"}),
    ("--image_aspect_ratio anyres --mm_patch_merge_type spatial_maxpool2x2", "mm_patch_merge_type", unsupported, {}),
    ("--mm_tunable_parts mm_mlp_adapter", "mm_tunable_parts", mapped,
     {"stage": "pretrain", "model.train": ["projector"]}),
    ("--mm_tunable_parts=mm_vision_tower,mm_mlp_adapter,mm_language_model --mm_vision_tower_lr=2e-6",
     "mm_vision_tower_lr", mapped,
     {"stage": "finetune", "model.train": ["projector", "language", "vision"], "optim.vision_lr": 2e-6}),
    ("--mm_tunable_parts mm_mlp_adapter,mm_language_model --mm_vision_tower_lr 2e-6", "mm_vision_tower_lr", no_effect,
     {"model.train": ["projector", "language"], "optim.vision_lr": ABSENT}),
    ("--mm_tunable_parts mm_vision_resampler,mm_mlp_adapter", "mm_tunable_parts", unsupported, {}),
    ("--mm_tunable_parts mm_language_model --unfreeze_mm_vision_tower True", "unfreeze_mm_vision_tower", no_effect,
     {"model.train": ["language"]}),
    ("--unfreeze_mm_vision_tower True --mm_vision_tower_lr 2e-6", "unfreeze_mm_vision_tower", mapped,
     {"model.train": ["projector", "language", "vision"], "optim.vision_lr": 2e-6}),
    ("--mm_resampler_type qformer", "mm_resampler_type", unsupported, {}),
    ("--attn_implementation sdpa --version qwen_1_5", "version", mapped, {"data.template": "chat_template"}),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "key", "verdict", "decided"), NEXT)
def test_flags_of_llava_next(flags: str, key: str, verdict: Verdict, decided: dict, tmp_path: Path) -> None:
    done = finetune(tmp_path, flags)
    assert row(done, key).verdict is verdict
    assert {k: done.all_overrides.get(k, ABSENT) for k in decided} == decided
    assert not unknown_of(done)


@pytest.mark.parametrize("flags", slow_after(2, [flags for flags, _, verdict, _ in NEXT if verdict is not unsupported]))
def test_flags_of_llava_next_make_a_whole_configuration(flags: str, tmp_path: Path) -> None:
    composes(finetune(tmp_path, flags))


def test_defaults_of_llava_next_are_its_own(tmp_path: Path) -> None:
    flags = "--model_name_or_path m --data_path d.json --vision_tower v "
    for extra, length, mode in (("", 512, "none"), ("--verbose_logging True", 4096, "full")):
        done = table_of(read(tmp_path, f"torchrun --nproc_per_node 4 llava/train/train.py {flags}{extra}"))
        assert (done.all_overrides["data.max_length"], done.all_overrides["activation_checkpointing"]) == (length, mode)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("datasets:\n- json_path: a.json\n  sampling_strategy: all\n- json_path: b.jsonl\n", ["a.json", "b.jsonl"]),
        ("datasets:\n- {json_path: a.json, sampling_strategy: first}\n", "a.json"),
        (
            "datasets:\n- {json_path: a.json}\n- {json_path: b.json, sampling_strategy: 'random:10%'}\n",
            "random:10% of b",
        ),
        ("datasets:\n- {path: a.json}\n", "no json_path"),
        ("datasets: []\n", "no datasets"),
        ("datasets: 3\n", "no datasets"),
        (None, "was not found"),
    ],
)
@pytest.mark.parametrize("is_named", [True, False])
def test_a_list_of_files_of_records(
    text: str | None, expected: list[str] | str, is_named: bool, tmp_path: Path
) -> None:
    """Given as another PATH or found by the script's path: its files are the data, or what is wrong is told."""
    script = tmp_path / "run.sh"
    folder = "" if is_named else f"{tmp_path}/"
    script.write_text(f"torchrun --nproc_per_node 2 llava/train/train.py {FINETUNE}--data_path {folder}mix.yaml")
    if text is not None:
        (tmp_path / "mix.yaml").write_text(text)
    (run,) = read_runs([str(script)] + [str(tmp_path / "mix.yaml")] * (is_named and text is not None), {})
    done = table_of(run)
    if isinstance(expected, list) or expected.endswith(".json"):
        assert (
            done.all_overrides["data.path"] == expected and row(done, "data_path").verdict is mapped and not done.lacks
        )
    else:
        assert "data.path" not in done.all_overrides and row(done, "data_path").verdict is unsupported
        assert expected in row(done, "data_path").text and any(expected in lack for lack in done.lacks)


def test_several_files_of_one_pattern(tmp_path: Path) -> None:
    done = finetune(tmp_path, "--data_path 'd/{a,b}.json'")
    assert done.all_overrides["data.path"] == ["d/a.json", "d/b.json"]
    done = migrate(done.run)
    assert not done.refused and "data.path=[d/a.json,d/b.json]" in done.words


# --- DeepSpeed --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "flags", "clip"),
    [({}, "", None), ({"gradient_clipping": "auto"}, "", 1.0),
     ({"gradient_clipping": "auto"}, "--max_grad_norm 0.5", 0.5),
     ({"gradient_clipping": 1.0}, "", 1.0), ({"gradient_clipping": 0}, "--max_grad_norm 0", None),
     (None, "", 1.0)],
)  # fmt: skip
def test_clipping_is_deepspeeds(extra: dict | None, flags: str, clip: float | None, tmp_path: Path) -> None:
    """Without its key DeepSpeed does not clip, whatever the trainer's max_grad_norm is."""
    done = finetune(tmp_path, flags, ZERO2 | extra if extra is not None else None)
    assert done.all_overrides["optim.clip"] == clip


NVME = {"offload": "nvme", "offload.folder": "/disk"}
ZERO_BLOCKS = [
    ({"stage": [3]}, {}),
    ({"stage": 0}, {"sharding": "zero0"}),
    ({"stage": 1}, {"sharding": "zero1"}),
    ({"stage": "3"}, {"sharding": "zero3"}),
    ({}, {"sharding": "zero0"}),
    ({"stage": 3, "zero_hpz_partition_size": 8}, {"sharding": "zero3"}),
    ({"stage": 3, "mics_shard_size": 2}, {"sharding": "zero3"}),
    ({"stage": 3, "offload_optimizer": {"device": "none"}}, {"sharding": "zero3"}),
    ({"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
     {"sharding": "zero2", "offload": "params"}),
    ({"stage": 1, "offload_optimizer": {"device": "cpu"}}, {"sharding": "zero1", "offload": "optimizer"}),
    ({"stage": 2, "offload_param": {"device": "cpu"}}, {"sharding": "zero2"}),  # DeepSpeed: with stage 3 alone
    ({"stage": 3, "offload_param": {"device": "cpu"}}, {"sharding": "zero3", "offload": "params"}),
    ({"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/disk"}}, {"sharding": "zero3"} | NVME),
    ({"stage": 3, "cpu_offload": True}, {"sharding": "zero3", "offload": "params"}),
    ({"stage": 3, "cpu_offload_param": True}, {"sharding": "zero3", "offload": "params"}),
    ({"stage": 3, "cpu_offload_params": True}, {"sharding": "zero3", "offload": "params"}),
    ({"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "nvme", "nvme_path": "/disk"}},
     {"sharding": "zero3"} | NVME),
    ({"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": "/disk"}},
     {"sharding": "zero1", "offload": "optimizer"}),
]  # fmt: skip


@pytest.mark.parametrize(("block", "expected"), ZERO_BLOCKS, ids=str)
def test_zero_and_offload(block: dict, expected: dict, tmp_path: Path) -> None:
    decided = finetune(tmp_path, zero={"zero_optimization": block}).all_overrides
    assert {k: v for k, v in decided.items() if k.startswith(("sharding", "offload"))} == expected


@pytest.mark.parametrize(("block", "expected"), slow_after(7, ZERO_BLOCKS), ids=str)
def test_zero_and_offload_make_a_whole_configuration(block: dict, expected: dict, tmp_path: Path) -> None:
    cfg = composes(finetune(tmp_path, zero={"zero_optimization": block}))
    assert (cfg.offload.mode.value, cfg.offload.folder) == (
        expected.get("offload", "none"),
        expected.get("offload.folder"),
    )


SHARED_SAMPLES = [
    ({"tensor_parallel": {"autotp_size": 2}}, {"parallel.tensor": 2}, 16),
    ({"autotp_size": "4"}, {"parallel.tensor": 4}, 8),
    ({"sequence_parallel_size": 8}, {"parallel.context": 8}, 4),
    ({"tensor_parallel": {"autotp_size": 2}, "sequence_parallel_size": 2},
     {"parallel.tensor": 2, "parallel.context": 2}, 8),
    ({"tensor_parallel": {"autotp_size": 3}, "sequence_parallel_size": True}, {}, 32),
]  # fmt: skip


@pytest.mark.parametrize(("zero", "expected", "batch"), SHARED_SAMPLES, ids=str)
def test_gpus_that_share_samples(zero: dict, expected: dict, batch: int, tmp_path: Path) -> None:
    """4 samples of a micro-batch, on 8 GPUs; those that share samples count once."""
    done = finetune(tmp_path, zero=ZERO2 | {"train_batch_size": batch} | zero)
    assert {k: v for k, v in done.all_overrides.items() if k.startswith("parallel")} == expected
    assert done.all_overrides["global_batch_size"] == batch and row(done, "train_batch_size").verdict is mapped


@pytest.mark.slow
def test_gpus_that_share_samples_make_a_whole_configuration(tmp_path: Path) -> None:
    zero = {"tensor_parallel": {"autotp_size": 2}, "sequence_parallel_size": 2}
    cfg = composes(finetune(tmp_path, zero=ZERO2 | zero))
    assert (cfg.parallel.tensor, cfg.parallel.context, cfg.global_batch_size) == (2, 2, 8)


def test_deepspeed_optimizer_has_one_group(tmp_path: Path) -> None:
    """It bypasses LLaVA's own group for the projector, and keys that it leaves out have DeepSpeed's defaults."""
    params = {"lr": "auto", "betas": [0.9, 0.999], "eps": "auto", "torch_adam": "true"}
    done = finetune(tmp_path, "--mm_projector_lr 1e-4", ZERO2 | {"optimizer": {"type": "AdamW", "params": params}})
    assert (done.all_overrides["optim.projector_lr"], done.all_overrides["optim.weight_decay"]) == (None, 0.01)
    assert row(done, "mm_projector_lr").verdict is no_effect
    assert row(done, "optimizer.params.lr").outcome.resolved == 2e-5
    bare = finetune(tmp_path, "--weight_decay 0.1", ZERO2 | {"optimizer": {"type": "Adam", "params": {}}})
    assert (bare.all_overrides["optim.lr"], bare.all_overrides["optim.weight_decay"]) == (1e-3, 0.0)
    assert row(bare, "learning_rate").verdict is row(bare, "weight_decay").verdict is no_effect
    assert row(bare, "optimizer.params.lr").source == "zero.json (not in it)"


def test_deepspeeds_warmup_gives_all_groups_one_rate(tmp_path: Path) -> None:
    zero = ZERO2 | {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_lr": "auto", "total_num_steps": 7}}}
    done = finetune(tmp_path, "--mm_projector_lr 1e-4 --max_steps 7", zero)
    assert done.all_overrides["optim.projector_lr"] is None
    assert row(done, "mm_projector_lr").verdict is no_effect


@pytest.mark.parametrize(
    ("zero", "key"),
    [({"train_micro_batch_size_per_gpu": 3}, "train_micro_batch_size_per_gpu"),
     ({"train_batch_size": 31}, "train_batch_size"),
     ({"gradient_clipping": 0.5}, "gradient_clipping"), ({"bf16": {"enabled": False}}, "bf16.enabled"),
     ({"fp16": {"enabled": True}}, "fp16.enabled")],
)  # fmt: skip
def test_values_that_contradict_the_script(zero: dict, key: str, tmp_path: Path) -> None:
    """transformers or DeepSpeed refuse them; the table and a caution repeat it."""
    done = finetune(tmp_path, zero=ZERO2 | zero)
    found = row(done, key)
    assert found.verdict is unsupported and "the original refuses to start" in found.text
    assert f"{key}: {found.text}" in done.cautions


def test_booleans_and_numbers_written_as_text(tmp_path: Path) -> None:
    zero = {"bf16": {"enabled": "true"}, "zero_optimization": {"stage": "2", "zero_quantized_weights": "false"}}
    extra = {"gradient_clipping": "1.0", "train_micro_batch_size_per_gpu": "4"}
    done = finetune(tmp_path, zero=zero | extra | {"fp16": {"enabled": "False", "loss_scale": 0}})
    assert row(done, "bf16.enabled").verdict is mapped
    assert row(done, "fp16.enabled").verdict is implied
    assert row(done, "zero_optimization.zero_quantized_weights").verdict is implied
    assert (done.all_overrides["sharding"], done.all_overrides["optim.clip"]) == ("zero2", 1.0)
    for key in extra:
        assert row(done, key).verdict is mapped


DEEPSPEED_VERDICTS = [
    ({"optimizer": {"type": "Adam", "params": {"bias_correction": False}}}, unsupported),
    ({"optimizer": {"type": "Adam", "params": {"bias_correction": "true"}}}, implied),
    ({"optimizer": {"type": "Adam", "params": {"weight_decay": 0.1, "adam_w_mode": "True"}}}, implied),
    ({"optimizer": {"type": "Adam", "params": {"weight_decay": 0.1, "adam_w_mode": False}}}, unsupported),
    ({"optimizer": {"params": {"freeze_step": 400}, "type": "OneBitAdam"}}, unsupported),
    ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 16}}, unsupported),
    ({"zero_optimization": {"stage": 3, "stage3_gather_fp16_weights_on_model_save": True}}, implied),
    ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, mapped),
    ({"zero_optimization": {"stage": 3, "zenflow": {"topk_ratio": 0.1}}}, unsupported),
    ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.3}}}, unsupported),
    ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pipeline": True}}}, mapped),
    ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "none", "pipeline": True}}}, implied),
    ({"zero_optimization": {"stage": 3}, "aio": {"block_size": 1}}, no_effect),
    ({"tensor_parallel": {"autotp_size": 1}}, implied),
    ({"tensor_parallel": {"autotp_size": 4}}, mapped),
    ({"tensor_parallel": {"autotp_size": "2", "tp_overlap_comm": True}}, implied),
    ({"tensor_parallel": {"tp_overlap_comm": True}}, implied),
    ({"tensor_parallel": {"autotp_size": 3}}, unsupported),
    ({"autotp_size": 2}, mapped),
    ({"autotp_size": 0}, implied),
    ({"sequence_parallel_size": 8}, mapped),
    ({"sequence_parallel_size": 1}, implied),
    ({"sequence_parallel_size": 16}, unsupported),
    ({"tensor_parallel": {"autotp_size": 4}, "sequence_parallel_size": 4}, unsupported),
    ({"graph_harvesting": True}, unsupported),
    ({"pipeline": {"stages": 2}}, no_effect),
    ({"tensorboard": {"enabled": True, "job_name": "y"}}, unsupported),
    ({"csv_monitor": {"enabled": True}}, unsupported),
    ({"wandb": {"enabled": False, "project": "x"}}, implied),
    ({"flops_profiler": {"enabled": False, "detailed": True}}, implied),
    ({"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}}}, unsupported),
    ({"data_efficiency": {"enabled": False, "data_routing": {"enabled": True}}}, implied),
    ({"sparse_attention": {"mode": "fixed"}}, unsupported),
    ({"communication_data_type": "bf16"}, unsupported),
    ({"activation_checkpointing": {"cpu_checkpointing": "true"}}, no_effect),
    ({"fp16": {"enabled": False, "hysteresis": 1}}, no_effect),
    ({"x": {}, "fp16": {}}, implied),
]


@pytest.mark.parametrize(("zero", "verdict"), DEEPSPEED_VERDICTS, ids=str)
def test_deepspeed_keys(zero: dict, verdict: Verdict, tmp_path: Path) -> None:
    """The last key of the file."""
    assert row(finetune(tmp_path, zero=zero), list(flat(zero))[-1]).verdict is verdict


def test_an_unknown_key_of_deepspeed_is_named(tmp_path: Path) -> None:
    done = finetune(tmp_path, zero={"zero_optimization": {"stage": 2, "overlap_com": True}, "x": {}, "fp16": {}})
    unknown = "not a name that migrate knows"
    assert unknown_of(done) == {
        "zero_optimization.overlap_com": f"{unknown}; did you mean zero_optimization.overlap_comm?", "x": unknown,
    }  # fmt: skip


def test_tables_have_an_answer_for_their_own_keys() -> None:
    assert all(deepspeed_rule(key.replace("*", "any")) is not None for key in DEEPSPEED)
    assert all(accelerate_rule(key.replace("*", "any")) is not None for key in ACCELERATE)


LOSS_SCALE = {
    "loss_scale": 0,
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
FP16 = "--fp16 True --bf16 False"


@pytest.mark.parametrize("key", LOSS_SCALE)
def test_deepspeeds_loss_scale(key: str, tmp_path: Path) -> None:
    """DeepSpeed's defaults are those of precision.scaler; other values have no equivalent."""
    done = finetune(tmp_path, FP16, {"fp16": {"enabled": "auto", **LOSS_SCALE, key: 7}})
    assert row(done, "fp16.enabled").verdict is mapped and done.all_overrides["precision"] == "fp16"
    found = {name: row(done, f"fp16.{name}").verdict for name in LOSS_SCALE}
    assert found == dict.fromkeys(LOSS_SCALE, implied) | {key: unsupported}
    precision = composes(done).precision
    scaler = precision.scaler
    assert precision.param_dtype.value == "fp16" and scaler.scale is None
    assert (scaler.initial_power, scaler.window, scaler.hysteresis, scaler.minimum) == (16, 1000, 2, 1.0)


def test_details_of_fp16(tmp_path: Path) -> None:
    details = {"auto_cast": True, "consecutive_hysteresis": True, "fp16_master_weights_and_grads": True}
    done = finetune(tmp_path, FP16, {"fp16": {"enabled": True, **details}})
    assert [row(done, f"fp16.{key}").verdict for key in details] == [implied, unsupported, unsupported]
    done = finetune(tmp_path, FP16, {"fp16": {"enabled": True, **dict.fromkeys(details, False)}})
    assert {row(done, f"fp16.{key}").verdict for key in details} == {implied}


def test_fp16_without_deepspeed_is_torchs_scaler(tmp_path: Path) -> None:
    done = finetune(tmp_path, FP16, zero=None)
    scaler = composes(done).precision.scaler
    assert (scaler.initial_power, scaler.window, scaler.hysteresis) == (16, 2000, 1)
    assert row(done, "fp16").verdict is mapped and "GradScaler" in row(done, "fp16").text


@pytest.mark.parametrize(
    ("block", "master", "moments"),
    [({"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}, "bf16", "bf16"),
     ({"bf16_master_weights_and_grads": True}, "bf16", "fp32"),
     ({"bf16_optimizer_states": True}, "fp32", "fp32")],
)  # fmt: skip
def test_deepspeeds_masters_in_bf16(block: dict, master: str, moments: str, tmp_path: Path) -> None:
    done = finetune(tmp_path, zero={"bf16": {"enabled": True, **block}})
    precision = composes(done).precision
    assert (precision.master_dtype.value, precision.moment_dtype.value) == (master, moments)
    assert {row(done, f"bf16.{key}").verdict for key in block} == {mapped if master == "bf16" else no_effect}


VALUES = [0, 1, 3, -1, 2e-5, 1e9, 1e999, "auto", "5e8", "true", "False", "x y", "", None, True, False, [], {},
          [1, {"a": 2}], {"device": "cpu"}, {"enabled": "auto"}, "é\n\x1b"]  # fmt: skip


def some_json(draw: random.Random) -> dict:
    """Known keys and unknown ones with values of every kind."""
    known = [key.replace("*", f"x{draw.randint(0, 9)}").split(".") for key in DEEPSPEED]
    found: dict = {}
    for _ in range(draw.randint(1, 30)):
        path = draw.choice(known) if draw.random() < 0.9 else [draw.choice("abc"), draw.choice("abc")]
        node = found
        for name in path[:-1]:
            inner = node.get(name)
            if not isinstance(inner, dict):
                inner = node[name] = {}
            node = inner
        node[path[-1]] = draw.choice(VALUES)
    return found


@pytest.mark.parametrize("seed", range(60))
def test_no_key_of_any_json_is_dropped(seed: int, tmp_path: Path) -> None:
    """Every leaf is one row with an answer."""
    draw = random.Random(seed)
    content = some_json(draw)
    (tmp_path / "zero.json").write_text(json.dumps(content).replace("Infinity", "1e999"))
    (tmp_path / "run.sh").write_text(f"deepspeed llava/train/train.py --deepspeed zero.json {FINETUNE}")
    (run,) = read_runs([str(tmp_path / "zero.json"), str(tmp_path / "run.sh")], {}, draw.choice([1, 3, 8]))
    printed = json.loads(json.dumps(entry.as_json(table_of(run)), allow_nan=False))
    keys = [r["key"] for r in printed["keys"] if r["source"] == "zero.json"]
    assert keys == list(flat(json.loads(json.dumps(content))))
    assert all(r["text"] and r["verdict"] for r in printed["keys"])


# --- which file -------------------------------------------------------------------------------------------------------


def test_where_a_named_json_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here, beside the script and in the folders around it; a file that was given wins."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "tree" / "scripts" / "v1_5" / "run.sh"
    script.parent.mkdir(parents=True)
    script.write_text(f"deepspeed llava/train/train.py --deepspeed ./scripts/zero.json {FINETUNE}")

    def stage(*given: Path) -> object:
        (run,) = read_runs(map(str, [script, *given]), {}, 8)
        return decide(run).get("sharding"), run.missing

    assert stage() == (None, ("./scripts/zero.json",))
    (run,) = read_runs([str(script)], {}, 8)
    done = table_of(run)
    assert "optim.clip" not in done.all_overrides and row(done, "deepspeed").verdict is unsupported
    assert done.lacks == ["./scripts/zero.json was not found: give it as another PATH"]
    for place, number in ((tmp_path / "tree" / "scripts", 1), (tmp_path, 2)):
        (place / "zero.json").write_text(json.dumps({"zero_optimization": {"stage": number}}))
    assert stage() == ("zero1", ())
    (tmp_path / "mine.JSON").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    assert stage(tmp_path / "mine.JSON") == ("zero3", ())
    assert stage(tmp_path / "zero.json") == ("zero2", ())


# --- Accelerate -------------------------------------------------------------------------------------------------------

ACCELERATE_ZERO = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config:
  gradient_accumulation_steps: 1
  gradient_clipping: 1.0
  offload_optimizer_device: none
  zero3_init_flag: true
  zero_stage: 3
mixed_precision: bf16
num_machines: 1
num_processes: 4
"""
ACCELERATE_FSDP = """
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_offload_params: false
  fsdp_sharding_strategy: FULL_SHARD
mixed_precision: no
num_processes: 8
"""


def test_accelerate_with_deepspeed(tmp_path: Path) -> None:
    script = f"accelerate launch --config_file accelerate.yaml --main_process_port 1 llava/train/train.py {FINETUNE}"
    done = migrate(read(tmp_path, script, accelerate=ACCELERATE_ZERO))
    cfg = config_of(assignments(done.printed_overrides))
    assert (done.run.gpus, cfg.global_batch_size) == (4, 16)
    assert (cfg.sharding.strategy.value, cfg.optim.clip) == ("FULL_SHARD", 1.0)
    assert not done.lacks and len({(r.source, r.key) for r in done.rows}) == len(done.rows)
    other = accelerated(tmp_path, ACCELERATE_ZERO.replace("clipping: 1.0", "clipping: 0.5"))
    assert any("gradient_clipping: the original refuses to start" in caution for caution in other.cautions)
    bare = accelerated(tmp_path, "distributed_type: DEEPSPEED\nnum_processes: 4\n")
    assert (bare.all_overrides["sharding"], bare.all_overrides["optim.clip"]) == ("zero2", None), (
        "DeepSpeedPlugin's defaults"
    )
    offloads = "  offload_param_device: nvme\n  offload_param_nvme_path: /disk\n"
    disk = accelerated(tmp_path, ACCELERATE_ZERO.replace("  zero_stage", offloads + "  zero_stage"))
    assert (disk.all_overrides["offload"], disk.all_overrides["offload.folder"]) == ("nvme", "/disk")
    fp16 = ACCELERATE_ZERO.replace("mixed_precision: bf16", "mixed_precision: fp16")
    assert "precision.scaler.window" not in accelerated(tmp_path, fp16, "--bf16 False").all_overrides


def test_accelerate_names_a_deepspeed_file(tmp_path: Path) -> None:
    """By its own key or by a flag of the launcher; a file with the end .yml is Accelerate's too."""
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "zero.json").write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    named = "distributed_type: DEEPSPEED\nnum_processes: 4\ndeepspeed_config:\n  deepspeed_config_file: x/zero.json\n"
    (tmp_path / "a.yml").write_text(named)
    script = tmp_path / "run.sh"
    script.write_text(f"accelerate launch llava/train/train.py {FINETUNE}")
    (run,) = read_runs(map(str, [script, tmp_path / "a.yml", tmp_path / "zero.json"]), {})
    assert (decide(run)["sharding"], run.gpus) == ("zero1", 4)
    (tmp_path / "a.yml").write_text("num_processes: 4\n")
    script.write_text(f"accelerate launch --deepspeed_config_file zero.json llava/train/train.py {FINETUNE}")
    (run,) = read_runs(map(str, [script, tmp_path / "a.yml", tmp_path / "zero.json"]), {})
    assert decide(run)["sharding"] == "zero1"
    with pytest.raises(ConfigError, match=r"other\.json is not used by a training command"):
        read_runs(map(str, [script, tmp_path / "a.yml", tmp_path / "other.json", tmp_path / "zero.json"]), {})


def test_files_of_several_scripts_are_all_used(tmp_path: Path) -> None:
    paths = []
    for stage in (1, 2):
        (tmp_path / f"zero{stage}.json").write_text(json.dumps({"zero_optimization": {"stage": stage}}))
        (tmp_path / f"run{stage}.sh").write_text(f"deepspeed train.py --deepspeed zero{stage}.json {FINETUNE}")
        paths += [str(tmp_path / f"run{stage}.sh"), str(tmp_path / f"zero{stage}.json")]
    runs = read_runs(paths, {}, 8)
    assert [(run.name, decide(run)["sharding"]) for run in runs] == [("run1.sh", "zero1"), ("run2.sh", "zero2")]


DYNAMO = "dynamo_config:\n  dynamo_mode: max-autotune\n  dynamo_backend: "
STRATEGY, COMPUTED = "strategy: FULL_SHARD", "mixed_precision: no"
ACCELERATED = [
    # a line of ACCELERATE_FSDP, what stands there instead, what that decides, and a key's verdict
    (f"fsdp_sharding_{STRATEGY}", "fsdp_reshard_after_forward: true", {"sharding": "zero3"}, "after_forward", mapped),
    (f"fsdp_sharding_{STRATEGY}", "fsdp_reshard_after_forward: false", {"sharding": "zero2"}, "after_forward", mapped),
    (f"fsdp_sharding_{STRATEGY}", "fsdp_reshard_after_forward: HYBRID_SHARD\n  fsdp_sharding_strategy: NO_SHARD",
     {"sharding": "hybrid"}, "after_forward", mapped),
    (f"fsdp_sharding_{STRATEGY}", "fsdp_version: 2", {"sharding": "zero3"}, "fsdp_version", implied),
    ("type: FSDP", "type: 'NO'", {"sharding": "zero0", "offload": ABSENT}, "distributed_type", mapped),
    ("type: FSDP", "type: TPU", {"sharding": "zero0"}, "distributed_type", unsupported),
    ("type: FSDP\nfsdp_config:", "type: MULTI_GPU\nfsdp_config:\n  fsdp_cpu_ram_efficient_loading: true",
     {"sharding": "zero0"}, "distributed_type", mapped),
    (STRATEGY, STRATEGY, {"sharding": "zero3", "precision": "bf16"}, "fsdp_sharding_strategy", mapped),
    (STRATEGY, "strategy: 2", {"sharding": "zero2"}, "fsdp_sharding_strategy", mapped),
    (STRATEGY, "strategy: HYBRID_SHARD", {"sharding": "hybrid"}, "fsdp_sharding_strategy", mapped),
    (STRATEGY, "strategy: HYBRID_SHARD_ZERO2", {"sharding": "hybrid2"}, "fsdp_sharding_strategy", mapped),
    (STRATEGY, "strategy: 3", {"sharding": "zero0"}, "fsdp_sharding_strategy", mapped),
    (STRATEGY, "strategy: odd", {"sharding": "zero0"}, "fsdp_sharding_strategy", unsupported),
    ("params: false", "params: true", {"offload": "params"}, "fsdp_offload_params", mapped),
    (COMPUTED, "mixed_precision: fp8", {"precision": "bf16"}, "mixed_precision", mapped),
    (COMPUTED, DYNAMO + "INDUCTOR", {"compile": True}, "dynamo_backend", mapped),
    (COMPUTED, DYNAMO + "INDUCTOR", {"compile": True}, "dynamo_mode", unsupported),
    (COMPUTED, DYNAMO + "TVM", {"compile": True}, "dynamo_backend", unsupported),
    (COMPUTED, DYNAMO + "'NO'", {"compile": False}, "dynamo_backend", mapped),
    ("offload_params: false", "activation_checkpointing: true", {"activation_checkpointing": "full"},
     "fsdp_activation_checkpointing", mapped),
    ("offload_params: false", "activation_checkpointing: false", {"activation_checkpointing": "full"},
     "fsdp_activation_checkpointing", mapped),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "decided", "key", "verdict"), ACCELERATED, ids=str)
def test_accelerate_with_fsdp(old: str, new: str, decided: dict, key: str, verdict: Verdict, tmp_path: Path) -> None:
    done = accelerated(tmp_path, ACCELERATE_FSDP.replace(old, new))
    assert {k: done.all_overrides.get(k, ABSENT) for k in decided} == decided
    (found,) = [r for r in done.rows if r.key.endswith(key)]
    assert found.verdict is verdict and not unknown_of(done)


@pytest.mark.parametrize(("old", "new"), [(old, new) for old, new, *_ in ACCELERATED], ids=str)
def test_accelerate_with_fsdp_makes_a_whole_configuration(old: str, new: str, tmp_path: Path) -> None:
    composes(accelerated(tmp_path, ACCELERATE_FSDP.replace(old, new)))


@pytest.mark.parametrize(("value", "mode"), [("true", "full"), ("false", "none")])
def test_accelerate_checkpoints_activations_by_itself(value: str, mode: str, tmp_path: Path) -> None:
    file = ACCELERATE_FSDP.replace("offload_params: false", f"activation_checkpointing: {value}")
    assert (
        accelerated(tmp_path, file, "--gradient_checkpointing False").all_overrides["activation_checkpointing"] == mode
    )


def test_accelerates_own_file_of_defaults(tmp_path: Path) -> None:
    """What `accelerate config` always writes besides."""
    text = (
        "tpu_env: []\ntpu_use_cluster: false\ndowncast_bf16: 'no'\ngpu_ids: 2,3\nmain_training_function: main\n"
        "rdzv_backend: static\nsame_network: true\nuse_cpu: false\ndebug: false\nmachine_rank: 0\nnum_processes: 2\n"
        "enable_cpu_affinity: false\nmegatron_lm_config: {}\nbase_job_name: 2024-01-01\n"
    )
    done = accelerated(tmp_path, text)
    assert done.words[0] == "CUDA_VISIBLE_DEVICES=2,3"
    assert [r.key for r in done.rows if r.verdict is unsupported] == ["base_job_name"]
    printed = {r["key"]: r["value"] for r in json.loads(json.dumps(entry.as_json(done)))["keys"]}
    assert printed["base_job_name"] == "2024-01-01"


@pytest.mark.parametrize(
    ("machines", "flags", "gpus", "found"),
    [
        (1, "", None, (1, 8)),
        (2, "", None, (2, 4)),
        (4, "", None, (4, 2)),
        (2, "", 16, (2, 8)),
        (2, "", 7, (1, 7)),
        (4, "--num_machines 2", None, (2, 4)),
        (2, "--num_processes 8", None, (2, 4)),
    ],
)
def test_accelerate_counts_the_processes_of_all_machines(
    machines: int, flags: str, gpus: int | None, found: tuple[int, int], tmp_path: Path
) -> None:
    file = f"num_machines: {machines}\nnum_processes: 8\n"
    run = read(tmp_path, f"accelerate launch {flags} llava/train/train.py {FINETUNE}", accelerate=file, gpus=gpus)
    done = table_of(run)
    assert ((run.ranks.nodes, run.ranks.per_node), run.gpus) == (found, gpus or 8)
    assert done.all_overrides["global_batch_size"] == 4 * (gpus or 8)
    command = " ".join(done.words)
    assert (f"--nnodes {found[0]} " in command) == (found[0] > 1) and f"--nproc-per-node {found[1]} " in command


def test_files_of_another_kind_are_named(tmp_path: Path) -> None:
    done = finetune(tmp_path, zero={"architectures": ["LlavaLlama"], "model_type": "llava"})
    assert "no key of zero.json is one of DeepSpeed's; is it another file?" in done.cautions


@pytest.mark.parametrize(
    ("value", "sharding", "offload"),
    [("full_shard auto_wrap", "zero3", None), ("shard_grad_op offload", "zero2", "params")],
)
def test_fsdp_of_the_trainer(value: str, sharding: str, offload: str | None, tmp_path: Path) -> None:
    done = finetune(tmp_path, f'--fsdp "{value}" --fsdp_transformer_layer_cls_to_wrap LlamaDecoderLayer', None)
    assert row(done, "fsdp").verdict is mapped
    assert (done.all_overrides["sharding"], done.all_overrides.get("offload"), done.all_overrides["optim.clip"]) == (
        sharding,
        offload,
        1,
    )


# --- the entry --------------------------------------------------------------------------------------------------------


def run_entry(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "llava_fsdp.migrate", *arguments]
    return subprocess.run(command, check=False, cwd=cwd, capture_output=True, text=True, timeout=120)


def test_entry(tmp_path: Path) -> None:
    (tmp_path / "zero.json").write_text(json.dumps(ZERO2))
    script = f"deepspeed llava/train/train.py --deepspeed zero.json {FINETUNE} --version $V"
    (tmp_path / "run.sh").write_text(script)
    done = run_entry("run.sh", "gpus=8", "V=plain", "format=json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (ExitCode.DONE, "")
    (run,) = json.loads(done.stdout)["runs"]
    assert run["overrides"]["data.template"] == "plain" and run["incomplete"] == [] and run["gpus"] == 8
    assert run["keys"] and all(each["known"] for each in run["keys"])

    (tmp_path / "zero.json").write_text('\ufeff{"x\\nrm": 1, "\\ud800": 1e999, "zero_optimization": {"stage": 2}}')
    text = run_entry("run.sh", "gpus=8", "V=plain", cwd=tmp_path)
    assert text.returncode == ExitCode.USER and "Traceback" not in text.stderr
    assert "x\\nrm, \\ud800 (see the table)" in text.stdout and "# incomplete: x\\nrm: not a name" in text.stdout
    assert "add compat=llava_v1_5" in text.stdout and "# compile=auto compiles blocks on CUDA" in text.stdout
    assert all(len(line) <= 140 for line in text.stdout.splitlines() if line[:1] in "│┃├")


@pytest.mark.parametrize("width", [80, 140])
def test_the_table_keeps_every_word_at_any_width(width: int, tmp_path: Path) -> None:
    long = "stage3_gather_16bit_weights_on_model_save"
    done = finetune(tmp_path, "--frob 1", {"zero_optimization": {"stage": 3, long: True}, "bf16": {"enabled": "auto"}})
    written = io.StringIO()
    Console(width=width, file=written, highlight=False, markup=False).print(entry.table(done.rows))
    printed = written.getvalue().splitlines()
    assert all(len(line) == width for line in printed[1:2])
    cells = [[cell.strip() for cell in line[1:-1].split("│")] for line in printed if line[:1] == "│"]
    columns = ["".join(cell[n] for cell in cells).replace(" ", "") for n in range(4)]
    for found in done.rows:
        for n, text in ((0, found.key), (2, found.verdict.value), (3, found.text)):
            assert entry.comment(text).replace(" ", "") in columns[n], (width, text)


MISTAKES = [
    (["gone.sh"], "gone.sh is not found"),
    (["."], ". is a folder"),
    (["a.py"], "a.py is a Python program"),
    (["list.json"], "list.json holds a list, not an object of settings; is it a dataset?"),
    (["twice.json"], "twice.json has a twice"),
    (["bad.json"], "bad.json is not JSON"),
    (["comment.json"], "comment.json is not JSON"),
    (["none.json"], "none.json is not JSON"),
    (["dots.json"], "dots.json has a.b twice, once with a dot in a name"),
    (["deep.json"], "deep.json is nested too deeply"),
    (["itself.yaml"], "itself.yaml refers to a part of itself with *x; write the values out"),
    (["binary.sh"], "binary.sh is not text"),
    (
        ["other.sh"],
        "other.sh has no training command: none that starts with deepspeed, torchrun, accelerate launch, swift sft, "
        "llamafactory-cli train, trl sft, or python with a training program; it starts real.sh: give that",
    ),
    (["bad.yaml"], "bad.yaml is not YAML"),
    (["empty.sh"], "empty.sh has no training command"),
    (["ok.json"], "ok.json is not used by a training command"),
    (["ok.json", "gpus=0"], "gpus=0: gpus is a number of at least 1"),
    (["ok.json", "format=xml"], "format=xml: choose text or json"),
    (["ok.json", "--gpus"], "--gpus is not an option"),
    (["ok.json", "gpu=8"], "gpu=8: no script reads $gpu, and it is not an option"),
    (["gpus=8"], "no PATH was given"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_mistakes(arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    files = {
        "a.py": "", "list.json": "[]", "twice.json": '{"a": 1, "a": 2}', "bad.json": "{", "bad.yaml": "a: [",
        "comment.json": '{"a": 1 // one\n}', "none.json": " \n",
        "dots.json": '{"a.b": 1, "a": {"b": 2}}', "deep.json": '{"a":' * 20000 + "1" + "}" * 20000,
        "itself.yaml": "a: &x [*x]", "other.sh": "bash real.sh",
        "ok.json": "{}", "empty.sh": "echo deepspeed-free\n",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "binary.sh").write_bytes(b"\xff\xfe\x00")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["migrate", *arguments])
    with pytest.raises(SystemExit) as stop:
        entry.main()
    assert stop.value.code == ExitCode.USER
    printed = capsys.readouterr()
    assert printed.err.startswith(f"ConfigError: {message}") and printed.err.count("\n") == 1
    assert printed.out == ""
