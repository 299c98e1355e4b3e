"""Renders Jinja2 templates in a sandbox, for the worker process of `bigfleet.operator.bootstrap.renderer`.

A template has its variables and four harmless globals; it cannot load files, reach attributes of Python objects or draw
random numbers. The worker process limits its time and memory. An error text must never have a rendering's secret.
"""

import base64
import json
import shlex
from collections.abc import Mapping
from functools import lru_cache
from types import TracebackType
from typing import Any, Final

from jinja2 import StrictUndefined, Template, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

OUTPUT_BYTES_MAX: Final = 1024 * 1024
#: Stands for the token where the text of an error is made.
TOKEN_PLACEHOLDER: Final = "000000.0000000000000000"  # noqa: S105 - an example, valid nowhere
#: Global functions that a template may call; all of them give the same result each time.
_GLOBALS: Final = ("range", "dict", "namespace", "joiner", "cycler")


class RenderingFault(Exception):
    """A template that cannot be parsed or rendered; the text has no path and nothing secret."""

    def __init__(self, text: str, line: int = 0) -> None:
        super().__init__(text)
        self.text = text
        #: From 1; 0 when it is not known.
        self.line = line


def quote(value: object) -> str:
    """Return the value as one word of a POSIX shell, with any characters; NUL raises ValueError."""
    text = str(value)
    if "\0" in text:
        raise ValueError("quote: the value has a NUL character, which no shell can pass on")
    return shlex.quote(text)


def to_json(value: object) -> str:
    """Return the value as JSON that is valid YAML as well, and has no single quote and none of `<>&`.

    Letters outside ASCII are written as they are above U+FFFF, because YAML knows no surrogate pairs.
    """
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, default=_no_json)
    return "".join(character if _is_plain(character) else f"\\u{ord(character):04x}" for character in text)


def _no_json(value: object) -> str:
    if isinstance(value, StrictUndefined):
        # Raises, and names the variable.
        return str(value)
    raise TypeError(f"tojson: a value of type {type(value).__name__} is no JSON")


def _is_plain(character: str) -> bool:
    return (" " <= character <= "~" and character not in "<>&'") or character > "\uffff"


def b64encode(value: object) -> str:
    """Return the value's UTF-8 text, or its bytes, in Base64 on one line."""
    return base64.b64encode(value if isinstance(value, bytes) else str(value).encode()).decode("ascii")


def environment() -> ImmutableSandboxedEnvironment:
    """Return the environment that templates are compiled in."""
    sandbox = ImmutableSandboxedEnvironment(
        undefined=StrictUndefined, autoescape=False, loader=None, keep_trailing_newline=True
    )
    sandbox.globals = {name: sandbox.globals[name] for name in _GLOBALS}
    sandbox.filters = {name: function for name, function in sandbox.filters.items() if name != "random"}
    sandbox.filters.update(quote=quote, tojson=to_json, b64encode=b64encode)
    return sandbox


def render(source: str, path: str, variables: Mapping[str, Any]) -> str:
    """Return the rendered text, or raise RenderingFault, whose text says nothing of the variable `token`."""
    try:
        return _render(source, path, variables)
    except RenderingFault as fault:
        if not variables.get("token") or not fault.line:
            raise
        # The message may hold the token or a part of it. A second rendering with a placeholder gives a message without.
        try:
            _render(source, path, {**variables, "token": TOKEN_PLACEHOLDER})
        except RenderingFault as harmless:
            raise harmless from None
        raise RenderingFault("rendering failed; the message may hold the token and is left out", fault.line) from None


def _render(source: str, path: str, variables: Mapping[str, Any]) -> str:
    template = _compiled(source, path)
    pieces: list[str] = []
    size_bytes = 0
    try:
        for piece in template.generate(**variables):
            size_bytes += len(piece.encode())
            if size_bytes > OUTPUT_BYTES_MAX:
                raise RenderingFault(f"the output is larger than {OUTPUT_BYTES_MAX} bytes")
            pieces.append(piece)
    except RenderingFault:
        raise
    except MemoryError:
        raise RenderingFault("rendering needs too much memory") from None
    # A template can raise everything that the functions that it calls raise.
    except Exception as fault:
        raise RenderingFault(_message(fault), _line(fault.__traceback__, path)) from None
    return "".join(pieces)


@lru_cache(maxsize=2)
def _compiled(source: str, path: str) -> Template:
    sandbox = environment()
    try:
        code = sandbox.compile(source, path, path)
        return Template.from_code(sandbox, code, sandbox.make_globals(None))
    except TemplateSyntaxError as fault:
        raise RenderingFault(fault.message or "syntax error", fault.lineno) from None
    except (RecursionError, MemoryError, SyntaxError, ValueError) as fault:
        raise RenderingFault(f"the template cannot be compiled: {_message(fault)}") from None


def _message(fault: BaseException) -> str:
    return str(fault) or type(fault).__name__


def _line(traceback: TracebackType | None, path: str) -> int:
    """Return the line of the template that was rendered last, 0 when there is none."""
    line = 0
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == path:
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line
