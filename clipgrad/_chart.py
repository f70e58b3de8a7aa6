"""An empty picture, where matplotlib is installed."""

from typing import Any


def empty_chart(width: float, height: float) -> Any:
    """A figure without panels, in inches, that needs no screen.

    Raises:
      ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            'plot needs matplotlib; install it with: pip install "clipgrad[demo]"'
        ) from error
    chart = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(chart)
    return chart
