"""Published thresholds, and a threshold from recorded norms."""

from typing import Any, NamedTuple

import numpy as np

from clipgrad._arrays import explain_call
from clipgrad._clip.composer import ClippingType
from clipgrad._clip.thresholds import warn_of_share


class SuggestedThreshold(NamedTuple):
    """A published threshold.

    Attributes:
      kind: ``"norm"`` (global norm), ``"value"`` or ``"adaptive"`` (the ratio of AGC).
      value: the threshold.
      setting: the model or the batch sizes for which it was used.
      source: where it was published: authors, title, year and link.
    """

    kind: ClippingType
    value: float
    setting: str
    source: str


_AGC = (
    "Brock et al., High-Performance Large-Scale Image Recognition Without Normalization, 2021, "
    "https://arxiv.org/abs/2102.06171"
)
_THAKUR = (
    "Thakur, Exploring Adaptive Gradient Clipping and NFNets, 2021, https://wandb.ai/"
    "ayush-thakur/nfnet/reports/Exploring-Adaptive-Gradient-Clipping-and-NFNets--Vmlldzo1MDc0NTQ"
)

SUGGESTED_THRESHOLDS: tuple[SuggestedThreshold, ...] = (
    SuggestedThreshold("norm", 2.0, "Inception-v3",
        "Szegedy et al., Rethinking the Inception Architecture for Computer Vision, 2016, "
        "https://arxiv.org/abs/1512.00567"),
    SuggestedThreshold("norm", 0.25, "CTRL, a transformer language model",
        "Keskar et al., CTRL: A Conditional Transformer Language Model, 2019, "
        "https://arxiv.org/abs/1909.05858"),
    SuggestedThreshold("norm", 1.0, "TaBERT, pretraining on text and tables", "Yin et al., "
        "TaBERT: Pretraining for Joint Understanding of Textual and Tabular Data, 2020, "
        "https://arxiv.org/abs/2005.08314"),
    SuggestedThreshold("norm", 0.1, "Compressive Transformer",
        "Rae et al., Compressive Transformers for Long-Range Sequence Modelling, 2019, "
        "https://arxiv.org/abs/1911.05507"),
    SuggestedThreshold("norm", 0.1, "Gated convolutional language model",
        "Dauphin et al., Language Modeling with Gated Convolutional Networks, 2017, "
        "https://arxiv.org/abs/1612.08083"),
    SuggestedThreshold("value", 15.0,
        "recurrent language model, on the errors that its neurons propagate back: an error clip",
        "Mikolov, Statistical Language Models Based on Neural Networks, 2012, "
        "https://www.fit.vut.cz/study/phd-thesis/283/.en"),
    SuggestedThreshold("adaptive", 0.01,
        "NF-ResNets, batches of 1024 to 4096, all but the last linear layer", _AGC),
    SuggestedThreshold("adaptive", 0.08,
        "NF-ResNets, smaller batches (up to this value), all but the last linear layer", _AGC),
    SuggestedThreshold("adaptive", 0.16,
        "NF-ResNets, batches of 128 and 256 (at least this value); with 0.01 and batches of 1024 "
        "a plain ResNet without BatchNorm gained nothing", _THAKUR),
)  # fmt: skip


@explain_call()
def suggest_threshold(norms: Any, percentile: float = 90.0) -> float:
    """Suggests a threshold for the global norm, from the norms in a run without clipping.

    Example:
      >>> import clipgrad as cg
      >>> cg.published.suggest_threshold([1.0, 2.0, 3.0, float("nan"), 1e9], percentile=50)
      2.5

    Args:
      norms: raw gradient norms from past steps, of any shape; NaN and inf are left out.
      percentile: a number in [0, 100]; with 90, one step in ten would have been clipped.

    Returns:
      The percentile of the finite norms.

    Raises:
      TypeError: if ``norms`` are not numbers.
      ValueError: if no norm is finite, a norm is negative, or ``percentile`` is out of range.

    References:
      Pascanu, Mikolov and Bengio, On the Difficulty of Training Recurrent Neural Networks, 2013,
      https://arxiv.org/abs/1211.5063: section 3.2: half to ten times the average norm over many
      updates worked.
    """
    if not 0 <= percentile <= 100:
        raise ValueError(f"percentile: got {percentile!r}, expected a number in [0, 100]")
    warn_of_share(percentile)
    try:
        recorded = np.asarray(norms, np.float64).ravel()
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"norms: got {type(norms).__name__}, expected an array or a list of numbers; {error}"
        ) from None
    finite = recorded[np.isfinite(recorded)]
    if not finite.size:
        raise ValueError(f"norms: got {recorded.size} norms, expected at least one that is finite")
    if finite.min() < 0:
        raise ValueError(f"norms: got {finite.min()}, expected norms of 0 or more")
    return float(np.percentile(finite, percentile))
