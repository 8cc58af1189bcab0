"""Turns pydantic's findings into one line per fault: dotted key, got, wanted, way out."""

import difflib
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from overstory.orchestrator.engine_args import EngineArgError
from overstory.orchestrator.errors import UserFault


class SpecError(UserFault, ValueError):
    """A deployment that cannot be used. `problems` has one line for each fault."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


def _keys_at(model: type[BaseModel], location: Sequence[Any]) -> list[str]:
    """Field names of the section that holds the key at `location`."""
    section: Any = model
    for part in location[:-1]:
        section = section.model_fields[part].annotation
    return list(section.model_fields)


def _line(fault: Any, model: type[BaseModel]) -> str:
    location = fault["loc"]
    dotted = ".".join(map(str, location))
    got = fault["input"]
    match fault["type"]:
        case "extra_forbidden":
            known = _keys_at(model, location)
            near = difflib.get_close_matches(str(location[-1]), known, n=1)
            hint = f"did you mean `{near[0]}`?" if near else f"known here: {', '.join(known)}"
            return f"{dotted}: unknown key; {hint}"
        case "missing":
            return f"{dotted}: is missing; it must be given"
        case "value_error":
            reason = str(fault["ctx"]["error"])
            says_key_itself = not dotted or isinstance(fault["ctx"]["error"], EngineArgError)
            return reason if says_key_itself else f"{dotted}: got {got!r}; {reason}"
        case _:
            wanted = fault["msg"].removeprefix("Input should be ")
            return f"{dotted}: got {got!r}, wanted {wanted}"


def from_validation_error(error: ValidationError, model: type[BaseModel]) -> SpecError:
    """All faults that pydantic found in `model`, as one `SpecError`."""
    return SpecError([_line(fault, model) for fault in error.errors(include_url=False)])
