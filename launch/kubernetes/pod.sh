#!/usr/bin/env bash
# What a pod runs: launch/multinode.sh, told by what Kubeflow puts into a pod's environment. The arguments are the
# training's. Kubeflow's PET_ variables would else be torchrun's defaults beside the flags that multinode.sh gives it.
#
#   RDZV_ID          a name of the run, the same in all its pods and all their restarts
#   RETRY_FROM_128   yes where only exit codes from 128 on are tried again (PyTorchJob's restartPolicy: ExitCode):
#                    75, stopped with a checkpoint, becomes 203, and 5, lost ranks, 133
#   NPROC_PER_NODE, MAX_RESTARTS, JOIN_TIMEOUT, LOG_DIR: as launch/multinode.sh takes them
set -euo pipefail

# shellcheck source=launch/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/../setup.sh"

[[ -n "${PET_NNODES:-}" ]] || die "PET_NNODES is not set: this runs in the pods of a PyTorchJob or a TrainJob"
export NNODES="$PET_NNODES" RDZV_ID="${RDZV_ID:-${PET_RDZV_ID:-}}"
export RDZV_ENDPOINT="${PET_RDZV_ENDPOINT:-${PET_MASTER_ADDR:-}:${PET_MASTER_PORT:-29400}}"
[[ -z "${PET_MAX_RESTARTS:-}" ]] || export MAX_RESTARTS="${MAX_RESTARTS:-$PET_MAX_RESTARTS}"
# "auto" and "gpu" are what multinode.sh does by itself
[[ ! "${PET_NPROC_PER_NODE:-}" =~ ^[0-9]+$ ]] || export NPROC_PER_NODE="${NPROC_PER_NODE:-$PET_NPROC_PER_NODE}"
# a PyTorchJob without a Master says a pod's number in its name alone
[[ "$HOSTNAME" =~ -([0-9]+)$ ]] || true
export NODE_RANK="${PET_NODE_RANK:-${BASH_REMATCH[1]:-}}"
unset "${!PET_@}" RANK WORLD_SIZE MASTER_ADDR MASTER_PORT

"$ROOT/launch/multinode.sh" "$@" &
training=$!
trap 'kill -TERM "$training" 2>/dev/null || true' TERM # Kubernetes sends it to this process alone
await "$training"
case "${RETRY_FROM_128:-}:$code" in
    yes:75 | yes:5) exit $((128 + code)) ;;
esac
exit "$code"
