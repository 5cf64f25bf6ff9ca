"""The attention kernels against the reference, in graphs, and without a wait for the host.

Written for an H200; on an MI355X the same file runs AITER. Shapes: T = packed rows, H = heads,
K = head width.
"""

import importlib.util
from collections.abc import Iterator, Sequence
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from encoders.attention import Attention, AttentionLayout, Backend, sdpa
from encoders.attention_kernels import is_rocm
from encoders.backends import choose_backend
from encoders.errors import BackendUnavailable
from tests.gpu.sync import no_sync

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU"),
    pytest.mark.timeout(1200),  # the first call of a head size compiles: AITER takes minutes
    # What kernel libraries and torch's sync detector warn of is not ours to fix.
    pytest.mark.filterwarnings("ignore"),
]

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BF16 = torch.bfloat16
HEADS = 16
HEAD_SIZES = (64, 72, 80, 128)
UNIFORM = (1024, 1024, 1024, 1024)
MIXED = (4096, 256, 1, 900)
OPTIONAL = {"flash", "aiter"}
each_kernel = pytest.mark.parametrize("name", ["varlen", "flash", "aiter"])


def kernel(name: str, head_size: int = 72) -> Backend:
    """The backend, or a skip that says why. `varlen` comes with torch and may not be missing."""
    try:
        return choose_backend(name, CUDA, BF16, head_size)
    except BackendUnavailable as error:
        if name not in OPTIONAL:
            raise
        pytest.skip(str(error))


def packed_qkv(rows: int, head_size: int, seed: int = 0) -> Tensor:
    """bf16 [T, 3, H, K] of unit variance, as the attention layer's linear leaves it."""
    generator = torch.Generator(CUDA).manual_seed(seed)
    shape = (rows, 3, HEADS, head_size)
    return torch.randn(shape, generator=generator, device=CUDA).to(BF16)


def boundaries(lengths: Sequence[int], device: torch.device = CUDA) -> Tensor:
    """`cu_seqlens` of segments with these lengths."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def listed(lengths: Sequence[int], device: torch.device = CUDA) -> AttentionLayout:
    """The list form of a layout."""
    return [boundaries(lengths, device), max(lengths)]


def attend(attention: Attention, qkv_T3HK: Tensor, layout: AttentionLayout) -> Tensor:
    """Attention on the strided views that the attention layer passes."""
    q_THK, k_THK, v_THK = qkv_T3HK.unbind(1)
    return attention(q_THK, k_THK, v_THK, layout)


def bits(x_THK: Tensor) -> Tensor:
    """Values to be compared as integers, so that NaN and -0 count."""
    return x_THK.contiguous().view(torch.int16)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("lengths", [UNIFORM, MIXED], ids=["uniform", "mixed"])
@pytest.mark.parametrize("head_size", HEAD_SIZES)
@each_kernel
def test_a_kernel_equals_the_reference(name: str, head_size: int, lengths: tuple[int, ...]) -> None:
    backend = kernel(name, head_size)
    qkv = packed_qkv(sum(lengths), head_size)

    out = attend(backend.attention, qkv, listed(lengths))

    host = listed(lengths, CPU)
    expected = attend(sdpa, qkv.float(), host)
    # The reference is fp32 on the same bf16 inputs. A kernel rounds twice to bf16, each time by at
    # most 2**-9 of the value: the weights, which sum to 1 over values of mean size 0.8, and the
    # result. That is 2**-9 absolute and 2**-9 relative; doubled for its softmax and summation.
    assert out.dtype == BF16
    torch.testing.assert_close(out.float(), expected, rtol=2**-8, atol=2**-8)


@each_kernel
def test_both_forms_of_a_layout_give_the_same_bits(name: str) -> None:
    backend = kernel(name)
    qkv = packed_qkv(sum(MIXED), 72)
    cu_seqlens = boundaries(MIXED)

    out = attend(backend.attention, qkv, [cu_seqlens, max(MIXED)])

    assert torch.equal(bits(out), bits(attend(backend.attention, qkv, cu_seqlens)))


@each_kernel
def test_views_of_a_packed_qkv_give_the_bits_of_copies(name: str) -> None:
    backend = kernel(name)
    qkv = packed_qkv(sum(MIXED), 72)
    layout = listed(MIXED)
    q, k, v = (x.contiguous() for x in qkv.unbind(1))

    views = attend(backend.attention, qkv, layout)

    assert torch.equal(bits(views), bits(backend.attention(q, k, v, layout)))


@each_kernel
def test_the_list_form_never_waits_for_the_device(name: str) -> None:
    backend = kernel(name)
    qkv = packed_qkv(sum(MIXED), 72)
    layout = listed(MIXED)
    warm = attend(backend.attention, qkv, layout)  # a first call may compile, load and probe

    with no_sync():
        out = attend(backend.attention, qkv, layout)

    assert torch.equal(bits(out), bits(warm))


@each_kernel
def test_a_bare_tensor_does_wait_so_the_detector_works(name: str) -> None:
    backend = kernel(name)
    qkv = packed_qkv(sum(MIXED), 72)
    cu_seqlens = boundaries(MIXED)
    attend(backend.attention, qkv, cu_seqlens)

    with no_sync(), pytest.raises(RuntimeError, match="synchroniz"):
        attend(backend.attention, qkv, cu_seqlens)


@each_kernel
def test_empty_segments_and_a_generous_max_seqlen_change_no_bit(name: str) -> None:
    backend = kernel(name)
    qkv = packed_qkv(sum(MIXED), 72)

    exact = attend(backend.attention, qkv, listed(MIXED))

    roomy: AttentionLayout = [boundaries((*MIXED, 0, 0, 0)), sum(MIXED)]
    assert torch.equal(bits(attend(backend.attention, qkv, roomy)), bits(exact))


@pytest.mark.parametrize("head_size", HEAD_SIZES)
@each_kernel
def test_a_replay_gives_the_bits_of_eager_for_other_values_and_other_boundaries(
    name: str, head_size: int
) -> None:
    backend = kernel(name, head_size)
    assert backend.capturable
    layouts = [(2000, 48, 1000), (1500, 1500, 48), (2048, 999, 1)]
    contents = [packed_qkv(3048, head_size, seed) for seed in range(len(layouts))]
    qkv, cu_seqlens = contents[0].clone(), boundaries(layouts[0])
    layout: AttentionLayout = [cu_seqlens, 2048]
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        attend(backend.attention, qkv, layout)  # whatever is lazy may not happen while capturing
    # The mode that leaves other threads free to use the device, as the service captures.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        out = attend(backend.attention, qkv, layout)

    replays = []
    for lengths, fresh in zip(layouts, contents, strict=True):
        qkv.copy_(fresh)
        # By a kernel: on HIP a copy into a captured buffer just before a replay may be read stale.
        torch.add(boundaries(lengths), 0, out=cu_seqlens)
        graph.replay()
        replays.append(out.clone())

    for lengths, fresh, replay in zip(layouts, contents, replays, strict=True):
        eager = attend(backend.attention, fresh, [boundaries(lengths), 2048])
        assert torch.equal(bits(replay), bits(eager)), lengths


@pytest.mark.parametrize("head_size", HEAD_SIZES)
@each_kernel
def test_an_image_keeps_its_bits_in_any_company(name: str, head_size: int) -> None:
    backend = kernel(name, head_size)
    lengths = (4096, 900, 256, 100, 1)  # flash compiles apart for a longest image of up to 192
    qkv = packed_qkv(sum(lengths), head_size)

    together = attend(backend.attention, qkv, listed(lengths))

    images = zip(qkv.split(lengths), together.split(lengths), lengths, strict=True)
    for image, in_company, length in images:
        alone = attend(backend.attention, image, listed([length]))
        assert torch.equal(bits(in_company), bits(alone)), length


@pytest.mark.skipif(is_rocm(), reason="the table's NVIDIA rows")
def test_auto_names_flash_for_heads_of_72_or_what_comes_with_torch() -> None:
    installed = importlib.util.find_spec("flash_attn.cute") is not None

    backend = choose_backend("auto", CUDA, BF16, 72)

    assert backend.name == ("flash" if installed else "varlen")
    assert "bfloat16, head size 72" in backend.reason


@pytest.mark.skipif(is_rocm(), reason="the table's NVIDIA rows")
def test_auto_names_the_reference_for_fp32_and_torchs_kernel_for_heads_of_64() -> None:
    assert choose_backend("auto", CUDA, torch.float32, 64).name == "sdpa"
    assert choose_backend("auto", CUDA, BF16, 64).name == "varlen"


@pytest.mark.skipif(not is_rocm(), reason="the table's AMD rows")
def test_auto_names_aiter_on_instinct_where_it_is_installed() -> None:
    kernel("aiter")  # or skip

    assert choose_backend("auto", CUDA, BF16, 72).name == "aiter"


def test_the_reference_on_a_gpu_takes_boundaries_on_the_host_without_waiting() -> None:
    qkv = packed_qkv(sum(MIXED), 64)
    host = listed(MIXED, CPU)
    warm = attend(sdpa, qkv, host)

    with no_sync():
        out = attend(sdpa, qkv, host)

    assert torch.equal(bits(out), bits(warm))
