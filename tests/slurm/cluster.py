"""A private Slurm on loopback: ``python -m tests.slurm.cluster COMMAND ...`` runs one inside it.

Two nodes with four pretend GPUs each, whatever this machine has. Every node is a slurmd with a host
name, an /etc/hosts and a /dev/shm of its own (mount and UTS namespaces, hence root), so that
code which shares memory across nodes fails. Nothing outside the folder is written, and all
processes end with the caller.
"""

from __future__ import annotations

import contextlib
import ctypes
import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PROGRAMS = {"munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client"}
NODES = ("n1", "n2")
N_GPUS = 4
N_CPUS = 128  # claimed by each node, so that real job scripts are accepted
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
PMIX = "/usr/lib"

CONFIGURATION = """\
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
TmpFS={folder}/tmp-%n
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_min_interval=0,sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=2
GresTypes=gpu
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} Sockets=2 "
    "CoresPerSocket={cores} ThreadsPerCore=1 RealMemory=512000 Gres=gpu:{gpus}\n"
)
NAMESPACE = (
    'hostname "$1"; mount --bind "$2/hosts" /etc/hosts; mount -t tmpfs -o mode=1777 shm /dev/shm; '
    'exec slurmd -D -N "$1" -f "$2/slurm.conf"'
)


def missing() -> list[str]:
    """Packages to install."""
    names = [pack for program, pack in PROGRAMS.items() if not shutil.which(program, path=PATH)]
    return names if pmix_folders() else [*names, "libpmix2"]


def pmix_folders() -> list[Path]:
    """Where the PMIx library of Slurm's plugin lies."""
    return [file.parent for file in Path(PMIX).glob("*/pmix2/lib/libpmix.so.2")]


def why_not() -> str:
    """Why no cluster can be started here; "" if it can. Installs what is missing, as root."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root on Linux, for namespaces"
    if subprocess.run(["unshare", "--uts", "--mount", "true"], check=False).returncode:
        return "no namespaces here"
    if packages := missing():
        if shutil.which("apt-get") is None:
            return f"not installed: {' '.join(packages)}"
        apt = ["apt-get", "install", "-q", "-y", "--no-install-recommends", *packages]
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["apt-get", "update", "-q"], apt):
            if subprocess.run(
                command, env=quiet, stdout=subprocess.DEVNULL, check=False
            ).returncode:
                return f"cannot be installed: {' '.join(packages)}"
    for folder in pmix_folders():  # the plugin opens the development name, which is not packaged
        if not (folder / "libpmix.so").exists():
            (folder / "libpmix.so").symlink_to("libpmix.so.2")
    return ""


def end_with_parent() -> None:
    """In a child before exec: die with the process that started it."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def wait_until(is_true: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    """Poll; an error after that time."""
    end = time.monotonic() + seconds
    while not is_true():
        if time.monotonic() > end:
            raise TimeoutError(f"{what} did not happen within {seconds:g} s")
        time.sleep(0.05)


def free_ports(n: int) -> int:
    """The first of n free ports in a row."""
    for first in range(17000 + os.getpid() % 1000 * 10, 60000, n):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + n):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise OSError("no free ports")


class Cluster:
    """A running cluster; a context manager."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="sl-", dir="/tmp"))
        self._daemons: list[subprocess.Popen[bytes]] = []
        settings = {
            "PATH": PATH,
            "SLURM_CONF": f"{self.folder}/slurm.conf",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            # no search for fast networks, loopback only, yield the core: a second instead of five
            "OMPI_MCA_pml": "ob1",
            "OMPI_MCA_btl": "^ofi,uct,openib",
            "OMPI_MCA_btl_tcp_if_include": "lo",
            "OMPI_MCA_mpi_yield_when_idle": "1",
        }
        self.environment = {**os.environ, **settings}

    def __enter__(self) -> Cluster:
        try:
            self._write()
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if len(self._daemons) > 1:  # jobs first: only slurmd ends their step daemons cleanly
            with contextlib.suppress(subprocess.SubprocessError):
                self.run("scancel", "--user", getpass.getuser(), check=False, timeout=10)
                wait_until(lambda: not self.run("squeue", "-h").stdout, "the end of the jobs")
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._sweep()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _sweep(self) -> None:
        """Kill what is left of the jobs: they carry the name of our configuration."""
        mark = f"SLURM_CONF={self.folder}/slurm.conf".encode()
        for entry in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if int(entry.parent.name) != os.getpid() and mark in entry.read_bytes().split(
                    b"\0"
                ):
                    os.kill(int(entry.parent.name), signal.SIGKILL)

    def run(
        self, *command: str, check: bool = True, timeout: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of Slurm to its end."""
        return subprocess.run(
            command,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            check=check,
            timeout=timeout,
        )

    def _write(self) -> None:
        folder, host, port = self.folder, socket.gethostname().partition(".")[0], free_ports(3)
        folder.chmod(0o755)
        (folder / "state").mkdir()
        names = {"host": host, "port": port, "folder": folder, "user": getpass.getuser()}
        text = CONFIGURATION.format(**names)
        for i, name in enumerate(NODES, 1):
            (folder / f"spool-{name}").mkdir()
            (folder / f"tmp-{name}").mkdir(mode=0o1777)
            cores = N_CPUS // 2
            text += NODE.format(name=name, host=host, port=port + i, cores=cores, gpus=N_GPUS)
        (folder / "slurm.conf").write_text(text)
        for i in range(N_GPUS):  # only a device file gets a number
            (folder / f"gpu{i}").symlink_to("/dev/null")
        nodes, last = ",".join(NODES), N_GPUS - 1
        (folder / "gres.conf").write_text(
            f"NodeName={nodes} Name=gpu File={folder}/gpu[0-{last}]\n"
        )
        hosts = Path("/etc/hosts").read_text() if Path("/etc/hosts").exists() else ""
        (folder / "hosts").write_text(f"{hosts.rstrip()}\n127.0.0.1 {' '.join(NODES)}\n")
        key = folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))

    def _start(self) -> None:
        at = self.folder
        self._daemon("munged", "--force", "--foreground", f"--key-file={at}/munge.key",
                     f"--socket={at}/munge.socket", f"--pid-file={at}/munge.pid",
                     f"--log-file={at}/munge.log", f"--seed-file={at}/munge.seed")  # fmt: skip
        wait_until((at / "munge.socket").exists, "the start of munged")
        self._daemon("slurmctld", "-D", "-f", f"{at}/slurm.conf")
        for name in NODES:
            words = ("unshare", "--uts", "--mount", "sh", "-ec", NAMESPACE, "sh", name, str(at))
            self._daemon(*words)
        wait_until(self._is_up, "the start of the nodes")

    def _is_up(self) -> bool:
        states = self.run("sinfo", "-h", "-N", "-o", "%t", check=False).stdout.split()
        return states == ["idle"] * len(NODES)

    def _daemon(self, *command: str) -> None:
        with open(self.folder / f"daemon{len(self._daemons)}.log", "wb") as log:
            self._daemons.append(
                subprocess.Popen(
                    command,
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=self.folder,
                    start_new_session=True,
                    preexec_fn=end_with_parent,
                )
            )


@contextlib.contextmanager
def cluster() -> Iterator[Cluster]:
    """A cluster, or an error that says why there is none."""
    if reason := why_not():
        raise RuntimeError(f"no Slurm: {reason}")
    with Cluster() as found:
        yield found


def main() -> int:
    """Run a command inside a cluster."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with cluster() as found:
        return subprocess.run(
            sys.argv[1:] or ["sinfo"], env=found.environment, check=False
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
