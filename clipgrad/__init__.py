"""Clip cotangents and gradients in JAX, and check gradients."""

import importlib.metadata
import typing

from clipgrad import published as published
from clipgrad import types as types
from clipgrad._lazily import published as _published

__version__ = importlib.metadata.version("clipgrad")

# What type checkers and editors see; `clipgrad._lazily.PUBLIC` has the same names, and makes them.
# mypy takes a function for the file of its name, unless that file is written here.
if typing.TYPE_CHECKING:
    from clipgrad._arrays import global_norm as global_norm
    from clipgrad._check import GradCheckError as GradCheckError
    from clipgrad._check import numerical_grad as numerical_grad
    from clipgrad._check.check_grads import check_grads as check_grads
    from clipgrad._clip import AdaptiveClip as AdaptiveClip
    from clipgrad._clip import AdaptiveThreshold as AdaptiveThreshold
    from clipgrad._clip import AutoNorm as AutoNorm
    from clipgrad._clip import ClipByBlockRMS as ClipByBlockRMS
    from clipgrad._clip import ClipByGlobalNorm as ClipByGlobalNorm
    from clipgrad._clip import ClipByNorm as ClipByNorm
    from clipgrad._clip import ClipByValue as ClipByValue
    from clipgrad._clip import ClipRule as ClipRule
    from clipgrad._clip import EMAThreshold as EMAThreshold
    from clipgrad._clip import ErrorClipByValue as ErrorClipByValue
    from clipgrad._clip import HistoryThreshold as HistoryThreshold
    from clipgrad._clip import PercentileThreshold as PercentileThreshold
    from clipgrad._clip import ZScoreThreshold as ZScoreThreshold
    from clipgrad._clip import adaptive_grad_clip as adaptive_grad_clip
    from clipgrad._clip import clip_by_block_rms as clip_by_block_rms
    from clipgrad._clip import clip_by_global_norm as clip_by_global_norm
    from clipgrad._clip import clip_by_norm as clip_by_norm
    from clipgrad._clip import clip_by_value as clip_by_value
    from clipgrad._clip import resume as resume
    from clipgrad._clip.clip_grads import clip_grads as clip_grads
    from clipgrad._clip.gradient_clip import gradient_clip as gradient_clip
    from clipgrad._clip.skip_spikes import skip_spikes as skip_spikes
    from clipgrad._compare.compare import compare as compare
    from clipgrad._compare.save_run import save_run as save_run
    from clipgrad._diagnose.diagnose import diagnose as diagnose
    from clipgrad._error_clip import clip_cotangent as clip_cotangent
    from clipgrad._error_clip import error_clip_by_name as error_clip_by_name
    from clipgrad._error_clip import error_clip_everywhere as error_clip_everywhere
    from clipgrad._error_clip import list_names as list_names
    from clipgrad._error_clip import value_and_grad_with_stats as value_and_grad_with_stats
    from clipgrad._error_clip.error_clip import error_clip as error_clip
    from clipgrad._per_example.clip_per_example import clip_per_example as clip_per_example
    from clipgrad._per_example.per_example_norms import per_example_norms as per_example_norms
    from clipgrad._recorder import FlightRecorder as FlightRecorder
    from clipgrad._recorder import HaltedError as HaltedError
    from clipgrad._recorder import load_capture as load_capture
    from clipgrad._training.scalars import scalars as scalars
    from clipgrad._training.train_step import train_step as train_step
    from clipgrad._training.watch_updates import watch_updates as watch_updates
    from clipgrad._values.with_value_stats import with_value_stats as with_value_stats
else:
    __getattr__, __dir__, __all__ = _published(__name__)
