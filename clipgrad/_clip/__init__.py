"""Clips: rules, their thresholds, and what became of a gradient.

1. A rule (`rules`) measures the norm of each group of elements, sets a limit for each norm, and
   scales the group down to the limit. The rule's threshold is a number, a schedule, or adapts to
   past norms (`thresholds`). Both are folders with doors of their own.
2. A clip in its stages (select, measure, adapt, scale, state) is ``update`` in `gradient_clip.py`,
   which makes an optax transformation of a rule; `clipping.py` has the stages, with selected leaves
   and a policy for NaN (`nonfinite`). Statistics (`stats`) are a function of the norms and limits.
3. `clip_grads` clips a tree in one call; `transformations` has one function for each rule.
4. `skip_spikes` skips a whole step instead, by the limit in `spike_limit`.
"""

from clipgrad._clip.any_rule import apply_rule as apply_rule
from clipgrad._clip.any_rule import as_rule as as_rule
from clipgrad._clip.any_rule import asks as asks
from clipgrad._clip.any_rule import for_value as for_value
from clipgrad._clip.clip_grads import clip_grads as clip_grads
from clipgrad._clip.clipping import clipped_with_stats as clipped_with_stats
from clipgrad._clip.composer import apply_gradient_clipping as apply_gradient_clipping
from clipgrad._clip.composer import gradient_clipping as gradient_clipping
from clipgrad._clip.gradient_clip import gradient_clip as gradient_clip
from clipgrad._clip.known_rules import RULES as RULES
from clipgrad._clip.known_rules import is_data as is_data
from clipgrad._clip.known_rules import is_known as is_known
from clipgrad._clip.nonfinite import NonFinite as NonFinite
from clipgrad._clip.nonfinite import check_policy as check_policy
from clipgrad._clip.nonfinite import nonfinite_counts as nonfinite_counts
from clipgrad._clip.nonfinite import raise_for_counts as raise_for_counts
from clipgrad._clip.optimizer import Wrapper as Wrapper
from clipgrad._clip.optimizer import as_optimizer as as_optimizer
from clipgrad._clip.optimizer import is_clip_alone as is_clip_alone
from clipgrad._clip.presets import SUGGESTED_THRESHOLDS as SUGGESTED_THRESHOLDS
from clipgrad._clip.presets import SuggestedThreshold as SuggestedThreshold
from clipgrad._clip.presets import suggest_threshold as suggest_threshold
from clipgrad._clip.rules import AdaptiveClip as AdaptiveClip
from clipgrad._clip.rules import AutoNorm as AutoNorm
from clipgrad._clip.rules import ClipByBlockRMS as ClipByBlockRMS
from clipgrad._clip.rules import ClipByGlobalNorm as ClipByGlobalNorm
from clipgrad._clip.rules import ClipByNorm as ClipByNorm
from clipgrad._clip.rules import ClipByValue as ClipByValue
from clipgrad._clip.rules import ClipRule as ClipRule
from clipgrad._clip.rules import ErrorClipByValue as ErrorClipByValue
from clipgrad._clip.rules import MeasuringRule as MeasuringRule
from clipgrad._clip.rules import check_is_no_rule as check_is_no_rule
from clipgrad._clip.rules import is_rule as is_rule
from clipgrad._clip.skip_spikes import SkipSpikesState as SkipSpikesState
from clipgrad._clip.skip_spikes import resume as resume
from clipgrad._clip.skip_spikes import skip_spikes as skip_spikes
from clipgrad._clip.state import GradientClipState as GradientClipState
from clipgrad._clip.stats import ClipStats as ClipStats
from clipgrad._clip.stats import scaled_stats as scaled_stats
from clipgrad._clip.stats import stats_dtype as stats_dtype
from clipgrad._clip.thresholds import AdaptiveThreshold as AdaptiveThreshold
from clipgrad._clip.thresholds import EMAThreshold as EMAThreshold
from clipgrad._clip.thresholds import HistoryThreshold as HistoryThreshold
from clipgrad._clip.thresholds import PercentileThreshold as PercentileThreshold
from clipgrad._clip.thresholds import Threshold as Threshold
from clipgrad._clip.thresholds import ZScoreThreshold as ZScoreThreshold
from clipgrad._clip.transformations import adaptive_grad_clip as adaptive_grad_clip
from clipgrad._clip.transformations import clip_by_block_rms as clip_by_block_rms
from clipgrad._clip.transformations import clip_by_global_norm as clip_by_global_norm
from clipgrad._clip.transformations import clip_by_norm as clip_by_norm
from clipgrad._clip.transformations import clip_by_value as clip_by_value
