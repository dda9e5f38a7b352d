# shellcheck shell=bash
# Sourced by the examples: runs their commands, on the CPU, and keeps what record.py reads afterwards.
# Needs llava-fsdp on PATH, or .venv, which launch/quickstart.sh sets up.

EXAMPLES="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=launch/setup.sh
source "$EXAMPLES/../launch/setup.sh"
use_venv
export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" COLUMNS=110

# begin NAME: the example's folder is outputs/examples/NAME, in $out. An earlier run's folder is not continued.
begin() {
    example="$1"
    out="outputs/examples/$example"
    [[ ! -e "$out" ]] || die "$out is there from an earlier run of this example; move or delete it"
    mkdir -p "$out/commands"
    count=0
}

# run COMMAND...: prints and runs it; its words, output, exit code and seconds are kept. $code is the exit code.
run() {
    local file began=$SECONDS
    count=$((count + 1))
    file="$out/commands/$(printf '%02d' "$count")"
    printf '%s\0' "$@" >"$file.words"
    printf '\n$ %s\n' "$*"
    code=0
    "$@" 2>&1 | tee "$file.txt" || code=$?
    printf '%s %s\n' "$code" "$((SECONDS - began))" >"$file.ended"
}

# must COMMAND...: run, and the end of the example where the command fails.
must() {
    run "$@"
    [[ $code -eq 0 ]] || die "exit code $code of: $*"
}

# finish [report.html]: writes the example's results, and an image of the page.
finish() {
    python "$EXAMPLES/record.py" "$example" "$out" "$@"
}
