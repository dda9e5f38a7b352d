#!/usr/bin/env bash
# Trains with 2 ranks to the end, trains the same again and kills a rank (SIGKILL), and continues that run with 3 ranks.
# Shows that the losses are those of the run that was never killed. Two minutes on two idle cores.
# Usage: examples/killed.sh [KEY=VALUE...]: keys for every training, such as optim.lr=1e-3
set -euo pipefail
# shellcheck source=examples/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
begin killed

# kill_rank RUN STEP: kills rank 1 of a run once STEP steps are recorded. A rank's heartbeat names its process.
kill_rank() {
    until [[ "$(wc -l <"$1/metrics.jsonl")" -ge "$2" ]]; do
        sleep 0.1
    done 2>/dev/null
    kill -KILL "$(python -c 'import json, sys; print(json.load(open(sys.argv[1]))["pid"])' \
        "$1/.heartbeats/rank-1.json")"
}

keys=(stage=pretrain precision=fp32 max_steps=24 checkpoint.every=5 export.enabled=false "$@")
must llava-fsdp train --nproc-per-node 2 "${keys[@]}" output_dir="$out/whole"

# --max-restarts 0: otherwise the run starts its ranks again by itself, up to three times
kill_rank "$out/killed" 13 &
killer=$!
run llava-fsdp train --nproc-per-node 2 --max-restarts 0 "${keys[@]}" output_dir="$out/killed"
kill "$killer" 2>/dev/null && die "the run ended before its rank could be killed"
[[ $code -ne 0 ]] || die "a run with a killed rank ended with exit code 0"

must llava-fsdp train --nproc-per-node 3 "${keys[@]}" output_dir="$out/killed"
must llava-fsdp report "$out/whole" "$out/killed" out="$out/report.html"
finish "$out/report.html"
