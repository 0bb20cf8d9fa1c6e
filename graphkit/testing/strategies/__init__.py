"""Hypothesis strategies for what graphkit takes: dims, buffers, bucket sets, policies, batches and their inputs.

Those of a runner are the ones to begin with: `batches_of(runner)`, `inputs_for(runner, dispatch)` and
`histories(runner)`. Sizes weigh what goes wrong: 0, 1, each bucket and its neighbors, the maximum. All shrink
to the least: the smallest batch, the plainest contents, the shortest history.

Raises:
    ImportError: at import, where hypothesis isn't installed.
"""

try:
    import hypothesis as _hypothesis  # noqa: F401
except ImportError as _error:
    raise ImportError(
        "graphkit.testing.strategies needs hypothesis, which isn't installed; install it with "
        "`pip install graphkit-cuda[test]`, or use the checks of graphkit.testing, which go without"
    ) from _error

from graphkit.testing.strategies.batches import Batch, batches, batches_above, batches_of
from graphkit.testing.strategies.buffers import (
    BUFFER_DTYPES,
    buffer_specs,
    extents,
    pads,
    small_values,
)
from graphkit.testing.strategies.contents import WAYS, histories, inputs_for, residents_for
from graphkit.testing.strategies.policies import bucket_sets, dispatchers, policies
from graphkit.testing.strategies.sizes import (
    affines,
    as_integer,
    dims,
    hostile,
    names,
    request_dims,
    sizes,
    sizes_near,
    sizes_of,
)

__all__ = [
    "BUFFER_DTYPES",
    "WAYS",
    "Batch",
    "affines",
    "as_integer",
    "batches",
    "batches_above",
    "batches_of",
    "bucket_sets",
    "buffer_specs",
    "dims",
    "dispatchers",
    "extents",
    "histories",
    "hostile",
    "inputs_for",
    "names",
    "pads",
    "policies",
    "request_dims",
    "residents_for",
    "sizes",
    "sizes_near",
    "sizes_of",
    "small_values",
]
