"""Adaptive thresholds: limits computed from the norms of past gradients, one in each file."""

from clipgrad._thresholds.base import AdaptiveThreshold as AdaptiveThreshold
from clipgrad._thresholds.base import Window as Window
from clipgrad._thresholds.base import check_between as check_between
from clipgrad._thresholds.base import check_steps as check_steps
from clipgrad._thresholds.base import is_adaptive as is_adaptive
from clipgrad._thresholds.base import unlimited as unlimited
from clipgrad._thresholds.ema import EMAThreshold as EMAThreshold
from clipgrad._thresholds.history import HistoryThreshold as HistoryThreshold
from clipgrad._thresholds.percentile import PercentileThreshold as PercentileThreshold
from clipgrad._thresholds.z_score import ZScoreThreshold as ZScoreThreshold
