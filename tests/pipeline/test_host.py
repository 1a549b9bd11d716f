"""Stages forked from a host that has imported everything: the same results and the same manners as stages started anew."""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from pipeline_project import ROOT, environment, make_project, make_tiny, runner, start
from stages import SLEEP, WRITE, alive, left_over, prepare_notebook, sleeping, validated, wait_for

from tepo_core.pipeline import host
from tepo_core.pipeline import launch as stage
from tepo_core.pipeline.processes import orphans
from tepo_core.pipeline.runner import MODULES as whole

LITTLE = ("papermill", "ipykernel.kernelapp", "tepo_core.pipeline.execute")  # enough for notebooks that compute nothing


class Hosted:
    """A host below a process that stands for 'tepo repro'."""

    def __init__(self, *modules: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tepo-host-"))  # a socket's path must be short
        self.above = start(ROOT, sys.executable, "-c", "import time; time.sleep(600)")
        self.variables = {"TEPO_HOST": str(self.folder), "TEPO_REPRO_PID": str(self.above.pid)}
        command = [sys.executable, "-m", "tepo_core.pipeline.host", str(self.folder), str(self.above.pid), *modules]
        self.process = start(ROOT, *command, PYTHONHASHSEED="0") if modules else None
        if modules:
            wait_for((self.folder / "socket").exists)

    def stage(self, project: Path, *arguments: str):
        return runner(project, *arguments, **self.variables)

    def close(self) -> None:
        self.above.kill()
        self.above.communicate()
        if self.process is not None:
            self.process.communicate(timeout=20)  # it ends by itself


@pytest.fixture(scope="module")
def hosted():
    one = Hosted(*LITTLE)
    yield one
    one.close()
    assert one.process.returncode == 0


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = make_project(tmp_path / "project")
    validated(folder)
    return folder


def test_same_results_as_without_a_host(project: Path, tmp_path: Path, hosted: Hosted) -> None:
    cells = (
        "import os, sys\nprint('in', os.getcwd(), os.environ['PYTHONHASHSEED'], hash('a'), sys.flags.hash_randomization)",
        WRITE,
    )
    prepare_notebook(project, *cells)
    process = hosted.stage(project, "prepare")
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 0, text
    with_host = (project / "data" / "prepared" / "notebook.ipynb").read_bytes()
    assert "in . 0 " in with_host.decode() and "prepare: done in" in text and "NOTE" not in text and "Traceback" not in text
    process = runner(project, "prepare")
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 0, text
    assert (project / "data" / "prepared" / "notebook.ipynb").read_bytes() == with_host


PICTURES = (
    "import matplotlib.pyplot as plt\nplt.plot([1, 2]);",  # a user's own notebook, which leaves its figures to the shell
    "fig, axis = plt.subplots()\naxis.plot([2, 1]);\nplt.figure().add_subplot().plot([3, 3]);",
    "from matplotlib.figure import Figure\nfrom tepo_core.analysis.figures.canvas import show\n"
    "mine = Figure((3, 2))\nmine.add_subplot().plot([1, 3])\nshow(mine, 'a line')",
    "mine",
)


@pytest.fixture(scope="module")
def hosted_whole():
    """A host with all that 'tepo repro' has it import, but for the models."""
    one = Hosted(*(name for name in host.MODULES if not name.startswith("transformers")))
    yield one
    one.close()


def test_pictures_are_the_same_as_without_a_host(project: Path, hosted_whole: Hosted) -> None:
    """Three of a shell's hook, one shown by name, and one that a shell formats: equal bytes, and every one of them in the page."""
    from jinja2 import Environment, FileSystemLoader

    from tepo_core.report.notebooks import NotebookPages

    prepare_notebook(project, WRITE, *PICTURES)
    kept = project / "data" / "prepared" / "notebook.ipynb"
    executed = []
    for process in (hosted_whole.stage(project, "prepare"), None):
        process = process or runner(project, "prepare")
        text, _ = process.communicate(timeout=60)
        assert process.returncode == 0, text
        executed.append(kept.read_bytes())
    assert [text.count(b'"image/png": "') for text in executed] == [5, 5]
    assert executed[0] == executed[1]
    page = NotebookPages(Environment(loader=FileSystemLoader(ROOT / "tepo_core/report/templates")), "").page(kept, "prepare")
    assert page.count("data:image/png;base64,") == 5


@pytest.mark.slow
def test_every_stage_writes_the_same_notebook_with_and_without_a_host(tmp_path: Path) -> None:
    """The study's own notebooks, from the problems to the report; the pages that speak of lines have them."""
    project = make_project(tmp_path / "project")
    make_tiny(project)
    (project / "claims.yaml").symlink_to(ROOT / "claims.yaml")
    (project / "notebooks").symlink_to(ROOT / "notebooks")
    (project / "data").mkdir()
    (project / "data" / "published.yaml").symlink_to(ROOT / "data" / "published.yaml")
    one, executed = Hosted(*whole.values(), *host.MODULES), {}
    try:
        assert runner(project, "normalise").wait() == 0
        axes, method = ("--task", "facts", "--seed", "0"), ("--method", "grpo")
        stages = (("prepare",), ("warmup", *axes), ("train", *axes, *method), ("evaluate", *axes, *method), ("evaluate_base", *axes),
                  ("analyse",), ("report",))  # fmt: skip
        for start_stage in (one.stage, runner):
            for arguments in stages:
                process = start_stage(project, *arguments)
                text, _ = process.communicate(timeout=240)
                assert process.returncode == 0, text
            kept = [p for part in ("data/prepared", "runs", "reports") for p in (project / part).rglob("*.ipynb")]
            executed[start_stage] = {p.relative_to(project).as_posix(): p.read_bytes() for p in kept}
            pages = project / "reports" / "notebooks"
            for page in (
                "warmup-facts-s0",
                "train-facts-grpo-s0",
                "evaluate-facts-grpo-s0",
                "evaluate-facts-base-s0",
                "analyse",
            ):
                assert (pages / f"{page}.html").read_text(encoding="utf-8").count("data:image/png;base64,") >= 1, page
    finally:
        one.close()
    assert len(executed[runner]) == 7 and executed[one.stage] == executed[runner]


def test_a_stage_is_a_child_of_the_host_and_its_output_is_the_stages(project: Path, hosted: Hosted) -> None:
    prepare_notebook(project, SLEEP)
    process = hosted.stage(project, "prepare")
    pids = sleeping(project)
    assert psutil.Process(pids[0]).ppid() == hosted.process.pid and psutil.Process(pids[1]).ppid() == pids[0]
    assert orphans(project) == []
    os.kill(pids[1], signal.SIGKILL)
    text, _ = process.communicate(timeout=30)
    assert process.returncode == 1 and "the kernel was killed (SIGKILL)" in text and "the notebook as far as it came" in text
    wait_for(lambda: not alive(pids))
    assert left_over(project) == [] and not (project / "data").exists()


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_term_reach_the_runner(project: Path, hosted: Hosted, sent: int, code: int) -> None:
    prepare_notebook(project, SLEEP, WRITE)
    process = hosted.stage(project, "prepare")
    pids = sleeping(project)
    os.kill(process.pid, sent)
    text, _ = process.communicate(timeout=20)
    assert process.returncode == code and "stopped: nothing half-made was kept" in text
    wait_for(lambda: not alive(pids))
    assert not (project / "data").exists() and left_over(project) == []


def test_a_killed_client_takes_runner_and_kernel_along(project: Path, hosted: Hosted) -> None:
    prepare_notebook(project, SLEEP)
    process = hosted.stage(project, "prepare")
    pids = sleeping(project)
    process.kill()
    process.communicate()
    wait_for(lambda: not alive(pids))
    assert psutil.pid_exists(hosted.process.pid) and left_over(project) == []


def test_a_killed_runner_is_named_and_leaves_no_kernel(project: Path, hosted: Hosted) -> None:
    prepare_notebook(project, SLEEP)
    process = hosted.stage(project, "prepare")
    pids = sleeping(project)
    os.kill(pids[0], signal.SIGKILL)
    text, _ = process.communicate(timeout=20)
    assert process.returncode == 1 and "the runner of this stage was killed" in text
    wait_for(lambda: not alive(pids))


def test_a_client_that_does_not_wait_leaves_nothing(project: Path, hosted: Hosted) -> None:
    prepare_notebook(project, SLEEP)
    os.kill(hosted.process.pid, signal.SIGSTOP)  # as a host that is still importing: it accepts, and does not answer
    try:
        process = hosted.stage(project, "prepare")
        time.sleep(1.5)
        os.kill(process.pid, signal.SIGINT)
        process.wait(timeout=20)
    finally:
        os.kill(hosted.process.pid, signal.SIGCONT)
    text, _ = process.communicate(timeout=20)  # the host held the output, which was on its way to it
    assert process.returncode == 130 and "stopped before this stage began" in text and "Traceback" not in text
    wait_for(lambda: not [p for p in psutil.Process(hosted.process.pid).children() if p.status() != psutil.STATUS_ZOMBIE])
    assert not (project / "pids").exists()


def test_a_host_that_dies_ends_its_stages(project: Path) -> None:
    one = Hosted(*LITTLE)
    prepare_notebook(project, SLEEP)
    os.kill(one.process.pid, signal.SIGSTOP)
    process = one.stage(project, "prepare")
    time.sleep(1.5)
    one.process.kill()
    text, _ = process.communicate(timeout=20)
    assert process.returncode == 1 and "was killed; run the same command again" in text and "Traceback" not in text
    one.above.kill()
    one.above.communicate()
    one.process.communicate()


def test_a_long_place_for_temporary_files_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.tempfile, "gettempdir", lambda: "/tmp/" + 100 * "x")
    assert host.socket_place() == "/tmp"
    monkeypatch.setattr(host.os, "access", lambda *_: False)
    place = host.socket_place()
    assert len(place) > 100 and not host.can_host("cpu", place + "/tepo-host-12345678")
    monkeypatch.setattr(host.tempfile, "gettempdir", lambda: "/var/tmp")
    assert host.socket_place() == "/var/tmp" and host.can_host("cpu", "/var/tmp/tepo-host-12345678")


def test_a_closed_standard_input_is_no_obstacle(project: Path, hosted: Hosted) -> None:
    """A scheduler may start 'make repro' so."""
    prepare_notebook(project, "import os\nprint('input', os.readlink('/proc/self/fd/0'))", WRITE)
    command = f"exec {sys.executable} -m tepo_core.pipeline.launch prepare <&-"
    process = start(project, "sh", "-c", command, **hosted.variables)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 0, text
    assert "input /dev/null" in (project / "data" / "prepared" / "notebook.ipynb").read_text()


def test_bad_arguments_give_argparse_s_code_and_a_wrong_request_harms_nothing(project: Path, hosted: Hosted) -> None:
    with socket.socket(socket.AF_UNIX) as rude:
        rude.connect(str(hosted.folder / "socket"))
        rude.sendall(b"nonsense\n")
        assert rude.recv(10) == b""
    process = hosted.stage(project, "no_such_stage")
    text, _ = process.communicate(timeout=20)
    assert process.returncode == 2 and "invalid choice: 'no_such_stage'" in text


def test_the_host_ends_with_tepo_repro(project: Path) -> None:
    one = Hosted(*LITTLE)
    prepare_notebook(project, SLEEP)
    process = one.stage(project, "prepare")
    pids = sleeping(project)
    one.close()
    process.communicate(timeout=20)
    assert process.returncode == 143
    wait_for(lambda: not alive([*pids, one.process.pid]))


def test_where_a_host_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has looked at CUDA cannot fork one that uses it."""
    monkeypatch.setattr(host.sys, "platform", "linux")
    monkeypatch.setattr(host.Path, "exists", lambda self: str(self) == "/dev/nvidiactl")
    assert [host.can_host(device) for device in ("cpu", "auto", "cuda")] == [True, False, False]
    monkeypatch.setattr(host.Path, "exists", lambda self: False)
    assert host.can_host("auto")
    monkeypatch.setattr(host.sys, "platform", "darwin")
    assert not host.can_host("cpu")


def test_names_shared_with_the_light_client() -> None:
    """The client imports none of the others, so it repeats their names."""
    from tepo_core.pipeline.processes import REPRO

    assert (stage.HOST, stage.SOCKET, stage.REPRO) == (host.HOST, host.SOCKET, REPRO)


@pytest.mark.slow
def test_a_host_is_started_when_none_is_there_or_it_died(project: Path) -> None:
    one = Hosted()
    prepare_notebook(project, "import sys\nprint('torch' in sys.modules)", WRITE)
    for _ in range(2):
        process = one.stage(project, "prepare")
        text, _ = process.communicate(timeout=120)
        assert process.returncode == 0, text
        assert "True" in (project / "data" / "prepared" / "notebook.ipynb").read_text()  # what a fresh kernel would not have
        hosts = [
            p for p in psutil.process_iter() if "tepo_core.pipeline.host" in p.cmdline() and str(one.folder) in p.cmdline()
        ]
        assert len(hosts) == 1 and environment()
        hosts[0].kill()
        hosts[0].wait()
    one.close()
