"""A large patch reply over loopback: its rate, and the memory that sending it takes of the sender.

    python benchmarks/bench_reply.py [--server uvicorn|proxy|haproxy] [--mib 256] [--repeats 4]

The embeddings lie ready in the sender, so nothing is decoded or encoded. `uvicorn` is the app
without Ray; `proxy` and `haproxy` are Ray Serve behind its own two. Memory is the anonymous part of
the process that holds the embeddings, sampled every 2 ms. HAProxy listens on every interface while
this runs. One line of JSON per reply.
"""

import argparse
import io
import json
import multiprocessing
import os
import re
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from fastapi import FastAPI
from PIL import Image

from encoders.config import EncoderConfig
from serve_app.api import build_api
from serve_app.endpoints import ApiLimits
from serve_app.service import Embedding

MIB = 1024 * 1024


def anonymous_mib() -> int:
    """Memory of this process that is no file's and not shared."""
    found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(found[1]) // 1024 if found else 0


class Sender:
    """The HTTP interface over embeddings that lie ready, and the most memory since it was asked."""

    def __init__(self, mib: int) -> None:
        rows = np.random.default_rng(0).random((mib * 64, 4096), np.float32)
        self._embeddings = [Embedding(half, (1, 1, len(half))) for half in np.split(rows, 2)]
        self._peak = 0

    def __serve_build_asgi_app__(self) -> FastAPI:
        app = build_api(self, EncoderConfig.load("dinov2-demo"), ApiLimits())  # type: ignore[arg-type]
        app.get("/peak")(self.peak)
        threading.Thread(target=self._watch, daemon=True).start()
        return app

    async def submit(self, *_: Any) -> list[Embedding]:
        return self._embeddings

    async def peak(self) -> dict[str, int]:
        peak, self._peak = self._peak, 0
        return {"peak": peak, "now": anonymous_mib()}

    def _watch(self) -> None:
        while True:
            self._peak = max(self._peak, anonymous_mib())
            time.sleep(0.002)


def serve_plainly(port: int, mib: int) -> None:
    import uvicorn

    app = Sender(mib).__serve_build_asgi_app__()
    uvicorn.run(app, port=port, log_level="warning")


def serve_by_ray(port: int, mib: int) -> None:
    import ray
    from ray import serve

    ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=300_000_000)
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    deployment: Any = serve.deployment(serve.ingress()(Sender))
    serve.run(deployment.bind(mib))


def fetch(port: int) -> tuple[int, float]:
    """Bytes and seconds of one reply, which is read and thrown away."""
    file, buffer, num_bytes = io.BytesIO(), bytearray(8 * MIB), 0
    Image.new("RGB", (64, 64)).save(file, "PNG")
    head = (
        "POST /v1/images/embeddings?output=patch HTTP/1.1\r\nhost: localhost\r\n"
        f"content-length: {len(file.getvalue())}\r\nconnection: close\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", port)) as connection:
        start = time.perf_counter()
        connection.sendall(head.encode() + file.getvalue())
        while received := connection.recv_into(buffer):
            num_bytes += received
        return num_bytes, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--server", default="uvicorn", choices=["uvicorn", "proxy", "haproxy"])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=4)
    args = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url, child = f"http://127.0.0.1:{port}", None
    if args.server == "uvicorn":
        child = multiprocessing.Process(target=serve_plainly, args=(port, args.mib), daemon=True)
        child.start()
    else:
        os.environ["RAY_SERVE_ENABLE_HA_PROXY"] = str(int(args.server == "haproxy"))
        os.environ["RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"] = "0"
        serve_by_ray(port, args.mib)
    httpx.HTTPTransport(retries=8).handle_request(httpx.Request("GET", f"{url}/peak")).read()
    fetch(port)  # warms up
    for _ in range(args.repeats):
        before = httpx.get(f"{url}/peak", timeout=60).json()["now"]
        num_bytes, seconds = fetch(port)
        memory = httpx.get(f"{url}/peak", timeout=60).json()
        line = {
            "server": args.server,
            "bytes": num_bytes,
            "GB/s": round(num_bytes / seconds / 1e9, 2),
            "sender_MiB_more": max(0, memory["peak"] - before),
        }
        print(json.dumps(line), flush=True)
    if child:
        child.terminate()


if __name__ == "__main__":
    main()
