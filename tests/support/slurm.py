"""A Slurm cluster on this machine, of the installed daemons: munged, slurmctld and a slurmd for every node.

Needs root and a slurmd that was built to run several times on one machine, as Debian's is.
"""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

DAEMONS = ("munged", "slurmctld", "slurmd")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def missing() -> str | None:
    """Why there can be no cluster here; None: there can."""
    absent = [name for name in (*DAEMONS, "sbatch", "scontrol") if shutil.which(name, path=PATH) is None]
    if absent:
        return f"not installed: {', '.join(absent)}"
    return None if os.geteuid() == 0 else "Slurm's daemons need root"


def free_ports(count: int) -> list[int]:
    """Held together, so that they differ."""
    found = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in found]
    for each in found:
        each.close()
    return ports


def configuration(folder: Path, nodes: int) -> str:
    """No cgroups, no accounting, and a job that was put back is started at once and not after two minutes."""
    host, (control, *slurmds) = socket.gethostname(), free_ports(nodes + 1)
    lines = [f"NodeName=n{i} NodeHostname={host} NodeAddr=127.0.0.1 Port={p} CPUs=1" for i, p in enumerate(slurmds)]
    return "\n".join([
        "ClusterName=test", f"SlurmctldHost={host}(127.0.0.1)", f"SlurmctldPort={control}", "SlurmUser=root",
        "AuthType=auth/munge", f"AuthInfo=socket={folder}/munge.socket,cred_expire=5", f"StateSaveLocation={folder}",
        f"SlurmdSpoolDir={folder}/spool-%n", f"SlurmctldPidFile={folder}/slurmctld.pid",
        f"SlurmdPidFile={folder}/slurmd-%n.pid", f"SlurmdLogFile={folder}/slurmd-%n.log", "GresTypes=gpu",
        "ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none", "JobAcctGatherType=jobacct_gather/none",
        "AccountingStorageType=accounting_storage/none", "SelectType=select/cons_tres", "SelectTypeParameters=CR_CPU",
        "SwitchType=switch/none", "MpiDefault=none", "ReturnToService=2",
        *(f"{line} Gres=gpu:1 State=UNKNOWN" for line in lines), "PartitionName=all Nodes=ALL Default=YES State=UP", "",
    ])  # fmt: skip


class Cluster:
    """`nodes` nodes with one GPU each, which are all this machine, and whose GPUs are a number."""

    def __init__(self, nodes: int):
        self.nodes = nodes
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: the socket's path has a limit
        self.daemons: list[subprocess.Popen] = []
        self.env = {**os.environ, "PATH": PATH, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def __enter__(self) -> "Cluster":
        (self.folder / "slurm.conf").write_text(configuration(self.folder, self.nodes))
        # a file that is there, and that nothing uses
        (self.folder / "gres.conf").write_text(f"NodeName=n[0-{self.nodes - 1}] Name=gpu File=/dev/null\n")
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        own = [f"--{name}={self.folder}/munge.{name}" for name in ("socket", "pid-file", "log-file", "seed-file")]
        try:
            self.start("munged", "--foreground", "--force", f"--key-file={key}", *own)
            self.until((self.folder / "munge.socket").exists, 20, "munged")
            self.start("slurmctld", "-D")
            for node in range(self.nodes):
                self.start("slurmd", "-D", "-N", f"n{node}")
            idle = ["idle"] * self.nodes
            self.until(lambda: self.ask("sinfo", "-h", "-N", "-o", "%T").split() == idle, 60, "the nodes")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self, *command: str) -> None:
        with (self.folder / f"{command[0]}-{len(self.daemons)}.out").open("w") as log:
            said = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
            self.daemons.append(subprocess.Popen(command, env=self.env, start_new_session=True, **said))

    def until(self, reached: Callable[[], object], seconds: float, what: str) -> None:
        end = time.monotonic() + seconds
        while not reached():
            logs = "".join(path.read_text() for path in self.folder.glob("*.out"))
            assert time.monotonic() < end, f"{what}: not within {seconds} s\n{logs[-3000:]}"
            time.sleep(0.2)

    def ask(self, *command: str) -> str:
        """What a command of Slurm's prints; empty where it fails, as it does while the controller starts."""
        done = subprocess.run(command, env=self.env, check=False, capture_output=True, text=True, timeout=60)
        return done.stdout if done.returncode == 0 else ""

    def submit(self, *words: str, folder: Path, **environment: str) -> str:
        """The number of a job that `sbatch WORDS...` makes in a folder."""
        done = subprocess.run(
            ["sbatch", "--parsable", *words], env={**self.env, **environment}, cwd=folder, check=False,
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """What Slurm says of a job, by its words: JobState, ExitCode, Restarts and others."""
        words = self.ask("scontrol", "show", "job", "--oneliner", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)
