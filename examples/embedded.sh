#!/usr/bin/env bash
# Trains the embedded default, both stages, then scores the model on held-out images and asks it a question.
# Shows that it learns to see: it answers the same questions much worse with blank images. Five minutes on two idle cores.
# Usage: examples/embedded.sh [KEY=VALUE...]: keys for both trainings, such as max_steps=20
set -euo pipefail
# shellcheck source=examples/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
begin embedded

must llava-fsdp train --nproc-per-node 2 stage=pretrain precision=fp32 output_dir="$out/pretrain" "$@"
must llava-fsdp train --nproc-per-node 2 stage=finetune precision=fp32 model.projector="$out/pretrain" \
    output_dir="$out/finetune" "$@"
must llava-fsdp evaluate "$out/finetune"
must llava-fsdp chat "$out/finetune" image=outputs/shapes/images/heldout_00001.png \
    question="What is shown in the picture?"
finish "$out/finetune/report.html"
