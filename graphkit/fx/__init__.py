"""Splitting a model that one can't edit at given operators, so that it runs as graphs with eager breaks.

`split` traces a model once, for all buckets, and gives a callable for a runner with a PIECEWISE route; `Splitter` is a
backend for `torch.compile` that does the same to the graphs it is given. Imported at first use: tracing is a large
part of torch.
"""

from graphkit.fx.matching import Operator
from graphkit.fx.split import Split, split
from graphkit.fx.splitter import Splitter

__all__ = ["Operator", "Split", "Splitter", "split"]
