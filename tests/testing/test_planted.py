"""`check_all` finds each planted bug for the right reason, and passes every right runner."""

from __future__ import annotations

import re
import time

import pytest

import graphkit as gk
from graphkit.testing import check_all

from .planted import BUGS, RIGHT, Planted


@pytest.mark.parametrize("planted", BUGS, ids=lambda planted: planted.name)
def test_each_bug_is_found_for_the_right_reason(device: str, planted: Planted) -> None:
    target, given = planted.target(device)
    began = time.process_time()
    with pytest.raises(gk.CheckError) as raised:
        check_all(target, **given)
    # Of this process, so that a busy machine doesn't count; they take half a second at most.
    assert time.process_time() - began < 10
    text, report = str(raised.value), raised.value.report
    if not planted.kind:
        assert re.search(planted.what, text), text
        return
    assert isinstance(report, gk.CheckReport)
    found = [f for f in report.failures if f.kind.name == planted.kind]
    assert any(re.search(planted.what, finding.message) for finding in found), text
    assert text.startswith(f"runner 'r', {planted.batch or 'dispatch('}"), text


@pytest.mark.parametrize("planted", RIGHT, ids=lambda planted: planted.name)
def test_right_runners_pass(device: str, planted: Planted) -> None:
    target, given = planted.target(device)
    reports = check_all(target, **given)
    assert reports
    assert all(report.passed for report in reports)


def test_there_are_enough_of_both() -> None:
    assert len(BUGS) >= 20
    assert len(RIGHT) >= 20
