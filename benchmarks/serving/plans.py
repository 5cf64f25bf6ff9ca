"""What can be measured, by name: which services to start, and which loads each of them gets.

Plans that want the same service share it, and a load that two of them want runs once.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import PurePath

CALLERS = {"224x224": 64, "512x512": 256, "768x1024": 96, "2048x1600": 24, "mix": 64, "varied": 64}
"""Callers of a closed loop that keep one GPU busy and wait less than the warm-up, by case."""
OTHER_CALLERS = 32
FEW_CALLERS = (1, 8)
"""Whose batches are small enough for graphs, and cost about as much to launch as to compute."""
PATCH_CALLERS = 128
"""Of patch rows, which take longer to leave than to be computed."""
SIZES = ("512x512", "768x1024", "2048x1600")
LONE = "512x512"
"""The case in which a lone caller's latency is taken apart."""
LOAD_SHARE = 0.8
WARM_UP_S = 2.0
LEARNING_S = 6.0
"""The same where graphs are compared: an encoder tries at first what gains by one."""
SMALL_CAPACITY = 2
"""Graphs that are too few for any mix of sizes."""
SMALL_IMAGES, SMALL_CALLERS = 32, 16
SAFETENSORS = "application/vnd.safetensors"


@dataclass(frozen=True)
class Service:
    """One service to start."""

    encoder: str
    topology: str
    proxy: str = "haproxy"
    graphs: tuple[tuple[str, str], ...] = ()
    """What `ENCODER_*` variables override in the encoder's graph settings."""
    gpus: int = 1
    """Encoders, and the GPUs that Ray is given if the machine has any."""

    @property
    def told(self) -> str:
        """In a line of text."""
        name = PurePath(self.encoder).stem
        return f"{name} {self.topology} {self.proxy} {self.graphs_told} {self.gpus} GPUs"

    @property
    def graphs_told(self) -> str:
        """The same in a word or two."""
        return " ".join(f"{name.removeprefix('graph_')}={value}" for name, value in self.graphs)


@dataclass(frozen=True)
class Shot:
    """One measurement of a running service."""

    plan: str
    case: str
    images_per_request: int = 1
    concurrency: int | None = None
    rate: float | None = None
    of_best: float | None = None
    """In place of `rate`: of what this service did at most in a closed loop of this case."""
    requests: int | None = None
    """A closed loop of so many, over which memory is watched."""
    query: str = ""
    accept: str = "application/x-npy"
    warm_up_s: float = WARM_UP_S

    @property
    def told(self) -> str:
        """In a line of text."""
        how_many = self.concurrency or self.rate or f"{self.of_best:.0%} of the best"
        times = f" x {self.images_per_request}" if self.images_per_request > 1 else ""
        return f"{self.plan} {self.case} {self.output}, {how_many}{times}"

    @property
    def output(self) -> str:
        """What the service is asked for."""
        return "patch" if "output=patch" in self.query else "pooled"

    def outstanding(self, max_images: int) -> int:
        """Images that can wait at once; an open loop bounds nothing."""
        callers = max_images if self.concurrency is None else self.concurrency
        return callers * self.images_per_request


@dataclass(frozen=True)
class Wanted:
    """What the command line leaves open."""

    encoder: str
    small_encoder: str
    topologies: tuple[str, ...] | None
    proxies: tuple[str, ...]
    cases: tuple[str, ...] | None
    concurrencies: tuple[int, ...] | None
    rate: float | None
    images_per_request: int
    gpus: tuple[int, ...]
    requests: int
    graph_modes: tuple[str, ...]
    patch_accept: str

    def topologies_or(self, *usual: str) -> tuple[str, ...]:
        """The given ones, or those that a plan is about."""
        return self.topologies or usual

    def cases_or(self, *usual: str) -> tuple[str, ...]:
        """The given ones, or those that a plan is about."""
        return self.cases or usual

    def callers(self, case: str) -> tuple[int, ...]:
        """The given ones, or as many as the case needs."""
        return self.concurrencies or (CALLERS.get(case, OTHER_CALLERS),)


Pairs = Iterable[tuple[Service, Shot]]


def sweep(wanted: Wanted) -> Pairs:
    """Every proxy and topology, case and concurrency that was asked for."""
    for proxy in wanted.proxies:
        for topology in wanted.topologies_or("split", "inline", "fused"):
            service = Service(wanted.encoder, topology, proxy)
            for case in wanted.cases_or("224x224"):
                shot = Shot("sweep", case, wanted.images_per_request)
                for concurrency in wanted.concurrencies or (1, 8, 32):
                    yield service, replace(shot, concurrency=concurrency)
                if wanted.rate:
                    yield service, replace(shot, rate=wanted.rate)


def topologies(wanted: Wanted) -> Pairs:
    """Throughput beside the bare tower; a lone caller's latency; latencies at 80 % load."""
    for topology in wanted.topologies_or("fused", "inline", "split"):
        service = Service(wanted.encoder, topology)
        cases = wanted.cases_or(*SIZES)
        lone = LONE if LONE in cases else cases[0]
        yield service, Shot("topologies", lone, concurrency=1)
        yield from throughput("topologies", service, cases, wanted)
        yield service, Shot("topologies", lone, of_best=LOAD_SHARE)


def throughput(plan: str, service: Service, cases: Iterable[str], wanted: Wanted) -> Pairs:
    """Closed loops that keep the encoders busy."""
    for case in cases:
        for callers in wanted.callers(case):
            yield service, Shot(plan, case, concurrency=callers * service.gpus)


def graphs(wanted: Wanted) -> Pairs:
    """Three sizes and their mix, few callers and many: graphs, none, too small a capacity."""
    modes = {
        "on": (),
        "off": (("graph_mode", "off"),),
        "few": (("graph_capacity", str(SMALL_CAPACITY)),),
        "exact": (("graph_mode", "exact"),),
    }
    cases = wanted.cases_or(*SIZES, "mix")
    callers = () if wanted.concurrencies else FEW_CALLERS
    for topology in wanted.topologies_or("fused"):
        for mode in wanted.graph_modes:
            service = Service(wanted.encoder, topology, graphs=modes[mode])
            shots = [Shot("graphs", case, concurrency=n) for case in cases for n in callers]
            shots += [shot for _, shot in throughput("graphs", service, cases, wanted)]
            shots.append(Shot("graphs", cases[-1], of_best=LOAD_SHARE))
            for shot in shots:
                yield service, replace(shot, warm_up_s=LEARNING_S)


def patch(wanted: Wanted) -> Pairs:
    """Rows of all patches as float16: gigabytes of payload a second."""
    for topology in wanted.topologies_or("fused"):
        service = Service(wanted.encoder, topology)
        for case in wanted.cases_or(LONE):
            for concurrency in wanted.concurrencies or (PATCH_CALLERS,):
                yield (
                    service,
                    Shot(
                        "patch",
                        case,
                        concurrency=concurrency,
                        query="?output=patch&dtype=float16",
                        accept=wanted.patch_accept,
                    ),
                )


def small(wanted: Wanted) -> Pairs:
    """A tower that costs next to nothing, many small images a request: the CPU is the limit."""
    for topology in wanted.topologies_or("fused", "inline"):
        for case in wanted.cases_or("224x224"):
            for callers in wanted.concurrencies or (SMALL_CALLERS,):
                shot = Shot("small", case, SMALL_IMAGES, concurrency=callers)
                yield Service(wanted.small_encoder, topology), shot


def gpus(wanted: Wanted) -> Pairs:
    """The same on one GPU and on several: an Encoder for each, and as many times the callers."""
    for topology in wanted.topologies_or("fused"):
        for count in wanted.gpus:
            service = Service(wanted.encoder, topology, gpus=count)
            yield from throughput("gpus", service, wanted.cases_or(LONE), wanted)


def memory(wanted: Wanted) -> Pairs:
    """Every process's memory over many requests."""
    for topology in wanted.topologies_or("split"):
        for case in wanted.cases_or(LONE):
            for callers in wanted.callers(case):
                yield (
                    Service(wanted.encoder, topology),
                    Shot("memory", case, concurrency=callers, requests=wanted.requests),
                )


PLANS: dict[str, Callable[[Wanted], Pairs]] = {
    "sweep": sweep,
    "topologies": topologies,
    "graphs": graphs,
    "patch": patch,
    "small": small,
    "gpus": gpus,
    "memory": memory,
}


def same(shot: Shot, other: Shot) -> bool:
    """Whether one load would be measured twice."""
    return replace(shot, plan=other.plan, warm_up_s=other.warm_up_s) == other


def stages(names: Iterable[str], wanted: Wanted) -> dict[Service, list[Shot]]:
    """What each service gets, in order: the memory of many requests last."""
    found: dict[Service, list[Shot]] = {}
    for name in names:
        for service, shot in PLANS[name](wanted):
            shots = found.setdefault(service, [])
            other = next((other for other in shots if same(shot, other)), None)
            if other is None:
                shots.append(shot)
            elif shot.warm_up_s > other.warm_up_s:
                shots[shots.index(other)] = replace(other, warm_up_s=shot.warm_up_s)
    return {
        service: sorted(shots, key=lambda shot: shot.requests is not None)
        for service, shots in found.items()
    }
