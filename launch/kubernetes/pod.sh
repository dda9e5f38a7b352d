#!/usr/bin/env bash
# Runs launch/multinode.sh in a pod, with variables made from Kubeflow's environment. The arguments are the training's.
# Kubeflow's PET_ variables are removed: torchrun would take them as defaults beside the flags of multinode.sh.
#
#   RDZV_ID          name of the run, the same in all its pods and restarts
#   RETRY_FROM_128   yes if only exit codes from 128 on are retried (PyTorchJob's restartPolicy: ExitCode):
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
# a PyTorchJob without a Master gives a pod's number only in its name
[[ "$HOSTNAME" =~ -([0-9]+)$ ]] || true
export NODE_RANK="${PET_NODE_RANK:-${BASH_REMATCH[1]:-}}"
unset "${!PET_@}" RANK WORLD_SIZE MASTER_ADDR MASTER_PORT

"$ROOT/launch/multinode.sh" "$@" &
training=$!
trap 'kill -TERM "$training" 2>/dev/null || true' TERM # Kubernetes sends it only to this process
await "$training"
case "${RETRY_FROM_128:-}:$code" in
    yes:75 | yes:5) exit $((128 + code)) ;;
esac
exit "$code"
