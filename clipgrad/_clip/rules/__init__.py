"""Rules: what they are, and each rule of this library in its file.

`ClipRule` is what a user may write, `MeasuringRule` the base of the rules here: its docstring has
the three steps of a clip with numbers. To write another one start from `global_norm.py`, the
shortest.
"""

from clipgrad._clip.rules.adaptive import AdaptiveClip as AdaptiveClip
from clipgrad._clip.rules.adaptive import unit_norms as unit_norms
from clipgrad._clip.rules.auto_norm import AutoNorm as AutoNorm
from clipgrad._clip.rules.axes import ReducedAxes as ReducedAxes
from clipgrad._clip.rules.axes import UnitAxis as UnitAxis
from clipgrad._clip.rules.axes import check_unit_axis as check_unit_axis
from clipgrad._clip.rules.axes import unit_axes as unit_axes
from clipgrad._clip.rules.block_rms import ClipByBlockRMS as ClipByBlockRMS
from clipgrad._clip.rules.clip_rule import ClipRule as ClipRule
from clipgrad._clip.rules.clip_rule import check_is_no_rule as check_is_no_rule
from clipgrad._clip.rules.clip_rule import is_rule as is_rule
from clipgrad._clip.rules.global_norm import ClipByGlobalNorm as ClipByGlobalNorm
from clipgrad._clip.rules.measuring_rule import MeasuringRule as MeasuringRule
from clipgrad._clip.rules.norm import ClipByNorm as ClipByNorm
from clipgrad._clip.rules.value import ClipByValue as ClipByValue
from clipgrad._clip.rules.value import ErrorClipByValue as ErrorClipByValue
