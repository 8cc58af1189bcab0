import subprocess
import sys


def test_the_gateway_process_imports_neither_torch_nor_sglang() -> None:
    """They would cost it 20 s and a gigabyte at every start."""
    code = (
        "import sys, overstory.orchestrator.gateway\n"
        "heavy = {'torch', 'sglang', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
