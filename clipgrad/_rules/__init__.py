"""Clip rules: pure functions from a tree of gradients to a clipped tree, one in each file."""

from clipgrad._rules._adaptive import AdaptiveClip as AdaptiveClip
from clipgrad._rules._base import ClipRule as ClipRule
from clipgrad._rules._base import apply_rule as apply_rule
from clipgrad._rules._base import as_rule as as_rule
from clipgrad._rules._block_rms import ClipByBlockRMS as ClipByBlockRMS
from clipgrad._rules._global_norm import ClipByGlobalNorm as ClipByGlobalNorm
from clipgrad._rules._norm import ClipByNorm as ClipByNorm
from clipgrad._rules._thresholds import RULES as RULES
from clipgrad._rules._thresholds import PerLeaf as PerLeaf
from clipgrad._rules._thresholds import adaptive_threshold as adaptive_threshold
from clipgrad._rules._thresholds import is_data as is_data
from clipgrad._rules._thresholds import is_own as is_own
from clipgrad._rules._thresholds import main_threshold as main_threshold
from clipgrad._rules._thresholds import resolve_schedules as resolve_schedules
from clipgrad._rules._thresholds import schedules_of as schedules_of
from clipgrad._rules._thresholds import threshold_array as threshold_array
from clipgrad._rules._thresholds import with_threshold as with_threshold
from clipgrad._rules._value import ClipByValue as ClipByValue
from clipgrad._rules._value import ErrorClipByValue as ErrorClipByValue
