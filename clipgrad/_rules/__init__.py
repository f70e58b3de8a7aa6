"""Clip rules: pure functions from a tree of gradients to a clipped tree, one in each file."""

from clipgrad._rules.adaptive import AdaptiveClip as AdaptiveClip
from clipgrad._rules.adaptive import unit_norms as unit_norms
from clipgrad._rules.auto_norm import AutoNorm as AutoNorm
from clipgrad._rules.base import ClipRule as ClipRule
from clipgrad._rules.base import apply_rule as apply_rule
from clipgrad._rules.base import as_rule as as_rule
from clipgrad._rules.base import is_rule as is_rule
from clipgrad._rules.block_rms import ClipByBlockRMS as ClipByBlockRMS
from clipgrad._rules.global_norm import ClipByGlobalNorm as ClipByGlobalNorm
from clipgrad._rules.norm import ClipByNorm as ClipByNorm
from clipgrad._rules.thresholds import RULES as RULES
from clipgrad._rules.thresholds import PerLeaf as PerLeaf
from clipgrad._rules.thresholds import adaptive_threshold as adaptive_threshold
from clipgrad._rules.thresholds import check_threshold as check_threshold
from clipgrad._rules.thresholds import is_data as is_data
from clipgrad._rules.thresholds import is_own as is_own
from clipgrad._rules.thresholds import limit_of as limit_of
from clipgrad._rules.thresholds import main_threshold as main_threshold
from clipgrad._rules.thresholds import resolve_schedules as resolve_schedules
from clipgrad._rules.thresholds import schedules_of as schedules_of
from clipgrad._rules.thresholds import threshold_array as threshold_array
from clipgrad._rules.thresholds import with_threshold as with_threshold
from clipgrad._rules.units import check_unit_axis as check_unit_axis
from clipgrad._rules.value import ClipByValue as ClipByValue
from clipgrad._rules.value import ErrorClipByValue as ErrorClipByValue
