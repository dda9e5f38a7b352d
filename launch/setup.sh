# shellcheck shell=bash
# Sourced by the other scripts: finds Python, makes .venv, installs the project, counts GPUs.
# Needs bash and Python 3.11 or 3.12 with pip and venv; run again, it installs only what has changed.

# The pin of torch is here and not in constraints.txt: pip refuses an installed torch that a constraint
# excludes, and a machine with GPUs must keep the torch that was built for its driver.
TORCH_WITHOUT_GPU="torch==2.13.0"
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"

say() { printf '== %s\n' "$*" >&2; }

# Reports a mistake to fix, with its exit code (docs/running.md): a scheduler does not restart it.
die() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

# Number of NVIDIA GPUs that work; 0 without a driver.
count_gpus() {
    local listed
    listed="$(nvidia-smi -L 2>/dev/null)" || listed=""
    grep -c '^GPU ' <<<"$listed" || true
}

# Ranks to start on this machine: NPROC_PER_NODE, default: one per GPU.
ranks_here() {
    local ranks="${NPROC_PER_NODE:-$(count_gpus)}"
    [[ -z "${NPROC_PER_NODE:-}" || "$ranks" =~ ^[1-9][0-9]*$ ]] ||
        die "NPROC_PER_NODE=$NPROC_PER_NODE must be a number of ranks, 1 or more"
    [[ "$ranks" != 0 ]] ||
        die "found no GPU that works (nvidia-smi -L); to train on the CPU, say how many ranks: NPROC_PER_NODE=2"
    echo "$ranks"
}

# await PID: waits for the end of a child, through the signals that end a wait early; $code is its exit code.
await() {
    local again=0
    while true; do
        code=0
        wait "$1" || code=$?
        kill -0 "$1" 2>/dev/null || break
    done
    [[ $code -gt 128 ]] || return 0
    wait "$1" 2>/dev/null || again=$? # a signal ended the wait and the child ended inside the trap: bash still has its code
    [[ $again -eq 127 ]] || code=$again
}

# Puts .venv, where there is one, before whatever else is installed.
use_venv() {
    if [[ -d "$VENV/bin" ]]; then
        export PATH="$VENV/bin:$PATH"
    fi
    command -v python >/dev/null || die "python is not on PATH; launch/quickstart.sh sets up .venv"
}

# Whether $1 runs and is a Python that the project supports. A name on PATH may be a shim of nothing.
is_right_python() {
    "$1" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' >/dev/null 2>&1
}

# Whether $1 has a torch of its own that the project supports and that finds the GPUs.
has_cuda_torch() {
    "$1" -c 'import sys, torch
version = tuple(map(int, torch.__version__.split(".")[:2]))
sys.exit(not (torch.cuda.is_available() and (2, 11) <= version < (2, 16)))' >/dev/null 2>&1
}

# Prints the Python to make .venv with; where $1 GPUs are present, one that has torch for them comes first.
# 3.11 stands before 3.12 because constraints.txt was made with it.
find_python() {
    local candidate found=""
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3 python; do
        is_right_python "$candidate" || continue
        if [[ $1 -gt 0 ]] && has_cuda_torch "$candidate"; then
            echo "$candidate"
            return
        fi
        found="${found:-$candidate}"
    done
    if [[ -z "$found" ]]; then
        die "no Python 3.11 or 3.12 on PATH (looked for: ${PYTHON:+$PYTHON, }python3.11, python3.12, python3, python)." \
            "Install one, or name it: PYTHON=/path/to/python3.11"
    fi
    echo "$found"
}

make_venv() {
    local gpus="$1" python options=()
    python="$(find_python "$gpus")"
    "$python" -c 'import ensurepip, venv' >/dev/null 2>&1 ||
        die "$python has no venv or no pip (Debian and Ubuntu: install its python3-venv package)"
    if [[ $gpus -gt 0 ]] && has_cuda_torch "$python"; then
        say "using the torch that $python has for this machine's GPUs"
        options+=(--system-site-packages)
    fi
    say "making .venv with $("$python" --version)"
    "$python" -m venv ${options[@]+"${options[@]}"} "$VENV"
}

# What an installation depends on; a change of it installs again.
wanted_stamp() {
    cat "$ROOT/pyproject.toml" "$ROOT/constraints.txt" "$ROOT/launch/setup.sh" | "$VENV/bin/python" -c '
import hashlib, sys
print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

# set_up EXTRAS: .venv with the project, editable, and its extras ("" or "dev,bench") in it.
# The plain torch of the Python package index brings gigabytes of CUDA libraries. A machine without a GPU needs
# none of them: set PIP_EXTRA_INDEX_URL to the index of CPU builds that pytorch.org names before the first run.
set_up() {
    local extras="$1" gpus stamp_file packages=() options=()
    gpus="$(count_gpus)"
    if [[ -e "$VENV" ]]; then
        is_right_python "$VENV/bin/python" || die "$VENV is no working Python 3.11 or 3.12; delete it and run again"
    else
        make_venv "$gpus"
    fi
    stamp_file="$VENV/.installed${extras:+-${extras//,/-}}"
    if [[ "$(cat "$stamp_file" 2>/dev/null)" != "$(wanted_stamp)" ]]; then
        [[ $gpus -gt 0 ]] || packages+=("$TORCH_WITHOUT_GPU")
        say "installing llava_fsdp${extras:+ with $extras} into .venv"
        # To compile all modules, most of which the tests never import, takes a minute. An environment for training is
        # compiled: its ranks may not be able to write there.
        [[ -z "$extras" ]] || options+=(--no-compile)
        "$VENV/bin/python" -m pip install --disable-pip-version-check --constraint "$ROOT/constraints.txt" \
            ${options[@]+"${options[@]}"} ${packages[@]+"${packages[@]}"} --editable "$ROOT${extras:+[$extras]}"
        wanted_stamp >"$stamp_file"
    fi
    use_venv
}
