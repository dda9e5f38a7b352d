#!/usr/bin/env bash
# Trains on several machines; run it on each of them with the same arguments:
#
#   NNODES=2 RDZV_ENDPOINT=host0:29400 RDZV_ID=run7 launch/multinode.sh stage=finetune model=llava_v1_5_7b ...
#
#   NNODES          how many machines
#   RDZV_ENDPOINT   host:port of one of them, reachable from all; torchrun meets there
#   RDZV_ID         a name that is the same on all machines, and new for every run
#   NODE_RANK       optional; this machine's number, for an order of ranks that is the same every time
#   NPROC_PER_NODE  optional; ranks on this machine, else one for each GPU
#   LOG_DIR         optional; what every rank prints, else outputs/logs/RDZV_ID; the terminal shows local rank 0
#
# output_dir must be a folder that all machines share.
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
[[ "$NNODES" =~ ^[1-9][0-9]*$ ]] || die "NNODES=$NNODES must be a number of machines"
[[ "$RDZV_ENDPOINT" =~ ^.+:[0-9]+$ ]] || die "RDZV_ENDPOINT=$RDZV_ENDPOINT must be host:port"
use_venv

ranks="$(ranks_here)"
OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(threads_per_rank "$ranks")}"
export OMP_NUM_THREADS
exec torchrun \
    --nnodes "$NNODES" --nproc-per-node "$ranks" ${NODE_RANK:+--node-rank "$NODE_RANK"} \
    --rdzv-backend c10d --rdzv-endpoint "$RDZV_ENDPOINT" --rdzv-id "$RDZV_ID" \
    --log-dir "${LOG_DIR:-outputs/logs/$RDZV_ID}" --tee 3 --local-ranks-filter 0 \
    -m llava_fsdp.train "$@"
