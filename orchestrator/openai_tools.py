"""Tools and conversations as clients send them: OpenAI's shapes, checked before SGLang's parsers
see them (SGLang's own types let unknown fields pass)."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

MAX_TOOLS = 512
"""Most tools of a request."""


def field_error(param: str, reason: str, code: str = "invalid_value") -> PydanticCustomError:
    """A finding about one field, for `openai_errors.from_validation`; `param` is the field's path
    from the body, or with a leading dot from the object that is validated."""
    context = {"param": param, "reason": reason, "code": code}
    return PydanticCustomError("request_field", "{param}: {reason}", context)


class Strict(BaseModel):
    """No unknown fields, no coercion, no NaN."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.\-]{1,64}$")]


class FunctionSpec(Strict):
    """A function that the model may call."""

    name: FunctionName
    """Letters, digits, `_`, `-` and `.`, at most 64."""

    description: str | None = None
    """For the model."""

    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments; unset: none."""

    strict: bool | None = None
    """Whether arguments must fit the schema where nothing forces the call."""


class ToolSpec(Strict):
    """A tool; only functions are supported."""

    type: Literal["function"]
    function: FunctionSpec


class NamedFunction(Strict):
    """A function by name."""

    name: FunctionName


class NamedTool(Strict):
    """The tool that the answer must call."""

    type: Literal["function"]
    function: NamedFunction


Choosing = Literal["none", "auto", "required"] | NamedTool
"""No call, the model's choice, at least one call, calls of this one function."""


class CalledFunction(Strict):
    """What an earlier answer called."""

    name: str = Field(min_length=1)
    arguments: str = "{}"
    """A JSON object, as text."""


class CalledTool(Strict):
    """A call in an earlier answer."""

    id: str = Field(min_length=1)
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    """Accepted as streams have it; of no effect."""

    def for_template(self) -> dict[str, Any]:
        """The call with its arguments as an object, as templates walk over them."""
        try:
            arguments = json.loads(self.function.arguments)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise field_error(
                ".tool_calls", f"arguments of the tool call {self.id!r} are not a JSON object"
            )
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": function}


class TextPart(Strict):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str


class ChatMessage(Strict):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    """May be left out only where an assistant called tools."""

    name: str | None = None

    tool_calls: list[CalledTool] = []
    """What an assistant called."""

    tool_call_id: str | None = None
    """The call that a tool answers."""

    reasoning_content: str | None = None
    """What an assistant thought before it spoke."""

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, data: Any) -> Any:
        """Clients send an assistant's answer back with its empty fields (`refusal`, `tool_calls`,
        ...)."""
        if not isinstance(data, Mapping):
            return data
        return {
            name: value
            for name, value in data.items()
            if value not in (None, [], {}) or (name == "content" and value == [])
        }

    @model_validator(mode="after")
    def _fields_of_the_role(self) -> "ChatMessage":
        if (self.tool_calls or self.reasoning_content) and self.role != "assistant":
            field = ".tool_calls" if self.tool_calls else ".reasoning_content"
            raise field_error(field, f"a message of role {self.role} has no {field[1:]}")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise field_error(
                ".tool_call_id", "messages of role tool, and no others, have a tool_call_id"
            )
        if self.content is None and not self.tool_calls:
            raise field_error(".content", f"a message of role {self.role} needs content")
        for call in self.tool_calls:
            call.for_template()
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it; `developer` is OpenAI's later name of
        `system`."""
        content = self.content or ""
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": content,
        }
        for name in ("name", "tool_call_id", "reasoning_content"):
            value = getattr(self, name)
            if value is not None:
                message[name] = value
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return message
