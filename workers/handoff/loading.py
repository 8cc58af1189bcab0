"""Weights from the same rank of a live replica, in place of the checkpoint on disk.

```
DefaultModelLoader.load_model    no source: as it is
                                 a source: SGLang's dummy loader, then written over from the peer
                                 whatever fails: as it is, from disk
then                             the model's memory is noted, to be given to others
```

SGLang's own way (`load_format: remote_instance`) wants an HTTP server in the giving replica, names
parameters only, and leaves out what a model derives from them.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from overstory.workers.handoff.pieces import Carried, Piece
from overstory.workers.handoff.weights import WeightTable, fingerprint
from overstory.workers.seam.patches import Patch, hook

if TYPE_CHECKING:
    from overstory.workers.handoff.peers import Taker

logger = logging.getLogger(__name__)

LOADER = "sglang.srt.model_loader.loader.DefaultModelLoader.load_model"


@dataclass(frozen=True)
class _Noted:
    """A model that is served here, and which it is."""

    table: WeightTable
    stamp: str


class WeightShelf:
    """The models of this process's rank.

    Attributes:
        source: where to take weights from; None loads from disk.
        settings: what else than the checkpoint decides what lies in memory (`weights_settings`).
        refuses: why nothing is given to others; empty if it is.
        taken: what came from there so far.
        reason: why the last model did not, if one did not.
    """

    def __init__(self) -> None:
        self.source: Taker | None = None
        self.settings = ""
        self.refuses = ""
        self.taken = Carried(0, 0.0)
        self.reason = ""
        self._noted: dict[str, _Noted] = {}

    def load(
        self, original: Callable[..., Any], loader: Any, *, model_config: Any, device_config: Any
    ) -> Any:
        """AROUND hook of SGLang's loader."""
        path = str(model_config.model_path)
        stamp = f"{self.settings} {fingerprint(Path(path)) if Path(path).is_dir() else path}"
        settings = {"model_config": model_config, "device_config": device_config}
        model = None
        if self.source is not None:
            try:
                model = self._take(self.source, loader, path, stamp, settings)
            except Exception as error:  # Whatever it is, the files are there.
                self.reason = str(error) or type(error).__name__
                logger.warning("weights of %s come from disk: %s", path, error)
                gc.collect()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
        if model is None:
            model = original(loader, **settings)
        try:
            self._noted[path] = _Noted(WeightTable(model), stamp)
        except Exception as error:  # Tensors without plain memory.
            logger.warning("weights of %s cannot be given to others: %s", path, error)
        return model

    def give(self, order: Any, piece_bytes: int) -> tuple[Iterable[Piece], Callable[[], bool]]:
        """A model's memory. From a giver's thread.

        Raises:
            ValueError: it is not served here, or is another one.
        """
        if self.refuses:
            raise ValueError(self.refuses)
        noted = self._noted.get(order["path"])
        if noted is None:
            raise ValueError(f"{order['path']} is not served there")
        if noted.stamp != order["stamp"]:
            raise ValueError(f"{order['path']} has other files or settings than are served there")
        if noted.table.layout != order["layout"]:
            raise ValueError(f"{order['path']} lies differently in memory there")
        return noted.table.gather(piece_bytes), lambda: True

    def _take(
        self, source: Taker, loader: Any, path: str, stamp: str, settings: dict[str, Any]
    ) -> Any:
        from sglang.srt.configs.load_config import LoadFormat
        from sglang.srt.model_loader.loader import DummyModelLoader

        dummy = DummyModelLoader(
            dataclasses.replace(
                loader.load_config, load_format=LoadFormat.DUMMY, model_loader_extra_config={}
            )
        )
        model = dummy.load_model(**settings)
        table = WeightTable(model)
        order = {"what": "weights", "path": path, "stamp": stamp, "layout": table.layout}
        with torch.inference_mode():
            self.taken += source.take(order, table.scatter(source.piece_bytes))
        return model


SHELF = WeightShelf()


def load(
    original: Callable[..., Any], loader: Any, *, model_config: Any, device_config: Any
) -> Any:
    """See `WeightShelf.load`."""
    return SHELF.load(original, loader, model_config=model_config, device_config=device_config)


def patches() -> list[Patch]:
    """The one change, for rank actors."""
    return [hook(LOADER, "around", load, "weights could not come from, or go to, a live replica")]
