"""The ``normalise`` stage: small files under ``build/`` that say what every other stage depends on.

- ``notebooks/NAME.ipynb``: the notebook without what JupyterLab changes;
- ``code/STAGE.json``: hashes of the files that decide its numbers (:mod:`tepo_core.pipeline.dependencies`), so that a change in the
  report trains nothing;
- ``parameters/STAGE.json``: the groups of parameters that the stage uses;
- ``params.json``: the parameters of this run of the pipeline; stages read them here, so that an edit meanwhile waits for the next one;
- ``methods/METHOD.json``: a method's resolved objective, training parameters and the hashes of its own files, so that a new
  variant trains only itself and a change of MPO does not train GRPO.

One file stands for many lines of dvc.yaml and, a run, of dvc.lock, which DVC reads and writes anew after every run.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tepo_core.config import Study
from tepo_core.files import write_json
from tepo_core.pipeline.dependencies import code_hashes, module_hashes, unused
from tepo_core.pipeline.notebooks import normalise, read_notebook, to_text
from tepo_core.pipeline.stages import FROZEN, PARAMETERS


def write_build(root: Path, study: Study) -> None:
    """Write all of ``build/`` anew. Files whose content stays the same keep their bytes; DVC looks at nothing else."""
    from tepo_core.objectives.methods import modules_of, resolve  # imports torch: not wanted at the start of every stage

    build = root / "build"
    for name in ("notebooks", "code", "parameters", "methods"):
        shutil.rmtree(build / name, ignore_errors=True)
        (build / name).mkdir(parents=True)
    notebooks = {path.stem: normalise(read_notebook(path)) for path in sorted((root / "notebooks").glob("*.ipynb"))}
    for name, notebook in notebooks.items():
        (build / "notebooks" / f"{name}.ipynb").write_text(to_text(notebook), encoding="utf-8")
    values = study.model_dump(mode="json")
    write_json(root / FROZEN, values)
    ruled_out = unused(study)
    for stage, groups in PARAMETERS.items():
        write_json(build / "code" / f"{stage}.json", code_hashes(root, notebooks[stage], stage, ruled_out))
        write_json(build / "parameters" / f"{stage}.json", {group: values[group] for group in groups})
    for name in study.methods:
        method = resolve(name, study.variants)
        values = {"preset": method.preset, "objective": method.options, "train": study.train_for(name).model_dump(mode="json")}
        write_json(build / "methods" / f"{name}.json", {**values, "code": module_hashes(root, modules_of(method))})
