"""Clips of finished gradients, as optax transformations."""

from clipgrad._gradient_clip.clip_grads import clip_grads as clip_grads
from clipgrad._gradient_clip.clip_state import stats_in as stats_in
from clipgrad._gradient_clip.clips import adaptive_grad_clip as adaptive_grad_clip
from clipgrad._gradient_clip.clips import clip_by_block_rms as clip_by_block_rms
from clipgrad._gradient_clip.clips import clip_by_global_norm as clip_by_global_norm
from clipgrad._gradient_clip.clips import clip_by_norm as clip_by_norm
from clipgrad._gradient_clip.clips import clip_by_value as clip_by_value
from clipgrad._gradient_clip.composer import apply_gradient_clipping as apply_gradient_clipping
from clipgrad._gradient_clip.gradient_clip import GradientClipState as GradientClipState
from clipgrad._gradient_clip.gradient_clip import gradient_clip as gradient_clip
from clipgrad._gradient_clip.nonfinite import check_policy as check_policy
from clipgrad._gradient_clip.nonfinite import nonfinite_counts as nonfinite_counts
from clipgrad._gradient_clip.nonfinite import raise_for_counts as raise_for_counts
from clipgrad._gradient_clip.presets import SUGGESTED_THRESHOLDS as SUGGESTED_THRESHOLDS
from clipgrad._gradient_clip.presets import SuggestedThreshold as SuggestedThreshold
from clipgrad._gradient_clip.presets import suggest_threshold as suggest_threshold
from clipgrad._gradient_clip.skip_spikes import SkipSpikesState as SkipSpikesState
from clipgrad._gradient_clip.skip_spikes import as_optimizer as as_optimizer
from clipgrad._gradient_clip.skip_spikes import resume as resume
from clipgrad._gradient_clip.skip_spikes import skip_spikes as skip_spikes
