"""The picture of a capture: the statistics of the steps before."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from clipgrad._chart import empty_chart


def recorder_figure(statistics: Mapping[str, Sequence], bad_step: Any) -> Any:
    """A panel for each number, by step, with the bad step marked.

    Raises:
      ImportError: matplotlib is not installed.
    """
    numbers = {name: values for name, values in statistics.items() if name != "step"}
    chart = empty_chart(8, 2 * len(numbers) + 1)
    panels = chart.subplots(len(numbers), 1, squeeze=False, sharex=True)[:, 0]
    for panel, (name, values) in zip(panels, numbers.items(), strict=True):
        array = np.array(values, float)
        panel.plot(statistics["step"], array, marker=".", color="#0072B2")
        panel.axvline(bad_step, color="#D55E00", linestyle="--")
        panel.set_ylabel(name)
        finite = array[np.isfinite(array)]
        if finite.size and (finite > 0).all():
            panel.set_yscale("log")
    panels[-1].set_xlabel("step")
    panels[0].set_title(f"the steps before the bad step, {bad_step}")
    return chart
