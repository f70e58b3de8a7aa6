"""What each page is found by: a description for search engines, words for the site's own search.

A word is an entry of the index, which the search of the site ranks above all text. The pages
themselves have none of it, since they are read in the repository too.
"""

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms import SphinxTransform
from sphinx.util import logging

FOUND_BY = {
    "nan": (
        "Find out why a gradient is NaN or inf in JAX, which operation and line makes it, and "
        "what to write instead.",
        "NaN; inf; nan_to_num; debug_nans; not finite; FloatingPointError; double where; safe norm",
    ),
    "two_versions": (
        "Find the first module where two versions of a JAX loss differ: a kernel and its "
        "reference, a port, before and after a change, a run before and after a restart.",
        "compare; save_run; resumed run; restart; reference; faster kernel; regression; "
        "differ; mismatch; neighbors; batch dependence; mask leak; "
        "padding",
    ),
    "port": (
        "Port a model from PyTorch to JAX: a file of the torch model, and the first module of the "
        "port that differs.",
        "PyTorch; torch; port; convert; weights; state_dict; parity; NCHW; NHWC; "
        "Hugging Face; logits differ",
    ),
    "bfloat16": (
        "Find the modules and the leaves of the gradient where bfloat16 or float16 loses "
        "precision in JAX.",
        "bf16; bfloat16; rounding; loss of precision; cancellation; low precision; float32; "
        "float64",
    ),
    "layout": (
        "Check a sharded JAX training step against the same step on one device: missing averages, "
        "wrong norms, statistics of one shard.",
        "psum; pmean; FSDP; tensor parallel; data parallel; wrong norm; missing all-reduce",
    ),
    "my_run_blew_up": (
        "A JAX training run that ended in NaN: keep the step, the batch and the parameters, and"
        " replay them to find the line.",
        "NaN loss; loss spike; divergence; loss climbs; blew up; flight recorder; halt; resume; "
        "post-mortem; checkpoint; roll back; bucket; GCS; S3",
    ),
    "logging": (
        "Log gradient norms and clip statistics of JAX training to Weights & Biases (wandb), "
        "TensorBoard or clu, without a host sync at every step.",
        "wandb; Weights and Biases; W&B; TensorBoard; tensorboardX; clu; logging; metrics; "
        "gradient norm; histogram; host sync",
    ),
    "frameworks": (
        "A whole training step with gradient clip, error clip by name and statistics in flax "
        "Linen, flax NNX, Haiku, Equinox and Keras 3 on JAX.",
        "flax; Linen; NNX; TrainState; nnx.Optimizer; Haiku; dm-haiku; Equinox; Keras; Keras 3;"
        " training step; training loop",
    ),
    "which_layer": (
        "See which layer of a JAX model learns, stands still or explodes while it trains: norms of "
        "gradients, parameters and updates by module, in optax, flax NNX, Linen and Equinox.",
        "which layer explodes; which layer; live; update norm; update ratio; update-to-weight "
        "ratio; parameter norm; norm per layer; training dynamics; wandb.watch; watch_updates; "
        "UpdateNorms; dead layer; layer that stands still",
    ),
    "recipes": (
        "Gradient clipping with LoRA, frozen parameters, optax.MultiSteps and gradient "
        "accumulation, dynamic loss scaling in float16, and mixed precision with bfloat16; "
        "attention logits that grow, and a coordinate check, in JAX.",
        "LoRA; adapters; fine-tuning; frozen parameters; freeze; optax.partition; optax.masked;"
        " MultiSteps; gradient accumulation; microbatch; loss scaling; DynamicScale; float16; "
        "mixed precision; AMP; attention logits; soft cap; z-loss; MLA; multi-head latent "
        "attention; muP; coordinate check",
    ),
    "published_clips": (
        "Gradient clipping thresholds that the papers and configurations of GPT-3, Gopher, "
        "PaLM, OPT, Llama 1 to 3, OLMo 1 to 3, DeepSeek-V2 and V3, Qwen, Pythia, BERT and others "
        "state, with sources.",
        "GPT-3; PaLM; Gopher; Llama; Llama 2; Llama 3; OLMo; OLMo 2; DeepSeek; DeepSeek-V3; "
        "BERT; RoBERTa; OPT; Baichuan; Megatron; Chameleon; Qwen; Gemma; Pythia; "
        "Moonlight; nanochat; max_grad_norm; clip norm; large language model; LLM; Muon; MuonClip; "
        "QK-clip; Newton-Schulz",
    ),
    "corner_cases": (
        "Complex numbers and holomorphic=True, why JAX's gradient is the conjugate of "
        "PyTorch's, anomaly detection, threads, derivatives at kinks such as relu at 0, and "
        "jax.custom_batching with gradients.",
        "complex; holomorphic; Wirtinger; conjugate; set_detect_anomaly; detect_anomaly; "
        "jax_debug_nans; threads; threading; thread safety; kink; subgradient; "
        "relu; abs; max; custom_batching; custom_vmap; sequential_vmap",
    ),
    "glossary": (
        "The words of clipgrad's documentation: cotangent, VJP, leaf, unit, group, rule, place,"
        " tag, site, probe, residual, path, threshold, capture, and others.",
        "glossary; definitions; terms; cotangent; VJP; JVP; pull-back; leaf; unit; tag; probe; "
        "site; residual",
    ),
    "which_clip": (
        "Which gradient clip to use for which problem in JAX, measured on ten tasks.",
        "which clip; clip threshold; norm clip; value clip; AutoClip; PercentileThreshold; "
        "percentile; quantile; ZClip; AdaGC; Levanter; adaptive threshold",
    ),
    "names": (
        "Clip or watch the gradient of any module or tagged value of a JAX model by its name, "
        "without an edit of the model.",
        "hooks; register_hook; backward hook; named_scope; checkpoint_name; module path",
    ),
    "per_example": (
        "Clip or measure the gradient of each example of a batch in JAX without storing it.",
        "per-example gradients; per-sample gradients; ghost clipping; gradient noise scale",
    ),
    "privacy": (
        "DP-SGD in JAX: clip each example, add noise, count epsilon; coming from Opacus and "
        "jax-privacy.",
        "DP-SGD; differential privacy; epsilon; delta; privacy accountant; dp_accounting; Poisson "
        "sampling; Opacus; jax-privacy",
    ),
    "check": (
        "How to test the gradient of a function, a Pallas kernel, a jax.custom_vjp or a "
        "jax.custom_jvp: against plain AD and finite differences in float64, in pytest.",
        "gradcheck; gradient check; finite differences; check_grads; Pallas; kernel; pallas_call; "
        "custom_vjp; custom_jvp; defvjp; interpret; Triton; Mosaic; pytest",
    ),
    "exploding": (
        "Why gradients vanish and explode, and what was invented against it.",
        "vanishing gradients; exploding; exploding gradients; explode; BPTT; backpropagation "
        "through time",
    ),
    "api/gradient_clip": (
        "Gradient clips for optax: clip_by_global_norm, clip_by_norm, clip_by_value, adaptive "
        "clipping, with schedules and statistics.",
        "norm; clip_by_global_norm; clip_by_norm; global norm; gradient clipping; clip by norm; "
        "clip by global norm; clip by value",
    ),
    "rules": (
        "All clip rules and adaptive thresholds, and how to write one.",
        "ClipRule; own rule; custom rule; threshold; mask; AutoNorm; AUTO-S; U-Clip; drop tokens; "
        "AdaptiveThreshold; own threshold",
    ),
    "costs": (
        "What clips, statistics, the flight recorder and the gradient check cost, beside optax, "
        "torch, jax-privacy and jax.test_util.",
        "cost; costs; overhead; speed; slow; slower",
    ),
    "benchmarks/RESULTS": (
        "Times of clipgrad beside optax, torch, chex, Opacus and others, losses included.",
        "benchmarks; performance",
    ),
}


class AddKeywords(SphinxTransform):
    """Puts the words of this page into its head and into the index."""

    default_priority = 6

    def apply(self) -> None:
        """Adds to this document."""
        if self.env.docname not in FOUND_BY:
            return
        description, words = FOUND_BY[self.env.docname]
        keywords = words.split("; ")
        section = next(self.document.findall(nodes.section))
        entries = [("single", word, section["ids"][0], "main", None) for word in keywords]
        section.insert(1, addnodes.index(entries=entries))
        for name, content in (("description", description), ("keywords", ", ".join(keywords))):
            self.document.insert(0, nodes.meta("", name=name, content=content))


def warn_of_unknown_pages(app: Sphinx, env: BuildEnvironment) -> None:
    """A page that is not there can't be found."""
    for page in sorted(set(FOUND_BY) - env.found_docs):
        logging.getLogger(__name__).warning("keywords.py names %s, which is no page", page)


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers this with Sphinx."""
    app.add_transform(AddKeywords)
    app.connect("env-check-consistency", warn_of_unknown_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
