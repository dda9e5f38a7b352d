"""Moving over: scripts that nobody wrote for us are read as their shell and their parser read them."""

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
from small import config_of

from llava_fsdp.data.text.templates import template
from llava_fsdp.migrate import main as entry
from llava_fsdp.migrate.accelerate import ACCELERATE
from llava_fsdp.migrate.accelerate import rule_of as accelerate_rule
from llava_fsdp.migrate.bash_script import commands, shown
from llava_fsdp.migrate.command import Migration, assignments, lines, migrate
from llava_fsdp.migrate.context import Context
from llava_fsdp.migrate.deepspeed import DEEPSPEED
from llava_fsdp.migrate.deepspeed import rule_of as deepspeed_rule
from llava_fsdp.migrate.inputs import flat, read_runs, sort_paths
from llava_fsdp.migrate.key_outcome import Row, Verdict
from llava_fsdp.migrate.overrides import TEMPLATES, decide
from llava_fsdp.migrate.source_run import Options, Run
from llava_fsdp.migrate.table import rows_of
from llava_fsdp.runtime.errors import ConfigError, ExitCode

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


def read(
    folder: Path, script: str | None = None, zero: dict | None = None, accelerate: str | None = None, **options: int
) -> Run:
    """The one run of these files' contents."""
    paths = []
    if script is not None:
        (folder / "run.sh").write_text(script)
        paths.append(folder / "run.sh")
    if zero is not None:
        (folder / "zero.json").write_text(json.dumps(zero))
        paths.append(folder / "zero.json")
    if accelerate is not None:
        (folder / "accelerate.yaml").write_text(accelerate)
        paths.append(folder / "accelerate.yaml")
    (run,) = read_runs(sort_paths(map(str, paths)), {}, Options(**options))
    return run


def moved(folder: Path, *contents: Any, **named: Any) -> Migration:
    return migrate(read(folder, *contents, **named))


def told(run: Run) -> Migration:
    """The migration without composing its command, which takes most of the time."""
    decided = decide(run)
    return Migration(run, decided, decided, rows_of(Context(run, decided)), "")


def finetune(folder: Path, flags: str = "", zero: dict | None = ZERO2, gpus: int = 8) -> Migration:
    named = "--deepspeed zero.json " if zero is not None else ""
    launcher = "deepspeed" if zero is not None else f"torchrun --nproc_per_node {gpus}"
    return moved(folder, f"{launcher} llava/train/train_mem.py {named}{FINETUNE}{flags}", zero=zero, gpus=gpus)


def row(done: Migration, key: str) -> Row:
    (found,) = [r for r in done.rows if r.key == key]
    return found


# --- shell ------------------------------------------------------------------------------------------------------------

NASTY = [
    ("a b   c", ["a", "b", "c"]),
    ("a \\\n  b\\\nc", ["a", "bc"]),
    ("a 'b c' \"d e\"f", ["a", "b c", "d ef"]),
    ("a 'it'\"'\"'s' \\$X \"\\$X \\\\ \\n\"", ["a", "it's", "$X", "$X \\ \\n"]),
    ("a # b 'c", ["a"]),
    ("a b#c", ["a", "b#c"]),
    ("X=1; a $X ${X} \"$X\" '$X' X$X", ["a", "1", "1", "1", "$X", "X1"]),
    ("X='1 2'\na $X \"$X\"", ["a", "1", "2", "1 2"]),
    ("export X=v1 Y=2\na $X$Y", ["a", "v12"]),
    ("a ${X:-d} ${X-e} ${X:=f} $X", ["a", "d", "e", "f", "f"]),
    ("X=\na ${X:-d}${X-e}", ["a", "d"]),
    ("Y=2\na ${X:-v$Y}", ["a", "v2"]),
    ("X=1\nX+=2\na $X", ["a", "12"]),
    ("A=(x 'y z' # c\n \\\n w)\na \"${A[@]}\" b", ["a", "x", "y z", "w", "b"]),
    ("N=4\na $((N * 2)) $(( $N + 1 ))", ["a", "8", "5"]),
    ("a $X ${X%.sh} $(nproc --all) `hostname` $1", ["a", "$X", "${X%.sh}", "$(nproc --all)", "`hostname`", "$1"]),
    ("X=1 a $Y", ["a", "$Y"]),
    ("a b > log.txt 2>&1", ["a", "b"]),
    ("a b &> log &", ["a", "b"]),
    ("a b 2>/dev/null | tee log", ["a", "b"]),
    ("if true; then\n  a b\nfi", ["a", "b"]),
    ("a b\r\n", ["a", "b"]),
    ("a ''", ["a", ""]),
    ("a --x=$X.json", ["a", "--x=$X.json"]),
    ("A=(x)\nA+=('y z' w)\na \"${A[@]}\"", ["a", "x", "y z", "w"]),
    ('declare -a A=(x y)\na "${A[@]}"', ["a", "x", "y"]),
    ("X='--b 1'\nX+=' --c 2'\na $X", ["a", "--b", "1", "--c", "2"]),
    ("cat <<EOF >/dev/null\na 'no \"\nEOF\na b", ["a", "b"]),
    ("cat <<-'EOF' | cat\n\tx \"\n\tEOF\na b", ["a", "b"]),
    ("f() {\n  a b\n}\nf", ["a", "b"]),
    ("case x in\n y) X=1;;\nesac\na b", ["a", "b"]),
]


@pytest.mark.parametrize(("text", "words"), NASTY, ids=lambda v: v if isinstance(v, str) else "")
def test_words_of_a_command(text: str, words: list[str]) -> None:
    found = [c for c in commands(text, {}, "x.sh")[0] if c.words[0] == "a"]
    assert [[shown(word) for word in c.words] for c in found] == [words]


BASH = [text for text, _ in NASTY if not re.search(r"nproc|\$1|%|if true|\r", text)]


@pytest.mark.parametrize("text", BASH)
def test_words_are_what_bash_makes_of_them(text: str, tmp_path: Path) -> None:
    """bash itself is the judge, with `a` a function that prints its arguments."""
    program = 'a() { for w in "$@"; do printf \'%s\\0\' "$w"; done >&9; }\n' + text
    script = f"exec 9>&1 >/dev/null 2>&1; {program}"
    environment = {"PATH": os.environ["PATH"]}
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, check=False)
    theirs = done.stdout.decode().split("\0")[:-1]
    (ours,) = [c.words[1:] for c in commands(text, {}, "x.sh")[0] if c.words[0] == "a"]
    unset = re.compile(r"\ue000[^\ue001]*\ue001")
    assert [w for w in (unset.sub("", word) for word in ours) if w] == [w for w in theirs if w]


NOTES = [
    ("X=1\nif [ $1 ]; then X=2; fi", "line 2 sets X inside if, case, for or while: taken as if it ran"),
    ("source env.sh", "line 1: source env.sh is not read; give what it sets as NAME=VALUE"),
    ("cd /x", "line 1: cd /x: start the command from there"),
    ("a\n--lr 1", "line 2: --lr 1 stands alone; is a \\ missing at the end of the line before?"),
]


@pytest.mark.parametrize(("text", "note"), NOTES)
def test_what_only_a_run_could_know_is_noted(text: str, note: str) -> None:
    assert commands(text, {}, "x.sh")[1] == [note]


def test_home_is_left_to_the_shell() -> None:
    found, _ = commands("X=~/x\na ~/d.json $X '~/y' x~", {}, "x.sh")
    assert [shown(word) for word in found[0].words] == ["a", "$HOME/d.json", "$HOME/x", "~/y", "x~"]


@pytest.mark.parametrize(
    ("text", "what"), [('a "b', 'line 1: a " is not closed'), ("\na 'b", "line 2: a ' is missing")]
)
def test_a_quote_that_is_not_closed(text: str, what: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"x.sh, {what}")):
        commands(text, {}, "x.sh")


def test_pasted_command_gives_bash_the_words_that_were_meant(tmp_path: Path) -> None:
    """Names with blanks and quotes, a variable that the script leaves open, and a number of GPUs to come."""
    names = '--data_path "it\'s \\$5 \\"a b\\".json" --output_dir out/$RUN'
    script = f"deepspeed llava/train/train_mem.py {FINETUNE} --deepspeed zero.json {names}"
    done = moved(tmp_path, script, ZERO2)
    pasted = "torchrun() { printf '%s\\n' \"$@\"; }\nRUN='my run' GPUS=8\n" + lines(done.words)
    said = subprocess.run(["bash", "-c", pasted], capture_output=True, text=True, check=True).stdout.splitlines()
    assert {'data.path=it\'s $5 "a b".json', "output_dir=out/my run", "global_batch_size=32"} <= set(said)
    assert said[: said.index("-m")] == ["--standalone", "--nproc-per-node", "8"]
    assert "$RUN is not set in the script" in done.run.notes
    assert done.refused == ""


# --- launchers --------------------------------------------------------------------------------------------------------

LAUNCHES = [
    ("deepspeed x/train.py", None),
    ("deepspeed --num_gpus 4 x/train.py", 4),
    ("deepspeed --num_gpus=4 --num_nodes 2 x/train.py", 8),
    ("deepspeed --include localhost:0,1,3 x/train.py", 3),
    ("deepspeed --include=a:0,1@b:2,3 --master_port 1 x/train.py", 4),
    ("deepspeed --include a@b x/train.py", None),
    ("deepspeed --hostfile h x/train.py", None),
    ("CUDA_VISIBLE_DEVICES=0,1 deepspeed x/train.py", 2),
    ("export CUDA_VISIBLE_DEVICES=0,1,2\ndeepspeed --module x.train", 3),
    ("torchrun x/train.py", 1),
    ("torchrun --nproc_per_node=8 --nnodes 2 --rdzv_endpoint h:1 x/train.py", 16),
    ("torchrun --nproc-per-node 8 --nnodes 1:4 x/train.py", None),
    ("torchrun --nproc-per-node gpu x/train.py", None),
    ("python -m torch.distributed.run --standalone --nproc_per_node 2 -m x.train", 2),
    ("python3.10 -u -m torch.distributed.launch --nproc_per_node 2 --use_env x/train.py", 2),
    ("accelerate launch --num_processes 8 --num_machines 2 --multi_gpu x/train.py", 8),
    ("python x/train.py", 1),
    ("srun -N 1 bash -c 'torchrun --nproc_per_node 4 x/train.py'", 4),
    ("nohup deepspeed --num_gpus $N x/train.py", None),
    ("bash -lc 'torchrun --nproc_per_node 4 x/train.py'", 4),
    ("pip install deepspeed x\necho deepspeed x/train.py\neval deepspeed --num_gpus 4 x/train.py", 4),
    ("python -u -m x.train", 1),
]


@pytest.mark.parametrize(("script", "gpus"), LAUNCHES)
def test_number_of_gpus(script: str, gpus: int | None, tmp_path: Path) -> None:
    end = "'" if script.endswith("'") else ""
    flags = " --output_dir o --per_device_train_batch_size 2 --gradient_accumulation_steps 3"
    done = told(read(tmp_path, script.removesuffix("'") + flags + end))
    assert done.run.gpus == gpus
    assert not done.unknown
    batch, words = shown(done.decided["global_batch_size"]), shown(" ".join(done.words))
    if gpus is not None:
        assert batch == str(6 * gpus)
        assert "$GPUS" not in words and "$NODES" not in words
    else:  # the same names in the launcher's flags and in the batch
        assert batch.startswith("$((")
        assert ("GPUS" in batch) == ("--nproc-per-node $GPUS" in words)
        assert ("NODES" in batch) == ("--nnodes $NODES" in words)
        assert "GPUS" in batch or "NODES" in batch


def test_gpus_given_win(tmp_path: Path) -> None:
    done = moved(tmp_path, "deepspeed --num_gpus 8 train.py --output_dir o", gpus=2)
    assert (done.run.gpus, done.cautions) == (2, ["gpus=2 was given, and the files say 8"])


def test_what_a_script_adds_around_the_flags_is_said(tmp_path: Path) -> None:
    script = 'export A=1\nB=2 torchrun --nnodes 1 --nnodes 1 train.py --output_dir o extra --bf16 True "$@"'
    done = moved(tmp_path, script)
    assert {
        "the script sets A=1, B=2: set for the command too what it needs",
        "--nnodes is given twice; the last one counts",
        "extra belongs to no flag",
        "$@: what the script is called with may add flags or change them",
    } <= set(done.run.notes)
    assert row(done, "(extra)").verdict is Verdict.unsupported
    assert done.decided["output_dir"] == "o"


def test_several_machines(tmp_path: Path) -> None:
    done = moved(
        tmp_path, "deepspeed --num_gpus 8 --num_nodes 2 --master_addr h --master_port 5 train.py --output_dir o"
    )
    said = " ".join(done.words)
    assert "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint h:5 --nproc-per-node 8" in said


def test_several_commands_are_several_runs(tmp_path: Path) -> None:
    (tmp_path / "both.sh").write_text(
        "echo train; python -m llava.eval.model_vqa --x 1\n"
        f"torchrun train.py {FINETUNE} --tune_mm_mlp_adapter True && torchrun train.py {FINETUNE}\n"
    )
    runs = read_runs(sort_paths([str(tmp_path / "both.sh")]), {}, Options())
    assert [run.stage for run in runs] == ["pretrain", "finetune"]
    assert [run.name for run in runs] == ["both.sh:2", "both.sh:2"]


# --- the original's flags ---------------------------------------------------------------------------------------------


def test_flags_as_argparse_takes_them(tmp_path: Path) -> None:
    done = finetune(
        tmp_path, "--learning_rate=1e-3 --weight-decay 0.5 --group_by_m yes --report_to wandb tensorboard "
        "--no_dataloader_pin_memory --tf32 --model_max_length 100 --adam_beta2 0.95",
    )  # fmt: skip
    assert done.decided["optim.lr"] == 1e-3
    assert done.decided["optim.weight_decay"] == 0.5
    assert done.decided["optim.beta2"] == 0.95
    assert done.decided["data.max_length"] == 100
    assert done.run.hf("report_to") == "wandb tensorboard"
    assert done.run.hf("dataloader_pin_memory") is False
    assert done.run.hf("tf32") is True
    assert {
        "--group_by_m is short for --group_by_modality_length",
        "--learning_rate is given twice; the last one counts",
    } <= set(done.run.notes)
    assert sum(r.key == "learning_rate" for r in done.rows) == 1


@pytest.mark.parametrize(
    ("flag", "message"),
    [("--learning_rate fast", "--learning_rate=fast is not a number"), ("--max_steps 1.5", "=1.5 is not a whole"),
     ("--bf16 maybe", "--bf16=maybe must be True or False")],
)  # fmt: skip
def test_values_that_the_original_refuses_too(flag: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        finetune(tmp_path, flag)


def test_an_unknown_flag_is_named(tmp_path: Path) -> None:
    done = finetune(tmp_path, "--mm_projector_tpye linear --frob 3 stray")
    found = {r.key: r.text for r in done.unknown}
    assert found == {"mm_projector_tpye": "unknown to us; did you mean mm_projector_type?", "frob": "unknown to us"}
    assert row(done, "frob").value == ["3", "stray"]


def test_what_the_script_leaves_to_defaults_is_said(tmp_path: Path) -> None:
    """The original's defaults are not ours: the command names every one that differs."""
    flags = "--output_dir o --model_name_or_path lmsys/vicuna-7b-v1.5 --data_path d.json"
    done = moved(tmp_path, f"torchrun --nproc_per_node 4 train.py {flags}")
    cfg = config_of(assignments(done.kept))
    assert (cfg.optim.schedule.value, cfg.optim.lr, cfg.optim.warmup_ratio, cfg.optim.clip) == (
        "linear",
        5e-5,
        0.0,
        1.0,
    )
    assert (cfg.epochs, cfg.data.max_length, cfg.data.image_aspect_ratio.value) == (3, 512, "square")
    assert (cfg.model.select_layer, cfg.model.projector_type, cfg.model.projector) == (-1, "linear", "random")
    assert (cfg.precision.param_dtype.value, cfg.activation_checkpointing.mode.value) == ("fp32", "none")
    assert (cfg.global_batch_size, cfg.micro_batch_size, cfg.data.template) == (32, 8, "v1")
    assert cfg.sharding.strategy.value == "NO_SHARD"
    silent = {r.key for r in done.rows if r.source == "not in the script"}
    assert {
        "lr_scheduler_type",
        "learning_rate",
        "num_train_epochs",
        "model_max_length",
        "mm_vision_select_layer",
    } <= silent
    assert row(done, "mm_use_im_patch_token").verdict is Verdict.unsupported
    assert row(done, "vision_tower").verdict is Verdict.unsupported


STAGES = [
    ("--tune_mm_mlp_adapter True", "pretrain", None),
    ("", "finetune", "p/mm_projector.bin"),
    ("--pretrain_mm_mlp_adapter ''", "finetune", "random"),
    ("--model_name_or_path liuhaotian/llava-v1.5-7b --pretrain_mm_mlp_adapter ''", "finetune_task", None),
    ("--model_name_or_path ./ckpt/llava-x", "finetune", "p/mm_projector.bin"),
]


@pytest.mark.parametrize(("flags", "stage", "projector"), STAGES)
def test_stage(flags: str, stage: str, projector: str | None, tmp_path: Path) -> None:
    done = finetune(tmp_path, flags)
    assert done.decided["stage"] == stage
    assert done.decided.get("model.projector") == projector
    cfg = config_of(assignments(done.kept))
    assert cfg.stage.name == stage
    assert (cfg.model.checkpoint is not None) == (stage == "finetune_task")


@pytest.mark.parametrize(
    ("version", "template", "verdict"),
    [("v0", "v1", Verdict.mapped), ("v0.5", "v1", Verdict.mapped), ("default", "v0", Verdict.mapped),
     ("llava_llama_2", "llava_llama_2", Verdict.mapped), ("vicuna_v1_1", None, Verdict.unsupported)],
)  # fmt: skip
def test_templates(version: str, template: str | None, verdict: Verdict, tmp_path: Path) -> None:
    """v0 trains with vicuna_v1 in the original, and an unknown name silently did so too."""
    done = finetune(tmp_path, f"--version {version}")
    assert done.decided.get("data.template") == template
    assert row(done, "version").verdict is verdict


def test_templates_exist() -> None:
    assert {template(name) for name in TEMPLATES.values()}


def test_tokens_around_pictures_come_with_a_checkpoint(tmp_path: Path) -> None:
    model = "--model_name_or_path my/llava --pretrain_mm_mlp_adapter '' --mm_use_im_start_end True"
    done = finetune(tmp_path, model)
    assert done.kept["model.image_start_end"] is True
    assert row(done, "mm_use_im_start_end").verdict is Verdict.mapped


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--lr_scheduler_type constant --warmup_ratio 0.1", ("constant", 0.0, None)),
        ("--lr_scheduler_type constant_with_warmup --warmup_ratio 0.1", ("constant", 0.1, None)),
        ("--warmup_steps 7 --warmup_ratio 0.1", ("cosine", 0.03, 7)),
        ("--lr_scheduler_type polynomial", ("cosine", 0.03, None)),
    ],
)
def test_schedules(flags: str, expected: tuple, tmp_path: Path) -> None:
    done = finetune(tmp_path, flags)
    optim = config_of(assignments(done.kept)).optim
    assert (optim.schedule.value, optim.warmup_ratio, optim.warmup_steps) == expected
    assert (row(done, "lr_scheduler_type").verdict is Verdict.unsupported) == ("polynomial" in flags)


FLAGS_AND_VERDICTS = [
    ("--fp16 True --bf16 False", "fp16", Verdict.mapped, {"precision": "fp16"}),
    ("--lora_enable True --lora_r 8", "lora_r", Verdict.mapped, {"model.lora.r": 8, "model.lora.alpha": 16}),
    ("--lora_enable True", "lora_enable", Verdict.mapped, {"stage": "finetune_lora"}),
    ("--lora_enable True --lora_bias all", "lora_bias", Verdict.mapped, {"model.lora.bias": "all"}),
    ("--lora_r 8", "lora_r", Verdict.no_effect, {}),
    ("--bits 4", "bits", Verdict.unsupported, {"stage": "finetune"}),
    ("--bits 4 --quant_type fp4", "quant_type", Verdict.unsupported, {"stage": "finetune"}),
    ("--bits 6 --lora_enable True", "bits", Verdict.unsupported, {"stage": "finetune_lora"}),
    ("--bits 4 --lora_enable True", "bits", Verdict.mapped, {"stage": "finetune_qlora", "model.quantize.mode": "nf4"}),
    ("--bits 4 --lora_enable True --quant_type fp4", "quant_type", Verdict.mapped, {"model.quantize.mode": "fp4"}),
    (
        "--bits 4 --lora_enable True --double_quant False",
        "double_quant",
        Verdict.mapped,
        {"model.quantize.double": False},
    ),
    ("--bits 8 --lora_enable True", "bits", Verdict.mapped, {"model.quantize.mode": "int8"}),
    ("--bits 8 --lora_enable True --double_quant True", "double_quant", Verdict.no_effect, {"stage": "finetune_qlora"}),
    (
        "--bits 4 --tune_mm_mlp_adapter True",
        "bits",
        Verdict.mapped,
        {"stage": "pretrain", "model.quantize.mode": "nf4"},
    ),
    ("--mm_use_im_start_end True", "mm_use_im_start_end", Verdict.unsupported, {}),
    ("--group_by_modality_length True", "group_by_modality_length", Verdict.mapped, {}),
    ("", "group_by_modality_length", Verdict.mapped, {"sampler.group_by_modality_length": False}),
    ("--freeze_backbone True", "freeze_backbone", Verdict.unsupported, {"model.train": ["projector"]}),
    ("--freeze_mm_mlp_adapter True", "freeze_mm_mlp_adapter", Verdict.mapped, {"model.train": ["language"]}),
    (
        "--mm_vision_select_feature cls_patch",
        "mm_vision_select_feature",
        Verdict.mapped,
        {"model.select_feature": "full"},
    ),
    ("--image_aspect_ratio anyres", "image_aspect_ratio", Verdict.mapped, {"data.image_aspect_ratio": "square"}),
    ("--save_strategy no", "save_strategy", Verdict.mapped, {"checkpoint.every": None}),
    ("--save_strategy epoch", "save_strategy", Verdict.unsupported, {"checkpoint.every": None}),
    ("--save_total_limit 1", "save_total_limit", Verdict.mapped, {"checkpoint.keep": 2}),
    ("--save_total_limit 5", "save_total_limit", Verdict.mapped, {"checkpoint.keep": 5}),
    ("--max_steps 10", "num_train_epochs", Verdict.no_effect, {"max_steps": 10}),
    ("--num_train_epochs 0.5", "num_train_epochs", Verdict.unsupported, {}),
    ("--ddp_timeout 60", "ddp_timeout", Verdict.mapped, {"comm.timeout": 60}),
    ("--full_determinism True", "full_determinism", Verdict.mapped, {"deterministic": True}),
    ("--optim adafactor", "optim", Verdict.unsupported, {}),
    ("--torch_compile True", "torch_compile", Verdict.mapped, {"compile": True}),
    ("--torch_compile_backend inductor", "torch_compile_backend", Verdict.mapped, {"compile": True}),
    ("--torch_compile_backend eager", "torch_compile_backend", Verdict.mapped, {"compile": False}),
    ("--torch_compile True --torch_compile_backend aot_eager", "torch_compile", Verdict.mapped, {"compile": False}),
    ("--torch_compile_backend tvm", "torch_compile_backend", Verdict.unsupported, {"compile": True}),
    ("--torch_compile False", "torch_compile", Verdict.mapped, {"compile": False}),
    ("--torch_compile False --torch_compile_mode default", "torch_compile", Verdict.no_effect, {"compile": True}),
    ("--torch_compile_mode max-autotune", "torch_compile_mode", Verdict.unsupported, {"compile": True}),
    ("--mm_projector_lr 1e-4", "mm_projector_lr", Verdict.mapped, {"optim.projector_lr": 1e-4}),
    ("--evaluation_strategy steps", "evaluation_strategy", Verdict.unsupported, {}),
    ("--bf16 $X", "bf16", Verdict.unsupported, {"precision": "fp32"}),
]


@pytest.mark.parametrize(("flags", "key", "verdict", "decided"), FLAGS_AND_VERDICTS)
def test_flags(flags: str, key: str, verdict: Verdict, decided: dict, tmp_path: Path) -> None:
    done = finetune(tmp_path, flags)
    assert row(done, key).verdict is verdict
    assert {k: done.decided[k] for k in decided} == decided
    assert not done.unknown and done.refused == ""


# --- DeepSpeed --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "flags", "clip"),
    [({}, "", None), ({"gradient_clipping": "auto"}, "", 1.0),
     ({"gradient_clipping": "auto"}, "--max_grad_norm 0.5", 0.5),
     ({"gradient_clipping": 1.0}, "", 1.0), ({"gradient_clipping": 0}, "--max_grad_norm 0", None)],
)  # fmt: skip
def test_clipping_is_deepspeeds(extra: dict, flags: str, clip: float | None, tmp_path: Path) -> None:
    """Without its key DeepSpeed does not clip, whatever the trainer's max_grad_norm is."""
    assert finetune(tmp_path, flags, ZERO2 | extra).decided["optim.clip"] == clip


def test_clipping_without_deepspeed(tmp_path: Path) -> None:
    done = finetune(tmp_path, zero=None)
    assert (done.decided["optim.clip"], done.decided["sharding"]) == (1.0, "zero0")


ZERO_BLOCKS = [
    ({"stage": [3]}, {}),
    ({"stage": 0}, {"sharding": "zero0"}),
    ({"stage": 1}, {"sharding": "zero1"}),
    ({"stage": "3"}, {"sharding": "zero3"}),
    ({}, {"sharding": "zero0"}),
    ({"stage": 3, "zero_hpz_partition_size": 4}, {"sharding": "hybrid", "sharding.shard_size": 4}),
    ({"stage": 3, "zero_hpz_partition_size": 8}, {"sharding": "zero3"}),
    ({"stage": 3, "mics_shard_size": 2}, {"sharding": "hybrid", "sharding.shard_size": 2}),
]


@pytest.mark.parametrize(("block", "expected"), ZERO_BLOCKS)
def test_zero_stages(block: dict, expected: dict, tmp_path: Path) -> None:
    done = finetune(tmp_path, zero={"zero_optimization": block})
    assert {k: v for k, v in done.decided.items() if k.startswith("sharding")} == expected
    assert done.refused == ""


SCHEDULERS = [
    ({"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}, ("warmup_log", 0.03, None, 0.001)),
    ({"type": "WarmupLR", "params": {"warmup_num_steps": 9, "warmup_max_lr": "auto"}}, ("warmup_log", 0.03, 9, 2e-5)),
    ({"type": "WarmupLR", "params": {"warmup_type": "linear", "warmup_max_lr": 2e-5}}, ("constant", 0.03, 1000, 2e-5)),
    ({"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto", "warmup_max_lr": "auto"}},
     ("warmup_decay", 0.03, None, 2e-5)),
    ({"type": "WarmupDecayLR", "params": {"warmup_type": "linear", "warmup_num_steps": 5, "warmup_max_lr": "auto"}},
     ("linear", 0.03, 5, 2e-5)),
    ({"type": "OneCycle", "params": {"cycle_min_lr": 1}}, ("cosine", 0.03, None, 2e-5)),
]  # fmt: skip


@pytest.mark.parametrize(("block", "expected"), SCHEDULERS)
def test_deepspeed_schedulers_replace_the_trainers(block: dict, expected: tuple, tmp_path: Path) -> None:
    done = finetune(tmp_path, zero=ZERO2 | {"scheduler": block})
    optim = config_of(assignments(done.kept)).optim
    assert (optim.schedule.value, optim.warmup_ratio, optim.warmup_steps, optim.lr) == expected
    assert row(done, "lr_scheduler_type").verdict is Verdict.no_effect
    assert (row(done, "scheduler.type").verdict is Verdict.unsupported) == (block["type"] == "OneCycle")


def test_deepspeed_optimizer_has_one_group(tmp_path: Path) -> None:
    """It bypasses LLaVA's own group for the projector."""
    params = {"lr": "auto", "betas": [0.9, 0.999], "eps": "auto", "torch_adam": True}
    zero = ZERO2 | {"optimizer": {"type": "AdamW", "params": params}}
    done = finetune(tmp_path, "--mm_projector_lr 1e-4", zero)
    assert done.decided["optim.projector_lr"] is None
    assert row(done, "mm_projector_lr").verdict is Verdict.no_effect
    assert row(done, "optimizer.params.lr").resolved == 2e-5
    other = finetune(tmp_path, zero=ZERO2 | {"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 400}}})
    assert (
        row(other, "optimizer.type").verdict
        is row(other, "optimizer.params.freeze_step").verdict
        is Verdict.unsupported
    )


@pytest.mark.parametrize(
    ("zero", "key"),
    [({"train_micro_batch_size_per_gpu": 3}, "train_micro_batch_size_per_gpu"),
     ({"train_batch_size": 31}, "train_batch_size"),
     ({"gradient_clipping": 0.5}, "gradient_clipping"), ({"bf16": {"enabled": False}}, "bf16.enabled")],
)  # fmt: skip
def test_values_that_contradict_the_script(zero: dict, key: str, tmp_path: Path) -> None:
    """transformers refuses them; so the table says."""
    found = row(finetune(tmp_path, zero=ZERO2 | zero), key)
    assert found.verdict is Verdict.unsupported and "the original refuses to start" in found.text


def test_booleans_and_numbers_written_as_text(tmp_path: Path) -> None:
    zero = {"bf16": {"enabled": "true"}, "zero_optimization": {"stage": "2", "zero_quantized_weights": "false"}}
    done = finetune(tmp_path, zero=zero | {"fp16": {"enabled": "False", "loss_scale": 0}})
    assert row(done, "bf16.enabled").verdict is Verdict.mapped
    assert row(done, "fp16.enabled").verdict is Verdict.implied
    assert row(done, "zero_optimization.zero_quantized_weights").verdict is Verdict.implied
    assert done.decided["sharding"] == "zero2"


def test_numbers_written_as_text_are_read_and_said(tmp_path: Path) -> None:
    done = finetune(tmp_path, zero=ZERO2 | {"gradient_clipping": "1.0", "train_micro_batch_size_per_gpu": "4"})
    assert done.decided["optim.clip"] == 1.0
    for key in ("gradient_clipping", "train_micro_batch_size_per_gpu"):
        assert row(done, key).verdict is Verdict.mapped and "written as text" in row(done, key).text


BATCHES = [
    # DeepSpeed's runtime/config.py: what is given, on so many GPUs, and what it makes of that
    ({"train_batch_size": 32}, 4, (32, 8)),
    ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2}, 8, (32, 2)),
    ({"train_batch_size": 32, "gradient_accumulation_steps": 2}, 8, (32, 2)),
    ({"train_micro_batch_size_per_gpu": 2}, 3, (6, 2)),
    ({"train_micro_batch_size_per_gpu": "2", "gradient_accumulation_steps": 5}, 3, (30, 2)),
    ({"train_batch_size": 32}, 3, "32 is not micro-batch 10 x accumulation 1 x 3 GPUs"),
    ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}, 4,
     "8 is not micro-batch 1 x accumulation 1 x 4 GPUs"),
    ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}, 3, "32 is not micro-batch 4 x accumulation 2 x 3"),
]  # fmt: skip


@pytest.mark.parametrize(("zero", "gpus", "expected"), BATCHES)
def test_batch_of_a_json_alone(zero: dict, gpus: int, expected: tuple | str, tmp_path: Path) -> None:
    done = told(read(tmp_path, zero=zero, gpus=gpus))
    if isinstance(expected, str):
        (caution,) = done.cautions
        assert "the original refuses to start" in caution and expected in caution
        assert row(done, "train_batch_size").verdict is Verdict.unsupported
    else:
        assert (done.kept["global_batch_size"], done.kept["micro_batch_size"]) == expected
        assert done.cautions == []


def test_optimizer_of_the_json_alone_counts(tmp_path: Path) -> None:
    """A key that DeepSpeed's entry leaves out has DeepSpeed's default, not the trainer's flag."""
    done = finetune(tmp_path, "--weight_decay 0.1", zero=ZERO2 | {"optimizer": {"type": "Adam", "params": {}}})
    assert (done.decided["optim.lr"], done.decided["optim.weight_decay"]) == (1e-3, 0.0)
    assert row(done, "learning_rate").verdict is row(done, "weight_decay").verdict is Verdict.no_effect
    assert row(done, "optimizer.params.lr").source == "zero.json (not in it)"
    torch = {"optimizer": {"type": "AdamW", "params": {"torch_adam": "true"}}}
    assert finetune(tmp_path, zero=ZERO2 | torch).decided["optim.weight_decay"] == 0.01


def test_deepspeeds_warmup_gives_all_groups_one_rate(tmp_path: Path) -> None:
    zero = ZERO2 | {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_lr": "auto", "total_num_steps": 7}}}
    done = finetune(tmp_path, "--mm_projector_lr 1e-4 --max_steps 7", zero)
    assert done.decided["optim.projector_lr"] is None
    assert row(done, "mm_projector_lr").verdict is Verdict.no_effect
    assert row(done, "scheduler.params.total_num_steps").verdict is Verdict.implied


DEEPSPEED_VERDICTS = [
    ({"optimizer": {"type": "Adam", "params": {"bias_correction": False}}}, Verdict.unsupported),
    ({"optimizer": {"type": "Adam", "params": {"bias_correction": "true"}}}, Verdict.implied),
    ({"optimizer": {"type": "Adam", "params": {"weight_decay": 0.1, "adam_w_mode": "True"}}}, Verdict.implied),
    ({"optimizer": {"type": "Adam", "params": {"weight_decay": 0.1, "adam_w_mode": False}}}, Verdict.unsupported),
    ({"zero_optimization": True}, Verdict.mapped),
    ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}}, Verdict.unsupported),
    ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 16}}, Verdict.mapped),
    ({"zero_optimization": {"stage": 3, "stage3_gather_fp16_weights_on_model_save": True}}, Verdict.implied),
    ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, Verdict.mapped),
    ({"zero_optimization": {"stage": 3, "zenflow": {"topk_ratio": 0.1}}}, Verdict.unsupported),
    ({"zero_optimization": {"stage": 3}, "aio": {"block_size": 1}}, Verdict.no_effect),
    ({"tensor_parallel": {"autotp_size": 1}}, Verdict.implied),
    ({"activation_checkpointing": {"cpu_checkpointing": "true"}}, Verdict.mapped),
    ({"activation_checkpointing": {"cpu_checkpointing": False}}, Verdict.no_effect),
    ({"activation_checkpointing": {"partition_activations": True}}, Verdict.no_effect),
]


@pytest.mark.parametrize(("zero", "verdict"), DEEPSPEED_VERDICTS, ids=str)
def test_deepspeed_keys(zero: dict, verdict: Verdict, tmp_path: Path) -> None:
    """The last key of the file."""
    assert row(told(read(tmp_path, zero=zero, gpus=8)), list(flat(zero))[-1]).verdict is verdict


def test_fp16_that_contradicts_the_script(tmp_path: Path) -> None:
    found = row(finetune(tmp_path, "--fp16 True --bf16 False", {"fp16": {"enabled": False}}), "fp16.enabled")
    assert found.verdict is Verdict.unsupported and "the original refuses to start: --fp16 is True" in found.text


DYNAMIC = {"loss_scale": 0, "initial_scale_power": 20, "loss_scale_window": 500, "hysteresis": 3, "min_loss_scale": 2}


def test_deepspeeds_loss_scale(tmp_path: Path) -> None:
    """All five settings, under their own names; a fixed scale leaves the others without effect, as there."""
    done = finetune(tmp_path, "--fp16 True --bf16 False", {"fp16": {"enabled": "auto", **DYNAMIC}})
    precision = config_of(assignments(done.kept)).precision
    scaler = precision.scaler
    assert (precision.param_dtype.value, precision.master_dtype.value) == ("fp16", "fp32")
    assert (scaler.scale, scaler.initial_power, scaler.window, scaler.hysteresis, scaler.minimum) == (
        None, 20, 500, 3, 2.0,
    )  # fmt: skip
    assert {row(done, f"fp16.{key}").verdict for key in ("enabled", *DYNAMIC)} == {Verdict.mapped}
    done = told(read(tmp_path, zero={"fp16": {"enabled": True, **DYNAMIC, "loss_scale": 128}}))
    assert done.decided["precision"] == "fp16" and done.decided["precision.scaler.scale"] == 128.0
    assert row(done, "fp16.loss_scale").verdict is Verdict.mapped
    assert {row(done, f"fp16.{key}").verdict for key in DYNAMIC if key != "loss_scale"} == {Verdict.no_effect}


def test_details_of_fp16(tmp_path: Path) -> None:
    details = {"auto_cast": True, "consecutive_hysteresis": True, "fp16_master_weights_and_grads": True}
    done = told(read(tmp_path, zero={"fp16": {"enabled": True, **details}}))
    verdicts = [row(done, f"fp16.{key}").verdict for key in details]
    assert verdicts == [Verdict.implied, Verdict.unsupported, Verdict.unsupported]
    done = told(read(tmp_path, zero={"fp16": {"enabled": True, **dict.fromkeys(details, False)}}))
    assert {row(done, f"fp16.{key}").verdict for key in details} == {Verdict.implied}


def test_fp16_without_deepspeed_is_torchs_scaler(tmp_path: Path) -> None:
    done = finetune(tmp_path, "--fp16 True --bf16 False", zero=None)
    scaler = config_of(assignments(done.kept)).precision.scaler
    assert (scaler.initial_power, scaler.window, scaler.hysteresis) == (16, 2000, 1)
    assert row(done, "fp16").verdict is Verdict.mapped and "GradScaler" in row(done, "fp16").text


@pytest.mark.parametrize(
    ("block", "master", "moments"),
    [({"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}, "bf16", "bf16"),
     ({"bf16_master_weights_and_grads": True}, "bf16", "fp32"),
     ({"bf16_optimizer_states": True}, "fp32", "fp32")],
)  # fmt: skip
def test_deepspeeds_masters_in_bf16(block: dict, master: str, moments: str, tmp_path: Path) -> None:
    done = moved(tmp_path, zero={"bf16": {"enabled": True, **block}}, gpus=8)
    precision = config_of(assignments(done.kept)).precision
    assert (precision.master_dtype.value, precision.moment_dtype.value) == (master, moments)
    wanted = Verdict.mapped if master == "bf16" else Verdict.no_effect
    assert {row(done, f"bf16.{key}").verdict for key in block} == {wanted}


@pytest.mark.parametrize(("word", "precision"), [("fp16", "fp16"), ("fp8", "fp8"), ("bf16", "bf16")])
def test_accelerates_mixed_precision(word: str, precision: str, tmp_path: Path) -> None:
    done = moved(
        tmp_path,
        accelerate=ACCELERATE_FSDP.format(strategy=1).replace("mixed_precision: no", f"mixed_precision: {word}"),
    )
    assert done.decided["precision"] == precision and done.refused == ""
    assert row(done, "mixed_precision").verdict is Verdict.mapped
    assert config_of(assignments(done.kept)).precision.linear.value == ("fp8" if word == "fp8" else "same")


OFFLOADS = [
    # DeepSpeed's blocks, and what becomes of them
    ({"stage": 3, "offload_optimizer": {"device": "none"}}, "none", None),
    ({"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}, "params", None),
    ({"stage": 1, "offload_optimizer": {"device": "cpu"}}, "optimizer", None),
    ({"stage": 2, "offload_param": {"device": "cpu"}}, "none", None),  # DeepSpeed: with stage 3 alone
    ({"stage": 3, "offload_param": {"device": "cpu"}}, "params", None),
    ({"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/disk"}}, "nvme", "/disk"),
    ({"stage": 3, "cpu_offload": True}, "params", None),
    ({"stage": 3, "cpu_offload_param": True}, "params", None),
]


@pytest.mark.parametrize(("block", "mode", "folder"), OFFLOADS, ids=str)
def test_offload_of_deepspeed(block: dict, mode: str, folder: str | None, tmp_path: Path) -> None:
    done = finetune(tmp_path, zero={"zero_optimization": block})
    assert (done.decided.get("offload", "none"), done.decided.get("offload.folder")) == (mode, folder)
    cfg = config_of(assignments(done.kept))
    assert (cfg.offload.mode.value, cfg.offload.folder) == (mode, folder)


def test_details_of_offload_are_explained(tmp_path: Path) -> None:
    block = {
        "stage": 3,
        "offload_param": {"device": "nvme", "nvme_path": "/disk", "pin_memory": True, "buffer_size": 1e8},
        "offload_optimizer": {"device": "cpu", "nvme_path": "/x", "ratio": 0.3, "pipeline": True},
    }
    done = finetune(tmp_path, zero={"zero_optimization": block, "aio": {"queue_depth": 8}})
    verdicts = {r.key.removeprefix("zero_optimization."): r.verdict for r in done.rows if "offload" in r.key}
    assert verdicts == {
        "offload_param.device": Verdict.mapped,
        "offload_param.nvme_path": Verdict.mapped,
        "offload_param.pin_memory": Verdict.implied,
        "offload_param.buffer_size": Verdict.implied,
        "offload_optimizer.device": Verdict.mapped,
        "offload_optimizer.nvme_path": Verdict.no_effect,
        "offload_optimizer.ratio": Verdict.unsupported,
        "offload_optimizer.pipeline": Verdict.implied,
    }
    assert row(done, "aio.queue_depth").verdict is Verdict.implied
    assert (done.decided["offload"], done.decided["offload.folder"]) == ("nvme", "/disk")


@pytest.mark.parametrize(
    ("said", "verdict", "decided"),
    [
        ("INDUCTOR", Verdict.mapped, {"compile": True}),
        ("TVM", Verdict.unsupported, {"compile": True}),
        ("AOT_EAGER", Verdict.mapped, {"compile": False}),
        ("'NO'", Verdict.mapped, {"compile": False}),
    ],
)
def test_accelerates_compiler(said: str, verdict: Verdict, decided: dict, tmp_path: Path) -> None:
    text = (
        ACCELERATE_FSDP.format(strategy=1) + f"dynamo_config:\n  dynamo_backend: {said}\n  dynamo_mode: max-autotune\n"
    )
    done = moved(tmp_path, accelerate=text)
    assert row(done, "dynamo_config.dynamo_backend").verdict is verdict
    of_mode = Verdict.unsupported if decided["compile"] else Verdict.no_effect
    assert row(done, "dynamo_config.dynamo_mode").verdict is of_mode
    assert {k: done.decided[k] for k in decided} == decided and done.refused == ""


def test_offload_of_accelerate(tmp_path: Path) -> None:
    done = moved(tmp_path, accelerate=ACCELERATE_FSDP.replace("params: false", "params: true").format(strategy="1"))
    assert (done.decided["sharding"], done.decided["offload"]) == ("zero3", "params")
    assert row(done, "fsdp_config.fsdp_offload_params").verdict is Verdict.mapped
    text = ACCELERATE_ZERO.replace("device: none", "device: nvme\n  offload_optimizer_nvme_path: /disk")
    done = moved(tmp_path, accelerate=text)
    assert (done.decided["offload"], done.decided["offload.folder"]) == ("nvme", "/disk")
    assert row(done, "deepspeed_config.offload_optimizer_nvme_path").verdict is Verdict.mapped


EVERYTHING = {
    "train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "steps_per_print": 10,
    "optimizer": {"type": "Lamb", "params": {"lr": 1e-3, "max_coeff": 0.3, "bias_correction": False}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 9, "cos_min_ratio": 0.1}},
    "communication_data_type": "bf16", "prescale_gradients": False, "gradient_predivide_factor": 1.0,
    "sparse_gradients": False, "fp16": {"enabled": False, "auto_cast": False, "consecutive_hysteresis": False},
    "bf16": {"enabled": True}, "amp": {"enabled": False, "opt_level": "O1"}, "gradient_clipping": 1.0,
    "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, "wall_clock_breakdown": False,
    "dump_state": False, "memory_breakdown": False, "dataloader_drop_last": False,
    "zero_optimization": {
        "stage": 3, "allgather_partitions": True, "allgather_bucket_size": 5e8, "overlap_comm": True,
        "reduce_scatter": True, "reduce_bucket_size": 5e8, "contiguous_gradients": True, "grad_hooks": True,
        "round_robin_gradients": False, "load_from_fp32_weights": True, "ignore_unused_parameters": True,
        "offload_param": {"device": "nvme", "nvme_path": "/x", "pin_memory": True, "buffer_count": 5, "buffer_size": 1,
                          "max_in_cpu": 1},
        "offload_optimizer": {"device": "cpu", "nvme_path": "/x", "ratio": 0.3, "buffer_count": 4, "fast_init": False,
                              "pipeline": True, "pipeline_read": True, "pipeline_write": True},
        "cpu_offload": False, "stage3_max_live_parameters": 1, "stage3_max_reuse_distance": 1,
        "stage3_prefetch_bucket_size": 1, "stage3_param_persistence_threshold": 1, "sub_group_size": 1,
        "stage3_model_persistence_threshold": 1, "elastic_checkpoint": False,
        "stage3_gather_16bit_weights_on_model_save": True,
        "zero_hpz_partition_size": 1, "zero_quantized_weights": False, "zero_quantized_gradients": False,
        "zero_quantized_nontrainable_weights": False, "mics_shard_size": -1, "mics_hierarchical_params_gather": False,
        "memory_efficient_linear": True, "legacy_stage1": False, "stage3_use_all_reduce_for_fetch_params": False,
        "stage3_module_granularity_threshold": 0, "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024},
    },
    "activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": False, "number_checkpoints": None,
                                 "contiguous_memory_optimization": False, "synchronize_checkpoint_boundary": False,
                                 "profile": False},
    "flops_profiler": {"enabled": False, "profile_step": 1, "module_depth": -1, "top_modules": 1, "detailed": True},
    "tensorboard": {"enabled": True, "output_path": "x", "job_name": "y"}, "wandb": {"enabled": False, "project": "x"},
    "csv_monitor": {"enabled": False}, "comet": {"enabled": False}, "comms_logger": {"enabled": False},
    "aio": {"block_size": 1048576, "queue_depth": 8, "thread_count": 1, "single_submit": False, "overlap_events": True},
    "autotuning": {"enabled": False, "fast": True}, "elasticity": {"enabled": False, "micro_batch_sizes": [2]},
    "data_efficiency": {"enabled": False, "data_routing": {"enabled": True, "random_ltd": {"enabled": True}}},
    "curriculum_learning": {"enabled": True, "curriculum_type": "seqlen"},
    "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}},
    "sparse_attention": {"mode": "fixed", "block": 16}, "progressive_layer_drop": {"enabled": False},
    "checkpoint": {"tag_validation": "Warn", "load_universal": False, "use_node_local_storage": False,
                   "parallel_write": {"pipeline_stage": False}},
    "data_types": {"grad_accum_dtype": "fp32"}, "hybrid_engine": {"enabled": False}, "eigenvalue": {"enabled": False},
    "tensor_parallel": {"autotp_size": 4}, "nebula": {"enabled": False}, "pipeline": {"stages": "auto"},
}  # fmt: skip


def test_every_documented_block_of_deepspeed_is_known(tmp_path: Path) -> None:
    done = moved(tmp_path, zero=EVERYTHING)
    assert [(r.key, r.value) for r in done.rows if "(not in it)" not in r.source] == list(flat(EVERYTHING).items())
    assert done.unknown == []
    verdicts = {r.key: r.verdict for r in done.rows}
    for key in ("optimizer.type", "scheduler.type", "tensorboard.enabled", "curriculum_learning.curriculum_type",
                "compression_training.weight_quantization.shared_parameters.enabled", "tensor_parallel.autotp_size",
                "sparse_attention.mode", "zero_optimization.offload_optimizer.ratio"):  # fmt: skip
        assert verdicts[key] is Verdict.unsupported, key
    for key in ("amp.opt_level", "flops_profiler.detailed", "wandb.project", "elasticity.micro_batch_sizes",
                "data_efficiency.data_routing.random_ltd.enabled", "zero_optimization.cpu_offload",
                "aio.block_size"):  # fmt: skip
        assert verdicts[key] is Verdict.implied, key


def test_an_unknown_key_of_deepspeed_is_named(tmp_path: Path) -> None:
    done = moved(tmp_path, zero={"zero_optimization": {"stage": 2, "overlap_com": True}, "x": {}, "fp16": {}})
    assert {r.key: r.text for r in done.unknown} == {
        "zero_optimization.overlap_com": "unknown to us; did you mean zero_optimization.overlap_comm?",
        "x": "unknown to us",
    }  # fmt: skip


def test_tables_have_an_answer_for_their_own_keys() -> None:
    assert all(deepspeed_rule(key.replace("*", "any")) is not None for key in DEEPSPEED)
    assert all(accelerate_rule(key.replace("*", "any")) is not None for key in ACCELERATE)


def test_activations_on_the_host(tmp_path: Path) -> None:
    """LLaVA's models never call DeepSpeed's own checkpointing; what a JSON alone is for is not known."""
    block = {"activation_checkpointing": {"cpu_checkpointing": True}}
    alone = moved(tmp_path, zero=ZERO2 | block)
    assert alone.kept["activation_checkpointing"] == "offload" and not alone.refused
    scripts = finetune(tmp_path, zero=ZERO2 | block)
    assert scripts.decided["activation_checkpointing"] == "full"
    found = row(scripts, "activation_checkpointing.cpu_checkpointing")
    assert (
        found.verdict is Verdict.no_effect and "activation_checkpointing=offload does what this asks for" in found.text
    )


@pytest.mark.parametrize(("said", "activation_checkpointing"), [("true", "full"), ("false", "none")])
def test_accelerates_checkpointing(said: str, activation_checkpointing: str, tmp_path: Path) -> None:
    fsdp = f"distributed_type: FSDP\nfsdp_config:\n  fsdp_activation_checkpointing: {said}\n"
    done = moved(tmp_path, accelerate=fsdp)
    assert done.kept["activation_checkpointing"] == activation_checkpointing
    assert (
        row(done, "fsdp_config.fsdp_activation_checkpointing").text
        == f"activation_checkpointing={activation_checkpointing}"
    )


def test_json_alone_says_what_it_can(tmp_path: Path) -> None:
    zero = ZERO2 | {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "train_batch_size": "auto"}
    done = moved(tmp_path, zero=zero, gpus=4)
    assert done.kept == {
        "sharding": "zero2", "optim.clip": None, "micro_batch_size": 4, "global_batch_size": 32,
    }  # fmt: skip
    assert "give that as another PATH" in row(done, "bf16.enabled").text
    assert row(done, "bf16.enabled").resolved == "--bf16 (false where it is not given)"
    assert row(done, "train_batch_size").resolved == 32


VALUES = [0, 1, 3, -1, 2e-5, 1e9, 1e999, "auto", "5e8", "true", "False", "x y", "", None, True, False, [], {},
          [1, {"a": 2}], {"device": "cpu"}, {"enabled": "auto"}, "é\n\x1b"]  # fmt: skip


def some_json(draw: random.Random, depth: int = 0) -> dict:
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


@pytest.mark.parametrize("seed", range(100))
def test_no_key_of_any_json_is_dropped(seed: int, tmp_path: Path) -> None:
    """Every leaf is one row with an answer, and every override of the command stands in a row."""
    draw = random.Random(seed)
    content = some_json(draw)
    (tmp_path / "zero.json").write_text(json.dumps(content).replace("Infinity", "1e999"))
    script = tmp_path / "run.sh"
    script.write_text(f"deepspeed train.py --deepspeed zero.json {FINETUNE}")
    paths = [str(tmp_path / "zero.json"), *[str(script)] * draw.randint(0, 1)]
    gpus = {"gpus": draw.choice([1, 2, 3, 8])} if draw.random() < 0.8 else {}
    (run,) = read_runs(sort_paths(paths), {}, Options(**gpus))
    done = told(run)
    said = json.loads(json.dumps(entry.as_json(done), allow_nan=False))
    assert [r["key"] for r in said["keys"] if r["source"] == "zero.json"] == list(flat(json.loads(json.dumps(content))))
    assert all(r["text"] and r["verdict"] for r in said["keys"])
    if not run.launch:
        texts = " ".join(r["text"] for r in said["keys"])
        assert [key for key in done.decided if f"{key}=" not in texts] == []


# --- which file -------------------------------------------------------------------------------------------------------


def test_where_a_named_json_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here, beside the script and in the folders around it; a file that was given wins."""
    monkeypatch.chdir(tmp_path)
    tree = tmp_path / "tree"
    (tree / "scripts" / "v1_5").mkdir(parents=True)
    script = tree / "scripts" / "v1_5" / "run.sh"
    script.write_text("deepspeed train.py --output_dir o --deepspeed ./scripts/zero.json")

    def stage(*given: Path) -> tuple[object, list[str]]:
        (run,) = read_runs(sort_paths(map(str, [script, *given])), {}, Options())
        return migrate(run).decided.get("sharding"), list(run.notes)

    assert stage() == (None, ["./scripts/zero.json was not found: give it as another PATH"])
    (tree / "scripts" / "zero.json").write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    assert stage() == ("zero1", [])
    (tmp_path / "mine.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    assert stage(tmp_path / "mine.json")[0] == "zero3"
    (tmp_path / "zero.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    assert stage(tmp_path / "zero.json") == ("zero2", [])


def test_a_json_that_is_missing_leaves_clipping_open(tmp_path: Path) -> None:
    done = moved(tmp_path, f"deepspeed train.py --deepspeed gone.json {FINETUNE}", gpus=8)
    assert not {"optim.clip", "sharding"} & done.decided.keys()
    assert row(done, "deepspeed").verdict is Verdict.unsupported
    assert entry.incomplete(done)


# --- Accelerate -------------------------------------------------------------------------------------------------------

ACCELERATE_ZERO = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config:
  gradient_accumulation_steps: 1
  gradient_clipping: 0.5
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
  fsdp_sharding_strategy: {strategy}
mixed_precision: no
num_processes: 8
"""


def test_accelerate_with_deepspeed(tmp_path: Path) -> None:
    script = f"accelerate launch --config_file accelerate.yaml --main_process_port 1 train.py {FINETUNE}"
    done = moved(tmp_path, script, accelerate=ACCELERATE_ZERO)
    cfg = config_of(assignments(done.kept))
    assert (done.run.gpus, cfg.global_batch_size) == (4, 16)
    assert (cfg.sharding.strategy.value, cfg.optim.clip) == ("FULL_SHARD", 0.5)
    assert not done.unknown and len({(r.source, r.key) for r in done.rows}) == len(done.rows)


@pytest.mark.parametrize(
    ("strategy", "sharding"),
    [
        ("FULL_SHARD", "zero3"),
        ("2", "zero2"),
        ("HYBRID_SHARD", "hybrid"),
        ("HYBRID_SHARD_ZERO2", "hybrid2"),
        ("3", "zero0"),
    ],
)
def test_accelerate_with_fsdp(strategy: str, sharding: str, tmp_path: Path) -> None:
    done = moved(tmp_path, accelerate=ACCELERATE_FSDP.format(strategy=strategy))
    assert (done.decided["sharding"], done.decided["precision"], done.run.gpus) == (sharding, "fp32", 8)
    assert not done.unknown


def test_accelerates_own_file_of_defaults(tmp_path: Path) -> None:
    """What `accelerate config` always writes besides."""
    text = (
        "tpu_env: []\ntpu_use_cluster: false\ndowncast_bf16: 'no'\ngpu_ids: 2,3\nmain_training_function: main\n"
        "rdzv_backend: static\nsame_network: true\nuse_cpu: false\ndebug: false\nmachine_rank: 0\nnum_processes: 2\n"
        "enable_cpu_affinity: false\nmegatron_lm_config: {}\nbase_job_name: 2024-01-01\n"
    )
    done = moved(tmp_path, accelerate=text)
    assert done.words[0] == "CUDA_VISIBLE_DEVICES=2,3"
    assert [r.key for r in done.rows if r.verdict is Verdict.unsupported] == ["base_job_name"]
    said: Any = json.loads(json.dumps(entry.as_json(done)))
    assert said["keys"][-1]["value"] == "2024-01-01"


def test_clipping_of_accelerate_that_contradicts_the_script(tmp_path: Path) -> None:
    done = moved(tmp_path, f"accelerate launch train.py {FINETUNE}", accelerate=ACCELERATE_ZERO)
    assert any("gradient_clipping: the original refuses to start" in caution for caution in done.cautions)


def test_files_of_another_kind_are_told(tmp_path: Path) -> None:
    (caution,) = moved(tmp_path, zero={"architectures": ["LlavaLlama"], "model_type": "llava"}).cautions
    assert caution == "no key of zero.json is one of DeepSpeed's; is it another file?"


def test_fsdp_of_the_trainer(tmp_path: Path) -> None:
    done = finetune(
        tmp_path, '--fsdp "full_shard auto_wrap" --fsdp_transformer_layer_cls_to_wrap LlamaDecoderLayer', None
    )
    assert (done.decided["sharding"], done.decided["optim.clip"]) == ("zero3", 1.0)
    assert "offload" not in done.decided
    offloaded = finetune(tmp_path, '--fsdp "shard_grad_op offload"', None)
    assert row(offloaded, "fsdp").verdict is Verdict.mapped and offloaded.decided["offload"] == "params"


# --- the entry --------------------------------------------------------------------------------------------------------


def run_entry(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "llava_fsdp.migrate", *arguments]
    return subprocess.run(command, check=False, cwd=cwd, capture_output=True, text=True, timeout=120)


def test_entry(tmp_path: Path) -> None:
    (tmp_path / "zero.json").write_text(json.dumps(ZERO2))
    (tmp_path / "run.sh").write_text(f"deepspeed train.py --deepspeed zero.json {FINETUNE} --version $V --frob 1")
    done = run_entry("run.sh", "gpus=8", "V=plain", "format=json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (ExitCode.DONE, "")
    (run,) = json.loads(done.stdout)["runs"]
    assert run["overrides"]["data.template"] == "plain" and run["unknown"] == ["frob"] and run["gpus"] == 8
    assert sum(run["counts"].values()) == len(run["keys"])

    (tmp_path / "odd.json").write_text('\ufeff{"x\\nrm": 1, "\\ud800": 1e999, "zero_optimization": {"stage": 2}}')
    odd = run_entry("odd.json", cwd=tmp_path)
    assert odd.returncode == ExitCode.DONE
    assert "# without: x\\nrm, \\ud800 (see the table)" in odd.stdout

    text = run_entry("run.sh", "strict=true", cwd=tmp_path)
    assert text.returncode == ExitCode.USER and "Traceback" not in text.stderr
    assert '"data.template=$V"' in text.stdout and "$V is not set in the script" in text.stdout
    assert "1 of them unknown to us: frob" in text.stdout
    assert "add compat=llava_v1_5" in text.stdout and "# compile=auto compiles blocks on CUDA" in text.stdout
    (tmp_path / "off.sh").write_text(f"torchrun train.py {FINETUNE} --torch_compile False")
    off = run_entry("off.sh", cwd=tmp_path).stdout
    assert "compile=false" in off and "compile=auto" not in off.partition("\n\n")[0]
    assert all(len(line) <= 140 for line in text.stdout.splitlines() if line[:1] in "│┃├")


@pytest.mark.parametrize("width", [80, 120, 140, 148, 200])
def test_the_table_keeps_every_word_at_any_width(width: int, tmp_path: Path) -> None:
    """Beside the longest key that is written in one piece where there is room."""
    long = "stage3_gather_16bit_weights_on_model_save"
    done = finetune(tmp_path, "--frob 1", {"zero_optimization": {"stage": 3, long: True}, "bf16": {"enabled": "auto"}})
    written = io.StringIO()
    console = Console(width=width, file=written, highlight=False, markup=False)
    console.print(entry.table(done.rows, width))
    lines = written.getvalue().splitlines()
    assert all(len(line) == width for line in lines[1:2]) and {line[-1] for line in lines} <= set("┓┃┩│┤┘")
    cells = [[cell.strip() for cell in line[1:-1].split("│")] for line in lines if line[:1] == "│"]
    columns = ["".join(cell[n] for cell in cells).replace(" ", "") for n in range(4)]
    for found in done.rows:
        for n, text in ((0, found.key), (2, found.verdict.value), (3, found.text)):
            assert entry.comment(text).replace(" ", "") in columns[n], (width, text)
    assert (f"zero_optimization.{long}" in written.getvalue()) == (width >= 140)


TRACKED = [
    ("none", {}, Verdict.implied, "metrics.jsonl has every step"),
    ("wandb", {"track.wandb": "online"}, Verdict.mapped, "track.wandb=online"),
    ("tensorboard", {"track.tensorboard": True}, Verdict.mapped, "track.tensorboard=true"),
    ("wandb tensorboard", {"track.wandb": "online", "track.tensorboard": True}, Verdict.mapped,
     "track.wandb=online, track.tensorboard=true"),
    ("all", {"track.wandb": "online", "track.tensorboard": True}, Verdict.mapped,
     "track.wandb=online, track.tensorboard=true: the original takes those that are installed"),
    ("wandb mlflow", {"track.wandb": "online"}, Verdict.unsupported,
     "track.wandb=online; mlflow is not told; metrics.jsonl has every step, and report.html shows it"),
    ("$WHERE", {}, Verdict.unsupported, "$WHERE is not known; say track.wandb=online or track.tensorboard=true"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "overrides", "verdict", "text"), TRACKED)
def test_trackers_become_ours(value: str, overrides: dict, verdict: Verdict, text: str, tmp_path: Path) -> None:
    done = finetune(tmp_path, f"--report_to {value} --run_name mine")
    tracked = {key: kept for key, kept in done.kept.items() if key.startswith("track.")}
    name = {"track.name": "mine"} if "track.wandb" in overrides else {}
    assert tracked == overrides | name and done.refused == ""
    assert (row(done, "report_to").verdict, row(done, "report_to").text) == (verdict, text)
    assert row(done, "run_name").verdict is (Verdict.mapped if name else Verdict.unsupported)


MISTAKES = [
    (["gone.sh"], "gone.sh is not here"),
    (["."], ". is a folder"),
    (["a.py"], "a.py is a Python program"),
    (["list.json"], "list.json holds a list, not an object of settings; is it a dataset?"),
    (["twice.json"], "twice.json has a twice"),
    (["bad.json"], "bad.json is not JSON"),
    (["comment.json"], "comment.json is not JSON"),
    (["nan.json"], "nan.json is not JSON: NaN is no number of JSON"),
    (["none.json"], "none.json is empty"),
    (["dots.json"], "dots.json has a.b twice, once with a dot in a name"),
    (["deep.json"], "deep.json is nested too deeply"),
    (["itself.yaml"], "itself.yaml refers to a part of itself with *x; write the values out"),
    (["binary.sh"], "binary.sh is no text"),
    (["other.sh"], "other.sh has no training command"),
    (["bad.yaml"], "bad.yaml is not YAML"),
    (["empty.sh"], "empty.sh has no training command"),
    (["ok.json", "gpus=0"], "gpus=0: gpus is a number of at least 1"),
    (["ok.json", "format=xml"], "format=xml: choose text or json"),
    (["ok.json", "--gpus"], "--gpus is no option"),
    (["ok.json", "gpu=8"], "gpu=8: no script reads $gpu, and it is no option"),
    (["gpus=8"], "no PATH was given"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_mistakes(arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    files = {
        "a.py": "", "list.json": "[]", "twice.json": '{"a": 1, "a": 2}', "bad.json": "{", "bad.yaml": "a: [",
        "comment.json": '{"a": 1 // one\n}', "nan.json": '{"a": NaN}', "none.json": " \n",
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
    said = capsys.readouterr()
    assert said.err.startswith(f"ConfigError: {message}") and said.err.count("\n") == 1
    assert said.out == ""


def test_restarts_and_a_changing_number_of_machines_are_mapped(tmp_path: Path) -> None:
    script = f"torchrun --nproc_per_node 8 --max_restarts 3 llava/train/train_mem.py {FINETUNE}"
    found = row(told(read(tmp_path, script)), "max_restarts")
    assert found.verdict is Verdict.mapped and "--max-restarts" in found.text
    script = f"deepspeed --min_elastic_nodes 1 llava/train/train_mem.py {FINETUNE}"
    found = row(told(read(tmp_path, script)), "min_elastic_nodes")
    assert found.verdict is Verdict.mapped and "launch/multinode.sh" in found.text
