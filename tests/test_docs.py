"""The docs are run: every Python block of a page, in order, as one program; and every relative link leads somewhere."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\((?!https?:|#|mailto:)([^)#\s]+)[^)]*\)")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [p for p in PAGES if BLOCK.search(p.read_text())], ids=name_of)
def test_the_code_of_a_page_runs(
    page: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "page.py"
    program.write_text("\n".join(BLOCK.findall(page.read_text())))
    runpy.run_path(str(program), run_name="__main__")
    capsys.readouterr()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_links_of_a_page_resolve(page: Path) -> None:
    broken = [to for to in LINK.findall(page.read_text()) if not (page.parent / to).exists()]
    assert not broken, f"{name_of(page)} links to what isn't there: {broken}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the README shows what a CPU prints")
def test_the_readme_shows_what_its_first_program_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "README.md").read_text()
    program = tmp_path / "first.py"
    program.write_text(BLOCK.findall(text)[0])
    shown = text.partition("It prints, on a CPU:")[2].split("```")[1]
    runpy.run_path(str(program), run_name="__main__")

    def timeless(report: str) -> str:
        return re.sub(r"captured in [\d.]+ s", "captured in some time", report.strip())

    assert timeless(capsys.readouterr().out) == timeless(shown)
