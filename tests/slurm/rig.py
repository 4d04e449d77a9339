"""A real Slurm of its own: munged, slurmctld and several slurmd on this host, started and stopped by pid.

All nodes share one address, one /tmp and one process space, which is harsher than a cluster. Needs Debian's packages
slurm-wlm and munge, but no root. Knows nothing of what the jobs run.
"""

import os
import pwd
import secrets
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = (
    "munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "sinfo", "squeue",
)  # fmt: skip
_SBIN = ("/usr/sbin", "/usr/local/sbin", "/sbin")
# The gpu plugin only wants distinct character devices.
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random")

_CONFIG = """\
ClusterName=rig
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={root}/run/munge.socket,cred_expire=5
CryptoType=crypto/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/run/slurmctld.pid
SlurmdPidFile={root}/run/slurmd.%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0,bf_interval=1,sched_interval=1
JobRequeue=1
ReturnToService=2
SlurmdTimeout=10
MessageTimeout=10
KillWait=15
MinJobAge=3600
CompleteWait=0
GresTypes=gpu
"""


def missing_programs() -> tuple[str, ...]:
    """Return which of Slurm's programs are not installed."""
    return tuple(name for name in PROGRAMS if find_program(name) is None)


def find_program(name: str) -> str | None:
    """Return the path of a program, also where an ordinary user's PATH does not look."""
    return shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", ""), *_SBIN)))


@dataclass
class SlurmRig:
    """A running cluster; `environ` is what its client commands need."""

    root: Path
    num_nodes: int
    daemons: list[subprocess.Popen] = field(default_factory=list)

    @property
    def environ(self) -> dict[str, str]:
        """This process's environment without an outer job's variables, for this cluster's commands."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM_", "SBATCH_", "SRUN_", "SUBMITIT_"))
        }
        return {**kept, "SLURM_CONF": str(self.root / "slurm.conf")}

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names with a hyphen and zero padding, which home-made node list parsers get wrong."""
        return tuple(f"g1-n{number:02d}" for number in range(1, self.num_nodes + 1))

    def start(self) -> None:
        """Start everything and wait until every node is idle."""
        for name in ("run", "state", "log", *(f"spool/{node}" for node in self.nodes)):
            (self.root / name).mkdir(parents=True, mode=0o755)
        self._write_config()
        key = self.root / "run" / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        run, logs = self.root / "run", self.root / "log"
        self._spawn(
            "munged",
            "--foreground",
            "--force",
            f"--socket={run / 'munge.socket'}",
            f"--key-file={key}",
            f"--pid-file={run / 'munged.pid'}",
            f"--log-file={logs / 'munged.log'}",
            f"--seed-file={run / 'munge.seed'}",
        )
        self._wait("munged's socket", lambda: (run / "munge.socket").exists())
        config = str(self.root / "slurm.conf")
        self._spawn("slurmctld", "-D", "-c", "-f", config)
        for node in self.nodes:
            self._spawn("slurmd", "-D", "-c", "-f", config, "-N", node)
        self._wait("idle nodes", self._all_idle)

    def stop(self) -> None:
        """Cancel what is left and stop the daemons, workers before the controller."""
        self.run("scancel", "--full", f"--user={_user()}")
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in reversed(self.daemons):
            try:
                daemon.wait(timeout=20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(timeout=20)

    def run(self, *argv: str, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess:
        """Run a client command of this cluster to its end."""
        return subprocess.run(
            [find_program(argv[0]) or argv[0], *argv[1:]],
            env=self.environ if environ is None else environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def record(self, job_id: str) -> dict[str, str]:
        """Return Slurm's record of a job: JobState, ExitCode, Reason and the rest."""
        text = self.run("scontrol", "-o", "show", "job", job_id).stdout
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def wait_for_job(self, job_id: str, timeout_s: float = 90.0) -> dict[str, str]:
        """Wait until a job has left its nodes and return its record."""
        final = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
        end_s = time.monotonic() + timeout_s
        while True:
            record = self.record(job_id)
            if record.get("JobState") in final:
                return record
            if time.monotonic() > end_s:
                raise AssertionError(f"job {job_id} after {timeout_s:g} s: {record}")
            time.sleep(0.1)

    def _all_idle(self) -> bool:
        states = self.run("sinfo", "-h", "-N", "-o", "%t").stdout.split()
        return states == ["idle"] * self.num_nodes

    def _write_config(self) -> None:
        host = socket.gethostname().partition(".")[0]
        first = _free_range(self.num_nodes + 1)
        text = _CONFIG.format(host=host, port=first, user=_user(), root=self.root)
        for index, node in enumerate(self.nodes, start=1):
            text += (
                f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={first + index} CPUs=8 Sockets=1 "
                f"CoresPerSocket=8 ThreadsPerCore=1 RealMemory=64000 Gres=gpu:h100:4 Feature=rig State=UNKNOWN\n"
            )
        text += (
            f"PartitionName=main Nodes={','.join(self.nodes)} Default=YES MaxTime=INFINITE State=UP "
            "DefMemPerCPU=500\n"
        )
        (self.root / "slurm.conf").write_text(text)
        lines = [
            f"NodeName={node} Name=gpu Type=h100 File={device}\n"
            for node in self.nodes
            for device in _DEVICES
        ]
        (self.root / "gres.conf").write_text("".join(lines))
        (self.root / "cgroup.conf").write_text("CgroupAutomount=no\n")

    def _spawn(self, name: str, *arguments: str) -> None:
        with (self.root / "log" / f"{name}.out").open("ab") as output:
            daemon = subprocess.Popen(
                [find_program(name) or name, *arguments],
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.daemons.append(daemon)

    def _wait(self, what: str, is_there, timeout_s: float = 30.0) -> None:
        end_s = time.monotonic() + timeout_s
        while not is_there():
            ended = [daemon.args[0] for daemon in self.daemons if daemon.poll() is not None]
            if ended or time.monotonic() > end_s:
                logs = "\n".join(
                    f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}"
                    for path in sorted((self.root / "log").iterdir())
                )
                raise AssertionError(f"no {what} after {timeout_s:g} s; ended: {ended}\n{logs}")
            time.sleep(0.05)


def _user() -> str:
    return pwd.getpwuid(os.getuid()).pw_name


def _free_range(count: int) -> int:
    """Return the first of `count` neighbouring ports that are all free now."""
    for _ in range(200):
        first = 20000 + secrets.randbelow(10000)
        sockets = []
        try:
            for port in range(first, first + count):
                probe = socket.socket()
                sockets.append(probe)
                probe.bind(("", port))
        except OSError:
            continue
        finally:
            for probe in sockets:
                probe.close()
        return first
    raise AssertionError(f"no {count} neighbouring free ports")
