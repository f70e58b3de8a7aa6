"""Published thresholds, and the clip of Composer."""

from clipgrad._clip import SUGGESTED_THRESHOLDS as SUGGESTED_THRESHOLDS
from clipgrad._clip import SuggestedThreshold as SuggestedThreshold
from clipgrad._clip import apply_gradient_clipping as apply_gradient_clipping
from clipgrad._clip import gradient_clipping as gradient_clipping
from clipgrad._clip import suggest_threshold as suggest_threshold

__all__ = [
    "SUGGESTED_THRESHOLDS",
    "SuggestedThreshold",
    "apply_gradient_clipping",
    "gradient_clipping",
    "suggest_threshold",
]
