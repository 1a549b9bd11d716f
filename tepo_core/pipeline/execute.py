"""Strict execution of one notebook with papermill, in a kernel of this very interpreter.

papermill alone would accept unknown parameters, take any kernel of the same name, and save a notebook whose kernel died, or
whose cell called ``sys.exit(0)``, as if every cell had run.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from jupyter_client.provisioning.local_provisioner import LocalProvisioner
from jupyter_client.utils import run_sync

from tepo_core.pipeline.notebooks import (
    KERNELSPEC,
    NotebookError,
    NotebookNode,
    check_parameters,
    declared_parameters,
    nbformat,
    normalise,
    read_notebook,
    to_text,
)
from tepo_core.pipeline.spare import has_spare, take_spare

ANSI = re.compile(r"\x1b\[[0-9;]*m")
KERNEL_ARGUMENTS = [
    "--HistoryManager.enabled=False",
    "--InteractiveShell.colors=nocolor",
    "--IPKernelApp.log_level=ERROR",
    "--InlineBackend.figure_formats={'retina'}",
]
GRACE_SECONDS = 3.0


class NotebookFailed(RuntimeError):
    """A notebook did not run to its end. ``notebook`` holds what there is of it."""

    def __init__(self, message: str, notebook: NotebookNode) -> None:
        super().__init__(message)
        self.notebook = notebook


class SpareProvisioner(LocalProvisioner):
    """Starts a kernel in the process that the host forked for it."""

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> dict[str, Any]:
        self.process = take_spare()
        module = cmd.index("-m")
        # jupyter_client's own launcher says this in the environment, which ipykernel reads when it is imported
        parent = f"--IPKernelApp.parent_handle={os.getpid()}"
        self.process.start([*cmd[module + 1 :], parent], kwargs["env"], str(kwargs["cwd"]))
        self.pid = self.pgid = self.process.pid
        self.cwd = kwargs["cwd"]
        return self.connection_info


class Kernel:
    """A kernel of the running interpreter, whatever kernelspecs are installed. Use as a context manager; leaving it kills the
    kernel and everything it started."""

    def __init__(self, cwd: Path, environment: Mapping[str, str]) -> None:
        self._folder = tempfile.mkdtemp(prefix="tepo-kernel-")
        argv = [sys.executable, "-m", "tepo_core.pipeline.kernel", "-f", "{connection_file}", *KERNEL_ARGUMENTS]
        # 'auto' encrypts the local sockets where both sides can; without it ipykernel prints a warning into every notebook.
        self.manager = AsyncKernelManager(kernel_name="python3", transport_encryption="auto")
        self.manager._kernel_spec = KernelSpec(
            argv=argv, display_name="Python 3", language="python", metadata={"supported_encryption": ["curve"]}
        )
        if has_spare():
            self.manager.provisioner = SpareProvisioner(
                kernel_id="spare", kernel_spec=self.manager.kernel_spec, parent=self.manager
            )
        self.manager.connection_file = str(Path(self._folder, "connection.json"))
        self._cwd, self._environment = (
            cwd,
            {
                **os.environ,
                "IPYTHONDIR": self._folder,  # the user's start-up files stay out
                **environment,
            },
        )
        self.process: subprocess.Popen | None = None

    def __enter__(self) -> Kernel:
        run_sync(self.manager.start_kernel)(cwd=str(self._cwd), env=self._environment)
        self.process = self.manager.provisioner.process
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.process is not None:
            if kind is not None and issubclass(kind, KeyboardInterrupt):
                # Ctrl-C: training writes a checkpoint when it is asked to end, and a little time is worth that.
                self.process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(GRACE_SECONDS)
            # The kernel leads a process group of its own. The group outlives a kernel that died with workers left behind.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        with contextlib.suppress(Exception):  # sockets of a kernel that is gone
            run_sync(self.manager.cleanup_resources)()
        shutil.rmtree(self._folder, ignore_errors=True)

    def death(self) -> str | None:
        """Why the kernel ended, in words; None while it lives."""
        if self.process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=2)
        return None if self.process.returncode is None else explain_exit(self.process.returncode)


def explain_exit(code: int) -> str:
    """An exit code in words, with what to do about it."""
    if code >= 0:
        return f"the kernel ended by itself with exit code {code} (sys.exit, os._exit, or a library that gave up)"
    name = signal.Signals(-code).name if -code in {int(s) for s in signal.Signals} else f"signal {-code}"
    if name == "SIGKILL":
        return (
            "the kernel was killed (SIGKILL): most often the machine ran out of memory. Lower train.micro_batch_tokens or "
            "rollout.batch_size, close other programs, or look into the system's log for 'Out of memory'"
        )
    if name in ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGILL"):
        return f"the kernel crashed ({name}): a fault in a compiled library; 'tepo doctor' checks the installed versions"
    return f"the kernel was stopped by {name}"


def execute(
    path: Path,
    parameters: Mapping[str, Any],
    *,
    cwd: Path,
    environment: Mapping[str, str],
    partial: Path,
    replacements: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
) -> NotebookNode:
    """Run a notebook and return it executed and cleaned (see :func:`clean`).

    ``partial`` is where papermill saves after each cell, for inspection after a crash. Text that cells print is forwarded to
    ``stdout`` and ``stderr`` as it comes. Raises :class:`NotebookError` before anything starts, or :class:`NotebookFailed`."""
    source = normalise(read_notebook(path))
    check_parameters(declared_parameters(source, path.name), dict(parameters), path.name)
    source.metadata.papermill = {}
    started: list[NotebookNode] = []
    with Kernel(cwd, environment) as kernel:
        import papermill  # takes as long as the kernel takes to start

        # What papermill warns of is checked here, and what it reports is said better below.
        papermill.log.logger.setLevel("CRITICAL")
        failure = None
        try:
            papermill.execute_notebook(
                source,
                str(partial),
                parameters=dict(parameters),
                kernel_name=KERNELSPEC["name"],
                language="python",
                progress_bar=False,
                cwd=str(cwd),
                km=kernel.manager,
                on_cell_start=lambda cell, cell_index: started.append(cell),
                record_timing=False,
                coalesce_streams=True,
                store_widget_state=False,
                stdout_file=stdout,
                stderr_file=stderr,
            )
        except Exception as error:
            failure = error
        executed = clean(_so_far(partial, source, failure), replacements)
        if failure is not None:
            message = _explain(failure, kernel)
        elif _all_ran(executed):
            return executed
        else:
            message = "the cells after it did not run (sys.exit?)"
            started = [cell for cell in started if cell.execution_count]
        where = f"{path.name}, cell {_describe(source, started[-1])}" if started else path.name
        raise NotebookFailed(f"{where}: {message}", executed) from failure


def _so_far(partial: Path, source: NotebookNode, failure: Exception | None) -> NotebookNode:
    """What papermill has saved. After a failure (a full disk, say) that file may be torn, and is not what must be said."""
    try:
        return read_notebook(partial) if partial.is_file() else source
    except NotebookError:
        if failure is None:
            raise
        return source


def _explain(failure: Exception, kernel: Kernel) -> str:
    from papermill.exceptions import PapermillExecutionError

    if isinstance(failure, PapermillExecutionError):
        return f"{failure.ename}: {ANSI.sub('', failure.evalue)}"
    if isinstance(failure, OSError):
        return f"{failure.strerror or failure}" + (f" ({failure.filename})" if failure.filename else "")
    return kernel.death() or f"{type(failure).__name__}: {ANSI.sub('', str(failure))}"


def _describe(source: NotebookNode, cell: NotebookNode) -> str:
    """Position in the source notebook, and its first line: ``4 (result = train(run.study, ...)``."""
    first = next((line.strip() for line in cell.source.splitlines() if line.strip()), "")
    position = next((n for n, other in enumerate(source.cells, 1) if other.id == cell.id), None)
    return f"{position} ({first[:80]})" if position else f"with the parameters ({first[:80]})"


def _all_ran(notebook: NotebookNode) -> bool:
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    return counts == list(range(1, len(counts) + 1))


def clean(notebook: NotebookNode, replacements: Mapping[str, str] | None = None) -> NotebookNode:
    """An executed notebook with equal bytes whenever it computed the same: no times, no random ids, no paths of this machine.

    ``replacements``: texts (paths) to be replaced everywhere."""
    marks = [cell for cell in notebook.cells if "papermill-error-cell-tag" in cell.metadata.get("tags", [])]
    notebook.cells = [cell for cell in notebook.cells if cell not in marks]
    bare = normalise(notebook)
    code = iter([cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()])
    for cell in bare.cells:
        if cell.cell_type == "code":
            ran = next(code)
            cell.execution_count, cell.outputs = ran.execution_count, ran.outputs
            for output in cell.outputs:
                if output.output_type == "error":
                    output.traceback = [ANSI.sub("", line) for line in output.traceback]
    text = to_text(bare)
    for old, new in (replacements or {}).items():
        text = text.replace(old, new)
    return nbformat.reads(text, as_version=4)
