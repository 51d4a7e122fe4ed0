"""Writes the pages as one folder that is opened from disk."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from turnwise.errors import ConfigError
from turnwise.report.view.scripts import script
from turnwise.report.view.source import Episodes, RunSource, index_script
from turnwise.runtime.disk import replace_file

SITE = Path(__file__).parent / "site"
"""The pages' own files."""
_MARKER = "turnwise-view"
"""What the first line of our `index.html` says."""
DATA = "data"


def site_files() -> list[Path]:
    """The files that every folder of pages has."""
    return sorted(path for path in SITE.iterdir() if path.suffix in (".html", ".css", ".js"))


def step_name(number: int, episodes: Episodes, step: int) -> str:
    """The name of a step's file below `data/`."""
    return f"{number}-{episodes.kind}-{step}.js"


def require_own_or_new(folder: Path) -> None:
    """Raises ConfigError if something else than pages of `turnwise view` is at `folder`."""
    if folder.is_dir():
        entries = {path.name for path in folder.iterdir()}
        foreign = sorted(entries - {path.name for path in site_files()} - {DATA})
        if not entries or (_is_own(folder) and not foreign):
            return
        held = f"it holds {', '.join(foreign[:3] or sorted(entries)[:3])}"
    elif folder.exists() or folder.is_symlink():
        held = "it is a file"
    else:
        return
    raise ConfigError(
        f"--out {folder}: {held}, which `turnwise view` hasn't written; name a new folder, or remove it first"
    )


def _is_own(folder: Path) -> bool:
    index = folder / "index.html"
    if not index.is_file():
        return False
    with index.open("rb") as file:
        return _MARKER.encode() in file.read(200)


def write_folder(
    folder: Path,
    runs: Sequence[RunSource],
    on_step: Callable[[int, int], None] = lambda num_written, total: None,
) -> Path:
    """Writes the pages of the runs, and returns the path of `index.html`. `on_step` hears how many steps of
    all are written. Pages of earlier steps in the folder are replaced."""
    require_own_or_new(folder)
    data = folder / DATA
    data.mkdir(parents=True, exist_ok=True)
    for earlier in data.glob("*.js"):
        earlier.unlink()
    for file in site_files():
        replace_file(folder / file.name, file.read_bytes())
    steps = list(_steps(runs))
    for position, (number, run, episodes, step) in enumerate(steps, start=1):
        content = run.step_script(number, episodes, step)
        (data / step_name(number, episodes, step)).write_bytes(content)
        on_step(position, len(steps))
    for number, run in enumerate(runs):
        if run.timeline is not None:
            (data / f"{number}-timeline.js").write_bytes(script("timeline", number, run.timeline))
    (data / "index.js").write_bytes(index_script(runs, is_live=False))
    return folder / "index.html"


def _steps(runs: Sequence[RunSource]) -> Iterator[tuple[int, RunSource, Episodes, int]]:
    for number, run in enumerate(runs):
        for episodes in run.episodes:
            for step in episodes.steps():
                yield number, run, episodes, step
