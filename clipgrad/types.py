"""Types of what the functions of clipgrad return and keep; for annotations and `isinstance`."""

import typing

from clipgrad._lazily import published as _published

if typing.TYPE_CHECKING:
    from clipgrad._arrays import Patterns as Patterns
    from clipgrad._arrays import Where as Where
    from clipgrad._check import GradCheckReport as GradCheckReport
    from clipgrad._clip import ClipStats as ClipStats
    from clipgrad._clip import GradientClipState as GradientClipState
    from clipgrad._clip import SkipSpikesState as SkipSpikesState
    from clipgrad._clip import Threshold as Threshold
    from clipgrad._compare import GradientComparison as GradientComparison
    from clipgrad._diagnose import GradientDiagnosis as GradientDiagnosis
    from clipgrad._recorder import Capture as Capture
    from clipgrad._training import TrainState as TrainState
    from clipgrad._training import TrainStep as TrainStep
    from clipgrad._training import UpdateNorms as UpdateNorms
    from clipgrad._training import WatchUpdatesState as WatchUpdatesState
    from clipgrad._values import ValueStats as ValueStats
else:
    __getattr__, __dir__, __all__ = _published(__name__)
