#!/usr/bin/env bash
# Trains into a local folder, and copies what it saves to a mounted bucket:
#
#   launch/skypilot/mirror.sh /bucket/run7 outputs/finetune launch/node.sh stage=finetune output_dir=outputs/finetune ...
#
# A bucket is not a file system (no locks, no renames, no appending), so a run cannot write there itself. It receives
# whole checkpoints, written once, and a new machine begins with these. MIRROR_EVERY: seconds between two checks
# for a new checkpoint, default 60. For one machine: several need a shared file system (docs/multinode.md).
set -euo pipefail

# shellcheck source=launch/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/../setup.sh"
[[ $# -ge 3 ]] || die "give the bucket's folder, output_dir, and the command that trains"
bucket="$1"
output="$2"
shift 2

# Files outside checkpoints: small, and written anew each time.
SMALL=(config.yaml metrics.jsonl validation.jsonl starts.jsonl skipped_records.jsonl run_status.json .begun)
# The result of a finished run: the model, or only its LoRA adapter (export.merge=false).
RESULTS=(export adapter)

# copy FROM TO: copies the files of a folder and its subfolders as new ones. Fails if one cannot be read to its end, for
# example in a checkpoint that the run deletes meanwhile.
copy() {
    local path
    [[ -d "$1" ]] || return 1
    while IFS= read -r -d '' path; do
        mkdir -p "$2/$(dirname "$path")" && cat "$1/$path" >"$2/$path" || return 1
    done < <(cd "$1" && find . -type f -print0)
}

# A checkpoint counts once its manifest is in complete/ under its name, because a copy may be interrupted at any byte.
# The same holds here: the run's folder gets its checkpoints only once all are copied.
restore() {
    local mark name staged="$output/checkpoints.restoring"
    [[ ! -d "$output/checkpoints" ]] || return 0 # they are already on this machine
    rm -rf "$staged"
    mkdir -p "$staged"
    for mark in "$bucket"/complete/step-*; do
        [[ -e "$mark" ]] || continue
        name="${mark##*/}"
        say "fetching $name from $bucket"
        copy "$bucket/checkpoints/$name" "$staged/$name" || {
            say "error: $bucket/checkpoints/$name cannot be read"
            exit 1 # not a user's mistake: the bucket may answer next time
        }
    done
    for name in "${SMALL[@]}"; do
        [[ ! -f "$bucket/$name" ]] || cat "$bucket/$name" >"$output/$name"
    done
    mv "$staged" "$output/checkpoints"
}

# is_mirrored NAME: whether the bucket has this very checkpoint, and not one of that step of a run that was begun anew.
is_mirrored() { cmp -s "$output/checkpoints/$1/manifest.json" "$bucket/complete/$1"; }

step_of() { echo $((10#${1#step-})); }

mirror() {
    local path name newest=0 failed=0
    mkdir -p "$bucket/complete" "$bucket/checkpoints"
    for path in "$output"/checkpoints/step-*; do
        name="${path##*/}"
        [[ "$name" =~ ^step-[0-9]+$ ]] || continue
        if ! is_mirrored "$name"; then
            rm -rf "${bucket:?}/complete/$name" "${bucket:?}/checkpoints/$name"
            if ! copy "$path" "$bucket/checkpoints/$name" || ! cat "$path/manifest.json" >"$bucket/complete/$name"; then
                [[ ! -d "$path" ]] || failed=1 # not one that the run has deleted meanwhile
                continue
            fi
        fi
        [[ $(step_of "$name") -le $newest ]] || newest="$(step_of "$name")"
    done
    for name in "${SMALL[@]}"; do
        [[ ! -f "$output/$name" ]] || cat "$output/$name" >"$bucket/$name" || return 1
    done
    for path in "$bucket"/complete/step-*; do # delete what the run has deleted, which is never newer than what it still has
        name="${path##*/}"
        [[ -e "$output/checkpoints/$name" || ! "$name" =~ ^step-[0-9]+$ || $(step_of "$name") -gt $newest ]] ||
            rm -rf "$path" "${bucket:?}/checkpoints/$name"
    done
    return "$failed"
}

keep_mirroring() {
    local second
    while true; do
        for ((second = 0; second < ${MIRROR_EVERY:-60}; second++)); do sleep 1; done # no longer one is left behind
        mirror || say "warning: $bucket cannot be written; trying again"
    done
}

restore
"$@" &
training=$!
keep_mirroring &
mirroring=$!
trap 'kill -TERM "$training" 2>/dev/null || true' TERM
await "$training"
kill "$mirroring" 2>/dev/null || true
wait "$mirroring" 2>/dev/null || true
mirror || say "warning: $bucket cannot be written; it lacks what was saved last"
if [[ $code -eq 0 ]]; then
    for name in "${RESULTS[@]}"; do
        [[ ! -d "$output/$name" ]] || copy "$output/$name" "$bucket/$name" ||
            say "warning: $bucket/$name cannot be written; $output/$name is nowhere else"
    done
fi
exit "$code"
