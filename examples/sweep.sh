#!/usr/bin/env bash
# Trains the first stage with three learning rates, one after the other, and lays the runs side by side on one page.
# Shows which rate is best, by the same loss that each run's own page has. Two minutes on two idle cores.
# Usage: examples/sweep.sh [KEY=VALUE...]: keys for every job, such as max_steps=20
set -euo pipefail
# shellcheck source=examples/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
begin sweep

must llava-fsdp sweep -m stage=pretrain precision=fp32 max_steps=40 export.enabled=false optim.lr=1e-3,4e-3,1.6e-2 \
    launch.nproc_per_node=1 hydra.sweep.dir="$out/sweep" "$@"
finish "$out/sweep/report.html"
