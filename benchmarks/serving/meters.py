"""What a service takes of the machine: cores by process and thread, memory, the GPUs' time."""

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

T = TypeVar("T")

CALM_CORES = 0.1
"""What others may take of the machine beside a measurement, if they can be waited for."""
TICKS = os.sysconf("SC_CLK_TCK")
RSS = ("VmRSS", "RssAnon")


class Beside(NamedTuple):
    """Who else used the machine during a measurement, in cores."""

    generator_core: float
    other_cores: float


class Cores(NamedTuple):
    """What a service took, in cores."""

    all: float
    others: float
    """Everybody else's on the machine, load generators included."""
    by_role: dict[str, float]
    busiest: str
    busiest_thread: str


class Memory(NamedTuple):
    """One process, in MiB. `own` leaves out what it shares: files and Ray's object store."""

    role: str
    rss: float
    own: float


def cpu_seconds(root: int) -> dict[int, float]:
    """utime + stime of a process and each of its descendants, by pid."""
    parents, seconds = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        if (fields := stat(path)) is None:
            continue  # it has just ended
        pid = int(path.parent.name)
        parents[pid] = int(fields[1])
        seconds[pid] = spent(fields)
    return {pid: seconds[pid] for pid in parents if root in ancestry(pid, parents)}


def thread_seconds(pids: list[int]) -> dict[tuple[int, int], tuple[str, float]]:
    """Name and utime + stime of each thread of these processes."""
    found = {}
    for pid in pids:
        for path in Path(f"/proc/{pid}/task").glob("*/stat"):
            if (fields := stat(path)) is not None:
                tid = int(path.parent.name)
                name = "main" if tid == pid else f"{thread_name(path.parent)} {tid}"
                found[pid, tid] = name, spent(fields)
    return found


def thread_name(folder: Path) -> str:
    """As the thread calls itself."""
    try:
        return (folder / "comm").read_text().strip()
    except OSError:
        return "?"


def stat(path: Path) -> list[str] | None:
    """The fields of a `stat` file behind the name, or None if the process has ended."""
    try:
        return path.read_text().rpartition(")")[2].split()
    except OSError:
        return None


def spent(fields: list[str]) -> float:
    """utime + stime."""
    return (int(fields[11]) + int(fields[12])) / TICKS


def ancestry(pid: int, parents: dict[int, int]) -> Iterator[int]:
    """A process, its parent, and so on."""
    while pid:
        yield pid
        pid = parents.get(pid, 0)


def role(command: str) -> str:
    """What a process is to the service: a deployment's name, the proxy, or Ray's own."""
    if "ServeReplica:" in command:
        return command.partition("ServeReplica:")[2].split(":")[1].split(".")[0].split()[0]
    if "haproxy" in command.split(" ")[0]:
        return "haproxy"
    for actor in ("HAProxyManager", "ProxyActor", "ServeController"):
        if actor in command:
            return actor
    return "ray"


def roles(pids: list[int]) -> dict[int, str]:
    """What each of these processes is."""
    found = {}
    for pid in pids:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            command = ""
        found[pid] = role(command)
    return found


class Meter:
    """CPU seconds since it was made: of a service, and of the whole machine."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._since = time.monotonic()
        self._before = cpu_seconds(root)
        self._threads = thread_seconds(list(self._before))
        self._busy_before = busy_seconds()

    def read(self) -> tuple[float, float]:
        """The service's, and all of the machine's. A process that came meanwhile counts whole."""
        return sum(self._by_process().values()), busy_seconds() - self._busy_before

    def cores(self) -> Cores:
        """The same as cores, and who took most of one."""
        elapsed = time.monotonic() - self._since
        took = {pid: seconds / elapsed for pid, seconds in self._by_process().items()}
        whole = (busy_seconds() - self._busy_before) / elapsed
        names, by_role = roles(list(took)), dict[str, float]()
        for pid, cores in took.items():
            by_role[names[pid]] = by_role.get(names[pid], 0.0) + cores
        busiest = max(took, key=lambda pid: took[pid], default=0)
        thread = (0.0, "?", 0)
        for (pid, tid), (name, seconds) in thread_seconds(list(took)).items():
            before = self._threads.get((pid, tid), ("", 0.0))[1]
            thread = max(thread, ((seconds - before) / elapsed, name, pid))
        return Cores(
            sum(took.values()),
            max(whole - sum(took.values()), 0.0),
            {name: round(cores, 2) for name, cores in sorted(by_role.items())},
            f"{names.get(busiest, '?')} {took.get(busiest, 0.0):.2f}",
            f"{names.get(thread[2], '?')}/{thread[1]} {thread[0]:.2f}",
        )

    def _by_process(self) -> dict[int, float]:
        after = cpu_seconds(self._root)
        return {pid: seconds - self._before.get(pid, 0.0) for pid, seconds in after.items()}


def busy_seconds() -> float:
    """What all cores have spent on anything but idling."""
    user, nice, system, _, _, irq, softirq, *_ = Path("/proc/stat").read_text().split()[1:]
    return sum(map(int, (user, nice, system, irq, softirq))) / TICKS


def memory(root: int) -> dict[int, Memory]:
    """Each process of a service that is not merely Ray's, by pid."""
    found = {}
    for pid, name in roles(list(cpu_seconds(root))).items():
        if name != "ray" and (sizes := resident(pid)):
            found[pid] = Memory(name, *sizes)
    return found


def resident(pid: int) -> tuple[float, float] | None:
    """VmRSS and RssAnon in MiB."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    kib = {
        key: int(value.split()[0])
        for key, _, value in (line.partition(":") for line in lines)
        if key in RSS
    }
    return (kib["VmRSS"] / 1024, kib["RssAnon"] / 1024) if kib else None


class GpuMeter:
    """The share of time that the GPUs were busy, as the driver samples it; None without one."""

    def __init__(self, num_gpus: int) -> None:
        self._samples: list[tuple[float, float]] = []
        self._process: subprocess.Popen[bytes] | None = None
        if num_gpus and (tool := shutil.which("nvidia-smi")):
            query = [tool, "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
            gpus = ",".join(map(str, range(num_gpus)))  # Ray lends the first ones
            ours, theirs = os.openpty()  # to a pipe it would write once in a few kilobytes
            self._process = subprocess.Popen(
                [*query, "-i", gpus, "-lms", "100"], stdin=subprocess.DEVNULL, stdout=theirs
            )
            os.close(theirs)
            threading.Thread(target=self._read, args=(ours,), daemon=True).start()

    def _read(self, terminal: int) -> None:
        with suppress(OSError), os.fdopen(terminal) as lines:  # it ends with an error
            for line in lines:
                if line.strip().isdigit():
                    self._samples.append((time.monotonic(), float(line)))

    def busy(self, begin: float, end: float) -> float | None:
        """Mean percent of the samples between two moments."""
        inside = [percent for moment, percent in self._samples if begin <= moment < end]
        return round(sum(inside) / len(inside), 1) if inside else None

    def end(self) -> None:
        """Stop sampling."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@contextmanager
def gpu_meter(num_gpus: int) -> Iterator[GpuMeter]:
    """A meter that stops with the block."""
    meter = GpuMeter(num_gpus)
    try:
        yield meter
    finally:
        meter.end()


def wait_for_calm(root: int, patience_s: float) -> None:
    """Until others leave the machine to the service, or patience ends."""
    deadline = time.monotonic() + patience_s
    calm = False
    while not calm and time.monotonic() < deadline:
        meter, interval_s = Meter(root), 3.0
        time.sleep(interval_s)
        service, busy = meter.read()
        calm = busy - service < CALM_CORES * interval_s


def calmest(
    measure: Callable[[], tuple[T, Beside]], root: int, patience_s: float
) -> tuple[T, Beside]:
    """A measurement that others left alone, or the least disturbed that patience allows.

    Chosen by what others did, never by its own figures.
    """
    deadline = time.monotonic() + patience_s
    best = measure()
    while best[1].other_cores > CALM_CORES and time.monotonic() < deadline:
        wait_for_calm(root, deadline - time.monotonic())
        best = min(best, measure(), key=lambda result: result[1].other_cores)
    return best
