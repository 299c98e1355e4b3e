"""Loads YAML with libyaml where it is installed, and rejects text that is nested too deeply for it.

libyaml's composer recurses for each level on the stack of C: some ten thousand brackets end the process with a
segmentation fault. Text that cannot be deep is not parsed twice. Text that is probably not meant as it would be read is
rejected too: a key that is given twice, and numbers that YAML 1.1 reads unlike they look (`1:30` as 90).
"""

import re
from typing import Any, Final

import yaml

#: No file of BigFleet has more than ten levels.
DEPTH_MAX: Final = 100
#: Opens levels in the block style: indentation, and one for each dash, question mark and colon of a line.
_BLOCK: Final = re.compile(r"^[ ]*(?:[-?:][ \t]+)*", re.MULTILINE)
#: The loader in C is ten times as fast as the one in Python.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


#: Keys of a mapping with what is merged into it; a few lines that merge each other would otherwise take all memory.
MERGED_KEYS_MAX: Final = 1_000
_MERGE: Final = "tag:yaml.org,2002:merge"
#: Numbers that are what they look like, by the tag of their node.
_PLAIN_NUMBERS: Final = {
    "tag:yaml.org,2002:int": re.compile(r"[-+]?(?:0|[1-9][0-9]*|0x[0-9a-fA-F]+)"),
    "tag:yaml.org,2002:float": re.compile(r"[^:_]*"),
}


class NestingError(ValueError):
    """Text has more levels than `DEPTH_MAX`."""


class AmbiguityError(ValueError):
    """Text is probably not meant as it would be read; the message names line and remedy."""


def load_yaml(text: str, *, is_strict: bool = True) -> Any:
    """Return the value of YAML text. Raises NestingError, and yaml.YAMLError and ValueError as the loader does.

    `is_strict` raises AmbiguityError for keys that are given twice and numbers that look like something else; leave it
    out for a file that other programs accept.
    """
    check_nesting(text)
    loader = _LOADER(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        _check_merges(root, {})
        if is_strict:
            _check_meaning(root, loader, set())
        return loader.construct_document(root)
    finally:
        loader.dispose()


def compose_yaml(text: str) -> yaml.Node | None:
    """Return the root node of YAML text, None for an empty one. Raises NestingError and yaml.YAMLError."""
    check_nesting(text)
    root: yaml.Node | None = yaml.compose(text, _LOADER)
    return root


def check_nesting(text: str) -> None:
    """Raise NestingError for YAML or JSON with more than `DEPTH_MAX` levels; text that is not YAML may pass."""
    # A level of the block style takes a character at least, and may hold a mapping beside its dash.
    block = max((len(found[0]) for found in _BLOCK.finditer(text)), default=0)
    if text.count("[") + text.count("{") + 2 * block + 2 <= DEPTH_MAX:
        return
    depth = 0
    try:
        for event in yaml.parse(text, _LOADER):
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
                if depth > DEPTH_MAX:
                    raise NestingError(f"more than {DEPTH_MAX} levels are nested")
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
    except yaml.YAMLError:
        # The loader reports where and why; nothing before that place was too deep.
        return


def _check_merges(node: yaml.Node, keys: dict[int, int]) -> None:
    """Raise ConstructorError for a mapping that merges make too large; `keys` counts those of each mapping by node."""
    if id(node) in keys:
        return
    keys[id(node)] = 0
    if isinstance(node, yaml.SequenceNode):
        for each in node.value:
            _check_merges(each, keys)
    if not isinstance(node, yaml.MappingNode):
        return
    count, has_merges = 0, False
    for key, value in node.value:
        _check_merges(key, keys)
        _check_merges(value, keys)
        if key.tag != _MERGE:
            count += 1
            continue
        has_merges = True
        merged = value.value if isinstance(value, yaml.SequenceNode) else [value]
        count += sum(keys[id(each)] for each in merged)
    if has_merges and count > MERGED_KEYS_MAX:
        raise yaml.constructor.ConstructorError(
            None, None, f"more than {MERGED_KEYS_MAX} keys are merged into a mapping", node.start_mark
        )
    keys[id(node)] = count


def _check_meaning(node: yaml.Node, loader: Any, seen: set[int]) -> None:
    """Raise AmbiguityError for a key that is given twice, and for a number that looks like something else."""
    if isinstance(node, yaml.ScalarNode):
        is_plain = _PLAIN_NUMBERS.get(node.tag)
        if is_plain is not None and not node.style and not is_plain.fullmatch(node.value):
            line, number = node.start_mark.line + 1, loader.construct_object(node)
            raise AmbiguityError(
                f"line {line}: {node.value} would be read as {number}; write text in quotes, and a number without "
                "colons, underscores and leading zeros"
            )
        return
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for each in node.value:
            _check_meaning(each, loader, seen)
        return
    lines: dict[tuple[str, str], int] = {}
    for key, value in node.value:
        _check_meaning(key, loader, seen)
        _check_meaning(value, loader, seen)
        if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
            continue
        line, name = key.start_mark.line + 1, (key.tag, key.value)
        before = lines.get(name)
        lines[name] = line
        if before is not None:
            raise AmbiguityError(
                f"line {line}: the key {key.value!r} is already in line {before}; remove one of the two"
            )
