"""The command line: texts and figures, or one clear line and exit code 2."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples.eagle import cli, weights
from examples.eagle.engine import StepRecord
from examples.eagle.model import Config, TinyLM
from examples.eagle.report import figures_table, plot, summarize
from examples.eagle.scheduler import Request
from examples.eagle.weights import load_target

ROOT = Path(__file__).parents[2]


def output_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main([*arguments, "--device", "cpu"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_one_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    out = output_of(capsys, "The import statement", "--max-tokens", "12")
    assert "1 prompt on cpu, EAGLE, K=3, graphs: prefill+decode\n" in out
    assert "not how fast they are" in out
    engine = cli.Engine.from_files(cli.Limits(max_reqs=1, k=0), graphs="none")
    assert (
        "The import statement" + engine.generate([b"The import statement"], 12)[0].decode() in out
    )
    lines = {line.split("  ")[0]: line.split() for line in out.splitlines()}
    assert lines["tokens"] == ["tokens", "12", "12"]
    assert float(lines["accepted length"][-1]) > 1
    assert lines["accepted length"][-1] == lines["accepted length"][-2]
    assert [name in lines for name in ("time to first token", "time per token")] == [True] * 2
    assert "NOT_UNIFORM" in out
    assert "runner decode: 1 of 1 graphs captured" in out


def test_several_prompts_from_everywhere(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("The del\n\nThe pass\n")
    out = output_of(
        capsys, "a", "--prompt", "b", "--file", str(file), "--max-tokens", "3",
        "--graphs", "none", "--max-reqs", "2",
    )  # fmt: skip
    assert out.startswith("4 prompts on cpu, EAGLE, K=3, graphs: none\n")
    for number, start in enumerate(("a", "b", "The del", "The pass"), 1):
        assert f"\n[{number}] {start}" in out
    assert "graphs:" not in out.split("steps")[1].split("\n")[0]
    assert "EAGER_POLICY" in out


def test_plain(capsys: pytest.CaptureFixture[str]) -> None:
    out = output_of(capsys, "The import", "--plain", "--max-tokens", "4")
    assert "plain decoding" in out
    assert "graphs: prefill+decode  eager" in out
    assert "decode" not in out.split("runner")[1]


def test_sampling_repeats_with_its_seed(capsys: pytest.CaptureFixture[str]) -> None:
    common = ("The", "--temperature", "1.5", "--graphs", "none", "--max-tokens", "20")
    texts = [
        output_of(capsys, *common, "--seed", seed).split("tokens")[0] for seed in ("1", "1", "2")
    ]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no prompt: give one"),
        ([""], "a prompt is empty"),
        (["x" * 512], "a prompt has 512 bytes, and the model takes at most 511: shorten it"),
        (["a", "--k", "0"], "--k 0: use 1 to 8, or use --plain for none"),
        (["a", "--k", "9"], "--k 9: use 1 to 8"),
        (["a", "--k", "three"], "invalid int value: 'three'"),
        (["a", "--graphs", "all"], "invalid choice: 'all'"),
        (["a", "--temperature", "-1"], "--temperature -1.0: use 0 (greedy) or more"),
        (["a", "--temperature", "nan"], "--temperature nan"),
        (["a", "--max-tokens", "0"], "--max-tokens 0: use at least 1"),
        (["a", "--max-reqs", "0"], "--max-reqs 0: use 1 to 256"),
        (["a", "--device", "tpu"], "--device tpu: use cuda or cpu"),
        (["a", "--device", "cpu:x"], "--device cpu:x: use cuda or cpu"),
        (["a", "--device", "cuda:x"], "--device cuda:x: use cuda or cpu"),
        (["a", "--device", "cuda:256"], "--device cuda:256: use cuda or cpu"),
        (["a", "--device", "meta"], "--device meta: use cuda or cpu"),
        (["a", "--device", ""], "--device : use cuda or cpu"),
        (["a", "--device", "cuda:60"], "--device cuda:60: "),
        (["a", "--seed", str(2**64)], "use one of 64 bits"),
        (["--file", "/nowhere/at/all"], "--file /nowhere/at/all: No such file"),
        (["a", "--weights", "/nowhere/at/all"], "no weights at /nowhere/at/all"),
        (["a", "--draft", "/nowhere/at/all"], "no draft weights at /nowhere/at/all"),
        (["a", "--plot", "/nowhere/at/all.png"], "there is no directory /nowhere/at"),
        (["a", "--plot", "all.foo"], "all.foo: use a name that ends in .pdf, .png, .svg"),
        (["a", "--plot", "all"], "--plot all: use a name that ends in .pdf, .png, .svg"),
        (["a", "--unknown"], "unrecognized arguments: --unknown"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as error:
        cli.main(arguments)
    assert error.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("python -m examples.eagle: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


@pytest.mark.parametrize("device", ["cpu", "cpu:0", "cpu:3"])
def test_a_cpu_is_one_whatever_its_number(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    arguments = ["a", "--max-tokens", "1", "--graphs", "none", "--device", device]
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    assert out.startswith("1 prompt on cpu, ")
    assert "not how fast they are" in out
    assert threads == [1]


def test_a_gpu_that_is_not_there_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SystemExit) as error:
        cli.main(["a", "--device", "cuda:2"])
    assert error.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "--device cuda:2: the last GPU here is cuda:1; use that or less" in captured.err


@pytest.mark.parametrize(("prompt", "max_tokens", "cut"), [(508, 4, False), (508, 5, True)])
def test_texts_that_end_at_the_models_length_are_announced_once(
    capsys: pytest.CaptureFixture[str], prompt: int, max_tokens: int, cut: bool
) -> None:
    out = output_of(
        capsys, "x" * prompt, "a", "--plain", "--graphs", "decode",
        "--max-tokens", str(max_tokens),
    )  # fmt: skip
    assert out.count("A text ends at the model's length, 512 bytes with its prompt") == cut
    assert out.count(f"even where --max-tokens {max_tokens} asks for more.\n") == cut


def test_bad_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    empty, damaged, other, small = (
        tmp_path / name for name in ("empty.txt", "damaged", "other", "small")
    )
    directory = tmp_path / "plot.png"
    directory.mkdir()
    empty.write_text("\n\n")
    damaged.write_bytes(b"no weights")
    weights.save(other, torch.nn.Linear(2, 2), {"config": weights.describe(load_target().config)})
    sizes = Config(width=16, layers=1, heads=2, kv_heads=1, head_dim=8, hidden=16, max_length=32)
    weights.save(small, TinyLM(sizes), {"config": weights.describe(sizes)})
    for arguments, message in (
        (["--file", str(empty)], "has no prompt: write one a line"),
        (["--file", str(tmp_path)], "Is a directory"),
        (["a", "--weights", str(damaged)], "is no readable weights file"),
        (["a", "--weights", str(other)], "holds another model's weights"),
        (["a", "--weights", str(tmp_path)], f"{tmp_path} is a directory: name the weights file"),
        (["a", "--draft", str(tmp_path)], f"{tmp_path} is a directory: name the weights file"),
        (["a", "--weights", str(small), "--plain"], "max_length=512 is beyond the model's 32"),
        (["a", "--weights", "x" * 300], "File name too long"),
        (["a", "--draft", "x" * 300], "File name too long"),
        (["a", "--plot", str(directory)], f"--plot {directory} is a directory: name a file"),
        (["a", "--draft", str(damaged)], "is no readable weights file"),
        (["a", "--draft", str(other)], "doesn't say what sizes its draft head has"),
    ):
        with pytest.raises(SystemExit) as error:
            cli.main(arguments)
        assert error.value.code == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        assert message in captured.err


def test_no_gpu_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit):
        cli.main(["a", "--device", "cuda"])
    assert "torch finds no GPU here; use cpu" in capsys.readouterr().err


def test_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.eagle"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith("python -m examples.eagle: no prompt")


def test_figures() -> None:
    first, second = Request(b"a", 8), Request(b"b", 8)
    records = [
        StepRecord(
            seconds=1, ended=11, is_uniform=False, gained={first: 1, second: 1}, verified=()
        ),
        StepRecord(
            seconds=1, ended=12, is_uniform=True, gained={first: 3, second: 1}, verified=(3, 1)
        ),
        StepRecord(seconds=2, ended=14, is_uniform=True, gained={first: 2}, verified=(4,)),
    ]
    summary = summarize(records, 10)
    assert (summary.tokens, summary.steps, summary.seconds) == (8, 3, 4)
    assert summary.tokens_per_second == 2
    assert summary.accepted_length == pytest.approx(8 / 3)
    assert summary.ttft == 1
    # 3 seconds for 5 tokens, and 1 for 1.
    assert summary.tpot == pytest.approx((3 / 5 + 1) / 2)
    assert "time per token       800.00 ms" in figures_table({"x": summary})
    alone = summarize(records[:1], 10)
    assert alone.accepted_length is None
    assert alone.tpot is None
    assert "accepted length      -" in figures_table({"x": alone})


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    request = Request(b"a", 8)
    records = [
        StepRecord(seconds=1, ended=1, is_uniform=False, gained={request: 1}, verified=()),
        StepRecord(seconds=1, ended=2, is_uniform=True, gained={request: 2}, verified=(2,)),
    ]
    plot(tmp_path / "steps.png", records)
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")
