#!/usr/bin/env bash
# Trains on all GPUs of this machine: launch/node.sh stage=finetune model=llava_v1_5_7b ...
# NPROC_PER_NODE=4 uses four of them (CUDA_VISIBLE_DEVICES chooses which), or starts that many CPU ranks.
# MAX_RESTARTS=0 turns off restarts of ranks that died; the default is 3.
# Exit codes: 0 done, 75 stopped by a signal with a checkpoint, 2 a mistake to fix, others: docs/running.md.
set -euo pipefail

# shellcheck source=launch/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
use_venv

ranks="$(ranks_here)"
OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(threads_per_rank "$ranks")}"
export OMP_NUM_THREADS
restarts="$(restarts)"
train_with --standalone --nproc-per-node "$ranks" --max-restarts "$restarts" -- "$@"
