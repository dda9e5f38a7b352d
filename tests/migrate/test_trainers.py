"""Commands of ms-swift, LLaMA-Factory and TRL become commands of this project."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from small import config_of
from test_migrate import quickly, row, unknown_of

from llava_fsdp.data.records.forms.parse_record import NO_KEYS, RecordKeys, parse_record
from llava_fsdp.migrate import main as entry
from llava_fsdp.migrate.command import Migration, assignments, migrate
from llava_fsdp.migrate.flags.trainer_tables import DIFFERS, TABLES
from llava_fsdp.migrate.reading.inputs import read_runs
from llava_fsdp.migrate.source.trainers import Trainer
from llava_fsdp.migrate.to_keys.keys import Verdict
from llava_fsdp.runtime.errors import ConfigError, DataError
from llava_fsdp.runtime.exit_codes import ExitCode

assert quickly  # a fixture, used by every test here
TURNS = {"messages": "messages", "images": "images"}
ROLES = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
INFO = {
    "photos": {"file_name": "photos.json", "formatting": "sharegpt", "columns": TURNS, "tags": ROLES},
    "held": {"file_name": "held.json", "formatting": "sharegpt", "columns": TURNS, "tags": ROLES},
    "old": {"file_name": "old.json", "formatting": "sharegpt", "columns": {"images": "pictures"}},
    "hub": {"hf_hub_url": "me/charts", "formatting": "openai", "columns": TURNS, "split": "dev"},
    "alpaca": {"file_name": "alpaca.json"},
    "film": {
        "file_name": "film.json",
        "formatting": "sharegpt",
        "columns": TURNS | {"videos": "videos"},
        "tags": ROLES,
    },
    "bot": {"file_name": "bot.json", "formatting": "sharegpt", "columns": TURNS, "tags": ROLES | {"user_tag": "me"}},
}
ZERO3 = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}, "gradient_clipping": "auto"}


def migrated(folder: Path, files: Mapping[str, str], *names: str, gpus: int | None = None) -> Migration:
    """The migration of the one run of these files, of which `names` are given; the others lie beside them."""
    for name, text in {"data/dataset_info.json": json.dumps(INFO), "z3.json": json.dumps(ZERO3), **files}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (run,) = read_runs([str(folder / name) for name in names or files], {}, gpus)
    return migrate(run)


# {name: (files, the GPUs given, words in front of the overrides, all overrides)}
RUNS: dict[str, tuple[dict[str, str], int | None, str, dict[str, object]]] = {
    "ms-swift, LoRA": (
        {
            "run.sh": "NPROC_PER_NODE=4 CUDA_VISIBLE_DEVICES=0,1,2,3 swift sft --model Qwen/Qwen2.5-VL-7B-Instruct \\\n"
            "  --dataset a.jsonl b.jsonl --train_type lora --torch_dtype bfloat16 --lora_rank 16 --freeze_vit true \\\n"
            "  --target_modules all-linear --per_device_train_batch_size 2 --gradient_accumulation_steps 8 \\\n"
            "  --learning_rate 2e-4 --num_train_epochs 1 --save_steps 100 --save_total_limit 3 --max_length 8192 \\\n"
            "  --warmup_ratio 0.05 --dataloader_num_workers 4 --output_dir out --deepspeed zero2_offload\n"
        },
        None,
        "CUDA_VISIBLE_DEVICES=0,1,2,3 llava-fsdp train --nproc-per-node 4",
        {
            "stage": "finetune_task_lora", "data": "llava_json", "sharding": "zero2", "offload": "params",
            "precision": "bf16", "activation_checkpointing": "full", "model.train": ["language"],
            "model.checkpoint": "Qwen/Qwen2.5-VL-7B-Instruct", "model.lora.r": 16, "model.lora.alpha": 32,
            "data.path": ["a.jsonl", "b.jsonl"], "data.images": ".", "data.workers": 4, "data.max_length": 8192,
            "data.too_long": "skip", "output_dir": "out", "checkpoint.every": 100, "checkpoint.keep": 3,
            "log_every": 5, "track.tensorboard": True, "global_batch_size": 64, "micro_batch_size": 2,
            "optim.clip": 1.0, "optim.weight_decay": 0.1, "optim.beta2": 0.95, "optim.projector_lr": None,
            "optim.warmup_ratio": 0.05,
        },
    ),
    "ms-swift, a YAML of all parts": (
        {
            "run.sh": "export ROOT_IMAGE_DIR=/images\nNPROC_PER_NODE=2 swift sft full.yaml --learning_rate 2e-5\n",
            "full.yaml": "model: OpenGVLab/InternVL3-2B-hf\ntuner_type: full\nfreeze_vit: false\n"
            "freeze_aligner: false\n"
            "vit_lr: 2e-6\naligner_lr: 1e-4\ndataset: [train.jsonl]\nval_dataset: held.jsonl\neval_strategy: steps\n"
            "eval_steps: 50\nreport_to: [wandb, none]\nnum_train_epochs: 2\nseed: 7\ntruncation_strategy: right\n"
            "max_length: 4096\nbf16: true\ngradient_checkpointing: false\nsave_strategy: 'no'\nrun_name: mine\n",
        },
        None,
        "llava-fsdp train --nproc-per-node 2",
        {
            "stage": "finetune_task", "data": "llava_json", "sharding": "zero0", "precision": "bf16",
            "activation_checkpointing": "none", "model.train": ["projector", "language", "vision"],
            "model.checkpoint": "OpenGVLab/InternVL3-2B-hf", "data.path": "train.jsonl", "data.images": "/images",
            "data.max_length": 4096, "val.path": "held.jsonl", "val.every": 50, "val.answers": 0,
            "optim.projector_lr": 1e-4, "optim.vision_lr": 2e-6, "seed": 7, "epochs": 2, "checkpoint.every": None,
            "log_every": 5, "track.wandb": "online", "track.name": "mine", "global_batch_size": 16,
            "micro_batch_size": 1, "optim.clip": 1.0, "optim.weight_decay": 0.1, "optim.beta2": 0.95,
            "optim.warmup_ratio": 0.0,
        },
    ),
    "ms-swift, four bits and its defaults": (
        {
            "run.sh": "CUDA_VISIBLE_DEVICES=0 swift sft --model google/gemma-3-4b-it --dataset me/charts:small "
            "--use_hf true --quant_method bnb --quant_bits 4 --per_device_train_batch_size 4 --max_steps 900\n"
        },
        None,
        "CUDA_VISIBLE_DEVICES=0 llava-fsdp train --nproc-per-node 1",
        {
            "stage": "finetune_task_lora", "data": "llava_json", "sharding": "zero0", "precision": "bf16",
            "activation_checkpointing": "full", "model.train": ["language"], "model.checkpoint": "google/gemma-3-4b-it",
            "model.lora.r": 8, "model.lora.alpha": 32, "model.quantize.mode": "nf4",
            "data.path": "hf://datasets/me/charts/small/train-*", "data.too_long": "fail", "optim.lr": 1e-4,
            "epochs": 3, "max_steps": 900, "log_every": 5, "track.tensorboard": True, "global_batch_size": 16,
            "micro_batch_size": 4, "optim.clip": 1.0, "optim.weight_decay": 0.1, "optim.beta2": 0.95,
            "optim.projector_lr": None, "optim.warmup_ratio": 0.0,
        },
    ),
    "LLaMA-Factory, a YAML alone": (
        {
            "lora.yaml": "model_name_or_path: Qwen/Qwen3-VL-4B-Instruct\ntrust_remote_code: true\nstage: sft\n"
            "do_train: true\nfinetuning_type: lora\nlora_rank: 8\nlora_target: all\ndataset: photos\n"
            "template: qwen3_vl_nothink\ncutoff_len: 4096\npreprocessing_num_workers: 16\noutput_dir: saves/lora\n"
            "logging_steps: 10\nsave_steps: 500\nplot_loss: true\noverwrite_output_dir: true\n"
            "per_device_train_batch_size: 1\ngradient_accumulation_steps: 8\nlearning_rate: 1.0e-4\n"
            "num_train_epochs: 3.0\nlr_scheduler_type: cosine\nwarmup_ratio: 0.1\nbf16: true\n"
            "ddp_timeout: 180000000\nresume_from_checkpoint: null\nreport_to: none\n"
        },
        8,
        "llava-fsdp train --nproc-per-node 8",
        {
            "stage": "finetune_task_lora", "data": "llava_json", "sharding": "zero0", "precision": "bf16",
            "activation_checkpointing": "full", "model.train": ["language"],
            "model.checkpoint": "Qwen/Qwen3-VL-4B-Instruct", "model.lora.r": 8, "model.lora.alpha": 16,
            "model.lora.dropout": 0.0, "data.path": "data/photos.json", "data.images": "data", "data.max_length": 4096,
            "output_dir": "saves/lora", "epochs": 3, "log_every": 10, "global_batch_size": 64, "micro_batch_size": 1,
            "optim.clip": 1.0, "optim.lr": 1e-4, "optim.projector_lr": None, "optim.warmup_ratio": 0.1,
        },
    ),
    "LLaMA-Factory, whole weights by its command": (
        {
            "run.sh": "FORCE_TORCHRUN=1 NNODES=2 NPROC_PER_NODE=8 MASTER_ADDR=10.0.0.1 MASTER_PORT=7 "
            "llamafactory-cli train full.yaml learning_rate=2e-5 output_dir=saves/two\n",
            "full.yaml": "model_name_or_path: google/gemma-3-4b-it\nfinetuning_type: full\nfreeze_vision_tower: false\n"
            "deepspeed: z3.json\ndataset: photos,old\neval_dataset: held\neval_strategy: steps\neval_steps: 100\n"
            "media_dir: /media\ntemplate: gemma3\npure_bf16: true\nwarmup_steps: 20\nlearning_rate: 1e-5\n"
            "disable_gradient_checkpointing: true\nddp_timeout: 7200\noutput_dir: saves/one\n",
        },
        None,
        "llava-fsdp train --nnodes 2 --rdzv-endpoint 10.0.0.1:7 --nproc-per-node 8",
        {
            "stage": "finetune_task", "data": "llava_json", "precision": "bf16_pure",
            "activation_checkpointing": "none", "model.train": ["language", "vision"],
            "model.checkpoint": "google/gemma-3-4b-it", "data.path": ["data/photos.json", "data/old.json"],
            "data.image_column": "pictures", "data.images": "/media", "val.path": "data/held.json", "val.every": 100,
            "val.answers": 0, "comm.timeout": 7200, "output_dir": "saves/two", "epochs": 3, "log_every": 500,
            "micro_batch_size": 8, "optim.clip": 1.0, "optim.schedule": "linear", "optim.warmup_steps": 20,
        },
    ),
    "LLaMA-Factory, flags of its program": (
        {
            "run.sh": "torchrun --nproc_per_node 2 src/train.py --stage sft --do_train True --dataset hub "
            "--model_name_or_path llava-hf/llava-1.5-7b-hf --finetuning_type lora --lora_alpha 64 --lora_dropout 0.1 "
            "--quantization_bit 8 --use_rslora True --template llava --fp16 True --output_dir q --save_total_limit 1\n"
        },
        None,
        "llava-fsdp train --nproc-per-node 2",
        {
            "stage": "finetune_task_lora", "data": "llava_json", "sharding": "zero0", "precision": "fp16",
            "precision.scaler.window": 2000, "precision.scaler.hysteresis": 1, "activation_checkpointing": "full",
            "model.train": ["language"], "model.checkpoint": "llava-hf/llava-1.5-7b-hf", "model.lora.r": 8,
            "model.lora.alpha": 64, "model.lora.dropout": 0.1, "model.lora.use_rslora": True,
            "model.quantize.mode": "int8", "data.path": "hf://datasets/me/charts/data/dev-*", "output_dir": "q",
            "epochs": 3, "log_every": 500, "global_batch_size": 16, "micro_batch_size": 8, "optim.clip": 1.0,
            "optim.lr": 5e-5, "optim.projector_lr": None, "optim.schedule": "linear", "optim.warmup_ratio": 0.0,
        },
    ),
    "TRL, its script for images": (
        {
            "run.sh": "accelerate launch --config_file z3.yaml examples/scripts/sft_vlm.py \\\n"
            "  --dataset_name HuggingFaceH4/llava-instruct-mix-vsft --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct"
            "  --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --output_dir sft --dtype bfloat16\n",
            "z3.yaml": "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_multinode_launcher: standard\n"
            "  zero_stage: 3\nmixed_precision: bf16\nnum_machines: 1\nnum_processes: 8\n",
        },
        None,
        "llava-fsdp train --nproc-per-node 8",
        {
            "stage": "finetune_task", "data": "llava_json", "precision": "bf16", "activation_checkpointing": "full",
            "model.train": ["projector", "language", "vision"], "model.checkpoint": "Qwen/Qwen2.5-VL-3B-Instruct",
            "data.path": "hf://datasets/HuggingFaceH4/llava-instruct-mix-vsft/data/train-*", "data.too_long": "fail",
            "output_dir": "sft", "epochs": 3, "log_every": 10, "micro_batch_size": 2, "optim.clip": 1.0,
            "optim.schedule": "linear", "optim.warmup_ratio": 0.0,
        },
    ),
    "TRL, its command with a YAML": (
        {
            "run.sh": "trl sft --config sft.yaml --num_processes 4 --output_dir out --max_length 4096\n",
            "sft.yaml": "model_name_or_path: HuggingFaceTB/SmolVLM-Instruct\ndataset_name: records\nuse_peft: true\n"
            "lora_target_modules: all-linear\nlearning_rate: 1.0e-4\naccelerate_config: zero2\nreport_to: wandb\n"
            "lr_scheduler_type: cosine\nwarmup_steps: 0.05\nsave_steps: 200\nmax_length: 2\n",
        },
        None,
        "llava-fsdp train --nproc-per-node 4",
        {
            "stage": "finetune_task_lora", "data": "llava_json", "sharding": "zero2", "precision": "bf16",
            "activation_checkpointing": "full", "model.train": ["language"],
            "model.checkpoint": "HuggingFaceTB/SmolVLM-Instruct", "model.lora.r": 16, "model.lora.alpha": 32,
            "data.path": "records", "data.max_length": 4096, "output_dir": "out", "epochs": 3,
            "checkpoint.every": 200, "log_every": 10, "track.wandb": "online", "global_batch_size": 32,
            "micro_batch_size": 8, "optim.clip": 1.0, "optim.lr": 1e-4, "optim.projector_lr": None,
            "optim.warmup_ratio": 0.05,
        },
    ),
    "TRL, one process with validation": (
        {
            "run.sh": "python trl/scripts/sft.py --model_name_or_path llava-hf/llava-1.5-7b-hf "
            "--dataset_name me/charts --dataset_config small --eval_strategy steps --eval_steps 25 "
            "--use_peft --lora_r 64 --load_in_4bit "
            "--dataloader_num_workers 3 --gradient_checkpointing False --bf16 False --weight_decay 0.01\n"
        },
        None,
        "llava-fsdp train --nproc-per-node 1",
        {
            "stage": "finetune_task_lora", "data": "llava_json", "sharding": "zero0", "precision": "fp32",
            "activation_checkpointing": "none", "model.train": ["language"],
            "model.checkpoint": "llava-hf/llava-1.5-7b-hf", "model.lora.r": 64, "model.lora.alpha": 32,
            "model.quantize.mode": "nf4", "model.quantize.double": False,
            "data.path": "hf://datasets/me/charts/small/train-*", "data.workers": 3, "data.max_length": 1024,
            "val.path": "hf://datasets/me/charts/small/test-*", "val.every": 25, "val.answers": 0, "epochs": 3,
            "log_every": 10, "global_batch_size": 8, "micro_batch_size": 8, "optim.clip": 1.0, "optim.lr": 2e-5,
            "optim.weight_decay": 0.01, "optim.projector_lr": None, "optim.schedule": "linear",
            "optim.warmup_ratio": 0.0,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_a_command_of_a_trainer_gives_exactly_these_keys(name: str, tmp_path: Path) -> None:
    files, gpus, words, overrides = RUNS[name]
    given = [file for file in files if file == "run.sh"] or list(files)
    done = migrated(tmp_path, files, *given, gpus=gpus)
    assert done.printed_overrides == overrides
    assert done.words == [*words.split(), *assignments(done.printed_overrides)]
    assert (done.lacks, unknown_of(done)) == ([], {})
    assert done.run.trainer and done.cautions == [f"{done.run.trainer.value}: {DIFFERS[done.run.trainer]}"]
    cfg = config_of(
        assignments({"model": "own", "model.language": overrides["model.checkpoint"]} | done.printed_overrides)
    )
    assert cfg.global_batch_size == done.run.batch and cfg.model.lora.enabled is done.run.is_lora


SWIFT = "swift sft --model m/m --dataset a.jsonl --bf16 true "
FACTORY = (
    "NPROC_PER_NODE=1 llamafactory-cli train --model_name_or_path m --dataset photos --template t --bf16 true "
    "--finetuning_type lora "
)
TRL = "python sft_vlm.py --model_name_or_path m --dataset_name me/charts "
REFUSED = [
    (SWIFT + "--dataset 'a.jsonl#500'", "dataset", "a.jsonl#500: a sample of 500 records is not taken"),
    (SWIFT + "--dataset AI-ModelScope/coco", "dataset", "AI-ModelScope/coco is a name of ModelScope"),
    (SWIFT + "--dataset a.csv", "dataset", "a.csv: give files of records"),
    (SWIFT + "--split_dataset_ratio 0.01", "split_dataset_ratio", "write held-out records into a file of their own"),
    (SWIFT + "--packing true", "packing", "a step there is a number of packed rows"),
    (SWIFT + "--tuner_type adalora", "tuner_type", "adalora: whole weights are trained (full) or LoRA adapters"),
    (SWIFT + "--freeze_vit false", "freeze_vit", "model.train=[language,vision]: adapters of the vision part"),
    (SWIFT + "--freeze_aligner false", "freeze_aligner", "the projector has no adapters here"),
    (SWIFT + "--target_modules q_proj v_proj", "target_modules", "model.train=[language]: adapters are in every"),
    (SWIFT + "--max_length 9 --truncation_strategy left", "truncation_strategy", "a longer sample is skipped (delete)"),
    (SWIFT + "--quant_method hqq --quant_bits 4", "quant_method", "weights are quantized by bitsandbytes"),
    (SWIFT + "--fsdp my.json", "fsdp", "my.json: only fsdp2 is known"),
    (SWIFT + "--lr_scheduler_type cosine_with_min_lr", "lr_scheduler_type", "choose one of"),
    (SWIFT + "--save_strategy epoch", "save_strategy", "checkpoint.every=null: give the steps of an epoch"),
    ("MAX_PIXELS=99 " + SWIFT, "MAX_PIXELS", "images are resized as the checkpoint's preprocessor_config.json says"),
    (FACTORY + "--dataset alpaca", "dataset", "alpaca: alpaca records (instruction, input, output) are not read"),
    (FACTORY + "--dataset film", "dataset", "film: the column videos for videos is not read"),
    (FACTORY + "--dataset bot", "dataset", "bot: me: speakers are named"),
    (FACTORY + "--dataset gone", "dataset", "dataset_info.json has no gone"),
    (FACTORY + "--dataset_dir elsewhere", "dataset", "dataset_info.json was not found: give it as another PATH"),
    (FACTORY + "--bf16 false", "bf16", "neither bf16 nor fp16 is set"),
    (FACTORY + "--image_max_pixels 262144", "image_max_pixels", "images are resized as the checkpoint's"),
    (FACTORY + "--max_samples 1000", "max_samples", "write the records that are to be trained on"),
    (FACTORY + "--stage dpo", "stage", "only sft, supervised fine-tuning, is done here"),
    (FACTORY + "--neat_packing true", "neat_packing", "a step there is a number of packed rows"),
    (FACTORY + "--mask_history true", "mask_history", "every answer has labels"),
    (FACTORY + "--finetuning_type freeze", "finetuning_type", "freeze: whole weights are trained (full)"),
    (TRL + "--dataset_train_split 'train[:5%]'", "dataset_train_split", ""),
    (
        TRL + "--completion_only_loss False",
        "completion_only_loss",
        "answers alone have labels, and the prompt has none",
    ),
    (TRL + "--packing", "packing", "TRL itself refuses it for models with images"),
    (TRL + "--use_peft --lora_target_modules q_proj v_proj", "lora_target_modules", "model.train=[language]: adapters"),
    (TRL + "--eval_strategy epoch", "eval_strategy", "validation is every N steps of the records in val.path"),
]


@pytest.mark.parametrize(("script", "key", "text"), REFUSED, ids=lambda value: str(value)[-40:])
def test_what_has_no_equivalent_is_refused_by_name(script: str, key: str, text: str, tmp_path: Path) -> None:
    done = migrated(tmp_path, {"run.sh": script}, "run.sh")
    key = "dataset_name" if key == "dataset_train_split" else key
    found = row(done, key)
    assert (found.verdict, found.known) == (Verdict.unsupported, True)
    assert found.text.startswith(text), found.text
    assert f"{key}: {found.text}" in done.lacks


@pytest.mark.parametrize("script", [SWIFT, FACTORY, TRL])
def test_an_unknown_flag_of_a_trainer_is_named(script: str, tmp_path: Path) -> None:
    done = migrated(tmp_path, {"run.sh": script + "--weight_decai 1 --frob x"}, "run.sh")
    assert unknown_of(done) == {
        "weight_decai": "not a name that migrate knows; did you mean weight_decay?",
        "frob": "not a name that migrate knows",
    }
    assert done.lacks == [f"{key}: {text}" for key, text in unknown_of(done).items()]


def test_the_exit_code_is_2_only_where_the_command_is_not_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.sh").write_text(SWIFT)
    monkeypatch.setattr(sys, "argv", ["migrate", "run.sh"])
    entry.main()
    assert "model.checkpoint=m/m" in capsys.readouterr().out
    (tmp_path / "run.sh").write_text(SWIFT + "--packing true")
    with pytest.raises(SystemExit) as stop:
        entry.main()
    assert stop.value.code == ExitCode.USER
    assert "# incomplete: packing: a step there" in capsys.readouterr().out


def test_a_yaml_file_of_flags_is_read_by_its_keys(tmp_path: Path) -> None:
    texts = {
        Trainer.swift: "model: m\ndataset: a.jsonl\n",
        Trainer.factory: "model_name_or_path: m\ndataset: photos\nbf16: true\n",
        Trainer.trl: "model_name_or_path: m\ndataset_name: me/charts\n",
    }
    for trainer, text in texts.items():
        done = migrated(tmp_path, {"flags.yaml": text}, "flags.yaml", gpus=2)
        assert (done.run.trainer, done.run.gpus, done.lacks) == (trainer, 2, [])
        with pytest.raises(ConfigError, match="the number of GPUs is not known; give gpus=N"):
            migrated(tmp_path, {"flags.yaml": text}, "flags.yaml")
    with pytest.raises(ConfigError, match=r"other\.yaml is not used by a training command"):
        migrated(tmp_path, {"other.yaml": "learning_rate: 1\n"}, "other.yaml", gpus=2)


@pytest.mark.parametrize(
    ("script", "trainer"),
    [
        ("swift sft --model m", Trainer.swift), ("torchrun swift/cli/sft.py --model m", Trainer.swift),
        ("python -m swift.cli.sft --model m", Trainer.swift),
        ("torchrun src/train.py x.yaml", Trainer.factory), ("CUDA_VISIBLE_DEVICES=0 lmf train x.yaml", Trainer.factory),
        ("torchrun trl/scripts/sft.py --config c.yaml", Trainer.trl),
        ("python sft_vlm.py --dataset_name a", Trainer.trl), ("python sft.py --data_path a", None),
        ("torchrun src/train.py --data_path a", None), ("torchrun llava/train/train.py", None),
    ],
)  # fmt: skip
def test_which_trainer_a_command_runs(script: str, trainer: Trainer | None, tmp_path: Path) -> None:
    assert migrated(
        tmp_path, {"run.sh": script, "x.yaml": "stage: sft", "c.yaml": "seed: 1"}, "run.sh"
    ).run.trainer is (trainer)


def test_other_commands_of_the_trainers_are_no_training(tmp_path: Path) -> None:
    for words in ("swift infer --model m", "llamafactory-cli export x.yaml", "trl dpo --dataset_name a"):
        with pytest.raises(ConfigError, match=r"run\.sh has no training command"):
            migrated(tmp_path, {"run.sh": words}, "run.sh")


def test_defaults_that_differ_between_the_trainers_are_each_ones_own() -> None:
    """As their sources have them: ms-swift 4.6, LLaMA-Factory 0.9.6, TRL 1.10."""
    names = (
        "learning_rate weight_decay adam_beta2 lr_scheduler_type per_device_train_batch_size logging_steps "
        "max_grad_norm gradient_accumulation_steps num_train_epochs save_steps"
    ).split()
    assert {trainer: [table[name].default for name in names] for trainer, table in TABLES.items()} == {
        Trainer.swift: [None, 0.1, 0.95, "cosine", 1, 5.0, 1.0, None, 3.0, 500.0],
        Trainer.factory: [5e-5, 0.0, 0.999, "linear", 8, 500.0, 1.0, 1, 3.0, 500.0],
        Trainer.trl: [2e-5, 0.0, 0.999, "linear", 8, 10.0, 1.0, 1, 3.0, 500.0],
    }


QUESTION, ANSWER = {"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "A cat."}
READ: list[tuple[dict, RecordKeys]] = [
    ({"messages": [QUESTION, ANSWER], "images": ["a.jpg"]}, NO_KEYS),
    ({"messages": [QUESTION, ANSWER], "images": [{"path": "a.jpg", "bytes": None}]}, NO_KEYS),
    ({"conversations": [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "A cat."}],
      "images": ["a.jpg"]}, NO_KEYS),
    ({"query": "<image>What?", "response": "A cat.", "images": ["a.jpg"]}, RecordKeys("query", "response")),
    ({"messages": [{"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": "What?"}]},
                   {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]}],
      "images": ["a.jpg"]}, NO_KEYS),
]  # fmt: skip
UNREAD = [
    ({"messages": [QUESTION, ANSWER], "images": ["/x/a.jpg"]}, "an absolute path"),
    ({"system": "s", "conversation": [{"human": "q", "assistant": "a"}]}, "conversations is missing"),
    ({"query": "q", "response": "a"}, "conversations is missing"),
    ({"instruction": "i", "input": "", "output": "o"}, "conversations is missing"),
    ({"prompt": [QUESTION], "completion": [ANSWER], "images": ["a.jpg"]}, "conversations is missing"),
]


@pytest.mark.parametrize(("raw", "keys"), READ)
def test_records_of_the_trainers_are_read_as_they_are(raw: dict, keys: RecordKeys) -> None:
    record = parse_record(Path("a.jsonl"), 0, raw, keys=keys)
    assert [(turn.role, turn.text) for turn in record.turns] == [("human", "<image>What?"), ("gpt", "A cat.")]
    assert (record.images, record.unread, record.unread_keys) == (("a.jpg",), None, ())


@pytest.mark.parametrize(("raw", "message"), UNREAD)
def test_records_of_the_trainers_that_are_not_read_are_refused(raw: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_record(Path("a.jsonl"), 0, raw)


def test_keys_of_the_trainers_that_are_not_read_are_reported() -> None:
    record = parse_record(
        Path("a.jsonl"), 0, {"messages": [QUESTION, ANSWER], "images": ["a.jpg"], "objects": {"a": 1}}
    )
    assert record.unread_keys == ("objects",)
    record = parse_record(Path("a.jsonl"), 0, {"conversations": [QUESTION, ANSWER], "images": ["a.jpg"], "system": "s"})
    assert record.unread_keys == () and record.turns[0].role == "system"
