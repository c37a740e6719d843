"""generate() of a patched model with every option of GenerationConfig: transformers' tokens, here or with a reason."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rtkernels import models

pytest.importorskip("transformers", minversion="5.0")

from support.generation import model_of, padded, patched, programs
from support.tiny_models import VOCABULARY, tokens
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import CompileConfig, EosTokenCriteria, MaxLengthCriteria
from transformers.generation import logits_process as processors

from rtkernels.models.generation import fields

SAMPLED = {"do_sample": True}
BEAMS, ASSISTED = "beam search is decoded by transformers", "assisted generation is decoded by transformers"


def processor(name: str) -> str:
    return f"the logits processor {name} is not computed on the device"


# A value of each option, and why transformers decodes then; None: our loop does.
CASES: dict[str, tuple[dict[str, Any], str | None]] = {
    "max_length": ({"max_length": 14, "max_new_tokens": None}, None),
    "max_new_tokens": ({"max_new_tokens": 1}, None),
    "min_length": ({"min_length": 14}, None),
    "min_new_tokens": ({"min_new_tokens": 5}, None),
    "max_time": ({"max_time": 600.0}, None),
    "stop_strings": ({"stop_strings": [chr(ord("a") + i) for i in range(3, 60)]}, None),
    "do_sample": (SAMPLED, None),
    "temperature": ({**SAMPLED, "temperature": 0.6}, None),
    "top_k": ({**SAMPLED, "top_k": 3}, None),
    "top_p": ({**SAMPLED, "top_p": 0.6}, None),
    "min_p": ({**SAMPLED, "min_p": 0.1}, None),
    "top_h": ({**SAMPLED, "top_h": 0.4}, processor("TopHLogitsWarper")),
    "typical_p": ({**SAMPLED, "typical_p": 0.5}, None),
    "epsilon_cutoff": ({**SAMPLED, "epsilon_cutoff": 0.01}, None),
    "eta_cutoff": ({**SAMPLED, "eta_cutoff": 0.01}, processor("EtaLogitsWarper")),
    "repetition_penalty": ({"repetition_penalty": 9.0}, None),
    "encoder_repetition_penalty": (
        {"encoder_repetition_penalty": 1.5},
        processor("EncoderRepetitionPenaltyLogitsProcessor"),
    ),
    "no_repeat_ngram_size": ({"no_repeat_ngram_size": 2}, processor("NoRepeatNGramLogitsProcessor")),
    "encoder_no_repeat_ngram_size": (
        {"encoder_no_repeat_ngram_size": 1},
        processor("EncoderNoRepeatNGramLogitsProcessor"),
    ),
    "bad_words_ids": ({"bad_words_ids": [[5], [6, 7]]}, processor("NoBadWordsLogitsProcessor")),
    "renormalize_logits": ({**SAMPLED, "renormalize_logits": True}, None),
    "forced_bos_token_id": ({"forced_bos_token_id": 5}, processor("ForcedBOSTokenLogitsProcessor")),
    "forced_eos_token_id": ({"forced_eos_token_id": 5}, processor("ForcedEOSTokenLogitsProcessor")),
    "remove_invalid_values": ({"remove_invalid_values": True}, None),
    "exponential_decay_length_penalty": (
        {"exponential_decay_length_penalty": (2, 1.5)},
        processor("ExponentialDecayLengthPenalty"),
    ),
    "suppress_tokens": ({"suppress_tokens": [*range(40)]}, None),
    "begin_suppress_tokens": (
        {"begin_suppress_tokens": [*range(40)]},
        processor("SuppressTokensAtBeginLogitsProcessor"),
    ),
    "sequence_bias": ({"sequence_bias": {(5,): 9.0}}, processor("SequenceBiasLogitsProcessor")),
    "guidance_scale": ({"guidance_scale": 1.5}, processor("UnbatchedClassifierFreeGuidanceLogitsProcessor")),
    "watermarking_config": ({"watermarking_config": {"bias": 9.0}}, processor("WatermarkLogitsProcessor")),
    "pad_token_id": ({"pad_token_id": 5}, None),
    "bos_token_id": ({"bos_token_id": 5}, None),
    "eos_token_id": ({"eos_token_id": [*range(3, 40)], "pad_token_id": 1}, None),
    "decoder_start_token_id": ({"decoder_start_token_id": 5}, None),
    "num_return_sequences": ({**SAMPLED, "num_return_sequences": 2}, None),
    "prefill_chunk_size": ({"prefill_chunk_size": 4}, None),
    "use_cache": ({"use_cache": False}, "use_cache is off"),
    "cache_implementation": ({"cache_implementation": "static"}, "the cache is a StaticCache"),
    "cache_config": ({"cache_config": {}}, None),
    "max_cache_len": ({"max_cache_len": 64}, None),
    "num_beams": ({"num_beams": 2}, BEAMS),
    "early_stopping": ({"early_stopping": True, "num_beams": 2}, BEAMS),
    "length_penalty": ({"length_penalty": 2.0, "num_beams": 2}, BEAMS),
    "prompt_lookup_num_tokens": ({"prompt_lookup_num_tokens": 3}, ASSISTED),
    "max_matching_ngram_size": ({"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1}, ASSISTED),
    "use_mtp": ({"use_mtp": True}, ASSISTED),
    "assistant_early_exit": ({"assistant_early_exit": 1}, ASSISTED),
    "num_assistant_tokens": ({"num_assistant_tokens": 3}, None),
    "num_assistant_tokens_schedule": ({"num_assistant_tokens_schedule": "heuristic"}, None),
    "assistant_confidence_threshold": ({"assistant_confidence_threshold": 0.9}, None),
    "assistant_lookbehind": ({"assistant_lookbehind": 3}, None),
    "target_lookbehind": ({"target_lookbehind": 3}, None),
    "assistant_ensemble_weight": ({"assistant_ensemble_weight": 0.5}, None),
    "speculation_type": ({"speculation_type": "dflash"}, None),
    "is_assistant": ({"is_assistant": True}, "it is the assistant of another model"),
    "output_attentions": ({"output_attentions": True}, "output_attentions is set"),
    "output_hidden_states": ({"output_hidden_states": True}, "output_hidden_states is set"),
    "output_scores": ({"output_scores": True}, "output_scores is set"),
    "output_logits": ({"output_logits": True}, "output_logits is set"),
    "return_dict_in_generate": ({"return_dict_in_generate": True}, "return_dict_in_generate is set"),
    "compile_config": ({"compile_config": CompileConfig()}, "compile_config is set"),
    "disable_compile": ({"disable_compile": True}, None),
    "low_memory": ({"low_memory": True}, None),
    "transformers_version": ({"transformers_version": "5.0"}, None),
}
# These need a function from the hub, or a tokenizer that heals prompts; no loop of transformers decodes them.
ELSEWHERE = {
    "penalty_alpha", "num_beam_groups", "diversity_penalty", "dola_layers", "constraints", "force_words_ids",
    "token_healing", "continuous_batching_config",
}  # fmt: skip
FIELDS = sorted(name for name in vars(GenerationConfig()) if not name.startswith("_"))


@cache
def tokenizer() -> Any:
    library = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    letters = library.Tokenizer(library.models.BPE({chr(ord("a") + i): i for i in range(VOCABULARY)}, merges=[]))
    letters.decoder = library.decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=letters)


@pytest.fixture(scope="module")
def pair() -> tuple[nn.Module, nn.Module]:
    """The same model twice, the second one patched."""
    plain, ours = model_of(), model_of()
    patched(ours)
    return plain, ours


def _result(model: nn.Module, prompt: Tensor, options: dict[str, Any]) -> Any:
    torch.manual_seed(3)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = model.generate(prompt, **options)
    except (ValueError, AttributeError, TypeError, RuntimeError) as error:
        return type(error), str(error)
    return (found if isinstance(found, Tensor) else found.sequences).tolist(), torch.rand(1).item()


def compare(pair: tuple[nn.Module, nn.Module], options: dict[str, Any], reason: str | None, rows: int = 2) -> None:
    """Check that both give the same tokens and leave the same random numbers, and which loop the patched one ran."""
    _, ours = pair
    report = models.report(ours)
    report.not_captured.clear()
    prompt, options = tokens(rows, 9), {"max_new_tokens": 8, "do_sample": False, **padded(rows), **options}
    before = {id(program): (program, program.count) for program in programs(ours)}  # keeps them: ids are not reused
    wanted, got = (_result(model, prompt, dict(options)) for model in pair)
    assert got == wanted
    assert [*report.not_captured][:1] == ([] if reason is None else [reason])
    steps = sum(program.count - before.get(id(program), (None, 0))[1] for program in programs(ours))
    if reason is None:
        assert isinstance(wanted[0], list), wanted
        assert options["max_new_tokens"] == 1 or steps >= len(wanted[0][0]) - 10
    else:
        assert steps == 0


@pytest.mark.parametrize("name", [name for name in FIELDS if name not in ELSEWHERE])
def test_every_option(name: str, pair: tuple[nn.Module, nn.Module]) -> None:
    """An option that is new in transformers is not in the table, and has to make the call fall back."""
    options, reason = CASES.get(name, ({name: 3}, f"{name} is set, an option that is not known here"))
    if name == "stop_strings":
        options = {**options, "tokenizer": tokenizer()}
    compare(pair, options, reason, 1 if reason == ASSISTED else 2)


def test_the_table_is_of_known_options() -> None:
    assert {*CASES} | ELSEWHERE == fields.KNOWN


def test_an_option_of_a_later_version(pair: tuple[nn.Module, nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    own = GenerationConfig.__init__

    def init(self, **given: Any) -> None:
        self.of_a_later_version = given.pop("of_a_later_version", None)
        own(self, **given)

    monkeypatch.setattr(GenerationConfig, "__init__", init)
    fields._of_transformers.cache_clear()
    try:
        compare(pair, {"of_a_later_version": 2}, "of_a_later_version is set, an option that is not known here")
        compare(pair, {"of_a_later_version": None}, None)
    finally:
        fields._of_transformers.cache_clear()


def _listed(*given: Any) -> dict[str, Any]:
    return {"logits_processor": LogitsProcessorList(given)}


Penalty = processors.RepetitionPenaltyLogitsProcessor


def test_two_penalties(pair: tuple[nn.Module, nn.Module]) -> None:
    """The second one reads a table of its own, because each may ignore another part of the prompt."""
    compare(pair, _listed(Penalty(30.0, prompt_ignore_length=9), Penalty(0.2)), None)


def test_a_penalty_that_ignores_new_tokens(pair: tuple[nn.Module, nn.Module]) -> None:
    compare(pair, _listed(Penalty(0.1, prompt_ignore_length=9)), None)
    reason = "a repetition penalty ignores more than the prompt"
    compare(pair, _listed(Penalty(0.1, prompt_ignore_length=12)), reason)
    compare(pair, _listed(Penalty(0.1, prompt_ignore_length=torch.tensor([9, 11]))), reason)


def test_a_processor_that_changes_between_calls(pair: tuple[nn.Module, nn.Module]) -> None:
    """A program is found by the numbers of a processor, and does not see that the object got others since then."""
    warm = processors.TemperatureLogitsWarper(0.35)
    compare(pair, {**SAMPLED, **_listed(warm)}, None)
    warm.temperature = 30.0
    compare(pair, {**SAMPLED, "temperature": 0.35}, None)
    compare(pair, {**SAMPLED, **_listed(warm)}, None)


def test_criteria_of_the_user_take_precedence(pair: tuple[nn.Module, nn.Module]) -> None:
    shorter = StoppingCriteriaList([MaxLengthCriteria(12)])
    compare(pair, {"stopping_criteria": shorter}, None)
    stop = StoppingCriteriaList([EosTokenCriteria([*range(3, 60)])])
    compare(pair, {"stopping_criteria": stop}, None)


def test_positions_below_zero(pair: tuple[nn.Module, nn.Module]) -> None:
    """They have no row in a table of angles."""
    compare(pair, {"position_ids": torch.arange(9).expand(2, 9) - 20}, None)
    assert programs(pair[1])[-1].tables is None


def test_a_function_of_the_user_decodes(pair: tuple[nn.Module, nn.Module]) -> None:
    reason = "a function that is not transformers' decodes (custom_generate, or code from the hub)"
    compare(pair, {"custom_generate": lambda model, input_ids, **given: input_ids}, reason)


def test_hooks_that_transformers_leaves_behind() -> None:
    """They rest unless outputs are requested, so that one call with outputs does not slow down all later ones."""
    plain, ours = model_of(), model_of()
    patched(ours)
    for model in (plain, ours):
        model.generate(tokens(1, 5), max_new_tokens=2, return_dict_in_generate=True, output_hidden_states=True)
    assert any(module._forward_hooks for module in ours.modules())
    compare((plain, ours), {}, None)


def test_ids_of_32_bits(pair: tuple[nn.Module, nn.Module]) -> None:
    wanted, got = (model.generate(tokens(2, 9).int(), max_new_tokens=5, do_sample=False) for model in pair)
    assert torch.equal(got, wanted) and got.dtype == wanted.dtype
