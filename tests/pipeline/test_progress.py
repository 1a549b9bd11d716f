"""Progress lines: where they go, when, and what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tepo_core import progress
from tepo_core.progress import Progress, duration


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def lines_of(shown: Progress, clock: Clock, steps: range, seconds: float, **values: float) -> None:
    for step in steps:
        clock.now += seconds
        shown.update(step, **values)


def test_throttled_but_first_and_last_are_shown(clock: Clock, capsys: pytest.CaptureFixture) -> None:
    lines_of(Progress(10, "train"), clock, range(1, 11), 1.0, reward=0.12345, tokens=200)
    assert capsys.readouterr().err.splitlines() == [
        "train: 1/10  reward 0.1235  200 tokens/s  9 s left",
        "train: 4/10  reward 0.1235  200 tokens/s  6 s left",
        "train: 7/10  reward 0.1235  200 tokens/s  3 s left",
        "train: 10/10  reward 0.1235  200 tokens/s  done in 10 s",
    ]


def test_after_a_resume_the_time_left_comes_from_this_process(clock: Clock, capsys: pytest.CaptureFixture) -> None:
    lines_of(Progress(100, every=0), clock, range(91, 94), 2.0)
    assert capsys.readouterr().err.splitlines() == ["91/100", "92/100  16 s left", "93/100  14 s left"]


def test_steps_of_different_size(clock: Clock, capsys: pytest.CaptureFixture) -> None:
    shown = Progress(320, every=0)
    for step in (32, 160):
        clock.now += 4.0
        shown.update(step, split="test")
    assert capsys.readouterr().err.splitlines() == ["32/320  split test", "160/320  split test  5 s left"]


def test_the_channel_takes_all_lines_and_a_broken_one_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    channel = tmp_path / "progress"
    monkeypatch.setenv(progress.CHANNEL, str(channel))
    Progress(1, "a").line("one")
    Progress(1, "b").line("two")
    assert channel.read_text() == "a: one\nb: two\n"
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv(progress.CHANNEL, str(tmp_path / "nowhere" / "progress"))
    Progress(1).line("three")
    assert capsys.readouterr().err == "three\n"


def test_durations() -> None:
    assert [duration(s) for s in (-1, 0.4, 59.4, 61, 3599, 7630)] == [
        "0 s", "0 s", "59 s", "1 min 01 s", "59 min 59 s", "2 h 07 min",
    ]  # fmt: skip
