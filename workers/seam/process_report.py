"""A note from each process saying which part of the seam ran in it, for proof and for diagnosis."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

#: Folder that every process writes its notes into; unset means no notes.
REPORT_FOLDER_VARIABLE = "OVERSTORY_SEAM_REPORT_DIR"


def write_process_report(stage: str, content: dict[str, object] | None = None) -> None:
    """Writes `{stage}-{pid}.json` into the report folder, if one is set.

    Args:
        stage: what ran: "sitecustomize", "plugin" or "serving" (a model runner with our attention).
        content: JSON-able details.
    """
    folder = os.environ.get(REPORT_FOLDER_VARIABLE)
    if not folder:
        return
    note = {"pid": os.getpid(), "parent": os.getppid(), "argv": sys.argv, **(content or {})}
    (Path(folder) / f"{stage}-{os.getpid()}.json").write_text(json.dumps(note))
