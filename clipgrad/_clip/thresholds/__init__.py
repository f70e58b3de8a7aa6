"""Thresholds: what one may be, and those that adapt to the norms of past gradients.

An adaptive threshold has two methods, `AdaptiveThreshold` says which; the norms that it remembers
are a `Window`. To write another one start from `percentile.py`, the shortest.
"""

from clipgrad._clip.thresholds.adaptive_threshold import AdaptiveThreshold as AdaptiveThreshold
from clipgrad._clip.thresholds.adaptive_threshold import Number as Number
from clipgrad._clip.thresholds.adaptive_threshold import Threshold as Threshold
from clipgrad._clip.thresholds.adaptive_threshold import is_adaptive as is_adaptive
from clipgrad._clip.thresholds.ema import EMAThreshold as EMAThreshold
from clipgrad._clip.thresholds.history import HistoryThreshold as HistoryThreshold
from clipgrad._clip.thresholds.percentile import PercentileThreshold as PercentileThreshold
from clipgrad._clip.thresholds.threshold_checks import check_threshold as check_threshold
from clipgrad._clip.thresholds.threshold_checks import is_real as is_real
from clipgrad._clip.thresholds.threshold_checks import is_schedule as is_schedule
from clipgrad._clip.thresholds.threshold_fields import check_between as check_between
from clipgrad._clip.thresholds.threshold_fields import warn_of_share as warn_of_share
from clipgrad._clip.thresholds.window import FAR_ABOVE_MEDIAN as FAR_ABOVE_MEDIAN
from clipgrad._clip.thresholds.window import Window as Window
from clipgrad._clip.thresholds.window import unlimited as unlimited
from clipgrad._clip.thresholds.z_score import ZScoreThreshold as ZScoreThreshold
