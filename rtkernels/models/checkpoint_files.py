"""The files of a checkpoint besides weights and configuration: tokenizer, processors, chat template."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

from torch import nn

from rtkernels.errors import ArgumentError

_FILES = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.model", "*.tiktoken",
    "chat_template*", "additional_chat_templates/*", "*processor_config.json",
)  # fmt: skip


def check_tokenizer(tokenizer: Any) -> None:
    """Raise an ArgumentError if `tokenizer` is neither None, False nor something that can be saved."""
    if tokenizer is not None and tokenizer is not False and not callable(getattr(tokenizer, "save_pretrained", None)):
        came = "True" if tokenizer is True else f"a {type(tokenizer).__name__}"
        raise ArgumentError(f"tokenizer is {came}; expected one with save_pretrained, a processor, None or False")


def write_tokenizer(model: nn.Module, tokenizer: Any, folder: Path) -> None:
    """Save `tokenizer`, or copy the files of the checkpoint that a model was loaded from; False writes nothing."""
    if tokenizer is False:
        return
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
        return
    name = getattr(model.config, "_name_or_path", None)
    if not name:  # built from a configuration
        return
    source = _source(name, getattr(model.config, "_commit_hash", None))
    files = [] if source is None else [file for pattern in _FILES for file in source.glob(pattern) if file.is_file()]
    if not files:
        warnings.warn(
            f"export_fp8: no tokenizer was found for {name!r}, so {folder} has none; pass tokenizer=", stacklevel=3
        )
    for file in files:
        target = folder / file.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        if not (target.exists() and target.samefile(file)):
            shutil.copyfile(file, target)


def _source(name: str, revision: str | None) -> Path | None:
    """Return the folder that a model was loaded from, None if it is not on this machine."""
    if Path(name).is_dir():
        return Path(name)
    from transformers.utils import cached_file

    try:
        config = cached_file(name, "config.json", local_files_only=True, revision=revision)
    except OSError:
        return None
    return None if config is None else Path(config).parent
