"""PIECEWISE: what a break costs on the host, when it pays, and what its capture costs.

    python -m benchmarks.piecewise [--device cuda] [--quick] [--out results]

Three questions, each with the device drained between steps and the ways taken in turns: host time per segment against
bare replays of the
same segments (and against the PyPI package breakable-cuda-graphs where it is installed); a 16-layer Llama-shaped
model with attention as a
break against eager, by `eager_break` and by `graphkit.fx`; capture time of 35 token buckets against FULL graphs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphkit as gk
from benchmarks.measure import interleaved_us, save, show, synchronize

SEGMENTS = (1, 16, 32)
PER_SEGMENT_BUDGET = 1.3
SPEEDUP_BUDGET = 1.5
CAPTURE_BUDGET = 1.3
TOKENS = 128
BUCKETS = (1, 2, 4, *range(8, 257, 8))


# -- a segment ------------------------------------------------------------------------------------


def chain(segments: int, middle: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    """A few small kernels a segment, in place, with a break between two."""

    def fn(x: Tensor) -> Tensor:
        for index in range(segments):
            if index:
                middle(x)
            x.mul_(0.5).add_(1.0).clamp_(max=3.0)
        return x

    return fn


def nothing(x: Tensor) -> None:
    """A break that does nothing: what is left is what the break costs."""


def same(x: Tensor) -> Tensor:
    """A break whose tensor passes through: its address is checked."""
    return x


def fresh(x: Tensor) -> Tensor:
    """A break that returns a new tensor: it is copied, one more launch than the break's own."""
    return x.abs()


def segment_runner(
    device: str, fn: Callable[[Tensor], Tensor], policy: gk.Policy | None = None
) -> tuple[gk.GraphRunner, gk.Dispatch]:
    rows = gk.Dim("rows", 64)
    group = gk.GraphGroup(device)
    buffers = group.buffers.declare(x=gk.BufferSpec((rows, 64), torch.float32, pad=0))
    runner = group.runner(
        "chain",
        fn,
        policy=gk.Policy.piecewise(gk.Buckets.of(rows, 64)) if policy is None else policy,
        inputs={"x": gk.Resident("x")},
        outputs=buffers.x,
    )
    group.capture(progress=False)
    return runner, runner.dispatch(rows=64)


def package_replay(segments: int) -> Callable[[], None] | None:
    """The same chain by breakable-cuda-graphs, captured; None where it can't be imported."""
    try:
        import breakable_cuda_graphs as package
    except ImportError:
        return None
    fn = chain(segments, package.no_graph(nothing))
    x = torch.zeros(64, 64, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        fn(x)
    torch.cuda.synchronize()
    graph = package.BreakableCUDAGraph()
    with package.breakable_graph(graph):
        fn(x)
    replay: Callable[[], None] = graph.replay
    return replay


def per_segment(device: str, number: int) -> list[dict[str, Any]]:
    rows = []
    for segments in SEGMENTS:
        steps: dict[str, Callable[[int], object]] = {}
        for kind in (nothing, same, fresh):
            runner, dispatch = segment_runner(device, chain(segments, gk.eager_break(kind)))
            runner.run(dispatch)
            launch = runner._plans[dispatch].launch
            steps[kind.__name__] = lambda i, launch=launch: launch()
            if kind is nothing:
                graphs = runner.entries[0]._graphs[-1].segments
                replays = [graph.replay for graph in graphs if graph.num_nodes]
                steps["bare"] = lambda i, replays=replays: [replay() for replay in replays]
                steps["run"] = lambda i, runner=runner, dispatch=dispatch: runner.run(dispatch)
        x = torch.zeros(64, 64, device=device)
        eager = chain(segments, nothing)
        steps["eager"] = lambda i, eager=eager, x=x: eager(x)
        replay = package_replay(segments) if device == "cuda" else None
        if replay is not None:
            steps["package"] = lambda i, replay=replay: replay()
        with torch.no_grad():
            seen = interleaved_us(steps, number=number)
        each = {name: value["host_us"] / segments for name, value in seen.items()}
        rows.append(
            {
                "segments": segments,
                "per_segment_us": each,
                "ratio": each["nothing"] / each["bare"],
                "kept": each["nothing"] <= PER_SEGMENT_BUDGET * each["bare"],
            }
        )
    return rows


# -- a model --------------------------------------------------------------------------------------


class Attention(nn.Module):
    """What is a break: causal attention over the tokens."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, inner: int, **factory: Any) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head = heads, kv_heads, width // heads
        self.norm1 = nn.RMSNorm(width, **factory)
        self.norm2 = nn.RMSNorm(width, **factory)
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.head, bias=False, **factory)
        self.out = nn.Linear(width, width, bias=False, **factory)
        self.gate = nn.Linear(width, inner, bias=False, **factory)
        self.up = nn.Linear(width, inner, bias=False, **factory)
        self.down = nn.Linear(inner, width, bias=False, **factory)
        self.attention = Attention()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(tokens, -1, self.head)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
        attended = self.attention(q, k, v)
        x = x + self.out(attended.squeeze(0).transpose(0, 1).reshape(tokens, width))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


class Model(nn.Module):
    """16 layers of Llama-3.2-1B's shape, from hidden states to hidden states."""

    def __init__(self, device: str, *, small: bool) -> None:
        super().__init__()
        width, heads, kv_heads, inner = (64, 4, 2, 128) if small else (2048, 32, 8, 8192)
        factory: dict[str, Any] = {
            "device": device,
            "dtype": torch.float32 if device == "cpu" else torch.bfloat16,
        }
        self.layers = nn.ModuleList(
            Layer(width, heads, kv_heads, inner, **factory) for _ in range(16)
        )
        half = width // heads // 2
        frequencies = 10000.0 ** (-torch.arange(half, device=device) / half)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.width = width
        self.requires_grad_(False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = positions[:, None, None] * self.frequencies
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x


def model_runner(
    model: Model, fn: Callable[..., Any], policy: gk.Policy, tokens: gk.Dim, device: str
) -> tuple[gk.GraphGroup, gk.GraphRunner]:
    group = gk.GraphGroup(device)
    dtype = model.layers[0].qkv.weight.dtype
    group.buffers.declare(
        x=gk.BufferSpec((tokens, model.width), dtype, pad=0),
        positions=gk.BufferSpec((tokens,), torch.int64, pad=0),
    )
    runner = group.runner(
        "model",
        fn,
        policy=policy,
        inputs={"x": gk.Resident("x"), "positions": gk.Resident("positions")},
        outputs=gk.Output((tokens, model.width), dtype),
    )
    return group, runner


def broken(model: Model) -> list[gk.Patch]:
    """Attention as a break in every layer, without editing the model."""
    return [gk.break_at(layer.attention) for layer in model.layers]


def against_eager(model: Model, device: str, number: int) -> dict[str, Any]:
    from graphkit import fx

    tokens = gk.Dim("tokens", TOKENS)
    bucket = gk.Buckets.of(tokens, TOKENS)
    steps: dict[str, Callable[[int], object]] = {}

    def add(name: str, fn: Callable[..., Any], policy: gk.Policy) -> None:
        group, runner = model_runner(model, fn, policy, tokens, device)
        group.capture(progress=False)
        dispatch = runner.dispatch(tokens=TOKENS)
        runner.run(dispatch)
        steps[name] = lambda i: runner.run(dispatch)

    add("eager", model, gk.Policy.eager())
    add("full", model, gk.Policy.full(bucket))
    patches = broken(model)
    add("piecewise", model, gk.Policy.piecewise(bucket))
    for patch in patches:
        patch.remove()
    specs = {
        "x": gk.BufferSpec((tokens, model.width), model.layers[0].qkv.weight.dtype, pad=0),
        "positions": gk.BufferSpec((tokens,), torch.int64, pad=0),
    }
    split = fx.split(model, at=[torch.ops.aten.scaled_dot_product_attention], inputs=specs)
    add("fx", split, gk.Policy.piecewise(bucket))

    # What the breaks do themselves, eagerly: given apart.
    layer = model.layers[0]
    shape = (1, layer.heads, TOKENS, layer.head)
    q = torch.zeros(shape, device=device, dtype=layer.qkv.weight.dtype)

    def attention_alone(i: int) -> None:
        for each in model.layers:
            q.copy_(each.attention.forward(q, q, q))

    steps["attention alone"] = attention_alone
    with torch.no_grad():
        seen = interleaved_us(steps, number=number)
    host = {name: value["host_us"] for name, value in seen.items()}
    return {
        "tokens": TOKENS,
        "host_us": host,
        "wall_us": {name: value["wall_us"] for name, value in seen.items()},
        "speedup": host["eager"] / host["piecewise"],
        "speedup_fx": host["eager"] / host["fx"],
        "kept": min(host["eager"] / host["piecewise"], host["eager"] / host["fx"])
        >= SPEEDUP_BUDGET,
    }


def capture_time(model: Model, device: str, buckets: tuple[int, ...]) -> dict[str, Any]:
    tokens = gk.Dim("tokens", buckets[-1])
    sizes = gk.Buckets.of(tokens, *buckets)
    seconds: dict[str, list[float]] = {"full": [], "piecewise": []}
    for _ in range(4):  # the first round also loads kernels
        for mode in ("full", "piecewise"):
            patches = broken(model) if mode == "piecewise" else []
            policy = gk.Policy.piecewise(sizes) if patches else gk.Policy.full(sizes)
            group, _ = model_runner(model, model, policy, tokens, device)
            synchronize()
            begin = time.perf_counter()
            group.capture(progress=False)
            synchronize()
            seconds[mode].append(time.perf_counter() - begin)
            group.close()
            for patch in patches:
                patch.remove()
    best = {mode: statistics.median(times[1:]) for mode, times in seconds.items()}
    ratio = best["piecewise"] / best["full"]
    return {
        "buckets": len(buckets),
        "seconds": best,
        "ratio": ratio,
        "kept": ratio <= CAPTURE_BUDGET,
    }


# -- the whole ------------------------------------------------------------------------------------


def run(device: str = "cuda", quick: bool = False) -> dict[str, Any]:
    """All figures; on the CPU they mean nothing, and show only that it runs."""
    small = quick or device == "cpu"
    number = 20 if device == "cpu" else (100 if quick else 300)
    segments = per_segment(device, number)
    model = Model(device, small=small)
    return {
        "name": "piecewise",
        "small": small,
        "per_segment": segments,
        "has_package": "package" in segments[0]["per_segment_us"],
        "model": against_eager(model, device, number),
        "capture": capture_time(model, device, BUCKETS[:5] if device == "cpu" else BUCKETS),
    }


def table(result: dict[str, Any]) -> None:
    """The result for people."""
    names = list(result["per_segment"][0]["per_segment_us"])
    show(
        "host µs a segment (a break that does nothing, passes its tensor on, returns a new one)",
        ["segments", *names, "nothing / bare", f"budget {PER_SEGMENT_BUDGET}"],
        [
            [row["segments"], *row["per_segment_us"].values(), row["ratio"], _kept(row)]
            for row in result["per_segment"]
        ],
    )
    if not result["has_package"]:
        print("  breakable-cuda-graphs is not installed here; it was not measured")
    model = result["model"]
    show(
        f"16 layers, attention as a break, {model['tokens']} tokens",
        ["", "host µs", "wall µs"],
        [[name, us, model["wall_us"][name]] for name, us in model["host_us"].items()],
    )
    print(
        f"  eager / PIECEWISE {model['speedup']:.2f}, eager / fx {model['speedup_fx']:.2f}, "
        f"at least {SPEEDUP_BUDGET}: {_kept(model)}"
    )
    capture = result["capture"]
    show(
        f"capture of {capture['buckets']} buckets",
        ["FULL s", "PIECEWISE s", "ratio", f"budget {CAPTURE_BUDGET}"],
        [[*capture["seconds"].values(), capture["ratio"], _kept(capture)]],
    )


def _kept(part: dict[str, Any]) -> str:
    return "kept" if part["kept"] else "missed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default)
    parser.add_argument("--quick", action="store_true", help="a smaller model, fewer steps")
    parser.add_argument("--out", type=Path, help="a folder for the result as JSON")
    options = parser.parse_args()
    result = run(options.device, options.quick)
    table(result)
    if options.out is not None:
        print(f"\nwritten to {save('piecewise', result, options.out)}")


if __name__ == "__main__":
    main()
