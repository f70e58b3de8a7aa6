"""Published thresholds, and the clip of Composer."""

import typing

from clipgrad._lazily import published as _published

if typing.TYPE_CHECKING:
    from clipgrad._clip import SUGGESTED_THRESHOLDS as SUGGESTED_THRESHOLDS
    from clipgrad._clip import SuggestedThreshold as SuggestedThreshold
    from clipgrad._clip import apply_gradient_clipping as apply_gradient_clipping
    from clipgrad._clip import gradient_clipping as gradient_clipping
    from clipgrad._clip import suggest_threshold as suggest_threshold
else:
    __getattr__, __dir__, __all__ = _published(__name__)
