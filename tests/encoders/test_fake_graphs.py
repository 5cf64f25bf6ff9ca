"""The fake recorder refuses, or gets wrong, what CUDA graphs do."""

import threading

import pytest
import torch

from tests.fake_aiter import Refused
from tests.fake_graphs import Broken, FakeGraph, FakeRecorder


def doubled(recorder: FakeRecorder) -> tuple[torch.Tensor, torch.Tensor, FakeGraph]:
    """An input, an output and a graph that doubles one into the other."""
    x, y = torch.ones(3), torch.zeros(3)
    recorder.measured(lambda: x * 2)
    return x, y, recorder.capture(lambda: y.copy_(x * 2))


def test_recording_writes_nothing_and_a_replay_reads_what_is_there_now() -> None:
    recorder = FakeRecorder()
    with recorder.on_stream():
        x, y, graph = doubled(recorder)
        assert y.tolist() == [0, 0, 0]
        x.fill_(5)
        graph.replay()

    assert y.tolist() == [10, 10, 10]


@pytest.mark.parametrize("read", [torch.Tensor.tolist, torch.Tensor.item, float])
def test_a_read_of_the_device_kills_the_capture_and_burns_the_pool(read: object) -> None:
    recorder, cell = FakeRecorder(), torch.ones(1)
    with recorder.on_stream():
        with pytest.raises(Refused, match="read of the device"):
            recorder.capture(lambda: read(cell))  # type: ignore[operator]
        with pytest.raises(RuntimeError, match="already recording"):
            recorder.capture(lambda: cell)
        recorder.renew()
        doubled(recorder)


def test_an_operator_or_shape_that_was_not_warmed_breaks() -> None:
    recorder, x = FakeRecorder(), torch.ones(3)
    with recorder.on_stream(), pytest.raises(Broken, match="never warmed"):
        recorder.capture(lambda: x.exp())


def test_a_pool_whose_last_graph_is_gone_takes_no_more() -> None:
    recorder = FakeRecorder()
    with recorder.on_stream():
        (anchor,) = recorder.pool.graphs
        anchor.reset()
        with pytest.raises(RuntimeError, match="use_count"):
            doubled(recorder)


def test_a_reset_can_take_the_workspace_from_under_the_others() -> None:
    recorder = FakeRecorder()
    recorder.reset_clears_workspace = True
    with recorder.on_stream():
        _, y, graph = doubled(recorder)
        _, _, other = doubled(recorder)
        other.reset()
        graph.replay()

    assert y.tolist() == [3, 3, 3]


def test_a_graph_that_was_reset_is_neither_replayed_nor_reset_again() -> None:
    recorder = FakeRecorder()
    with recorder.on_stream():
        _, _, graph = doubled(recorder)
        graph.reset()
        for use in (graph.replay, graph.reset):
            with pytest.raises(Broken):
                use()


def test_a_pool_is_not_left_while_graphs_live_in_it() -> None:
    recorder = FakeRecorder()
    with recorder.on_stream():
        doubled(recorder)
        with pytest.raises(Broken, match="still live"):
            recorder.renew()


def test_another_thread_and_another_stream_break() -> None:
    recorder, caught = FakeRecorder(), list[Broken]()

    def elsewhere() -> None:
        try:
            with recorder.on_stream():
                doubled(recorder)
        except Broken as error:
            caught.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()

    assert len(caught) == 1
    with pytest.raises(Broken, match="stream"):
        doubled(recorder)
