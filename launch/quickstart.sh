#!/usr/bin/env bash
# Trains the embedded tiny LLaVA from nothing, both stages, and asks it questions about images.
# Needs bash and Python 3.11 or 3.12; sets up .venv on first use. After that, under 3 minutes on two idle cores.
set -euo pipefail

# shellcheck source=launch/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$ROOT"
set_up ""

gpus="$(count_gpus)"
ranks=$((gpus > 0 ? gpus : 2))
train=(python -m llava_fsdp train --nproc-per-node "$ranks")
# Steps of a model as small as this one are 1.6 times faster in fp32 than in bf16 on a CPU that has bf16.
quick=()
((gpus)) || quick=(precision=fp32)

say "stage 1 of 2: the projector learns, on $ranks ranks"
"${train[@]}" stage=pretrain ${quick[@]+"${quick[@]}"}
say "stage 2 of 2: projector and language model learn"
# two epochs instead of three save a quarter of the time and cost two percent of the answers
"${train[@]}" stage=finetune epochs=2 ${quick[@]+"${quick[@]}"}
say "questions about pictures that it has not seen"
python -m llava_fsdp.evaluate
say "curves and settings of both runs, for a browser: outputs/pretrain/report.html, outputs/finetune/report.html"
say "for the command llava-fsdp in your shell: source .venv/bin/activate"
say "next, a real language model, vision tower and questions: ./examples/real/run.sh"
