"""`reproduce`: the long computing with progress, then the notebook, then paper beside ours."""

from __future__ import annotations

import ast
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

from tqdm.auto import tqdm

from specter_lab import paths
from specter_lab.errors import UserError
from specter_lab.experiments import results
from specter_lab.experiments.compare import comparison
from specter_lab.experiments.local_processes import WORKER_BYTES, SharedProcesses, process_count, shared_processes
from specter_lab.experiments.registry import DEFAULT_MODELS, TIMED, TIMED_NOTEBOOKS, find, find_lab
from specter_lab.experiments.results import Result
from specter_lab.experiments.run import Measurement, answer, context_for, measure, module_of, run

NOTEBOOKS = paths.ROOT / "notebooks"
KERNEL_START_S = 600  # seconds are usual; a machine at work may take minutes


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
    result = _written(run(name, tier=tier, seed=seed, fresh=fresh, models=models, runner=runner))
    return _shown_alone(result, seed, models)


def reproduce_each(
    names: Sequence[str],
    *,
    tier: str = "cpu",
    seed: int = 0,
    fresh: bool = False,
    models: Sequence[str] = (),
    runner: str = "local",
) -> Iterator[tuple[str, Result | UserError]]:
    """`reproduce` several experiments, each once: its id with its result, or with what the user can put right.

    On the cpu tier of this machine all cores are kept at work: rows of the next experiment and notebooks of the last ones
    are computed while an experiment's last rows are. Those that measure times come afterwards, one after the other in one
    process, and nothing runs beside them, nor beside the notebooks of `TIMED_NOTEBOOKS`; their other notebooks come last,
    side by side.

    Raises:
        UserError: one of the names is unknown.
    """
    how = {"tier": tier, "seed": seed, "fresh": fresh, "models": models, "runner": runner}
    ids = list(dict.fromkeys(find(name).id for name in names))
    if tier != "cpu" or runner != "local":
        for name in ids:
            yield name, _or_mistake(partial(reproduce, name, **how))
        return
    beside, timed = [name for name in ids if name not in TIMED], [name for name in ids if name in TIMED]
    count = process_count(tier, models or DEFAULT_MODELS[tier], 2 * WORKER_BYTES)  # a notebook has one of its own
    if beside:
        with ThreadPoolExecutor(2) as threads, shared_processes(count) as processes:
            try:
                for name in beside:
                    module_of(name)  # imported here, not by two threads at once
                rows = {name: threads.submit(_measured, name, processes, how) for name in beside}
                outcomes = ((name, _or_mistake(partial(_judged, measured))) for name, measured in rows.items())
                yield from _with_notebooks(outcomes, processes, seed, models)
            finally:  # what has not begun never does; then the processes end, and with them what has
                threads.shutdown(wait=False, cancel_futures=True)
    outcomes = []
    if timed:
        with shared_processes(1) as processes:  # with all threads; what one has loaded serves the next
            for name in timed:
                outcome = _or_mistake(partial(_timed, name, processes, how))
                if name in TIMED_NOTEBOOKS and isinstance(outcome, Result):
                    yield name, _or_mistake(partial(_shown_alone, outcome, seed, models))
                else:
                    outcomes.append((name, outcome))
    if outcomes:
        with shared_processes(min(count, len(outcomes))) as processes:
            yield from _with_notebooks(outcomes, processes, seed, models)


def _measured(name: str, processes: SharedProcesses, how: Mapping) -> Result | Measurement:
    """Begins when no row waits for a process; there are two threads, so two experiments are under way at the most."""
    processes.wait_for_room()
    return measure(context_for(name, shared=processes, **how))


def _judged(measured: Future) -> Result:
    return _written(answer(measured.result()))


def _timed(name: str, processes: SharedProcesses, how: Mapping) -> Result:
    return _written(answer(measure(context_for(name, shared=processes, **how))))


def _shown_alone(result: Result, seed: int, models: Sequence[str]) -> Result:
    """The result with its notebook, executed here and now."""
    with TemporaryDirectory() as folder:
        return _completed(result, *_execute_timed(*_notebook_of(result, seed, models), Path(folder)))


def _with_notebooks(
    outcomes: Iterable[tuple[str, Result | UserError]], processes: SharedProcesses, seed: int, models: Sequence[str]
) -> Iterator[tuple[str, Result | UserError]]:
    """The same, in order, every result with its notebook, which is executed while the next ones come."""
    waiting: deque[tuple[str, Result | UserError, Future | None]] = deque()

    def next_one() -> tuple[str, Result | UserError]:
        name, outcome, notebook = waiting.popleft()
        return name, outcome if notebook is None else _or_mistake(lambda: _completed(outcome, *_executed(notebook)))

    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # a kernel that was stopped may still write
        for name, outcome in outcomes:
            notebook = None
            if isinstance(outcome, Result):
                notebook = processes.submit(_execute_timed, *_notebook_of(outcome, seed, models), Path(folder))
            waiting.append((name, outcome, notebook))
            while waiting and (waiting[0][2] is None or waiting[0][2].done()):
                yield next_one()
        while waiting:
            yield next_one()


def _executed(notebook: Future) -> tuple[Path, float]:
    try:
        return notebook.result()
    except BrokenProcessPool as error:
        raise UserError(
            "the process that executed its notebook was killed, most likely for lack of memory: "
            "close other programs and run the same command again, finished rows are kept"
        ) from error


def _or_mistake(work: Callable[[], Result]) -> Result | UserError:
    try:
        return work()
    except UserError as error:
        return error


def _written(result: Result) -> Result:
    """The result; where it lies is said at once."""
    tqdm.write(f"{result.experiment}: rows, claims and figure are in {results.shown(result.folder)}")
    return result


def _notebook_of(result: Result, seed: int, models: Sequence[str]) -> tuple[Path, dict]:
    """The notebook that shows a result, and its parameters."""
    parameters = {"tier": result.provenance["tier"], "seed": seed, "models": list(models)}
    return NOTEBOOKS / f"{result.experiment}.ipynb", parameters


def _execute_timed(notebook: Path, parameters: dict, folder: Path) -> tuple[Path, float]:
    """The executed copy, in a folder of its own in `folder`, and the seconds it took."""
    start = time.monotonic()
    return _execute(notebook, Path(mkdtemp(dir=folder)), parameters), time.monotonic() - start


def _completed(result: Result, executed: Path, seconds: float) -> Result:
    """The result with its notebook; the terminal gets its report."""
    result = results.add_notebook(result, executed)
    tqdm.write(f"{result.experiment}: notebook executed in {seconds:.0f} s")
    tqdm.write(report(result))
    return result


def run_lab(name: str, given: Mapping[str, str]) -> Path:
    """Execute a lab notebook headless and keep the executed copy.

    Args:
        name: id.
        given: notebook parameters, as typed; lists stand apart by spaces. The notebook's own values serve for the rest.

    Returns:
        The executed copy, under the results, named after what was given.

    Raises:
        UserError: no such notebook or parameter, a value of the wrong kind, or what a cell says can be put right.
    """
    notebook = NOTEBOOKS / f"{find_lab(name).id}.ipynb"
    defaults = _parameters(notebook)
    parameters = {key: _typed(key, text, defaults) for key, text in given.items()}
    with TemporaryDirectory() as folder:
        executed = _execute(notebook, Path(folder), parameters)
        slug = re.sub(r"[^\w.]+", "-", "-".join(Path(word).name for text in given.values() for word in text.split()))
        return results.keep_lab_notebook(name, slug or "default", executed)


def _parameters(notebook: Path) -> dict[str, object]:
    """Names and default values in the cell that is tagged `parameters`."""
    import papermill

    found = papermill.inspect_notebook(str(notebook))
    return {name: ast.literal_eval(parameter["default"]) for name, parameter in found.items()}


def _typed(name: str, text: str, defaults: Mapping[str, object]) -> object:
    """What was typed for a parameter, in the type of its default."""
    if name not in defaults:
        raise UserError(f"the notebook has no parameter '{name}': it has {', '.join(defaults)}")
    kind = type(defaults[name])
    try:
        return text.split() if kind is list else kind(text)
    except ValueError as error:
        raise UserError(f"{name}={text} is not {'a number' if kind in (int, float) else kind.__name__}") from error


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
    settings = Config(
        KernelManager={"transport": "ipc", "connection_file": str(folder / "k.json")},  # no network, no home folder
        NotebookClient={"extra_arguments": ["--IPKernelApp.log_level=50"]},  # it logs its own stack trace at Ctrl-C
    )
    try:
        papermill.execute_notebook(
            notebook, executed, parameters, kernel_name="python3", language="python", progress_bar=False,
            start_timeout=KERNEL_START_S, config=settings,
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
    except RuntimeError as error:  # jupyter's only word for a kernel that did not answer, or died before it could
        raise UserError(
            f"the kernel of notebooks/{notebook.name} did not start ({error}): close other programs and run the same "
            f"command again; rows, claims and figure of the run are written"
        ) from error
    return executed
