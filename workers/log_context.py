"""What every log line of a process begins with: whose it is, and the request that it is about.

By a record factory, so that lines of SGLang, Ray and libraries carry it too, whatever handlers and
formats they set up.
"""

from __future__ import annotations

import logging
from contextvars import ContextVar
from typing import Any

_REQUEST: ContextVar[str] = ContextVar("overstory_request", default="")
_LABELLED = "_overstory_label"


def label_process(label: str) -> None:
    """Has every log line of this process begin with `[label]`, and `[label request]` where one is
    named. A second label takes the place of the first."""
    make = logging.getLogRecordFactory()
    make = getattr(make, _LABELLED, make)

    def labelled(*arguments: Any, **more: Any) -> logging.LogRecord:
        record = make(*arguments, **more)
        words = " ".join(filter(None, (label, _REQUEST.get())))
        # Not into `msg` as it is: its arguments are filled in later, and a label may hold a "%".
        record.msg = f"[{words}] ".replace("%", "%%" if record.args else "%") + str(record.msg)
        return record

    setattr(labelled, _LABELLED, make)
    logging.setLogRecordFactory(labelled)


def name_request(request: str) -> None:
    """What is logged from here on, in this task and those that it starts, is about a request."""
    _REQUEST.set(request)


def named_request() -> str:
    """The request that this task is about; empty for none."""
    return _REQUEST.get()
