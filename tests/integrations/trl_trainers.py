"""Tiny models and trainers of TRL, and what their training is compared by."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

trl = pytest.importorskip("trl", minversion="1.15")
transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")

WORDS = [f"w{i}" for i in range(60)]
SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
KINDS = {
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, tie_word_embeddings=False),
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, final_logit_softcapping=3.0, sliding_window=16),
}


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = ["<pad>", "<s>", "</s>", "<unk>", *WORDS]
    built = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    built.pre_tokenizer = Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=built, **special)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models on disk, where trainers find the reference model."""
    found = {}
    for kind, config in KINDS.items():
        torch.manual_seed(1)
        found[kind] = tmp_path_factory.mktemp(kind)
        model = transformers.AutoModelForCausalLM.from_config(config(), attn_implementation="eager")
        model.lm_head.weight.data.mul_(20)  # entropies that differ between tokens
        model.save_pretrained(found[kind])
    return found


def text(seed: int, length: int) -> str:
    return " ".join(WORDS[(seed * 7 + i * i * 3) % len(WORDS)] for i in range(length))


def rows(kind: str) -> Any:
    prompts = [text(i, 3) for i in range(8)]
    good, bad = [" " + text(i + 20, 2 + i % 4) for i in range(8)], [" " + text(i + 40, 3 + i % 3) for i in range(8)]
    if kind == "sft":
        return datasets.Dataset.from_dict({"prompt": prompts, "completion": good})
    if kind == "dpo":
        return datasets.Dataset.from_dict({"prompt": prompts, "chosen": good, "rejected": bad})
    if kind == "kto":
        return datasets.Dataset.from_dict(
            {"prompt": prompts, "completion": good, "label": [i % 2 == 0 for i in range(8)]}
        )
    return datasets.Dataset.from_dict({"prompt": prompts})


def reward(completions: list[str], **kwargs: Any) -> list[float]:
    return [sum(ord(c) for c in completion) % 7 / 7 for completion in completions]


TRAINERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sft": ("SFT", {"max_length": 32}),
    "dpo": ("DPO", {"max_length": 32, "use_weighting": True}),
    "kto": ("KTO", {"max_length": 32}),
    "grpo": ("GRPO", {"num_generations": 2, "max_completion_length": 6, "beta": 0.1, "temperature": 0.8,
                      "entropy_coef": 0.01}),
    "rloo": ("RLOO", {"num_generations": 2, "max_completion_length": 6, "beta": 0.1, "temperature": 0.8}),
}  # fmt: skip
# Trainers without TRL's fused head: the module, and the name in it that must not be called.
OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "CPO": ("trl.experimental.cpo", "selective_log_softmax", {"max_length": 32, "cpo_alpha": 0.7}),
    "CPO, simpo": (
        "trl.experimental.cpo", "selective_log_softmax", {"max_length": 32, "cpo_alpha": 0.0, "loss_type": "simpo"},
    ),
    "ORPO": ("trl.experimental.orpo", "selective_log_softmax", {"max_length": 32}),
    "Distillation": ("trl", "ChunkedDivergenceFunction", {"max_completion_length": 6, "beta": 0.3, "temperature": 0.8}),
}  # fmt: skip


def build(kind: str, folder: Path, out: Path, peft_config: Any = None, **more: Any) -> Any:
    module, name, options = (trl, *TRAINERS[kind]) if kind in TRAINERS else _other(kind)
    config = getattr(module, f"{name}Config")
    options = {k: v for k, v in {**options, **more}.items() if k in config.__dataclass_fields__}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    args = config(
        output_dir=str(out), max_steps=3, per_device_train_batch_size=4, report_to="none", use_cpu=True,
        save_strategy="no", logging_steps=1, optim="sgd", learning_rate=0.02, lr_scheduler_type="constant", seed=3,
        max_grad_norm=0.0, disable_tqdm=True, gradient_checkpointing=False, **{"bf16": False, **options},
    )  # fmt: skip
    given = {"reward_funcs": reward} if kind in ("grpo", "rloo") else {}
    given |= {"teacher_model": teacher(folder)} if kind == "Distillation" else {}
    given |= {} if peft_config is None else {"peft_config": peft_config}
    data = rows({"CPO": "dpo", "CPO, simpo": "dpo", "ORPO": "dpo"}.get(kind, kind))
    return getattr(module, f"{name}Trainer")(
        model=model, args=args, train_dataset=data, processing_class=tokenizer(), **given
    )


def _other(kind: str) -> tuple[Any, str, dict[str, Any]]:
    module, _, options = OTHERS[kind]
    return importlib.import_module(module), kind.partition(",")[0], options


def teacher(folder: Path) -> Any:
    """A model with other weights and a larger hidden size."""
    torch.manual_seed(2)
    config = transformers.AutoConfig.from_pretrained(folder)
    config.hidden_size = 80
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


class Called(Exception):
    """TRL's own function was called."""


@pytest.fixture
def raising(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Replace TRL's function by one that raises."""
    import trl.trainer.utils as utils

    class Raises:
        @staticmethod
        def apply(*args: Any) -> Any:
            raise Called

    return lambda: monkeypatch.setattr(utils, "_ChunkedLogProbFunction", Raises)


def logs(trainer: Any) -> list[dict[str, float]]:
    """Return the metrics of every step without times."""
    skipped = ("time", "runtime", "second", "flos", "num_input")
    return [
        {k: v for k, v in entry.items() if not any(part in k for part in skipped)}
        for entry in trainer.state.log_history if "loss" in entry
    ]  # fmt: skip


def trained(trainer: Any) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    trainer.train()
    return logs(trainer), {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def same(ours: Any, theirs: Any, tolerance: float = 1e-5) -> None:
    assert len(ours[0]) == len(theirs[0]) == 3
    for mine, wanted in zip(ours[0], theirs[0], strict=True):
        assert mine.keys() == wanted.keys()
        for name, value in wanted.items():
            assert mine[name] == pytest.approx(value, rel=tolerance, abs=2e-5), name
    for name, value in theirs[1].items():
        torch.testing.assert_close(
            ours[1][name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
