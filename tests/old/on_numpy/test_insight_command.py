"""The command, run in this process and in its own."""

from __future__ import annotations

import io
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

import recorded
import uniclip
from uniclip.insight import command, tables
from uniclip.insight.advice import suggest
from uniclip.insight.reading import read
from uniclip.insight.spikes import Spike, spikes

COMMANDS = ["report", "suggest", "spikes"]


class Terminal(io.StringIO):
    """A text that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return the file of a run with spikes."""
    return recorded.write(recorded.run(1000, spikes=[300, 600, 900]), tmp_path / "run.jsonl")


def python(*arguments: str | Path, without: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, in which some module is missing."""
    program = f"import sys; sys.modules.update(dict.fromkeys({without.split()!r}))\n"
    program += "from uniclip.insight.command import main; sys.exit(main())"
    line = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(line, check=False, capture_output=True, text=True)


def test_module() -> None:
    """``python -m uniclip`` alone prints the help; it knows its version."""
    line = [sys.executable, "-m", "uniclip"]
    done = subprocess.run(line, check=True, capture_output=True, text=True)
    assert done.stdout.startswith("usage: uniclip ")
    assert all(name in done.stdout for name in COMMANDS)
    done = subprocess.run([*line, "--version"], check=True, capture_output=True, text=True)
    assert done.stdout == f"uniclip {uniclip.__version__}\n"


def test_entry_point() -> None:
    """The command ``uniclip`` is the same function."""
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'[project.scripts]\nuniclip = "{command.main.__module__}:{command.main.__name__}"\n' in project


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The help of each command ends with an example, whose arguments are right."""
    with pytest.raises(SystemExit) as left:
        command.main([name, "--help"])
    assert left.value.code == 0
    example = capsys.readouterr().out.splitlines()[-1]
    assert example.startswith(f"example: uniclip {name} run.jsonl")
    assert command._parser().parse_args(example.split()[2:]).file == Path("run.jsonl")


def test_report(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A report has the run, the advice, other limits, and the spikes; nothing goes to stderr."""
    assert command.main(["report", str(file)]) == 0
    shown = capsys.readouterr()
    parts = ["The run\n-------\n", "Advice\n------\n", "Spikes\n------\n"]
    places = [shown.out.index(part) for part in parts]
    assert places == sorted(places)
    record = read(file)
    assert suggest(record).verdict in shown.out
    assert tables.as_text(tables.of_spikes(spikes(record)), 80) in shown.out
    assert shown.err == ""


def test_a_run_without_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that was killed before its first step has a report and a page, which say that nothing was recorded."""
    file = recorded.write(recorded.nothing(), tmp_path / "run.jsonl")
    assert command.main(["report", str(file), "-o", str(tmp_path / "run.html")]) == 0
    shown = capsys.readouterr().out
    assert "steps  none\n" in shown
    assert "0 norms are known" in " ".join(shown.split())
    assert tables.EMPTY in (tmp_path / "run.html").read_text(encoding="utf-8")


def test_page(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With ``-o`` the page is written, and the report says where."""
    assert command.main(["report", str(file), "-o", str(tmp_path / "run.html")]) == 0
    assert capsys.readouterr().out.endswith(f"\nThe page is in {tmp_path / 'run.html'}.\n")
    assert (tmp_path / "run.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_suggest(file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The advice is printed as it is, where it fits."""
    monkeypatch.setenv("COLUMNS", "1000")
    assert command.main(["suggest", str(file)]) == 0
    assert capsys.readouterr().out.split() == str(suggest(read(file))).split()


def test_spikes(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All spikes are listed, found with the numbers that are given."""
    for arguments, options in [
        ([], {}),
        (["-z", "2"], {"z": 2.0}),
        (["-z", "2", "--window", "30"], {"z": 2.0, "window": 30}),
    ]:
        assert command.main(["spikes", str(file), *arguments]) == 0
        lines = capsys.readouterr().out.splitlines()
        found = [str(spike.step) for spike in spikes(read(file), **options)]
        assert [line.split()[0] for line in lines[1:-1]] == found
        assert lines[-1] == f"{len(found)} in all."
    assert command.main(["spikes", str(recorded.write(recorded.run(5), file))]) == 0
    assert capsys.readouterr().out == "No spikes.\n"


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("content", [None, "", "no record\n", '{"uniclip": 1}\n{"step": 1, "no\n{"step": 2}\n'])
def test_a_file_that_is_no_record(
    name: str, content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing or damaged file is named in one line, and the status is 2."""
    path = tmp_path / "other.jsonl"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    assert command.main([name, str(path)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("uniclip: ")
    assert shown.err.count("\n") == 1
    assert "other.jsonl" in shown.err


def test_a_page_that_cannot_be_written(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """So is a page in a folder that does not exist."""
    assert command.main(["report", str(file), "-o", str(tmp_path / "none" / "run.html")]) == 2
    assert capsys.readouterr() == ("", f"uniclip: {tmp_path / 'none' / 'run.html'}: No such file or directory\n")


@pytest.mark.parametrize(
    "arguments", [["-z", "-1"], ["-z", "0"], ["-z", "many"], ["--window", "0"], ["--window", "1.5"]]
)
def test_wrong_numbers(arguments: list[str], file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers that no search for spikes takes are refused, as any wrong argument is."""
    with pytest.raises(SystemExit) as left:
        command.main(["spikes", str(file), *arguments])
    assert left.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines()[-1].startswith(f"uniclip spikes: error: argument {arguments[0]}: ")


def test_without_matplotlib_and_tqdm(file: Path, tmp_path: Path) -> None:
    """The terminal needs neither; a page needs matplotlib, and one line says how to install it."""
    done = python("report", file, without="matplotlib tqdm")
    assert (done.returncode, done.stderr) == (0, "")
    assert "smallest factor" in done.stdout
    done = python("report", file, "-o", tmp_path / "run.html", without="matplotlib")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith('uniclip: pictures need matplotlib: pip install "uniclip-gradients[insight]"')


@pytest.mark.parametrize("width", [64, 100])
def test_width(width: int, file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are as long as the terminal is wide at most."""
    monkeypatch.setenv("COLUMNS", str(width))
    command.main(["report", str(file)])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width


def test_tables_wrap() -> None:
    """The last column of a table is wrapped below itself; no word is lost."""
    rows = [("1", "a b " * 20), ("22", "c")]
    text = tables.as_text(tables.Table(("n", "words"), rows), 40)
    first, *others = text.splitlines()
    assert first == "n   words"
    assert all(len(line) <= 40 for line in others)
    assert " ".join(text.split()) == " ".join(["n words 1", *["a b"] * 20, "22 c"])


@pytest.mark.skipif(os.name == "nt", reason="pipes break in another way there")
@pytest.mark.parametrize("name", COMMANDS)
def test_broken_pipe(name: str, file: Path) -> None:
    """Nothing is said where the reader of the output has gone, as ``head`` does."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "uniclip", name, str(file)],
        check=False,
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writing)
    assert done.stderr == ""


def test_progress(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large files have a progress bar, in a terminal only; small ones have none."""
    for large, stderr, shown in [(0, Terminal(), True), (0, io.StringIO(), False), (10**9, Terminal(), False)]:
        monkeypatch.setattr(command, "_LARGE", large)
        monkeypatch.setattr(sys, "stderr", stderr)
        assert command.main(["suggest", str(file)]) == 0
        assert ("read" in stderr.getvalue() and "1/2" in stderr.getvalue()) == shown


def test_spikes_that_are_not_finite() -> None:
    """Of what is not finite no ratio is shown, and it counts as larger than all else."""
    broken = Spike(7, math.nan, math.nan, True, math.nan, math.nan, [("a", math.inf), ("b", 2.0)])
    small, large = (Spike(step, 9.0, ratio, False, 1.0, 2.0, []) for step, ratio in ((3, 4.0), (5, 6.0)))
    assert tables.of_spikes([small, large, broken], 2).rows == [
        ("5", "9", "6 x", "no", "1", "2", "-"),
        ("7", "not finite", "-", "yes", "-", "-", "a (not finite), b (2 x)"),
    ]


@pytest.mark.parametrize("name", ["run.jsonl", "link.jsonl", "other.jsonl", "damaged.jsonl"])
def test_a_page_replaces_no_record(name: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A page does not replace the file that is read, under whatever name, or another record: one line, status 2."""
    folder = file.parent
    (folder / "link.jsonl").symlink_to(file)
    recorded.write(recorded.run(5), folder / "other.jsonl")
    (folder / "damaged.jsonl").write_text('\ufeff{"uniclip": 1, "lea', encoding="utf-8")
    before = (folder / name).read_bytes()
    assert command.main(["report", str(file), "-o", str(folder / name)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert shown.err.startswith(f"uniclip: {folder / name} is ")
    assert (folder / name).read_bytes() == before


def test_a_page_replaces_no_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor the log of a trainer that is read; a page is replaced."""
    log, page = tmp_path / "metrics.csv", tmp_path / "run.html"
    log.write_text("step,clip/norm\n1,2.0\n", encoding="utf-8")
    page.write_text("old", encoding="utf-8")
    assert command.main(["report", str(log), "-o", str(log)]) == 2
    assert log.read_text(encoding="utf-8") == "step,clip/norm\n1,2.0\n"
    assert command.main(["report", str(log), "-o", str(page)]) == 0
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize(
    "content",
    [
        '{"uniclip": 1}\n{"step": 1, "norm": 1%s}\n{"step": 2}\n' % ("0" * 400),
        '{"uniclip": 1}\n{"step": 99999999999999999999}\n{"step": 2}\n',
        '{"uniclip": 1}\n%s\n{"step": 2}\n' % ("[" * 100_000),
        '{"uniclip": 1, "leaves": 5}\n',
        '{"uniclip": 1, "scope": []}\n',
        '{"uniclip": 1, "ord": "abc"}\n',
        "step,clip/norm,a\n1,2.0,%s\n2,1.0,\n" % ("9" * 140_000),
    ],
)
def test_damaged_files(name: str, content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever is wrong in a file is said in one line."""
    path = tmp_path / "other.jsonl"
    path.write_text(content, encoding="utf-8")
    assert command.main([name, str(path)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"uniclip: {path}, line ")
    assert shown.err.count("\n") == 1


def test_control_characters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing in a file acts on the terminal."""
    path = tmp_path / "run.jsonl"
    header = '{"uniclip": 1, "rule": "\\u001b[31mred\\u202e", "leaves": ["\\u001b]0;x\\u0007"], "sizes": [1]}'
    rows = [f'{{"step": {step}, "norm": 1.0, "leaves": [{1 + step % 2}]}}' for step in range(1, 60)]
    last = '{"step": 60, "norm": 99.0, "leaves": [99.0]}'
    path.write_text("\n".join([header, *rows, last]) + "\n", encoding="utf-8")
    assert command.main(["report", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "\ufffd[31mred\ufffd" in shown
    assert "\ufffd]0;x\ufffd" in shown
    assert all(one.isprintable() for one in shown.replace("\n", ""))
