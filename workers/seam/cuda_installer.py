"""What a CUDA process changes in SGLang: the attention backend behind its own name."""

from __future__ import annotations

from typing import Any

from overstory.workers.seam.patches import Patch

BACKEND_NAME = "overstory"


def make_backend(model_runner: Any) -> Any:
    """The backend of one model runner, with SGLang's Triton backend for what is not ours."""
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    from overstory.workers.seam.cuda_attention import OverstoryAttention

    return OverstoryAttention(model_runner, TritonAttnBackend(model_runner))


def _install_backend() -> None:
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_attention_backend(BACKEND_NAME)(make_backend)


def _backend_taken() -> bool:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    return ATTENTION_BACKENDS.get(BACKEND_NAME) is make_backend


def _install_choice() -> None:
    from sglang.srt.server_args import add_attention_backend_choices

    if not _choice_taken():
        add_attention_backend_choices([BACKEND_NAME])


def _choice_taken() -> bool:
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES

    return BACKEND_NAME in ATTENTION_BACKEND_CHOICES


def patches() -> list[Patch]:
    """The backend and its name, as changes to SGLang."""
    return [
        Patch(
            f"attention backend {BACKEND_NAME}",
            "SGLang captures DFLASH's verify without a tree's mask, and its Triton kernel reads "
            "the cache once per head",
            _install_backend,
            _backend_taken,
        ),
        Patch(
            f"attention backend choice {BACKEND_NAME}",
            "SGLang's command line would refuse the name",
            _install_choice,
            _choice_taken,
        ),
    ]
