"""Requests drawn from an OpenAPI document: bodies that fit its schemas, nearly fit, or do not.

Not collected: it holds no test.
"""

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

TEXTS = st.one_of(
    st.text(max_size=12), st.sampled_from(["", "tiny", "user", "{", "</think>", "\ud800", "a\x00b"])
)
JUNK = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXTS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


class Drawer:
    """Values for the schemas of one document."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._schemas = document["components"]["schemas"]

    def body(self, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        """Mostly what fits, sometimes with a field replaced, added or taken away; seldom junk."""
        fitting = self.fitting(schema)
        return st.one_of(fitting, fitting, fitting.flatmap(_spoilt), JUNK)

    def fitting(self, schema: Mapping[str, Any], depth: int = 0) -> st.SearchStrategy[Any]:
        """Values of a schema."""
        if "$ref" in schema:
            return self.fitting(self._schemas[schema["$ref"].rsplit("/", 1)[1]], depth + 1)
        if "anyOf" in schema:
            return st.one_of([self.fitting(one, depth) for one in schema["anyOf"]])
        if "enum" in schema:
            return st.sampled_from(schema["enum"])
        if "const" in schema:
            return st.just(schema["const"])
        match schema.get("type"):
            case "object":
                return self._object(schema, depth)
            case "array":
                most = min(schema.get("maxItems", 3), 3)
                least = min(schema.get("minItems", 0), most)
                items = self.fitting(schema.get("items", {}), depth + 1)
                return st.lists(items, min_size=least, max_size=most)
            case "string":
                if "pattern" in schema:
                    return st.from_regex(schema["pattern"], fullmatch=True)
                return TEXTS.filter(lambda text: len(text) >= schema.get("minLength", 0))
            case "integer":
                return st.integers(schema.get("minimum", -5), schema.get("maximum", 200))
            case "number":
                least = schema.get("minimum", schema.get("exclusiveMinimum", -3))
                return st.floats(least, schema.get("maximum", 3), allow_nan=False)
            case "boolean":
                return st.booleans()
            case "null":
                return st.none()
        return JUNK

    def _object(self, schema: Mapping[str, Any], depth: int) -> st.SearchStrategy[Any]:
        fields = schema.get("properties")
        if fields is None:
            return st.dictionaries(st.text(max_size=5), JUNK, max_size=2)
        drawn = {name: self.fitting(field, depth + 1) for name, field in fields.items()}
        must = set(schema.get("required", []))
        optional = {name: value for name, value in drawn.items() if name not in must}
        required = {name: drawn[name] for name in drawn if name in must}
        if not optional:
            return st.fixed_dictionaries(required)
        few = st.lists(st.sampled_from(sorted(optional)), max_size=4, unique=True)
        return few.flatmap(
            lambda names: st.fixed_dictionaries(
                {**required, **{name: optional[name] for name in sorted(names)}}
            )
        )


def _spoilt(body: Any) -> st.SearchStrategy[Any]:
    if not isinstance(body, dict):
        return JUNK
    names = st.one_of(st.sampled_from(sorted(body) or ["model"]), st.text(max_size=6))
    replaced = st.tuples(names, JUNK).map(lambda pair: {**body, pair[0]: pair[1]})
    without = names.map(lambda gone: {name: body[name] for name in body if name != gone})
    return st.one_of(replaced, without)
