#!/usr/bin/env bash
# Trains on several machines; run it on each of them with the same arguments:
#
#   NNODES=2 RDZV_ENDPOINT=host0:29400 RDZV_ID=run7 launch/multinode.sh stage=finetune model=llava_v1_5_7b ...
#
#   NNODES          how many machines; 3:4 goes on with three where one of four is lost, and takes a fourth again
#   RDZV_ENDPOINT   host:port of one of them, reachable from all; torchrun meets there
#   RDZV_ID         a name that is the same on all machines, and new for every run
#   NODE_RANK       optional; 0 on the machine that RDZV_ENDPOINT names, another number elsewhere: for networks in
#                   which a machine does not know itself by that name, and so would not open the port
#   NPROC_PER_NODE  optional; ranks on this machine, else one for each GPU
#   MAX_RESTARTS    optional; how often ranks that died are started again, else 3
#   LOG_DIR         optional; what every rank prints, else outputs/logs/RDZV_ID; the terminal shows local rank 0
#
# torchrun numbers the machines itself, so rank 0, which reports the steps, may be on any of them.
# output_dir must be a folder that all machines share. Exit codes: docs/running.md.
set -euo pipefail

# shellcheck source=launch/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

need() {
    [[ -n "${!1:-}" ]] || die "$1 is not set: $2. Example:" \
        "NNODES=2 RDZV_ENDPOINT=host0:29400 RDZV_ID=run7 launch/multinode.sh stage=finetune"
}
need NNODES "how many machines take part"
need RDZV_ENDPOINT "host:port of one of the machines, reachable from all"
need RDZV_ID "a name that is the same on all machines, and new for every run"
[[ "$NNODES" =~ ^[1-9][0-9]*(:[1-9][0-9]*)?$ ]] || die "NNODES=$NNODES must be a number of machines"
[[ "$RDZV_ENDPOINT" =~ ^.+:[0-9]+$ ]] || die "RDZV_ENDPOINT=$RDZV_ENDPOINT must be host:port"
[[ "${NODE_RANK:-0}" =~ ^[0-9]+$ ]] || die "NODE_RANK=$NODE_RANK must be a number: 0 on the machine of RDZV_ENDPOINT"
use_venv

# A restarted worker must not read the dead ones' addresses in a store that outlived them (pytorch#135712).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

host=()
if [[ -n "${NODE_RANK:-}" ]]; then
    host=(--rdzv-conf "is_host=$([[ "$NODE_RANK" -eq 0 ]] && echo true || echo false)")
fi
ranks="$(ranks_here)"
OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(threads_per_rank "$ranks")}"
export OMP_NUM_THREADS
restarts="$(restarts)"
train_with \
    --nnodes "$NNODES" --nproc-per-node "$ranks" \
    --rdzv-backend c10d --rdzv-endpoint "$RDZV_ENDPOINT" --rdzv-id "$RDZV_ID" ${host[@]+"${host[@]}"} \
    --max-restarts "$restarts" \
    --log-dir "${LOG_DIR:-outputs/logs/$RDZV_ID}" --tee 3 --local-ranks-filter 0 \
    -- "$@"
