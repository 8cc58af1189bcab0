"""A program for `test_seam_processes`: SGLang's own Engine with processes that it spawns.

Usage: stock_engine.py TARGET DRAFTER TP. The last line of output is JSON.
"""

from __future__ import annotations

import json
import os
import sys

from overstory.workers.environment import cpu_engine_defaults, prepare_process

PROMPTS = [[7, 8, 9, 10], list(range(100, 190))]


def main() -> None:
    import psutil
    import sglang

    target, drafter, tp = sys.argv[1:]
    engine = sglang.Engine(
        **{
            **cpu_engine_defaults(),
            "model_path": target,
            "speculative_algorithm": "DFLASH",
            "speculative_draft_model_path": drafter,
            "tp_size": int(tp),
            "skip_tokenizer_init": True,
            "max_total_tokens": 2048,
            "max_running_requests": 4,
            "log_level": "warning",
        }
    )
    from overstory.workers.seam import plugin

    plugin.verify_installed()
    params = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}
    answers = engine.generate(input_ids=PROMPTS, sampling_params=params)
    children = [
        child
        for child in psutil.Process().children(recursive=True)
        if "resource_tracker" not in " ".join(child.cmdline())
    ]
    print(
        json.dumps(
            {
                "pid": os.getpid(),
                "children": [child.pid for child in children],
                "schedulers": [
                    child.pid for child in children if "scheduler" in " ".join(child.cmdline())
                ],
                "ids": [answer["output_ids"] for answer in answers],
            }
        ),
        flush=True,
    )
    loads = engine.tokenizer_manager.load_snapshot_reader.path
    engine.shutdown()
    os.unlink(loads)  # SGLang leaves it.


if __name__ == "__main__":
    prepare_process("cpu")
    main()
