#!/usr/bin/env bash
# Trains into a folder of this machine, and keeps a copy of what it saves in a mounted bucket:
#
#   launch/skypilot/mirror.sh /bucket/run7 outputs/finetune launch/node.sh stage=finetune output_dir=outputs/finetune ...
#
# A bucket is no file system (no locks, no renames, no appending), so that a run cannot write there itself. It gets
# whole checkpoints, written once, and a new machine begins with what it holds. MIRROR_EVERY: seconds between two looks
# for a new checkpoint, else 60. For one machine: several need a shared file system (docs/multinode.md).
set -euo pipefail

# shellcheck source=launch/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/../setup.sh"
[[ $# -ge 3 ]] || die "give the bucket's folder, output_dir, and the command that trains"
bucket="$1"
output="$2"
shift 2

# What is no checkpoint of its own: small, and written anew each time.
SMALL=(config.yaml metrics.jsonl run_status.json .begun quarantine.jsonl)

# copy FROM TO: files of a folder, and of those below, as new ones. Fails where one cannot be read to its end, as that of
# a checkpoint which the run deletes meanwhile.
copy() {
    local path
    while IFS= read -r -d '' path; do
        mkdir -p "$2/$(dirname "$path")" && cat "$1/$path" >"$2/$path" || return 1
    done < <(cd "$1" && find . -type f -print0)
}

# A checkpoint counts once its manifest stands in complete/ under its name: a copy may be cut short at any byte.
restore() {
    local mark name
    [[ ! -d "$output/checkpoints" ]] || return 0 # of this very machine
    mkdir -p "$output"
    for mark in "$bucket"/complete/step-*; do
        [[ -e "$mark" ]] || continue
        name="${mark##*/}"
        say "fetching $name from $bucket"
        copy "$bucket/checkpoints/$name" "$output/checkpoints/.$name" || die "$bucket/checkpoints/$name cannot be read"
        mv "$output/checkpoints/.$name" "$output/checkpoints/$name"
    done
    for name in "${SMALL[@]}"; do
        [[ ! -f "$bucket/$name" ]] || cat "$bucket/$name" >"$output/$name"
    done
}

# is_mirrored NAME: whether the bucket has this very checkpoint, and not one of that step of a run that was begun anew.
is_mirrored() { cmp -s "$output/checkpoints/$1/manifest.json" "$bucket/complete/$1"; }

mirror() {
    local path name kept=""
    mkdir -p "$bucket/complete" "$bucket/checkpoints"
    for path in "$output"/checkpoints/step-*; do
        name="${path##*/}"
        [[ "$name" =~ ^step-[0-9]+$ ]] || continue
        if ! is_mirrored "$name"; then
            rm -rf "${bucket:?}/complete/$name" "${bucket:?}/checkpoints/$name"
            copy "$path" "$bucket/checkpoints/$name" || continue
            cat "$path/manifest.json" >"$bucket/complete/$name" || continue
        fi
        kept=yes
    done
    for name in "${SMALL[@]}"; do
        [[ ! -f "$output/$name" ]] || cat "$output/$name" >"$bucket/$name" || return 1
    done
    [[ -n "$kept" ]] || return 0
    for path in "$bucket"/complete/step-*; do # what the run has deleted
        name="${path##*/}"
        [[ -e "$output/checkpoints/$name" ]] || rm -rf "$path" "${bucket:?}/checkpoints/$name"
    done
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
mirror
[[ $code -ne 0 || ! -d "$output/export" ]] || copy "$output/export" "$bucket/export"
exit "$code"
