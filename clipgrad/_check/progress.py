"""A progress bar for long measurements, where tqdm is installed."""

import contextlib
from collections.abc import Callable, Iterator

LONG = 5000


@contextlib.contextmanager
def progress_bar(total: int) -> Iterator[Callable[[int], object]]:
    """Yield a function that is told how much more is done; silent for short work."""
    if total < LONG:
        yield lambda done: None
        return
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda done: None
        return
    with tqdm(total=total, desc="differences", leave=False, disable=None) as bar:
        yield bar.update
