"""`reproduce`: the long computing with progress, then the notebook, then paper beside ours."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from specter_lab import paths
from specter_lab.errors import UserError
from specter_lab.experiments import results
from specter_lab.experiments.compare import comparison
from specter_lab.experiments.registry import find
from specter_lab.experiments.results import Result
from specter_lab.experiments.run import run

NOTEBOOKS = paths.ROOT / "notebooks"


def reproduce(
    name: str,
    *,
    tier: str = "cpu",
    seed: int = 0,
    fresh: bool = False,
    models: Sequence[str] = (),
    runner: str = "local",
) -> Result:
    """Run an experiment, execute its notebook headless over the result, and print paper / recorded / yours.

    The run comes first and in this process, so that its progress, its errors and Ctrl-C are the terminal's; the
    notebook then finds the result ready and computes only its worked example.

    Raises:
        UserError: whatever the run or a notebook cell says the user can put right.
    """
    experiment = find(name)
    result = run(name, tier=tier, seed=seed, fresh=fresh, models=models, runner=runner)
    print(f"{experiment.id}: rows, claims and figure are in {_shown(result.folder)}")
    notebook = NOTEBOOKS / f"{experiment.id}.ipynb"
    with TemporaryDirectory() as folder:
        start = time.monotonic()
        executed = _execute(notebook, Path(folder), {"tier": tier, "seed": seed, "models": list(models)})
        result = results.add_notebook(result, executed)
    print(f"{experiment.id}: notebook executed in {time.monotonic() - start:.0f} s")
    print(report(result))
    return result


def report(result: Result) -> str:
    """Paper, recorded and yours for every claim of a result, as text for a terminal."""
    lines = [f"{result.experiment}, {result.tier} tier"]
    for row in comparison(result.experiment, result.tier).itertuples():
        lines += [
            f"\n  {row.claim}",
            f"    paper {row.paper} / recorded {row.recorded} / yours {row.yours}",
            f"    {row.verdict}: {row.why}",
        ]
    return "\n".join(lines)


def _execute(notebook: Path, folder: Path, parameters: dict) -> Path:
    """Execute a notebook with parameters; the executed copy lies in `folder`."""
    import papermill
    from nbclient.exceptions import DeadKernelError
    from traitlets.config import Config

    executed = folder / notebook.name
    try:
        papermill.execute_notebook(
            notebook, executed, parameters, kernel_name="python3", language="python", progress_bar=False,
            cwd=paths.ROOT, config=Config(KernelManager={"transport": "ipc"}),
        )  # fmt: skip
    except papermill.PapermillExecutionError as error:
        if error.ename == UserError.__name__:
            raise UserError(error.evalue) from error
        raise UserError(
            f"notebooks/{notebook.name} failed ({error.ename}: {error.evalue}) in the cell that begins "
            f"'{error.source.splitlines()[0]}': open it with `make lab`; rows, claims and figure of the run are written"
        ) from error
    except DeadKernelError as error:
        raise UserError(
            f"notebooks/{notebook.name} was stopped (Ctrl-C, or not enough memory): run the same command again, "
            f"finished rows are kept"
        ) from error
    return executed


def _shown(path: Path) -> Path:
    return path.relative_to(paths.ROOT) if path.is_relative_to(paths.ROOT) else path
