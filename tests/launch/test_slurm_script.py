"""launch/slurm.sbatch between fakes of Slurm's commands; tests/launch/test_slurm.py has the real ones."""

import subprocess
import sys
from pathlib import Path

import pytest
from machine import BASH, ROOT, Machine
from tiers import slow_after

SRUN = f"""#!{BASH}
echo "srun $*" >>"$NOTES"
while [[ $1 == --* ]]; do shift; done
SLURM_NODEID=0 SLURM_GPUS_ON_NODE=2 exec "$@"
"""
SCONTROL = f"""#!{BASH}
case "$1 $2" in
  "show hostnames") printf 'n0\\nn1\\n' ;;
  "show job") echo "JobId=4207 JobName=x JobState=$STATE Reason=None" ;;
  *) echo "scontrol $*" >>"$NOTES"; exit "${{REFUSES:-0}}" ;;
esac
"""
JOB = {"SLURM_JOB_ID": "4207", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[0-1]", "PYTHONPATH": f"{ROOT}/src"}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    made.venv()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        made.put(name, text)
    return made


def run(machine: Machine, *words: str, **environment: str) -> subprocess.CompletedProcess:
    env = {**JOB, "SLURM_SUBMIT_DIR": str(machine.root), "STATE": "RUNNING", **environment}
    return machine.bash('exec launch/slurm.sbatch "$@"', "sbatch", "output_dir=.", *words, **env)


@pytest.mark.parametrize(
    ("told", "code", "requeued", "said"),
    slow_after(
        1,
        [
            ({"CODE": "75", "SAVES": "1"}, 75, True, "to go on after step 5"),
            pytest.param({"CODE": "5", "SAVES": "1"}, 5, True, "to go on after step 5", marks=pytest.mark.slow),
            ({"CODE": "75", "SAVES": "1", "STATE": "COMPLETING"}, 75, False, "was cancelled"),
            ({"CODE": "75"}, 1, False, "has saved nothing since step 0"),
            pytest.param({"CODE": "2", "SAVES": "1"}, 2, False, "ends with exit code 2", marks=pytest.mark.slow),
            pytest.param(
                {"CODE": "75", "SAVES": "1", "REFUSES": "1"}, 75, True, "Slurm refuses that", marks=pytest.mark.slow
            ),
        ],
    ),
)
def test_put_back_into_the_queue_where_that_helps(
    told: dict[str, str], code: int, requeued: bool, said: str, machine: Machine
) -> None:
    done = run(machine, **told)
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr
    assert machine.noted("scontrol") == (["scontrol requeue 4207"] if requeued else [])


def test_a_node_trains_as_multinode_says(machine: Machine) -> None:
    """Meeting at the first node, on a port of the job's own, under the job's name, with all GPUs of the node."""
    assert run(machine, "seed=7", CODE="2", RDZV_HOST="127.0.0.1", SLURM_RESTART_COUNT="3").returncode == 2
    (command,) = machine.noted("train")
    assert command == (
        "train --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:24207 "
        "--rdzv-id slurm-4207 --rdzv-conf join_timeout=600,is_host=true --local-addr 127.0.0.1 --max-restarts 3 "
        "--log-dir outputs/logs/slurm-4207/start-3 --tee 3 --local-ranks-filter 0 "
        "output_dir=. seed=7 shutdown=150"
    )
    (step,) = machine.noted("srun")
    assert step.startswith("srun --ntasks-per-node=1 --kill-on-bad-exit=0 --cpu-bind=none bash -c")


def test_a_wrong_place_is_said(machine: Machine, tmp_path: Path) -> None:
    done = run(machine, SLURM_SUBMIT_DIR=str(tmp_path))
    assert done.returncode == 2 and "submit from the root of the checkout, or name it by LLAVA_FSDP_ROOT" in done.stderr
    done = run(machine, SLURM_JOB_ID="")
    assert done.returncode == 2 and "this is a job for Slurm: sbatch launch/slurm.sbatch" in done.stderr
    assert machine.noted("train") == []


def test_a_checkpoint_that_cannot_be_asked_for_at_the_end_leaves_the_exit_code(machine: Machine) -> None:
    fake = f"""#!{BASH}
if [[ "$*" == *status*--saved* ]]; then
    grep -q asked "$NOTES" && exit 1
    echo asked >>"$NOTES"; echo 0; exit 0
fi
[[ "$*" != "-m llava_fsdp train"* ]] || exit "$CODE"
exec {sys.executable} "$@"
"""
    machine.put(".venv/bin/python", fake)
    done = run(machine, CODE="2")
    assert done.returncode == 2 and "ends with exit code 2" in done.stderr
    done = run(machine, CODE="75")
    assert done.returncode == 1 and machine.noted("scontrol") == []


@pytest.mark.parametrize("code", [0, 75])
def test_a_child_that_ends_within_a_trap_keeps_its_exit_code(code: int, machine: Machine) -> None:
    script = f"""
        source launch/setup.sh
        trap 'while kill -0 "$child" 2>/dev/null; do sleep 0.05; done' USR1
        (sleep 0.6; exit {code}) & child=$!
        (sleep 0.2; kill -USR1 $$) &
        await "$child"
        echo "$code"
    """
    assert machine.bash(script).stdout == f"{code}\n"


def test_a_child_that_a_signal_ended_says_so(machine: Machine) -> None:
    script = 'source launch/setup.sh; sleep 9 & child=$!; kill -TERM "$child"; await "$child"; echo "$code"'
    assert machine.bash(script).stdout == "143\n"
