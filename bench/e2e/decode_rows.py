"""``generate()`` of six models, token by token, beside transformers' static cache with torch.compile.

``python -m bench e2e infer --rows --seconds 300 --out FILE --continue`` measures what FILE does not have until the time
is over, so that the table can be filled in parts. Without ``--out``, rows are only printed. A row is a model, an arm, a
prompt length and a batch size; every model and arm is a process of its own. With ``--together``, six of them prepare
and compile at once, and measure one after the other. "hf_compile" is transformers with a static cache and
``torch.compile(mode="reduce-overhead")``; "generate" is a patched model; "generate_fp8", "generate_int4" and
"generate_nvfp4" are models of ``serve(weights=..., head=True)``. "generate_invariant", not measured by default, is
"generate" inside of ``batch_invariant(1)``:
``--models qwen3_8b_8 --arms generate,generate_invariant --prompts 1024 --batches 1,32,128`` shows what that costs.

Bytes are those that a token has to read: linear layers and head once, of experts as many as the batch can choose, and
the keys and values of half of the new tokens and the prompt. The floor is their time at the rate of a copy in the same
process; efficiency is floor : time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import meta
from bench.e2e import processes

MODELS = ("qwen3_09b", "llama", "qwen3_06b", "gemma3", "qwen3_moe", "qwen3_8b_8")
ARMS = ("generate", "generate_fp8", "hf_compile")
VOCABULARY = 151936
TINY = {"prompts": "12", "batches": "1,2", "new": 4}
_PROCESSES = 6  # processes with --together


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="python -m bench e2e infer --rows", description=__doc__.splitlines()[0])
    options.add_argument("--models", default=",".join(MODELS))
    options.add_argument("--arms", default=",".join(ARMS))
    options.add_argument("--prompts", default="128,2048", help="tokens of a prompt")
    options.add_argument("--batches", default="1,8,32")
    options.add_argument("--new", type=int, default=64, help="tokens that are decoded")
    options.add_argument("--layers", type=int, help="of all models, for a first look")
    options.add_argument("--seconds", type=float, default=1e9, help="start no row after these")
    processes.add_options(options)
    return options


def cells(args: argparse.Namespace) -> list[tuple[int, int]]:
    """Return prompt lengths and batch sizes, the short ones first."""
    lengths, batches = (list(map(int, text.split(","))) for text in (args.prompts, args.batches))
    return list(itertools.product(lengths, batches))


def key_of(model: str, arm: str, prompt: int, batch: int) -> str:
    return f"{model} {arm} {prompt} {batch}"


def bytes_of(model: Any, prompt: int, new: int, batch: int) -> int:
    """Return the bytes that one token of every sequence must read."""
    config = model.config
    experts = getattr(config, "num_experts", None)
    share = min(1.0, batch * config.num_experts_per_tok / experts) if experts else 1.0
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    total = 0.0
    for name, p in itertools.chain(model.named_parameters(), model.named_buffers()):
        if p is table.weight and p is not head.weight:
            continue
        total += p.nbytes * (share if ".experts." in name else 1.0)
    if "weight" not in head._parameters and "weight" not in head._buffers:
        total += head.weight.nbytes
    keys = prompt + new // 2
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    window = getattr(config, "sliding_window", None) or keys
    seen = sum(min(keys, window) if kind == "sliding_attention" else keys for kind in kinds)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(total) + batch * seen * 2 * 2 * config.num_key_value_heads * width


def copy_rate(device: str) -> float:
    """Return bytes that a copy reads and writes in a second."""
    import torch

    a = torch.empty(1 << (20 if device == "cpu" else 30), dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    marks = [processes.mark(device)]
    for _ in range(6):
        b.copy_(a)
        marks.append(processes.mark(device))
    processes.wait(device)
    fastest = min(processes.between(x, y) for x, y in itertools.pairwise(marks[1:]))
    return 2 * a.nbytes / max(fastest, 1e-6) * 1000


class Generated:
    """A patched model: time per token of ``generate()``, without its prompt, and of a replay alone."""

    def __init__(self, arm: str, model: Any) -> None:
        import rtkernels

        self.model, self.device = model, str(next(model.parameters()).device.type)
        self.level = int(arm == "generate_invariant")
        model.config.use_cache = model.generation_config.use_cache = True
        weights = arm.removeprefix("generate").removeprefix("_")
        if weights and not self.level:
            rtkernels.models.serve(model, weights=weights, head=True)
        self.report = rtkernels.models.patch(model, loss=False, fused_layers=True, attention=True)

    def _ms(self, ids: Any, new: int) -> float:
        processes.wait(self.device)
        start = time.perf_counter()
        self.model.generate(ids, max_new_tokens=new, do_sample=False, eos_token_id=None)
        processes.wait(self.device)
        return (time.perf_counter() - start) * 1000

    def measure(self, ids: Any, new: int) -> dict[str, Any]:
        from rtkernels import batch_invariant

        with batch_invariant(self.level):
            return self._measured(ids, new)

    def _measured(self, ids: Any, new: int) -> dict[str, Any]:
        from rtkernels.models.generation import loop

        short = max(new // 4, 1)
        with processes.sharing():
            self._ms(ids, new)  # compiles and captures
        with processes.alone():
            long, brief = (min(self._ms(ids, count) for _ in range(2)) for count in (new, short))
            record = {"ms_per_token": (long - brief) / max(new - short, 1)}
            graph = loop.steps_of(self.model)[-1].graph if loop.steps_of(self.model) else None
            if graph is not None:
                record["replay_ms"] = self._replayed(graph)
        reasons = {str(reason) for reason in self.report.in_steps.values() if reason}
        return record | {"note": "; ".join([*sorted(reasons), *self.report.not_captured])}

    def _replayed(self, graph: Any) -> float:
        start = processes.mark(self.device)
        for _ in range(10):  # they overwrite keys behind the last token, which nobody reads
            graph.replay()
        end = processes.mark(self.device)
        processes.wait(self.device)
        return processes.between(start, end) / 10


class Compiled:
    """transformers with a static cache and a compiled step."""

    def __init__(self, model: Any, tiny: bool) -> None:
        self.model, self.tiny = model, tiny

    def measure(self, ids: Any, new: int) -> dict[str, Any]:
        from bench.e2e.infer import Runner

        prompt, device = ids.shape[1], str(ids.device.type)
        runner = Runner("hf_compile", self.model, prompt + new + 8, self.tiny)
        runner.model = self.model  # the prompt is not measured, and not compiled

        def measured() -> float:
            cache = runner.cache()
            token = runner.prefill(ids, cache)
            processes.wait(device)
            start = processes.mark(device)
            runner.decode(token, prompt, cache, new)
            end = processes.mark(device)
            processes.wait(device)
            return processes.between(start, end) / new

        measured()  # compiles, for long on the host alone
        with processes.alone():
            return {"ms_per_token": min(measured() for _ in range(2)), "note": ""}


def run_one(args: argparse.Namespace) -> int:
    """Measure the cells of one model and arm in this process; write each as soon as it is known."""
    import torch

    from bench.e2e import arms

    arms.quiet()
    started, (name, arm) = time.perf_counter(), args.one.split(" ")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    missing = [cell for cell in cells(args) if key_of(name, arm, *cell) not in _rows_of(args.out)]
    if not missing:
        return 0
    length = max(prompt for prompt, _ in missing) + args.new + 8
    dtype = torch.bfloat16 if device == "cuda" or arm != "hf_compile" else torch.float32
    vocabulary = 512 if args.tiny else VOCABULARY
    options = {"tiny": args.tiny, "device": device, "dtype": dtype, "layers": args.layers}
    with processes.sharing():
        model = arms.build(name, vocabulary, length, **options).eval().requires_grad_(False)
        runner = Compiled(model, args.tiny) if arm == "hf_compile" else Generated(arm, model)
    with processes.alone():
        rate = copy_rate(device)
    with torch.no_grad():
        for prompt, batch in missing:
            if time.perf_counter() - started > args.seconds:
                break
            generator = torch.Generator().manual_seed(batch)
            ids = torch.randint(0, model.config.vocab_size, (batch, prompt), generator=generator).to(device)
            try:
                record = runner.measure(ids, args.new)
            except Exception as error:  # the other rows do not depend on it
                record = {"failed": f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"}
            else:
                ms, read = record["ms_per_token"], bytes_of(model, prompt, args.new, batch)
                floor = read / rate * 1000
                record |= {"tokens_per_s": round(batch / ms * 1000), "bytes": read, "floor_ms": floor}
                record |= {"efficiency": round(floor / ms, 4), "rate": round(rate / 1e12, 3)}
            _add(args.out, key_of(name, arm, prompt, batch), record)
            if device == "cuda":
                torch.cuda.empty_cache()
    return 0


def _rows_of(out: Path) -> dict[str, Any]:
    return json.loads(out.read_text()).get("rows", {}) if out.exists() else {}


def _add(out: Path, key: str, record: dict[str, Any]) -> None:
    import fcntl

    rounded = {name: round(value, 5) if isinstance(value, float) else value for name, value in record.items()}
    with out.with_name(out.name + ".lock").open("w") as lock:  # others may write at the same time
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = json.loads(out.read_text())
        result["rows"][key] = rounded
        processes.write(out, result)
    print(line(key, rounded), flush=True)


def line(key: str, row: dict[str, Any]) -> str:
    """Return a row of the table."""
    if "failed" in row:
        return f"{key:36}failed: {row['failed']}"
    replay = f"{row['replay_ms']:9.3f}" if "replay_ms" in row else f"{'-':>9}"
    numbers = f"{row['ms_per_token']:9.3f}{replay}{row['bytes'] / 1e9:8.2f}{row['floor_ms']:9.3f}"
    return f"{key:36}{numbers}{row['efficiency']:8.0%}{row['tokens_per_s']:10}  {row['note']}"


def _started(command: list[str], environment: dict[str, str]) -> Any:
    return subprocess.Popen(command, env={**environment, **os.environ})


def _run(commands: Iterator[list[str]], limit: int) -> None:
    """Run commands, up to `limit` at a time."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {processes.LOCK: str(Path(folder) / "lock")} if limit > 1 else {}
        running: list[Any] = []
        for command in commands:
            running.append(_started(command, environment))
            while len(running) >= limit:
                running = [process for process in running if process.poll() is None]
                time.sleep(0.05)
        for process in running:
            process.wait()


def main(argv: list[str] | None = None) -> int:
    """Measure all rows that are missing, each model and arm in its own process."""
    given = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(given)
    if args.tiny:
        args.__dict__.update({name: type(getattr(args, name))(value) for name, value in TINY.items()})
    if args.one:
        return run_one(args)
    if args.out is None:
        with tempfile.TemporaryDirectory() as folder:
            return main([*given, "--out", str(Path(folder) / "rows.json")])
    if args.out.exists() and not args.goes_on:
        raise SystemExit(f"{args.out} exists; --continue measures what it does not have")
    if args.out.exists():
        processes.check_source(json.loads(args.out.read_text()), args.out)
    else:  # known from the start, should this process be ended
        processes.write(args.out, {"kind": "decode_rows", "rows": {}, "environment": meta.environment()})
    started = time.perf_counter()
    head = f"{'ms':>9}{'replay':>9}{'GB':>8}{'floor':>9}{'eff.':>8}{'tokens/s':>10}  note"
    print(f"{'model arm prompt batch':36}{head}", flush=True)

    def missing() -> Iterator[list[str]]:
        for arm, name in itertools.product(args.arms.split(","), args.models.split(",")):
            left = args.seconds - (time.perf_counter() - started)
            if left <= 0:
                break
            if not all(key_of(name, arm, *cell) in _rows_of(args.out) for cell in cells(args)):
                words = [w for w in given if w != "--continue"]
                yield [
                    sys.executable,
                    "-m",
                    "bench.e2e.decode_rows",
                    *words,
                    "--seconds",
                    f"{left:.0f}",
                    "--one",
                    f"{name} {arm}",
                ]

    _run(missing(), _PROCESSES if args.together else 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
