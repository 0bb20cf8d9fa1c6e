"""A graph without a GPU: a capture logs operations, and a replay runs the log on the same memory.

It has a CUDA graph's semantics, for correctness and not for speed:

- the Python body does not run again; addresses are frozen; in-place effects repeat; outputs are
  overwritten; random operations draw anew;
- what a CUDA capture refuses is refused, with the operation and the user's line;
- memory that existed before a capture is, after it, as it was before.

Where it can't be like CUDA: there is one kind of memory here, so that a copy between the device and
the host (`.to("cpu")`, a CPU tensor used as an index) can't be told from one on the device, and a
tensor that a CUDA program keeps on the host on purpose is treated as the device's. Work outside
PyTorch's dispatcher (NumPy on a tensor's memory, other threads) isn't logged; comparing two
recordings, `RecordedGraph.difference`, is what finds it.
"""

from __future__ import annotations

from graphkit.backends.recording.backend import RecordingBackend
from graphkit.backends.recording.capture import RecordingCapture
from graphkit.backends.recording.graph import RecordedGraph

__all__ = ["RecordedGraph", "RecordingBackend", "RecordingCapture"]
