"""`python -m serve_app serve_config.yaml`: `serve run` that finishes what is under way first.

`serve run` itself cuts its clients off: at once on SIGTERM, which it does not handle, and within
a tenth of a second on SIGINT. Here both signals first tell every Ingress replica to refuse new
images and to finish those that it has; then they become the interrupt that `serve run` expects.

With `--production`, requests come by HAProxy, and the ports that this opens are told.
"""

import logging
import os
import signal
import sys
from types import FrameType

import ray
from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.scripts import cli

from encoders.errors import ConfigError
from serve_app import production

logger = logging.getLogger(__name__)

DRAIN_S = 65.0
"""A little more than the longest request that the shipped configurations allow."""


def drain() -> int:
    """Let every application's Ingress finish. How many requests were still running at the end."""
    left = 0
    for name, application in serve.status().applications.items():
        if application.status == "RUNNING":
            answers = serve.get_app_handle(name).broadcast("drain", DRAIN_S)
            left += sum(answers.results(timeout_s=DRAIN_S + 5))
    return left


def drain_and_interrupt(signum: int, _: FrameType | None) -> None:
    """Signal handler. A second signal does not wait."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    logger.warning("%s: finishing the requests under way", signal.Signals(signum).name)
    try:
        logger.warning("drained, %d requests left running", drain())
    except (ray.exceptions.RayError, RayServeException, TimeoutError) as error:
        logger.warning("could not drain: %s", error)
    raise KeyboardInterrupt


def main(arguments: list[str]) -> None:
    """Run `serve run` with these arguments in this process."""
    logging.basicConfig(format="%(message)s")
    if in_production := production.FLAG in arguments:
        try:
            production.begin_again(arguments)
            arguments = [word for word in arguments if word != production.FLAG]
            for line in production.opened(production.read(arguments), os.environ):
                logger.warning("production: %s", line)
        except ConfigError as error:
            sys.exit(str(error))
    # Ray sets a handler of its own for SIGTERM when it starts, so ours has to come after. A Ray
    # that runs here keeps the environment that it was started with: it is joined if it is named.
    address = os.environ.get("RAY_ADDRESS", "local" if in_production else None)
    ray.init(address=address, namespace="serve")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, drain_and_interrupt)
    cli.main(["run", *arguments], standalone_mode=False)


if __name__ == "__main__":
    main(sys.argv[1:])
