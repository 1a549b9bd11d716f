"""pyproject.toml, the lock, environment.yml and the installed packages agree; nothing ties the project to one machine."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pipeline_project import ROOT
from ruamel.yaml import YAML

from tepo_core.commands import doctor

PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
PROJECT = tomllib.loads(PYPROJECT)["project"]
LOCK = {canonicalize_name(name): pinned for name, pinned in doctor.locked(ROOT / "requirements" / "lock.txt").items()}
CONDA = YAML(typ="safe").load((ROOT / "environment.yml").read_text(encoding="utf-8"))
EXTRAS = PROJECT["optional-dependencies"]


def test_the_lock_holds_every_dependency_at_an_allowed_version() -> None:
    wanted = [*PROJECT["dependencies"], *EXTRAS["dev"], *EXTRAS["lora"]]
    for requirement in map(Requirement, wanted):
        pinned = LOCK.get(canonicalize_name(requirement.name))
        assert pinned, f"{requirement.name} is not in requirements/lock.txt; run 'make lock'"
        assert requirement.specifier.contains(pinned), f"lock: {requirement.name} {pinned}; pyproject: {requirement.specifier}"


def test_the_lock_is_free_of_hosts_builds_and_hashes() -> None:
    text = (ROOT / "requirements" / "lock.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.lstrip().startswith("#")]
    assert lines and all(re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][A-Za-z0-9.]*", line) for line in lines)
    assert LOCK["torch"] == "2.13.0"


def test_installed_is_what_is_locked() -> None:
    for name, pinned in LOCK.items():
        try:
            found = version(name).split("+")[0]
        except PackageNotFoundError:
            found = "missing"
        assert found == pinned, f"{name}: {found} installed, {pinned} locked; run 'make venv'"


def test_constraints_are_kept() -> None:
    for line in (ROOT / "requirements" / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            assert requirement.specifier.contains(LOCK[canonicalize_name(requirement.name)]), line


def test_conda_environment() -> None:
    pip = next(item["pip"] for item in CONDA["dependencies"] if isinstance(item, dict))
    assert "-r requirements/lock.txt" in pip and "-e ." in pip
    assert EXTRAS["vllm"] == [f"vllm=={doctor.VLLM}"] and EXTRAS["vllm"][0] in pip
    python = next(item for item in CONDA["dependencies"] if str(item).startswith("python="))
    assert Requirement(f"python{PROJECT['requires-python']}").specifier.contains(python.split("=")[1])


def test_every_dependency_says_why() -> None:
    inside = False
    for line in PYPROJECT.splitlines():
        inside = (inside or line.startswith("dependencies = [")) and line != "]"
        if inside and re.match(r'\s+"', line):
            assert re.search(r'",\s+# \S', line), line


def test_make_builds_from_the_lock_and_keys_its_stamp_by_it() -> None:
    def commands(lock: str | None = None) -> str:
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        if lock:
            makefile = makefile.replace("cksum < requirements/lock.txt", f"printf '%s' '{lock}' | cksum")
        done = subprocess.run(
            ["make", "-n", "-f", "-", "venv", "VENV=/nowhere"],
            input=makefile,
            cwd=ROOT,
            text=True,
            capture_output=True,
            check=True,
        )
        return done.stdout

    text = commands()
    assert "-m pip install --quiet --disable-pip-version-check -r requirements/lock.txt" in text
    assert "--no-deps --no-build-isolation -e ." in text
    stamp = re.search(r"/nowhere/\.installed-\d+", text)[0]
    assert stamp not in commands(lock="torch==0") and "/nowhere/.installed-" in commands(lock="torch==0")


def test_make_leaves_another_folder_s_environment_alone(tmp_path: Path) -> None:
    """A clone that borrows an environment by VENV must not install itself there when the locks differ."""
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\ntouch {tmp_path}/called\n")
    python.chmod(0o755)
    command = ["make", "-C", str(ROOT), "venv", f"VENV={tmp_path / 'venv'}", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0 and "built from another lock; it is left alone" in done.stderr
    assert not (tmp_path / "called").exists()


def test_citation_names_the_papers() -> None:
    cff = YAML(typ="safe").load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cff["license"] == PROJECT["license"] == "MIT" and cff["version"] == PROJECT["version"]
    urls = [reference["url"] for reference in cff["references"]]
    assert urls == ["https://arxiv.org/abs/2604.12736", "https://arxiv.org/abs/2602.14386"]
    assert all(reference["authors"] and reference["title"] for reference in cff["references"])
    assert "MIT License" in (ROOT / "LICENSE").read_text(encoding="utf-8")
