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
exec python -m llava_fsdp train --nproc-per-node "$ranks" --max-restarts "${MAX_RESTARTS:-3}" "$@"
