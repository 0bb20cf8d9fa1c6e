"""What the EAGLE tests share: a tally of greedy continuations that differ at a near tie."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import pytest
import torch


@attrs.define
class Tally:
    """Continuations compared with plain decoding."""

    compared: int = 0
    near_ties: int = 0


TALLY = pytest.StashKey[Tally]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[TALLY] = Tally()


@pytest.fixture(scope="session")
def tally(request: pytest.FixtureRequest) -> Tally:
    return request.config.stash[TALLY]


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Operations of this size take far longer to share out than to do, above all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    tally = config.stash[TALLY]
    if tally.compared:
        terminalreporter.write_line(
            f"EAGLE: {tally.compared} greedy continuations compared with plain decoding, "
            f"{tally.near_ties} part where the two best logits are within 1e-4"
        )
