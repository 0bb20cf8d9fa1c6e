"""The command line of the example."""

from __future__ import annotations

import argparse
import codecs
import importlib.util
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch

from .draft import DRAFT
from .engine import Engine
from .memory import Limits
from .report import Summary, figures_table, modes_table, plot, summarize
from .scheduler import Request
from .speculator import GRAPHS, Graphs
from .weights import TARGET, WeightsError

MAX_K = 8
MAX_REQS = 256
PLOTS = (".pdf", ".png", ".svg")

DESCRIPTION = """\
Generate text with a tiny model, EAGLE and CUDA graphs; then say how fast it was, with graphs and
without, and which graphs ran.
"""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Exit with code 2."""
        self.exit(2, f"{self.prog}: {message}\n")


class UsageError(ValueError):
    """What was asked for can't be done."""


def parser() -> Parser:
    """The options."""
    options = Parser(prog="python -m examples.eagle", description=DESCRIPTION)
    options.add_argument("prompts", nargs="*", metavar="PROMPT", help="the start of a text")
    options.add_argument("--prompt", action="append", default=[], help="the same, as an option")
    options.add_argument("--file", type=Path, help="more prompts, one a line")
    options.add_argument("--k", type=int, default=3, help=f"drafts a step, 1 to {MAX_K} (3)")
    options.add_argument(
        "--graphs",
        choices=GRAPHS,
        default="prefill+decode",
        help="what is captured (prefill+decode)",
    )
    options.add_argument("--plain", action="store_true", help="no draft: one token a step")
    options.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (0)")
    options.add_argument("--max-tokens", type=int, default=64, help="for each prompt (64)")
    options.add_argument("--max-reqs", type=int, default=8, help="at a time; more wait (8)")
    options.add_argument("--device", help="cuda or cpu (cuda where there is one)")
    options.add_argument("--seed", type=int, default=0, help="of the random numbers (0)")
    options.add_argument(
        "--no-compare", action="store_true", help="don't run again without graphs, to compare"
    )
    options.add_argument(
        "--plot", type=Path, help="draw accepted length and step time (pdf, png, svg)"
    )
    options.add_argument("--weights", type=Path, default=TARGET, help="the target's")
    options.add_argument("--draft", type=Path, default=DRAFT, help="the draft head's weights")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = parser()
    asked = options.parse_args(arguments)
    try:
        run(asked)
    except (UsageError, WeightsError) as error:
        options.error(str(error))
    return 0


def run(asked: argparse.Namespace) -> None:
    """Do what was asked for.

    Raises:
        UsageError: it can't be done.
        WeightsError: a weights file is missing, damaged, or another model's.
    """
    prompts, device = _checked(asked)
    # All that can be wrong is found before the first line is printed.
    engine, requests = _prepare(asked, prompts, device, asked.graphs)
    count = f"{len(prompts)} prompt{'s' if len(prompts) > 1 else ''}"
    way = "plain decoding" if asked.plain else f"EAGLE, K={asked.k}"
    print(f"{count} on {device}, {way}, graphs: {asked.graphs}")
    if device.type == "cpu":
        print(
            "On a CPU graphkit records and replays operations one by one: that shows whether graphs "
            "are right,\nnot how fast they are."
        )
        # Operations of this size take longer to share out than to do.
        torch.set_num_threads(1)
    longest = engine.limits.max_length
    if any(len(prompt) + asked.max_tokens > longest for prompt in prompts):
        print(
            f"A text ends at the model's length, {longest} bytes with its prompt, "
            f"even where --max-tokens {asked.max_tokens} asks for more."
        )
    runs = {_title(asked.graphs): _generate(engine, asked.seed, Texts(requests))}
    if asked.graphs != "none" and not asked.no_compare:
        eager, _ = _prepare(asked, prompts, device, "none")
        runs[_title("none")] = _generate(eager, asked.seed)
    print()
    print(figures_table(runs))
    report = engine.group.report()
    print()
    print(modes_table(report))
    print()
    print(report)
    if asked.plot is not None:
        try:
            plot(asked.plot, engine.records)
        except (OSError, ValueError) as error:
            raise UsageError(f"--plot {asked.plot}: {error}") from None


def _title(graphs: Graphs) -> str:
    return "eager" if graphs == "none" else f"graphs: {graphs}"


def _checked(asked: argparse.Namespace) -> tuple[list[bytes], torch.device]:
    """The prompts and the device."""
    texts = [*asked.prompts, *asked.prompt]
    prompts = [text.encode(errors="surrogateescape") for text in texts]
    if asked.file is not None:
        try:
            lines = asked.file.read_bytes().splitlines()
        except OSError as error:
            raise UsageError(f"--file {asked.file}: {error.strerror}") from None
        prompts.extend(line for line in lines if line)
        if not prompts:
            raise UsageError(f"--file {asked.file} has no prompt: write one a line")
    if not prompts:
        raise UsageError('no prompt: give one, as in python -m examples.eagle "The import"')
    _between("--k", asked.k, 1, MAX_K, "or use --plain for none" if asked.k == 0 else "")
    _between("--max-reqs", asked.max_reqs, 1, MAX_REQS)
    _between("--max-tokens", asked.max_tokens, 1, None)
    if not 0 <= asked.temperature < float("inf"):
        raise UsageError(f"--temperature {asked.temperature}: use 0 (greedy) or more")
    if not -(2**63) <= asked.seed < 2**63:
        raise UsageError(f"--seed {asked.seed}: use one of 64 bits")
    if asked.plot is not None:
        _check_plot(asked.plot)
    return prompts, _device(asked.device)


def _check_plot(path: Path) -> None:
    if path.suffix.lower() not in PLOTS:
        raise UsageError(f"--plot {path}: use a name that ends in {', '.join(PLOTS)}")
    if not path.parent.is_dir():
        raise UsageError(f"--plot {path}: there is no directory {path.parent}")
    if path.is_dir():
        raise UsageError(f"--plot {path} is a directory: name a file")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install matplotlib")


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, ValueError):
        raise UsageError(f"--device {name}: use cuda or cpu") from None
    # torch cuts large numbers short: cuda:256 is cuda:0 to it.
    if device.type not in ("cuda", "cpu") or str(device) != name:
        raise UsageError(f"--device {name}: use cuda or cpu")
    if device.type == "cpu":
        # There is one CPU, whatever its number.
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError(f"--device {name}: torch finds no GPU here; use cpu")
    count = torch.cuda.device_count()
    if device.index is not None and device.index >= count:
        raise UsageError(
            f"--device {name}: the last GPU here is cuda:{count - 1}; use that or less"
        )
    return device


def _between(name: str, value: int, low: int, high: int | None, hint: str = "") -> None:
    if value < low or (high is not None and value > high):
        allowed = f"at least {low}" if high is None else f"{low} to {high}"
        raise UsageError(f"{name} {value}: use {allowed}{', ' + hint if hint else ''}")


def _prepare(
    asked: argparse.Namespace, prompts: Sequence[bytes], device: torch.device, graphs: Graphs
) -> tuple[Engine, list[Request]]:
    """A new engine, with all prompts in its queue."""
    k = 0 if asked.plain else asked.k
    # No seats that nobody will take: each size is a graph to capture.
    seats = min(asked.max_reqs, len(prompts))
    limits = Limits(max_reqs=seats, k=k, max_tokens=max(512, seats * (k + 1)))
    try:
        engine = Engine.from_files(
            limits,
            target=asked.weights,
            draft=asked.draft,
            device=device,
            temperature=asked.temperature,
            graphs=graphs,
        )
        requests = [engine.add(prompt, asked.max_tokens) for prompt in prompts]
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from None
    return engine, requests


def _generate(engine: Engine, seed: int, texts: Texts | None = None) -> Summary:
    """Generate all texts, and print them if they are to be shown."""
    engine.capture()
    torch.manual_seed(seed)
    began = time.perf_counter()
    if texts is not None:
        texts.begin()
    for new in engine.run():
        if texts is not None:
            texts.show(new)
    return summarize(engine.records, began)


class Texts:
    """Prints texts as they come: a single one piece by piece, several each when it is complete."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._numbers = {request: number for number, request in enumerate(requests, 1)}
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._requests = requests
        self._streams = len(requests) == 1

    def begin(self) -> None:
        """Print a single text's prompt, for its continuation to follow."""
        if self._streams:
            print(f"\n{self._decoder.decode(self._requests[0].prompt)}", end="", flush=True)

    def show(self, new: dict[Request, list[int]]) -> None:
        """Print what a step has brought."""
        for request, tokens in new.items():
            if self._streams:
                piece = self._decoder.decode(bytes(tokens), final=request.is_done)
                print(_printable(piece), end="\n" if request.is_done else "", flush=True)
            elif request.is_done:
                text = (request.prompt + request.output).decode(errors="replace")
                print(f"\n[{self._numbers[request]}] {_printable(text)}", flush=True)


def _printable(text: str) -> str:
    return text.rstrip("\0")


if __name__ == "__main__":
    sys.exit(main())
