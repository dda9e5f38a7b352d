#!/usr/bin/env bash
# Trains low-rank adapters on one machine instead of the whole language model, and scores the merged model.
# Shows how few weights train, and how small the adapter is. Three minutes on two idle cores.
# Usage: examples/lora.sh [KEY=VALUE...]: keys for the trainings, such as max_steps=20
set -euo pipefail
# shellcheck source=examples/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
begin lora

must llava-fsdp train --nproc-per-node 2 stage=pretrain precision=fp32 output_dir="$out/pretrain" "$@"
must llava-fsdp train --nproc-per-node 2 stage=finetune_lora precision=fp32 model.projector="$out/pretrain" \
    output_dir="$out/finetune_lora" "$@"
must llava-fsdp evaluate "$out/finetune_lora"
must llava-fsdp export source="$out/finetune_lora" to="$out/peft" format=peft
finish "$out/finetune_lora/report.html"
