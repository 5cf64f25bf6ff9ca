"""`python -m encoders FILE...`: embeddings of local image files, without Ray.

Writes one array per file to `.safetensors`, named by path; or, if every file's is of one shape,
one stacked array to `.npy`.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from encoders.config import EncoderConfig
from encoders.encoder import DTYPES, Encoder
from encoders.errors import EncoderError, InvalidRequest
from encoders.packing import GridTHW, PackedBatch, Pixels
from encoders.reading import read
from encoders.sizes import NUM_PREFIX


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m encoders", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--encoder", default="dinov2-demo", help="a shipped name, or a YAML file")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", choices=("pooled", "patch"), default="pooled")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--batch", type=int, default=16, help="images per batch")
    parser.add_argument("--out", type=Path, default=Path("embeddings.safetensors"))
    options = parser.parse_args(arguments)
    if options.out.suffix not in (".npy", ".safetensors"):
        parser.error(f"--out ends in .npy or .safetensors, not {options.out.suffix!r}")
    if options.out.suffix == ".npy" and options.dtype == "bfloat16":
        parser.error("NumPy has no bfloat16: write .safetensors, or another --dtype")
    return options


def read_file(path: Path, config: EncoderConfig) -> tuple[Pixels, GridTHW]:
    """One file's pixels and grid. Raises an `EncoderError` that names it."""
    try:
        return read(path.read_bytes(), config)
    except OSError as error:
        raise InvalidRequest(f"{path}: {error.strerror}") from error
    except EncoderError as error:
        raise error.named(str(path)) from error


def embed(encoder: Encoder, options: argparse.Namespace) -> Iterator[Tensor]:
    """One host tensor per file, in order."""
    config = encoder.config
    for start in range(0, len(options.files), options.batch):
        files = [read_file(path, config) for path in options.files[start : start + options.batch]]
        images, grids = zip(*files, strict=True)
        batch = PackedBatch.of(images, grids, NUM_PREFIX[config.family])
        yield from encoder.encode(batch, options.output, options.dtype)


def write(path: Path, names: Sequence[str], results: Sequence[Tensor]) -> None:
    """Save the results in the format of the path's suffix."""
    if path.suffix == ".safetensors":
        # Clones: patch rows of one batch share memory, which the format refuses.
        save_file({n: r.clone() for n, r in zip(names, results, strict=True)}, path)
    elif len({result.shape for result in results}) == 1:
        np.save(path, torch.stack(list(results)).numpy(), allow_pickle=False)
    else:
        raise InvalidRequest(f"{path}: the files' rows differ in number; write .safetensors")


def main(arguments: Sequence[str]) -> int:
    """Run the command; the exit status."""
    options = parse(arguments)
    try:
        encoder = Encoder.load(EncoderConfig.load(options.encoder), options.device)
        bar = tqdm(embed(encoder, options), total=len(options.files), unit="image")
        write(options.out, [str(path) for path in options.files], list(bar))
    except EncoderError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
