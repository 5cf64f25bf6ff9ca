"""Encoder replicas: one tower on one device behind one engine thread."""

import asyncio
import logging
import os
from concurrent.futures import ThreadPoolExecutor

import torch

from encoders.config import EncoderConfig
from encoders.encoder import Encoder
from encoders.packing import PackedBatch
from serve_app.service import Rows


class EncoderReplica:
    """Loads an Encoder and runs its batches one after another."""

    def __init__(self, config: EncoderConfig, device: str) -> None:
        speak_up("encoders")
        if device == "cpu":
            # Ray sets OMP_NUM_THREADS from the logical CPUs that it placed us by, at least 1.
            torch.set_num_threads(os.cpu_count() or 1)
        self._engine = ThreadPoolExecutor(1, "engine")
        self._encoder = self._engine.submit(Encoder.load, config, device).result()

    async def encode(self, batch: PackedBatch) -> Rows:
        """One row per image, in order of arrival."""
        # The engine thread alone touches the device, so the loop stays free for health checks.
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._engine, self._encoder.encode, batch)


def speak_up(name: str) -> None:
    """Log a package at INFO to stderr, which Ray forwards to whoever ran `serve run`."""
    logger = logging.getLogger(name)
    logger.setLevel(logging.INFO)
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler())
