"""DDTREE in SGLang's registry of speculative algorithms, and its handling of server arguments."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from overstory.workers.ddtree import ALGORITHM, POLICY_ENV, rows_for
from overstory.workers.ddtree.drafter_config import check_pair, read_drafter
from overstory.workers.policy import MEASURE_SECONDS_ENV
from overstory.workers.tree_policy import AutoPolicy, Policy, parse_policy, policy_from_budget

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

MAX_ROWS = 64
"""Most rows per request (`overstory.kernels.reference.MAX_ROWS`, without importing torch)."""

_DEFAULT_MAX_RUNNING = 48

_SIMULATED = "SGLANG_SIMULATE_ACC_LEN"
"""SGLang's switch that forces the length of a chain, off at 0 and below."""

_MASKED_BACKENDS = {"cpu": ("torch_native",), "cuda": ("overstory", "triton")}
"""Attention backends by device whose verify forward applies a tree's mask, for MLA as well."""

CAPTURED_BACKEND = "overstory"
"""The attention backend whose captured verify forward applies a tree's mask."""


def starting_policy(max_rows: int, block_size: int) -> Policy:
    """Policy an engine starts with: that of the environment, else the largest it has room for.

    Raises:
        ValueError: the environment names a policy that is unknown or too large.
    """
    named = os.environ.get(POLICY_ENV)
    if not named:
        return policy_from_budget(max_rows - 1, block_size)
    policy = parse_policy(named)
    if policy.drafted_nodes(block_size) > max_rows - 1:
        raise ValueError(
            f"{POLICY_ENV}={named} drafts more than the {max_rows - 1} nodes that "
            f"speculative_num_draft_tokens={max_rows} leaves room for"
        )
    return policy


def wants_table() -> bool:
    """Whether engines of this process measure a cost table: to start with, or on wish."""
    named = os.environ.get(POLICY_ENV)
    automatic = bool(named) and isinstance(parse_policy(str(named)), AutoPolicy)
    return automatic or MEASURE_SECONDS_ENV in os.environ


def handle_server_args(arguments: ServerArgs) -> None:
    """Check and complete the server arguments of an engine with DDTREE, in place.

    Raises:
        ValueError: a setting that DDTREE cannot run with; names it, its value and the way out.
    """
    _refuse_unsupported(arguments)
    drafter = read_drafter(arguments.speculative_draft_model_path)
    check_pair(drafter, arguments.model_path)
    arguments.speculative_num_draft_tokens = _row_budget(arguments, drafter.block_size)
    starting_policy(arguments.speculative_num_draft_tokens, drafter.block_size)
    # SGLang's EAGLE sizes; the generic accounting of slots and buffers reads them.
    arguments.speculative_num_steps = 1
    arguments.speculative_eagle_topk = 1
    if arguments.speculative_draft_attention_backend is None:
        ours = arguments.attention_backend == CAPTURED_BACKEND
        arguments.speculative_draft_attention_backend = (
            "triton" if ours else arguments.attention_backend
        )
    if arguments.max_running_requests is None:
        arguments.max_running_requests = _DEFAULT_MAX_RUNNING
        logger.info("max_running_requests set to %d for %s", _DEFAULT_MAX_RUNNING, ALGORITHM)


def _refuse_unsupported(arguments: ServerArgs) -> None:
    unsupported = {
        "pp_size": (arguments.pp_size, 1),
        "enable_dp_attention": (arguments.enable_dp_attention, False),
        "enable_mixed_chunk": (arguments.enable_mixed_chunk, False),
        "enable_lora": (bool(arguments.enable_lora), False),
        "speculative_adaptive": (arguments.speculative_adaptive, False),
        # They would be ignored: every token here is the target's own draw.
        "speculative_accept_threshold_single": (arguments.speculative_accept_threshold_single, 1.0),
        "speculative_accept_threshold_acc": (arguments.speculative_accept_threshold_acc, 1.0),
        "speculative_use_rejection_sampling": (arguments.speculative_use_rejection_sampling, False),
        "speculative_draft_window_size": (arguments.speculative_draft_window_size, None),
        "disaggregation_mode": (arguments.disaggregation_mode, "null"),
    }
    for name, (value, wanted) in unsupported.items():
        if value != wanted:
            raise ValueError(f"{ALGORITHM} runs with {name}={wanted} only, got {value}")
    simulated = os.environ.get(_SIMULATED, "0")
    if not simulated.startswith("-") and simulated.strip("0."):
        raise ValueError(
            f"{ALGORITHM} accepts what the target says, got {_SIMULATED}={simulated} in the "
            "environment, which would be ignored: unset it, or take speculative_algorithm DFLASH"
        )
    page_size = arguments.page_size or 1
    if page_size < 1 or page_size & (page_size - 1):
        raise ValueError(
            f"{ALGORITHM} runs with pages of 1, 2, 4, 8, ... slots, got page_size={page_size}: "
            "SGLang's allocator kernels take powers of two"
        )
    _refuse_unmasked_verify(arguments)
    if arguments.speculative_draft_model_path is None:
        raise ValueError(
            f"{ALGORITHM} needs a drafter: set speculative_draft_model_path to a DFlash checkpoint "
            "made for this model"
        )


def _refuse_unmasked_verify(arguments: ServerArgs) -> None:
    """Backends that drop the ancestor mask would verify a tree as a chain, without a word."""
    masked = _MASKED_BACKENDS.get(arguments.device)
    if masked is None:
        raise ValueError(
            f"{ALGORITHM} runs on devices {sorted(_MASKED_BACKENDS)}, got device={arguments.device}"
        )
    if arguments.attention_backend not in masked:
        raise ValueError(
            f"{ALGORITHM} on {arguments.device} needs attention_backend to be one of {masked}, "
            f"which honour a tree's mask; got {arguments.attention_backend}"
        )
    if arguments.device == "cpu" or not captures_steps(arguments):
        return
    if arguments.attention_backend == CAPTURED_BACKEND:
        _leave_prefill_uncaptured(arguments)
    if arguments.attention_backend != CAPTURED_BACKEND:
        raise ValueError(
            f"{ALGORITHM} with CUDA graphs needs attention_backend={CAPTURED_BACKEND}, got "
            f"{arguments.attention_backend}, whose captured verify forward has no mask: set "
            "disable_cuda_graph to run without graphs"
        )
    backend = arguments.cuda_graph_config.decode.backend
    if backend != "full":
        raise ValueError(
            f"{ALGORITHM} captures whole forwards: cuda_graph_backend_decode must be full or "
            f"disabled, got {backend}"
        )


def _leave_prefill_uncaptured(arguments: ServerArgs) -> None:
    """SGLang captures prefill forwards by default; our backend has no graphs of those."""
    prefill = arguments.cuda_graph_config.prefill
    if prefill.backend != "disabled":
        logger.warning(
            "prefill runs without CUDA graphs: attention_backend=%s has none of it",
            CAPTURED_BACKEND,
        )
        prefill.backend = "disabled"


def captures_steps(arguments: ServerArgs) -> bool:
    """Whether the engine captures its decode forwards in CUDA graphs."""
    if arguments.disable_cuda_graph:
        return False
    return bool(arguments.cuda_graph_config.decode.backend != "disabled")


def _row_budget(arguments: ServerArgs, block_size: int) -> int:
    given = arguments.speculative_num_draft_tokens
    if given is None:
        named = os.environ.get(POLICY_ENV)
        policy = parse_policy(named or "chain")
        given = rows_for(policy.drafted_nodes(block_size), block_size)
    rows = int(given)
    if not block_size <= rows <= MAX_ROWS:
        raise ValueError(
            f"speculative_num_draft_tokens={rows} (1 + tree nodes) must be between the drafter's "
            f"block size {block_size} and {MAX_ROWS}: a smaller tree is a policy ({POLICY_ENV}), "
            "not a smaller engine"
        )
    return rows


def _worker_class(arguments: ServerArgs) -> type:
    """Factory that SGLang calls in a rank."""
    del arguments
    from overstory.workers.ddtree.worker import DDTreeWorker

    return DDTreeWorker


def register() -> None:
    """Put DDTREE into SGLang's registry; a second call changes nothing."""
    if registered():
        return
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    SpeculativeAlgorithm.register(ALGORITHM, supports_overlap=True, spec_class=_spec_class())(
        _worker_class
    )


def own_algorithm() -> Any:
    """The registry's entry of this process."""
    from sglang.srt.speculative.spec_registry import get_spec

    return get_spec(ALGORITHM)


def registered() -> bool:
    """Whether SGLang resolves the name to ours."""
    found = own_algorithm()
    return found is not None and found.factory is _worker_class


def _spec_class() -> Any:
    """Class of the registry entry; built here because its base is SGLang's."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    class DDTreeAlgorithm(CustomSpecAlgo):
        """Answers SGLang's questions about DDTREE.

        It is one of the DFLASH family: hidden-state capture, the drafter's share of KV memory and
        decode preparation depend on that. The registry's base class lacks the last three names,
        though the scheduler calls them.

        Attributes:
            drafter_rows: rows of the drafter's forward per request; 0 until a worker starts.
        """

        drafter_rows = 0

        def get_num_tokens_per_req_for_target_verify(
            self, num_draft_tokens: int, is_draft_worker: bool
        ) -> int:
            """Rows per request of a captured forward: the drafter's are always its block."""
            if is_draft_worker and self.drafter_rows:
                return int(self.drafter_rows)
            return num_draft_tokens

        def is_dflash_family(self) -> bool:
            return True

        def supports_target_verify_for_draft(self) -> bool:
            return True

        def handle_server_args(self, server_args: ServerArgs) -> None:
            handle_server_args(server_args)

        def carries_draft_hidden_states(self) -> bool:
            return False

        def need_topk(self) -> bool:
            return False

        create_future_map = SpeculativeAlgorithm.create_future_map

    return DDTreeAlgorithm
