"""The options of ``generate()`` whose effect on a decoding loop is known here.

transformers adds options with its releases. One that is not in this list, and is set, leaves the call to transformers.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from transformers import GenerationConfig

# What each of them does to the loop: it decides about processors or criteria, which are looked at themselves;
_PROCESSORS_AND_CRITERIA = """
    max_length max_new_tokens min_length min_new_tokens max_time stop_strings do_sample temperature top_k top_p min_p
    top_h typical_p epsilon_cutoff eta_cutoff repetition_penalty encoder_repetition_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids renormalize_logits forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens sequence_bias
    guidance_scale watermarking_config pad_token_id bos_token_id eos_token_id
"""
# the prompt, the cache or the batch, before the loop;
_BEFORE = """
    token_healing num_return_sequences prefill_chunk_size use_cache cache_implementation cache_config max_cache_len
    decoder_start_token_id
"""
# another loop, and options that only this one reads;
_LOOPS = """
    num_beams early_stopping length_penalty num_beam_groups diversity_penalty constraints force_words_ids penalty_alpha
    low_memory dola_layers use_mtp speculation_type prompt_lookup_num_tokens max_matching_ngram_size
    assistant_early_exit num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold
    assistant_lookbehind target_lookbehind assistant_ensemble_weight continuous_batching_config
"""
# a reason to leave the call to transformers (``supported``); whether a cache of another kind is compiled for.
_SUPPORTED = """
    is_assistant output_attentions output_hidden_states output_scores output_logits return_dict_in_generate
    compile_config disable_compile
"""
KNOWN = frozenset(f"{_PROCESSORS_AND_CRITERIA}{_BEFORE}{_LOOPS}{_SUPPORTED} transformers_version".split())


@cache
def _of_transformers() -> dict[str, Any]:
    """Return the public options of this version of transformers, with their defaults."""
    names = [name for name in vars(GenerationConfig()) if not name.startswith("_")]
    defaults = getattr(GenerationConfig, "_get_default_generation_params", dict)()
    return {name: defaults.get(name) for name in names}


def unknown(config: Any) -> str | None:
    """Return an option that is set, and that this module does not know; None if there is none."""
    for name, default in _of_transformers().items():
        value = getattr(config, name, None)
        if name not in KNOWN and value is not None and (type(value) is not type(default) or value != default):
            return name
    return None
