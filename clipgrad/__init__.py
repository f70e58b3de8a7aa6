"""Clip cotangents and gradients in JAX, and prove gradients right."""

import importlib.metadata

from clipgrad._cotangent import clip_cotangent as clip_cotangent
from clipgrad._error_clip import error_clip as error_clip
from clipgrad._norms import global_norm as global_norm
from clipgrad._rules import AdaptiveClip as AdaptiveClip
from clipgrad._rules import ClipByBlockRMS as ClipByBlockRMS
from clipgrad._rules import ClipByGlobalNorm as ClipByGlobalNorm
from clipgrad._rules import ClipByNorm as ClipByNorm
from clipgrad._rules import ClipByValue as ClipByValue
from clipgrad._rules import ClipRule as ClipRule
from clipgrad._rules import ErrorClipByValue as ErrorClipByValue
from clipgrad._stats import ClipStats as ClipStats

__version__ = importlib.metadata.version("clipgrad")
