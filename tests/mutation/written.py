"""Hand-written mutants."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Written:
    """One edit.

    Attributes:
        name: Unique in its file, says what is wrong.
        file: Relative to ``cuda_src``.
        around: Text that is in the file once.
        old: Expression or statement in it that is replaced; once in it.
        new: What it becomes.
        is_statement: Whether it is a statement.
    """

    name: str
    file: str
    around: str
    old: str
    new: str
    is_statement: bool = False


# Bugs that no test of a release noticed. Two of the same name are one bug in two places.
WRITTEN = (
    Written("all queries of a tile see one key more", "attention/masks.cuh",
            "{lo(min(end, lq) - 1), hi(first)}", "hi(first)", "hi(first) + 1"),
    Written("keys are seen by one query more", "attention/masks.cuh",
            "max(end - 1 - shift - right, 0)", "end - 1 - shift - right", "end - 2 - shift - right"),
    Written("page of the fourth chunk of a warp", "attention/decode.cu",
            "next_page = page_of((later + warps) * kChunk)", "(later + warps) * kChunk", "later * kChunk"),
    Written("fourth chunk of a warp not fetched", "attention/decode.cu",
            "        if (later < end) {", "later < end", "later < end && chunk == mine"),
    Written("first rows of groups not clamped", "gemm/schedule_sm90.cuh",
            "return min(max(first, 0), all);", "min(max(first, 0), all)", "first"),
    Written("ends of groups not clamped", "gemm/schedule_sm90.cuh",
            "max(min(ends[g], all) - first_of(g), 0)", "min(ends[g], all)", "ends[g]"),
    Written("only the next block's sums are added", "gemm/schedule_sm90.cuh",
            "first_of(block, count) < tile_end();", "tile_end()", "end + 1"),
    Written("parts of k begin at an even block", "gemm/schedule_sm90.cuh",
            "found.k = static_cast<i32>(first_step()) * block_depth;", "first_step()", "first_step() & ~1u"),
    Written("rows of the other warpgroup's tile", "gemm/gemm_sm90.cu",
            "const int own_part = kPingPong ? 0 : consumer;", "kPingPong ? 0 : consumer", "consumer"),
    Written("numbers repeat after 65,536", "random/random.cu",
            "static_cast<u64>(i), static_cast<u64>(offset));\n        draw<T>", "static_cast<u64>(i)", "i & 0x3fff"),
    Written("mask repeats after 65,536", "random/random.cu",
            "static_cast<u64>(i), static_cast<u64>(offset));\n        float v[4];\n        if (aligned",
            "static_cast<u64>(i)", "i & 0x3fff"),
    Written("scales of the first stretch for both", "quant/nvfp4.cu",
            "scales[number >> (shift - 3)]", "number >> (shift - 3)", "first >> (shift - 3)"),
    Written("codes of the first stretch for both", "quant/nvfp4.cu",
            "ptx::ld_stream<8>(codes + number * 8)", "number * 8", "first * 8"),
    Written("results of the first stretch for both", "quant/nvfp4.cu",
            "store_elements<T, 8>(out + number * 8,", "number * 8", "first * 8"),
    Written("zeros are told apart", "sort/keys.cuh",
            "v[0] == 0.0f ? kSign", "v[0] == 0.0f", "false"),
    Written("NaN by its bits", "sort/keys.cuh", "v[0] != v[0] ? kAll", "v[0] != v[0]", "false"),
    Written("any zero in a long row", "sort/radix_tile.cuh",
            "(key == kAll || key == kSign)", "key == kSign", "false"),
    Written("any NaN in a long row", "sort/radix_tile.cuh", "(key == kAll || key == kSign)", "key == kAll", "false"),
    Written("of several NaN any", "reduce/monoids.cuh",
            "a == b || (a != a && b != b)", "(a != a && b != b)", "false"),
    Written("any zero of a maximum with its index", "reduce/monoids.cuh",
            "if (equals(v[i], best)) best = v[i], at = i;", "best = v[i], at = i", "at = i"),
    Written("variance of one infinity", "reduce/monoids.cuh",
            "s.squares + (s.mean - s.mean)", "s.squares + (s.mean - s.mean)", "s.squares"),
    Written("minimum by negation", "reduce/monoids.cuh", "v[i] = ~v[i];", "~v[i]", "-v[i]"),
    Written("minimum by negation", "reduce/monoids.cuh", "lift & kLiftFlip ? ~v : v", "~v", "-v"),
    Written("NaN is among all values", "sort/search.cu",
            "low < count && value_at(sorted, low) == wanted", "value_at(sorted, low) == wanted",
            "!(wanted < value_at(sorted, low))"),
    Written("16 bits of a place", "scan/compact.cu", "to = place + i;", "place + i", "(place & 0xffff) + i"),
    Written("16 bits of a source", "scan/compact.cu", "begin + chosen[i], to", "begin + chosen[i]",
            "(begin & 0xffff) + chosen[i]"),
)  # fmt: skip
