"""Tests how peers.py takes times, with a GPU in software whose clock advances by what it is given: python3 tests/peers_test.py."""

import collections
import contextlib
import pathlib
import sys
import types
import unittest
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
sys.dont_write_bytecode = True


RESULT = mock.Mock()


class Gpu:
    """A GPU that runs a kernel while the host launches the next one. Times are in milliseconds."""

    def __init__(self, launch, kernel):
        self.launch, self.kernel = launch, kernel
        # The host's clock, and when the GPU has done all that was launched.
        self.host, self.done = 0.0, 0.0
        self.recording, self.calls = None, []

    def run(self, launch, kernels):
        self.host += launch
        self.done = max(self.host, self.done) + self.kernel * len(kernels)
        self.calls += kernels

    def call(self, turn):
        if self.recording is None:
            self.run(self.launch, [turn])
        else:
            self.recording.append(turn)
        return RESULT

    def synchronize(self):
        self.host = self.done = max(self.host, self.done)


class Event:
    def __init__(self, gpu):
        self.gpu = gpu

    def record(self):
        self.at = max(self.gpu.host, self.gpu.done)

    def elapsed_time(self, end):
        return end.at - self.at


class Graph:
    def __init__(self, gpu):
        self.gpu, self.kernels = gpu, []

    def replay(self):
        self.gpu.run(self.gpu.launch, self.kernels)

    @contextlib.contextmanager
    def record(self):
        self.gpu.recording = self.kernels
        try:
            yield
        finally:
            self.gpu.recording = None


class Times(unittest.TestCase):
    def peers(self, gpu):
        """peers.py on this GPU."""
        torch = mock.MagicMock()
        torch.cuda.is_available.return_value = True
        torch.cuda.synchronize = gpu.synchronize
        torch.cuda.Event = lambda enable_timing: Event(gpu)
        torch.cuda.CUDAGraph = lambda: Graph(gpu)
        torch.cuda.graph = lambda graph, stream: graph.record()
        names = ["torch", "torch._functorch", "torch._functorch.config", "torch.nn", "torch.nn.functional"]
        names += ["torch.nn.attention", "torch.nn.attention.flex_attention"]
        with mock.patch.dict(sys.modules, dict.fromkeys(names, torch)):
            sys.modules.pop("peers", None)
            import peers
        peers.time = types.SimpleNamespace(perf_counter=lambda: gpu.host / 1e3)
        return peers

    def test_a_graph_hides_launches_and_takes_all_inputs_equally_often(self):
        gpu = Gpu(launch=0.05, kernel=0.01)
        peers = self.peers(gpu)
        # Launches are what a queue of short calls takes.
        self.assertAlmostEqual(peers.device_time(gpu.call)[0], 0.05, delta=0.001)
        gpu.calls.clear()
        times = peers.replayed_time(gpu.call, 7, lambda result: True)
        for time in times:
            self.assertAlmostEqual(time, 0.01, delta=0.0003)
        last = collections.Counter(turn % 7 for turn in gpu.calls[-7 * 29 :])
        self.assertEqual(last, dict.fromkeys(range(7), 29))

    def test_long_calls_take_the_same_time_either_way(self):
        gpu = Gpu(launch=0.05, kernel=30.0)
        peers = self.peers(gpu)
        self.assertAlmostEqual(peers.device_time(gpu.call)[0], 30, delta=0.1)
        self.assertAlmostEqual(peers.replayed_time(gpu.call, 1, lambda result: True)[0], 30, delta=0.1)

    def test_what_cannot_be_replayed_has_a_note(self):
        gpu = Gpu(launch=0.05, kernel=0.01)
        peers = self.peers(gpu)
        self.assertEqual(list(peers.time_of_step(gpu.call, 1, lambda result: True)), ["time_ms"])
        timed = peers.time_of_step(gpu.call, 1, lambda result: False)
        self.assertEqual(timed["note"], "with launches: the graph's results differ from those of its calls")
        self.assertAlmostEqual(timed["time_ms"][0], 0.05, delta=0.001)

        def refused(turn):
            if gpu.recording is not None:
                raise RuntimeError("operation not permitted when stream is capturing\nand more")
            return gpu.call(turn)

        note = peers.time_of_step(refused, 1, lambda result: True)["note"]
        self.assertEqual(note, "with launches: operation not permitted when stream is capturing")


if __name__ == "__main__":
    unittest.main()
