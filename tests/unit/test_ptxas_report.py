import pytest

from overstory.kernels.ptxas_report import KernelResources, as_table, read_report

PRINTED = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1kPf' for 'sm_90'
ptxas info    : Function properties for _Z1kPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
ptxas info    : Compile time = 22.845 ms
ptxas info    : Compiling entry function '_Z1lPf' for 'sm_90'
ptxas info    : Function properties for _Z1lPf
    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 16 bytes cumulative stack size, 1024 bytes smem
"""


def test_each_entry_is_read() -> None:
    kernels = read_report(PRINTED)
    assert kernels == [
        KernelResources("_Z1kPf", "sm_90", 8, 0, 0, 0),
        KernelResources("_Z1lPf", "sm_90", 255, 16, 20, 1024),
    ]
    assert [line.split()[-1] for line in as_table(kernels).splitlines()[1:]] == ["_Z1kPf", "_Z1lPf"]


def test_another_format_is_no_silence() -> None:
    with pytest.raises(ValueError, match="no resources for _Z1kPf"):
        read_report(PRINTED.replace("spill stores", "spilled"))
