"""Which implementations of attention there are, and at which shapes each is measured."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from .baselines import flashinfer_mla, naive, sglang_decode, sglang_verify
from .baselines.foreign_sglang import ForeignSglang
from .cases import AttentionCase
from .inputs import AttentionInputs
from .ours import ours
from .timing import Launch


@dataclass(frozen=True)
class Implementation:
    """A name in the results, and how to make a launch over one set of inputs."""

    name: str
    prepare: Callable[[AttentionInputs], Launch]
    takes: Callable[[AttentionCase], bool]
    whole: bool
    """Whether it computes all that our op does, so that its output can be checked."""
    version: str = ""
    """Of the project it is from."""


def _is_bf16(case: AttentionCase) -> bool:
    return case.kv_dtype == "bf16"


def _is_verify(case: AttentionCase) -> bool:
    return _is_bf16(case) and case.op == "verify_attention"


def _decode_takes(case: AttentionCase) -> bool:
    # At bs 4 and 65,536 it once ended in an illegal memory access, which ends the process too.
    short = case.op == "decode_attention" or case.bs * case.context <= 1 << 17 or case.bs == 1
    return _is_bf16(case) and short


OURS = Implementation("ours", ours, lambda case: True, True)
NAIVE = Implementation("naive_block_per_head", naive.naive, _is_bf16, True)


def from_sglang(folders: Iterable[Path], quick: bool) -> list[Implementation]:
    """Those that the given `sglang` folders hold the files of, named by their versions.

    Args:
        folders: each with `kernels/ops/attention/`.
        quick: of the split decode one number of splits per shape instead of all, and nothing
            that takes a minute to compile.

    Raises:
        FileNotFoundError: one is no such folder.
    """
    found: list[Implementation] = []
    for folder in folders:
        sglang = ForeignSglang(folder)
        if sglang.has("extend_attention"):
            found.append(_extend(sglang))
        if sglang.has("decode_attention"):
            found += [_decode(sglang, splits, quick) for splits in sglang_decode.SPLITS]
        if sglang.has("verify_mla"):
            found.append(_shared_kv(sglang, quick))
    return found


def from_flashinfer() -> list[Implementation]:
    """FlashInfer's kernels, where it is installed."""
    if not flashinfer_mla.installed():
        return []
    version = f"flashinfer {flashinfer_mla.version()}"
    return [
        Implementation(
            f"flashinfer_{backend}_chain",
            functools.partial(flashinfer_mla.chain, backend=backend),
            _is_bf16,
            False,
            version,
        )
        for backend in flashinfer_mla.BACKENDS
    ]


def _extend(sglang: ForeignSglang) -> Implementation:
    return Implementation(
        f"sglang_{sglang.version}_triton_extend",
        lambda inputs: sglang_verify.extend(sglang, inputs),
        _is_verify,
        True,
        f"sglang {sglang.version}",
    )


def _decode(sglang: ForeignSglang, splits: int, quick: bool) -> Implementation:
    def takes(case: AttentionCase) -> bool:
        wanted = not quick or splits == sglang_decode.likely_best_splits(case.context)
        return wanted and _decode_takes(case)

    return Implementation(
        f"sglang_{sglang.version}_triton_split_decode_{splits}",
        lambda inputs: sglang_decode.folded_decode(sglang, inputs, splits),
        takes,
        False,
        f"sglang {sglang.version}",
    )


def _shared_kv(sglang: ForeignSglang, quick: bool) -> Implementation:
    # Its second kernel holds rows x rows x 1,024 products: for 17 to 32 rows it takes more than a
    # minute to compile, and for more Triton refuses so large a tensor.
    most_rows = 16 if quick else 32
    return Implementation(
        f"sglang_{sglang.version}_shared_kv_chain",
        lambda inputs: sglang_verify.shared_kv(sglang, inputs),
        lambda case: _is_verify(case) and case.q <= most_rows,
        False,
        f"sglang {sglang.version}",
    )
