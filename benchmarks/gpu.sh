#!/usr/bin/env bash
# Everything that needs a GPU, in six calls of under ten minutes each on one GPU:
#
#   benchmarks/gpu.sh OUT_FOLDER tests      tests/gpu
#   benchmarks/gpu.sh OUT_FOLDER            checks: sharding strategies, a training of both stages and its answers
#   benchmarks/gpu.sh OUT_FOLDER memory     LLaVA-1.5-7B on 80 GB: the planner and activation checkpointing, measured
#   benchmarks/gpu.sh OUT_FOLDER speed      steps of its second stage, compared with transformers' and DeepSpeed's
#   benchmarks/gpu.sh OUT_FOLDER pretrain   the same of its first stage
#   benchmarks/gpu.sh OUT_FOLDER variants   ours: compiled or not, each activation checkpointing, fp8, a simulated rank
#   benchmarks/gpu.sh OUT_FOLDER brief      what 15 minutes on one H200 can show: a call of its own, of at most 590 s
#   ... --dry                             the smallest sizes of every part, to try the script itself, with or without a GPU
#
# Into OUT_FOLDER: of tests: gpu-tests.jsonl; of checks: strategies-*.json and .png, training.json; of memory:
# memory-7b-*.json and .png, activation-checkpointing-*.json and .png; of the other three: speed-*.json and .png; of
# each call: summary-*.json and log-*.txt. The call `brief` leaves at most eight files: kernels-*.json, bf16-*.json,
# fp8-*.json, hangs-*.json, tests.jsonl, compiled.tar.gz, and the last two. All JSON files are written after every case, so that a call that is cut off
# leaves what it has measured; a case that fails is a row with its reason.
#
# PYTHON   the interpreter (default: the first of python, python3, python3.12 and python3.11 that has torch)
# WHEELS   a folder of wheels that the machine lacks; they are installed beside it, without any index
#          (benchmarks/rehearse.sh makes them)
# LIMIT    seconds at most for each part, where that is less than the part's own limit
# BUDGET   seconds of the whole call `brief`, instead of 590; a part that no time is left for does not begin
# COMPILED compiled.tar.gz of an earlier call `brief`: its kernels need not be compiled again
#
# Every part has a time limit; one that fails or is cut off does not stop the others, and the script then returns 1.
set -uo pipefail

usage="usage: benchmarks/gpu.sh OUT_FOLDER [tests|checks|memory|speed|pretrain|variants|brief] [--dry]"
out=${1:?$usage}
what=checks
dry=""
budget=${BUDGET:-590}
for argument in "${@:2}"; do
    case $argument in
        tests | checks | memory | speed | pretrain | variants | brief) what=$argument ;;
        --dry) dry=--dry ;;
        *) echo "$usage"; exit 2 ;;
    esac
done
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python=${PYTHON:-}
for candidate in python python3 python3.12 python3.11; do
    [ -z "$python" ] || break
    "$candidate" -c 'import importlib.util as u, sys
sys.exit(not u.find_spec("torch") or sys.version_info[:2] not in ((3, 11), (3, 12)))' > /dev/null 2>&1 && python=$candidate
done
[ -n "$python" ] || { echo "no Python 3.11 or 3.12 on PATH has torch; name one: PYTHON=/path/to/python"; exit 2; }
export PYTHONPATH="$PWD/src:$work/site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
exec > >(tee "$out/log-$what.txt") 2>&1
failed=0
parts="$work/parts.jsonl"
: > "$parts"

# Writes what there is so far: the script may be killed before its end.
summarize() {
    "$python" - "$work" "$out" "$what" "${1:-}" << 'PY'
import json, pathlib, sys

work, out = map(pathlib.Path, sys.argv[1:3])
what, end = sys.argv[3:]


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


if what == "checks":
    keys = ("step", "loss", "grad_norm", "tokens", "seconds", "tokens_per_second", "peak_memory_bytes")
    training = {
        stage: [{k: row[k] for k in keys if k in row} for row in rows(work / "out" / stage / "metrics.jsonl")]
        for stage in ("pretrain", "finetune")
    }
    answers = work / "evaluate.txt"
    said = [line for line in answers.read_text().splitlines() if line.startswith("{")] if answers.is_file() else []
    training["evaluate"] = json.loads(said[-1].replace(f"{work}/", "")) if said else None
    (out / "training.json").write_text(json.dumps(training, indent=1) + "\n")
parts = rows(work / "parts.jsonl")
if what == "brief":
    for part in parts:
        if part["part"] == "train":
            part["steps"] = rows(work / "out" / "metrics.jsonl")  # those of the part `resume` too
    for path in sorted(out.glob("*-????-??-??.json")):  # of each script, the cases that did not run or that failed
        report = json.loads(path.read_text())
        for row in report.get("cases", report.get("ways", [])):
            for key, state in (("not_run", "not run"), ("failed", "failed")):
                if key in row:
                    parts.append({"part": f"{path.stem[:-11]}: {row['name']}", "state": state, "reason": row[key]})
(out / f"summary-{what}.json").write_text(json.dumps(parts, indent=1) + "\n")
if end:
    print("\nsummary")
    for part in parts:
        detail = part.get("reason") or f"{part['seconds']} s, exit code {part['exit_code']}"
        print(f"  {part['state'].upper():15} {part['part']}: {detail}")
PY
}

# part NAME SECONDS COMMAND...: run one part under its limit and note how it went.
part() {
    local name=$1 limit=$2 started code state="done"
    shift 2
    [ -z "$dry" ] || limit=$((3 * limit)) # a rehearsal may share its cores with other work
    [ "${LIMIT:-$limit}" -ge "$limit" ] || limit=$LIMIT
    if [ "$what" = brief ]; then
        local rest=$((budget - SECONDS - 12)) # to end a part takes ten seconds at most
        if [ "$rest" -lt 3 ]; then
            failed=1
            not_run "$name" "nothing is left of the $budget s of this call"
            return 1
        fi
        [ "$limit" -le "$rest" ] || limit=$rest
    fi
    echo "== $name (at most $limit s): $*"
    started=$(date +%s)
    timeout --kill-after=10 "$limit" "$@"
    code=$?
    [ "$code" -eq 0 ] || { failed=1 state=failed; }
    if [ "$code" -eq 124 ] || [ "$code" -eq 137 ]; then state="over its limit"; fi
    echo "== $name: $state, exit code $code, $(($(date +%s) - started)) s"
    printf '{"part": "%s", "state": "%s", "exit_code": %d, "seconds": %d}\n' \
        "$name" "$state" "$code" "$(($(date +%s) - started))" >> "$parts"
    summarize
    return "$code"
}

not_run() {
    echo "NOT RUN: $1: $2"
    printf '{"part": "%s", "state": "not run", "reason": "%s"}\n' "$1" "$2" >> "$parts"
    summarize
}

has() { "$python" -c "import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, sys.argv[1:])))" "$@"; }

if [ -n "${WHEELS:-}" ]; then
    part wheels 30 "$python" -m pip install --quiet --no-index --no-deps --target "$work/site" "$WHEELS"/*.whl
fi
timeout 60 "$python" - << 'PY' || { echo "torch cannot be imported by $python"; exit 2; }
import platform, torch, transformers
gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
print(f"{gpu}; python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}")
PY
gpus=$(timeout 60 "$python" -c "import torch; print(torch.cuda.device_count())")

# Missing modules are named here, once, instead of in every part's traceback.
for module in hydra omegaconf rich safetensors PIL numpy; do
    has "$module" || { not_run "all parts that import llava_fsdp" "$module is not installed"; failed=1; }
done

measure_memory() {
    local sizes=(--timeout 100) recomputed=(--model llava_v1_5_7b --ranks 8 --tokens 4096 --repetitions 4)
    if [ "$dry" = --dry ] || [ "$gpus" -eq 0 ]; then
        sizes=(--tiny)
        recomputed=(--tiny --tokens 512 --ranks 8 --repetitions 2)
        [ "$gpus" -gt 0 ] || not_run "the real shape" "torch sees no GPU; tiny models run on the CPU instead"
    fi
    part memory 440 "$python" benchmarks/memory.py "$out" --real "${sizes[@]}"
    part recompute 120 "$python" benchmarks/activation_checkpointing.py "$out" --modes full "${recomputed[@]}"
    has matplotlib || not_run "the plots" "matplotlib is not installed"
}

measure_speed() {
    local how=()
    if [ "$dry" = --dry ] || [ "$gpus" -eq 0 ]; then
        how=(--tiny --limit 600)
        [ "$gpus" -gt 0 ] || not_run "the real shape" "torch sees no GPU; tiny models run on the CPU instead"
    fi
    case $what in
        pretrain) how+=(--stage pretrain) ;;
        variants) how+=(--variants) ;;
    esac
    part "$what" 560 "$python" benchmarks/speed.py "$out" "${how[@]}"
    has matplotlib || not_run "the plots" "matplotlib is not installed"
}

# run_tests ROWS SECONDS OPTIONS...: the tests of tests/gpu that pytest's options select, each a row of ROWS.
run_tests() {
    local rows=$1 limit=$2 how=("${@:3}")
    if ! has pytest; then
        not_run gpu-tests "pytest is not installed"
        failed=1
        return
    fi
    # the tests compile, each for itself, on the host
    [ "$gpus" -eq 0 ] || ! has xdist || how+=(-n 4)
    ! has pytest_timeout || how+=(--timeout 180)
    rm -f "$rows"
    GPU_TESTS_ROWS="$rows" part gpu-tests "$limit" "$python" -m pytest tests/gpu "${how[@]}" -v \
        -p no:cacheprovider --continue-on-collection-errors
}

run_brief() {
    local sizes=() row=(--row 4608) run=("output_dir=$work/out" "data.root=$work/shapes" model.projector=random)
    run+=(global_batch_size=8 micro_batch_size=4 checkpoint.every=2 export.enabled=false offload=params
        compile=false)
    if [ "$dry" = --dry ] || [ "$gpus" -eq 0 ]; then
        sizes=(--tiny) row=()
    fi
    export TMPDIR=$work TORCHINDUCTOR_CACHE_DIR="$work/compiled/inductor" TRITON_CACHE_DIR="$work/compiled/triton"
    mkdir "$work/compiled"
    [ -z "${COMPILED:-}" ] || tar -xzf "$COMPILED" -C "$work"
    [ "$gpus" -gt 0 ] || not_run "everything on CUDA" "torch sees no GPU; small sizes run on the CPU where they can"

    part kernels 45 "$python" benchmarks/kernels.py "$out" "${sizes[@]}"
    # the changes that `bf16` is compared with run in its process
    for way in bf16 fp8; do
        part "$way" "$([ "$way" = bf16 ] && echo 200 || echo 95)" "$python" benchmarks/speed.py "$out" --brief --one-process \
            --profile --no-first-loss --steps 4 --name "$way" --ways "$way" "${sizes[@]}" "${row[@]}"
    done
    part compiled 10 tar -czf "$out/compiled.tar.gz" -C "$work" compiled
    part hangs 50 "$python" benchmarks/hangs.py "$out"
    # one rank over cpu:gloo,cuda:nccl, with checkpoints in the background
    part train 30 "$python" -m llava_fsdp.train "${run[@]}" max_steps=4
    part resume 20 "$python" -m llava_fsdp.train "${run[@]}" max_steps=6
    part export 20 "$python" -m llava_fsdp.export "source=$work/out" "to=$work/export"
    # those that failed when all were run last, and the waits
    run_tests "$out/tests.jsonl" 55 -k "on_the_host_are_not_on or tower or its_formula_says or no_wait_but"
}

run_checks() {
    local sizes=(--hidden 1024 --layers 8 --rows 32 --repetitions 8 --threads 4)
    if [ "$dry" = --dry ] || [ "$gpus" -eq 0 ]; then
        sizes=(--rows 4 --repetitions 2 --threads 1)
        [ "$gpus" -gt 0 ] || not_run "strategies at the size of a GPU" "torch sees no GPU; the tiny model runs on the CPU instead"
    fi
    part strategies 130 "$python" benchmarks/strategies.py "$out" "${sizes[@]}"
    has matplotlib || not_run "the plot of strategies" "matplotlib is not installed"

    # The embedded default, both stages, then its held-out questions: the commands of the README.
    run=("data.root=$work/shapes" "data.workers=$([ "$gpus" -gt 0 ] && echo 4 || echo 0)" "log_every=5")
    asked=()
    if [ "$dry" = --dry ] || [ "$gpus" -eq 0 ]; then
        run+=(max_steps=2 global_batch_size=8 micro_batch_size=4)
        asked=(limit=8 max_new_tokens=4)
        [ "$gpus" -gt 0 ] || not_run "training on CUDA" "torch sees no GPU; two small steps of each stage run on the CPU instead"
    fi
    part pretrain 110 "$python" -m llava_fsdp.train stage=pretrain "output_dir=$work/out/pretrain" "${run[@]}" &&
        part finetune 110 "$python" -m llava_fsdp.train stage=finetune "output_dir=$work/out/finetune" "${run[@]}"
    if [ ! -d "$work/out/finetune/export" ]; then
        not_run evaluate "there is no trained model"
    elif has llava_fsdp.evaluate; then
        part evaluate 60 "$python" -m llava_fsdp.evaluate "model.checkpoint=$work/out/finetune" "data.root=$work/shapes" \
            "${asked[@]}" format=json > "$work/evaluate.txt"
        cat "$work/evaluate.txt"
    else
        not_run evaluate "llava_fsdp.evaluate does not exist"
    fi

    if [ "$gpus" -lt 2 ]; then
        not_run "several ranks over NCCL" "needs two GPUs or more, here are $gpus; the same code runs on gloo in tests/"
    else
        ranks=$((gpus >= 4 ? 4 : 2))
        part strategies-nccl 150 "$python" benchmarks/strategies.py "$out/nccl" --ranks "$ranks" "${sizes[@]}"
    fi
}

case $what in
    tests)
        if [ "$gpus" -eq 0 ]; then
            not_run "tests on CUDA" "torch sees no GPU; the tests of tests/gpu that need none run on the CPU instead"
            run_tests "$out/gpu-tests.jsonl" 560 -m "slow and not gpu"
        else
            run_tests "$out/gpu-tests.jsonl" 560 -m gpu
        fi
        ;;
    brief) run_brief ;;
    memory) measure_memory ;;
    checks) run_checks ;;
    *) measure_speed ;;
esac
summarize end
exit "$failed"
