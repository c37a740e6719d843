"""Losses over the vocabulary: ``cross_entropy`` (one pass, in place, vocabulary-parallel), ``linear_cross_entropy``,
``linear_logprob`` and ``linear_divergence`` from hidden states, ``kl_div`` and ``jsd`` for distillation,
``check_labels``. Device code: ``cuda_src/loss/``. Uses ``reduce`` and ``gemm``.
"""
