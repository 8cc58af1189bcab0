"""The installed SGLang is what the seam relies on, and the seam notices when it is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from overstory.workers import rank_hooks
from overstory.workers.seam import internals, patches, plugin
from overstory.workers.seam.errors import MissingOpError, SeamError
from overstory.workers.seam.internals import Inline, Internal, NameList


@pytest.fixture(scope="module", autouse=True)
def _plugins() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    plugin.verify_installed()


def test_installed_sglang_is_what_we_rely_on() -> None:
    internals.check()


def test_every_hook_target_is_listed() -> None:
    listed = {entry.path for entry in internals.entries()}
    hooks = [*plugin.installed(), *rank_hooks.patches()]
    targets = {p.name for p in hooks if p.name.startswith("sglang.")}
    assert targets <= listed


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (Internal("sglang.srt.plugins.no_such", "x"), "is gone"),
        (Internal("sglang.srt.plugins.load_plugins", "x", "server"), "has no server"),
        (Internal("sglang.srt.utils.common.support_triton", "x", "backend"), ""),
        (NameList("sglang.srt.server_args.ATTENTION_BACKEND_CHOICES", "x", "zz"), "must have"),
        (
            NameList("sglang.srt.server_args.ATTENTION_BACKEND_CHOICES", "x", lacks="triton"),
            "must not have",
        ),
        (Inline("sglang.srt.utils.common.support_triton", "x", "return False"), "no longer says"),
    ],
)
def test_a_difference_is_named(
    entry: internals.Entry, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(internals, "DDTREE", (entry,))
    if not said:
        internals.check()
        return
    with pytest.raises(SeamError, match=said):
        internals.check()


def test_a_hook_on_a_missing_target_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = patches.hook("sglang.srt.plugins.no_such", "replace", lambda: None, "a test")
    monkeypatch.setattr(plugin._STATE, "patches", [lost])
    with pytest.raises(SeamError, match=r"sglang\.srt\.plugins\.no_such"):
        plugin.verify_installed()
    assert plugin.report() == {lost.name: False}


def test_a_hook_that_was_not_applied_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    late = patches.hook("sglang.srt.plugins.load_plugins", "before", lambda: None, "a test")
    monkeypatch.setattr(plugin._STATE, "patches", [late])
    with pytest.raises(SeamError, match="unchanged though registered"):
        plugin.verify_installed()


def test_a_failing_installer_is_found_and_others_still_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[str] = []

    def fail() -> None:
        raise KeyError("gone")

    def mark(name: str) -> Callable[[], None]:
        return lambda: ran.append(name)

    state = plugin._State()
    monkeypatch.setattr(plugin, "_STATE", state)
    monkeypatch.setattr(plugin, "CPU_INSTALLERS", ("overstory.no_such_module",))
    monkeypatch.setattr(plugin, "INSTALLERS", ())
    plugin.register()
    plugin._install([patches.Patch("bad", "a test", fail, lambda: True)])
    plugin._install([patches.Patch("good", "a test", mark("good"), lambda: True)])
    assert ran == ["good"]
    assert plugin.report() == {"overstory.no_such_module": False, "bad": False, "good": True}
    with pytest.raises(SeamError, match="KeyError"):
        plugin.verify_installed()


def test_an_op_without_implementation_raises_with_its_name() -> None:
    import sgl_kernel
    from sgl_kernel.flash_mla import flash_mla_with_kvcache

    with pytest.raises(MissingOpError, match=r"sgl_kernel\.moe_fused_gate"):
        sgl_kernel.moe_fused_gate(1, 2)
    with pytest.raises(MissingOpError, match=r"sgl_kernel\.flash_mla\.flash_mla_with_kvcache"):
        flash_mla_with_kvcache()


def test_portable_slot_ops_are_inverse() -> None:
    import torch
    from sgl_kernel import assign_extend_cache_locs_cpu, assign_req_to_token_pool_cpu

    table = torch.zeros(4, 16, dtype=torch.int32)
    rows, start, end = torch.tensor([2, 0]), torch.tensor([3, 0]), torch.tensor([6, 2])
    slots = torch.tensor([10, 11, 12, 20, 21])
    assign_req_to_token_pool_cpu(rows, table, start, end, slots, 16)
    assert table[2, 3:6].tolist() == [10, 11, 12]
    assert table[0, :2].tolist() == [20, 21]
    assert int(table.count_nonzero()) == 5
    read = torch.zeros(5, dtype=torch.int64)
    assign_extend_cache_locs_cpu(rows, table, start, end, read, 16)
    assert read.tolist() == slots.tolist()
