"""YAML in a file or after `--set`: what is no YAML, or says a thing twice, is told."""

from typing import Any

import yaml

from overstory.orchestrator.spec_errors import SpecError

_MERGE = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """PyYAML's own would take the last of two equal keys and drop the first in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value} is given twice; keep one", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml(text: str, source: str) -> Any:
    """What the text says.

    Raises:
        SpecError: it is not YAML, or gives a key twice; it names `source`, line and column.
    """
    loader = _Loader(text)
    loader.name = source
    try:
        return loader.get_single_data()
    except yaml.YAMLError as error:
        raise SpecError([f"{source}: is not valid YAML: {error}"]) from error
    except RecursionError as error:
        raise SpecError([f"{source}: is nested too deeply"]) from error
    except ValueError as error:  # A date that there is not, for one.
        raise SpecError([f"{source}: a value cannot be read: {error}"]) from error
    finally:
        loader.dispose()
