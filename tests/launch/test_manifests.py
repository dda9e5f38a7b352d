"""The files for Kubernetes and SkyPilot: their form, and that what they start is launch/multinode.sh as it wants it."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from machine import BASH, ROOT, Machine
from schemas import KUBERNETES, SKYPILOT_TASK, SKYPILOT_VOLUME

from llava_fsdp.runtime.exit_codes import ENDINGS

KUBERNETES_FILES = sorted((ROOT / "launch" / "kubernetes").glob("*.yaml"))
DOCKERFILE = (ROOT / "launch" / "kubernetes" / "Dockerfile").read_text()
TRAIN = f"""#!{BASH}
[[ "$1 $2 $3" == "-m llava_fsdp train" ]] || exec {sys.executable} "$@"
env | grep -E "^(PET_|RANK=|MASTER_)" >>"$NOTES"
echo "$@" >>"$NOTES"
"""


def documents(name: str) -> dict[str, dict[str, Any]]:
    text = (ROOT / "launch" / "kubernetes" / name).read_text()
    return {found["kind"]: found for found in yaml.safe_load_all(text)}


def container_of(kind: str) -> dict[str, Any]:
    """What a pod runs, with the arguments, wherever the file says them."""
    if kind == "PyTorchJob":
        workers = documents("pytorchjob.yaml")[kind]["spec"]["pytorchReplicaSpecs"]["Worker"]
        (found,) = workers["template"]["spec"]["containers"]
        return found
    both = documents("trainjob.yaml")
    (job,) = both["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    (found,) = job["template"]["spec"]["template"]["spec"]["containers"]
    return {**found, "args": both["TrainJob"]["spec"]["trainer"]["args"]}


@pytest.mark.parametrize("path", KUBERNETES_FILES, ids=lambda path: path.name)
def test_kubernetes_knows_every_field(path: Path) -> None:
    for found in yaml.safe_load_all(path.read_text()):
        Draft202012Validator(KUBERNETES[found["kind"]]).validate(found)


def test_skypilot_knows_every_field() -> None:
    folder = ROOT / "launch" / "skypilot"
    for name, schema in (("spot", SKYPILOT_TASK), ("nodes", SKYPILOT_TASK), ("volume", SKYPILOT_VOLUME)):
        Draft202012Validator(schema).validate(yaml.safe_load((folder / f"{name}.yaml").read_text()))


def test_exit_codes_mean_the_same_everywhere() -> None:
    """What is worth another start is tried again and not counted, what is not ends the job, and the rest is counted."""
    again = {int(ENDINGS[name].exit_code) for name in ("stopped", "communication")}
    final = {int(e.exit_code) for e in ENDINGS.values() if e.is_permanent} - {0} - again
    for name in ("spot", "nodes"):
        task = yaml.safe_load((ROOT / "launch" / "skypilot" / f"{name}.yaml").read_text())
        assert set(task["resources"]["job_recovery"]["recover_on_exit_codes"]) == again
    (job,) = documents("trainjob.yaml")["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    rules = job["template"]["spec"]["podFailurePolicy"]["rules"]
    said = {rule["action"]: set(rule["onExitCodes"]["values"]) for rule in rules if "onExitCodes" in rule}
    assert said == {"FailJob": final, "Ignore": {int(ENDINGS["stopped"].exit_code)}}
    assert rules[0]["action"] == "FailJob", "the first rule that fits is taken"


@pytest.mark.parametrize("kind", ["PyTorchJob", "TrainJob"])
def test_times_and_places_agree(kind: str) -> None:
    """The image has what the command names, and a pod is not killed while torchrun still waits for its ranks."""
    name = {"PyTorchJob": "pytorchjob.yaml", "TrainJob": "trainjob.yaml"}[kind]
    text = (ROOT / "launch" / "kubernetes" / name).read_text()
    container = container_of(kind)
    env = {each["name"]: each.get("value", "") for each in container["env"]}
    grace = int(text.partition("terminationGracePeriodSeconds: ")[2].split()[0])
    assert 30 < int(env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < grace
    (command,) = container["command"]
    workdir = DOCKERFILE.partition("\nWORKDIR ")[2].split()[0]
    assert "\nCOPY launch launch\n" in DOCKERFILE
    assert os.access(ROOT / Path(command).relative_to(workdir), os.X_OK)
    claim = documents("shared.yaml")["PersistentVolumeClaim"]
    assert f"claimName: {claim['metadata']['name']}" in text and claim["spec"]["accessModes"] == ["ReadWriteMany"]
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {"/shared", "/dev/shm"}
    places = [arg.partition("=")[2] for arg in container["args"] if "=/" in arg]
    assert len(places) == 3 and all(place.startswith("/shared/") for place in places)


def operator_env(kind: str, address: str, port: int) -> dict[str, str]:
    """What Kubeflow puts into the second pod of two, beside what the file says."""
    if kind == "PyTorchJob":
        job = documents("pytorchjob.yaml")[kind]
        elastic = job["spec"]["elasticPolicy"]
        return {
            "HOSTNAME": f"{job['metadata']['name']}-worker-1", "PET_RDZV_ENDPOINT": f"{address}:{port}",
            "PET_RDZV_BACKEND": elastic["rdzvBackend"], "PET_RDZV_ID": elastic["rdzvId"],
            "PET_NNODES": f"{elastic['minReplicas']}:{elastic['maxReplicas']}",
            "PET_MAX_RESTARTS": str(elastic["maxRestarts"]),
        }  # fmt: skip
    return {
        "HOSTNAME": "llava-fsdp-node-0-1", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "auto", "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": address, "PET_MASTER_PORT": str(port),
        **{each["name"]: each["value"] for each in documents("trainjob.yaml")["TrainJob"]["spec"]["trainer"]["env"]},
    }  # fmt: skip


@pytest.mark.parametrize(("kind", "nodes"), [("PyTorchJob", "2:2"), ("TrainJob", "2")])
def test_a_pod_trains_as_multinode_does(kind: str, nodes: str, tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.venv()
    machine.put(".venv/bin/python", TRAIN)
    machine.gpus(8)
    container = container_of(kind)
    with socket.create_server(("127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
        own = {each["name"]: each["value"] for each in container["env"] if "value" in each}
        env = {**own, **operator_env(kind, "127.0.0.1", port), "RANK": "1", "MASTER_ADDR": "x", "LOG_DIR": "logs"}
        done = machine.bash("launch/kubernetes/pod.sh", *container["args"], **env)
    assert done.returncode == 0, done.stderr
    assert machine.notes.read_text() == (
        f"-m llava_fsdp train --nnodes {nodes} --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port} "
        "--rdzv-id llava-fsdp --rdzv-conf join_timeout=1800,is_host=false --local-addr 127.0.0.1 --max-restarts 3 "
        f"--log-dir logs --tee 3 --local-ranks-filter 0 {' '.join(container['args'])}\n"
    )


@pytest.mark.parametrize(("code", "plain", "raised"), [(75, 75, 203), (5, 5, 133), (2, 2, 2), (3, 3, 3)])
def test_a_pod_ends_with_a_code_that_its_operator_understands(
    code: int, plain: int, raised: int, tmp_path: Path
) -> None:
    """A PyTorchJob tries codes from 128 on again, and no others."""
    machine = Machine(tmp_path)
    machine.venv()
    env = {
        "PET_NNODES": "1", "PET_MASTER_ADDR": "127.0.0.1", "RDZV_ID": "x", "HOSTNAME": "pod-0", "CODE": str(code),
        "NPROC_PER_NODE": "1", "PYTHONPATH": str(ROOT / "src"),
    }  # fmt: skip
    script = "launch/kubernetes/pod.sh"
    assert machine.bash(script, "output_dir=.", **env).returncode == plain
    assert machine.bash(script, "output_dir=.", **env, RETRY_FROM_128="yes").returncode == raised


def run_of(name: str) -> str:
    return yaml.safe_load((ROOT / "launch" / "skypilot" / f"{name}.yaml").read_text())["run"]


def test_skypilot_tells_multinode_who_meets_where(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.venv()
    machine.put(".venv/bin/python", TRAIN)
    (machine.bin / "head").symlink_to(shutil.which("head") or "/no/head")
    env = {
        "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_GPUS_PER_NODE": "8",
        "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8", "SKYPILOT_TASK_ID": "sky-managed-7",
    }  # fmt: skip
    done = machine.bash(run_of("nodes"), **env)
    assert done.returncode == 0, done.stderr
    said = machine.notes.read_text()
    assert said.startswith(
        "-m llava_fsdp train --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint 10.0.0.7:29400 "
        "--rdzv-id sky-managed-7 "
        "--rdzv-conf join_timeout=1800,is_host=true "
    )
    assert " --log-dir /shared/logs/sky-managed-7 " in said and "output_dir=/shared/outputs/finetune" in said


TRAINS = f"""#!{BASH}
set -e
at="$OUT/checkpoints"
last=$(ls "$at" 2>/dev/null | tail -n 1 || true)
echo "begins at ${{last:-nothing}}"
mkdir -p "$at/step-00000$1/shards"
echo "$1 $2" >"$at/step-00000$1/manifest.json"
echo "weights $1 $2" >"$at/step-00000$1/shards/rank-0"
mkdir -p "$at/step-000099.tmp"
echo "$1" >>"$OUT/metrics.jsonl"
[[ -z "$last" || -n "${{KEEP:-}}" ]] || rm -rf "${{at:?}}/$last"
exit "$3"
"""


def mirrored(bucket: Path, out: Path, *command: str, **environment: str) -> subprocess.CompletedProcess:
    words = [BASH, str(ROOT / "launch/skypilot/mirror.sh"), str(bucket), str(out), BASH, *command]
    env = {**os.environ, "OUT": str(out), **environment}
    return subprocess.run(words, check=False, capture_output=True, text=True, env=env)


def put_checkpoint(bucket: Path, name: str) -> None:
    (bucket / "checkpoints" / name).mkdir(parents=True)
    (bucket / "complete").mkdir(exist_ok=True)
    for path in (bucket / "checkpoints" / name / "manifest.json", bucket / "complete" / name):
        path.write_text(name)


@pytest.mark.slow
def test_fetching_that_was_cut_short_begins_again(tmp_path: Path) -> None:
    """No run goes on from what had come until then, and the bucket keeps what is newer than the run."""
    bucket, out, script = tmp_path / "bucket", tmp_path / "out", tmp_path / "train.sh"
    script.write_text(TRAINS)
    for name in ("step-000001", "step-000002"):
        put_checkpoint(bucket, name)
    (bucket / "checkpoints" / "step-000002").rename(tmp_path / "away")
    done = mirrored(bucket, out, str(script), "3", "a", "75")
    assert done.returncode == 1 and "step-000002 cannot be read" in done.stderr and done.stdout == ""
    assert not (out / "checkpoints").exists()
    (tmp_path / "away").rename(bucket / "checkpoints" / "step-000002")
    assert mirrored(bucket, out, str(script), "3", "a", "75", KEEP="1").stdout == "begins at step-000002\n"
    put_checkpoint(bucket, "step-1000000")  # longer names are newer, whatever their letters
    for name in ("step-000001", "step-000002"):
        shutil.rmtree(out / "checkpoints" / name)
    assert mirrored(bucket, out, str(script), "4", "a", "75", KEEP="1").returncode == 75
    kept = {"step-000003", "step-000004", "step-1000000"}
    assert {path.name for path in (bucket / "complete").iterdir()} == kept
    assert {path.name for path in (bucket / "checkpoints").iterdir()} == kept


@pytest.mark.slow
def test_a_bucket_gets_the_results_and_leaves_the_exit_code_alone(tmp_path: Path) -> None:
    bucket, out, script = tmp_path / "bucket", tmp_path / "out", tmp_path / "train.sh"
    script.write_text(
        'for name in validation starts; do echo "{}" >"$OUT/$name.jsonl"; done\n'
        'mkdir -p "$OUT/adapter"; echo weights >"$OUT/adapter/model"; exit "$1"\n'
    )
    bucket.mkdir()
    assert mirrored(bucket, out, str(script), "0").returncode == 0
    assert sorted(path.name for path in bucket.rglob("*") if path.is_file()) == [
        "model", "starts.jsonl", "validation.jsonl",
    ]  # fmt: skip
    (bucket / "starts.jsonl").unlink()
    (bucket / "starts.jsonl").mkdir()  # what cannot be written
    done = mirrored(bucket, out, str(script), "75")
    assert done.returncode == 75 and "it lacks what was saved last" in done.stderr


def test_a_bucket_gives_the_next_machine_what_the_last_one_saved(tmp_path: Path) -> None:
    """Whole checkpoints alone, and of a run that was begun anew the new one's."""
    bucket, script = tmp_path / "bucket", tmp_path / "train.sh"
    script.write_text(TRAINS)
    bucket.mkdir()

    def machine(number: int, *words: str) -> str:
        out = tmp_path / f"machine-{number}"
        done = mirrored(bucket, out, str(script), *words)
        assert done.returncode == int(words[-1]), done.stderr
        return done.stdout

    def saved() -> list[str]:
        return sorted(path.name for path in (bucket / "checkpoints").iterdir())

    assert machine(1, "1", "a", "75") == "begins at nothing\n" and saved() == ["step-000001"]
    (bucket / "checkpoints" / "step-000007").mkdir()  # the copy of it was cut short
    assert machine(2, "2", "a", "75") == "begins at step-000001\n"
    assert {"step-000002"} == {path.name for path in (bucket / "complete").iterdir()}
    assert (bucket / "metrics.jsonl").read_text() == "1\n2\n"
    shutil.rmtree(tmp_path / "machine-2" / "checkpoints" / "step-000002")
    (bucket / "complete" / "step-000002").write_text("2 of another run\n")
    assert machine(2, "2", "b", "0") == "begins at step-000099.tmp\n"  # its own folder, as it left it
    assert (bucket / "checkpoints" / "step-000002" / "shards" / "rank-0").read_text() == "weights 2 b\n"
