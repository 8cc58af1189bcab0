"""Measured cost tables on disk, one file per key. Standard library only.

A file is as good as what its key names: models, device, versions and settings that change a step's
cost. One process at a time measures for a key; others wait for its result.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from overstory.workers.policy import CACHE_ENV
from overstory.workers.policy.cost_table import BadTable, CostTable

logger = logging.getLogger(__name__)

FORMAT = 3
_POLL_S = 0.1


def cache_folder() -> Path:
    """Folder of cached tables, from the environment or the user's cache."""
    named = os.environ.get(CACHE_ENV)
    root = Path(named) if named else Path.home() / ".cache" / "overstory"
    return root / "cost_tables"


class TableCache:
    """Cached table of one key.

    Args:
        folder: made if it is not there.
        key: everything that a table depends on, JSON-able.
    """

    def __init__(self, folder: Path, key: Mapping[str, object]) -> None:
        self._key = {"format": FORMAT, **key}
        text = json.dumps(self._key, sort_keys=True)
        name = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
        self.path = folder / f"{name}.json"
        self._lock_path = folder / f"{name}.lock"

    def load(self) -> CostTable | None:
        """The cached table; None if there is none or it is damaged (with a warning)."""
        try:
            data = json.loads(self.path.read_text())
            if data["key"] != json.loads(json.dumps(self._key)):
                raise BadTable("it was measured under another key")
            return CostTable.from_json(data["table"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning(
                "cost table %s cannot be used and is measured again: %s: %s",
                self.path,
                type(error).__name__,
                error,
            )
            return None

    def store(self, table: CostTable) -> None:
        """Writes the table; readers see the old file or the whole new one.

        A folder that cannot be written is no reason not to serve: it is said, and the next start
        measures again.
        """
        data = {"key": self._key, "table": json.loads(table.to_json())}
        try:
            handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.stem)
            with os.fdopen(handle, "w") as file:
                json.dump(data, file)
            os.replace(name, self.path)
        except OSError as error:
            logger.warning("cost table not cached in %s: %s", self.path, error)

    @contextlib.contextmanager
    def alone(self, patience_s: float) -> Iterator[bool]:
        """Holds the key's lock inside; False if another process kept it for ``patience_s``, or
        there is no place for a lock."""
        with contextlib.ExitStack() as held:
            yield self._locked(held, time.monotonic() + patience_s)

    def load_or_measure(self, measure: Callable[[], CostTable], patience_s: float) -> CostTable:
        """The cached table, else the one that ``measure`` gives, cached."""
        with self.alone(patience_s) as alone:
            if not alone:
                logger.warning("another process measures %s for long; going on", self.path)
            table = self.load()
            if table is None:
                table = measure()
                self.store(table)
            return table

    def _locked(self, held: contextlib.ExitStack, deadline: float) -> bool:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = held.enter_context(self._lock_path.open("w"))
        except OSError as error:
            logger.warning("no lock at %s: %s", self._lock_path, error)
            return False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    return False
                time.sleep(_POLL_S)
