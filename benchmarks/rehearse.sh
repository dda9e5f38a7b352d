#!/usr/bin/env bash
# Tries, without a GPU, what the first hour on a machine with one will run:
#
#   benchmarks/rehearse.sh FOLDER                  about a quarter of an hour on two idle cores; the folder is reused
#   benchmarks/rehearse.sh FOLDER checks memory    these calls of gpu.sh alone, such as brief
#
# The environment is what such a machine may have: torch, the oldest transformers that the project supports, and no
# optional package. Everything else that the project and its tests need is built as wheels into FOLDER/wheels, some of
# them from sources (antlr4-python3-runtime has no wheel): copy that folder to a machine that reaches no index, and name
# it there as WHEELS. Then each call of gpu.sh runs with --dry and, where the system allows it, without a network. Fails if
# a part fails, or if `brief` takes too long or leaves too many files.
#
# PYTHON   the interpreter (default: as launch/setup.sh finds it); there must be a build of torch without CUDA for it
set -euo pipefail

# shellcheck source=launch/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/../launch/setup.sh"
cd "$ROOT"
mkdir -p "${1:?usage: benchmarks/rehearse.sh FOLDER}"
folder="$(cd "$1" && pwd)"
bare="$folder/venv/bin/python"
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

if [[ ! -x "$bare" ]]; then
    say "a bare environment in $folder/venv"
    "$(find_python 0)" -m venv "$folder/venv"
fi
oldest="$("$bare" -c 'import re, tomllib
named = tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]
print(next(re.match("transformers>=([0-9.]+)", name)[1] for name in named if name.startswith("transformers")))')"
"$bare" -m pip install --quiet "$TORCH_WITHOUT_GPU" "transformers==$oldest.*"

say "wheels of what is missing"
rm -rf "$folder/wheels"
"$bare" - "$folder" << 'PY'
import json, pathlib, re, subprocess, sys, tomllib
from importlib import metadata

from packaging.requirements import Requirement

folder = pathlib.Path(sys.argv[1])
present = {re.sub("[-_.]+", "-", one.name).lower() for one in metadata.distributions()}
pins = [line for line in open("constraints.txt") if not line.startswith("#")]
pins = [line for line in pins if re.sub("[-_.]+", "-", line.partition("==")[0]).lower() not in present]
(folder / "constraints.txt").write_text("".join(pins))
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
wanted = [*project["dependencies"], *project["optional-dependencies"]["fp8"], "pytest", "pytest-timeout", "pytest-xdist"]
wanted = [name for name in wanted if Requirement(name).name not in present]
pip = [sys.executable, "-m", "pip", "--quiet"]
report = folder / "missing.json"
resolve = ["install", "--dry-run", "--report", str(report), "--constraint", str(folder / "constraints.txt")]
subprocess.run([*pip, *resolve, *wanted], check=True, stdout=subprocess.DEVNULL)
missing = [one["metadata"] for one in json.loads(report.read_text())["install"]]
names = [f"{one['name']}=={one['version']}" for one in missing]
assert not any(name.startswith(("torch==", "nvidia", "transformers==")) for name in names), names
subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(folder / "wheels"), *names], check=True)
PY

failed=()
shift
[[ $# -gt 0 ]] || set -- tests checks memory speed pretrain variants brief
alone=(unshare --map-root-user --net sh -c 'ip link set lo up && exec "$@"' sh)
"${alone[@]}" true 2> /dev/null || { say "the calls could reach a network"; alone=(); }
for what in "$@"; do
    say "gpu.sh $what"
    rm -rf "${folder:?}/$what"
    SECONDS=0
    PYTHON="$bare" WHEELS="$folder/wheels" ${alone[@]+"${alone[@]}"} benchmarks/gpu.sh "$folder/$what" "$what" --dry ||
        failed+=("$what")
    [[ "$what" != brief ]] || say "brief: $SECONDS s, files: $(cd "$folder/brief" && echo ./*)"
    [[ "$what" != brief || (SECONDS -le 590 && $(find "$folder/brief" -type f | wc -l) -le 8) ]] || failed+=("$what")
done
[[ ${#failed[@]} -eq 0 ]] || die "failed: ${failed[*]}; see log-*.txt in $folder"
say "all parts ran"
