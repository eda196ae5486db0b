"""Rules for the arguments of functions, made of the functions' own JSON schemas."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from threading import Lock
from typing import Any

from jaxinfer.text.json_schema import byte_tokenizer
from jaxinfer.text.structure_trial import Trials, require_packages
from jaxinfer.validation import cut

NUM_KNOWN = 256
# Models write their calls with a space after commas and colons, or with none. Other white space has no bound, so small
# models would write it for ever.
WHITE_SPACE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


def not_honoured(function: str, error: ValueError) -> ValueError:
    """Returns the error for a function with a schema that has another error."""
    return ValueError(f"the parameters of the function {cut(function)} cannot be honoured: {error}")


class SchemaRules:
    """Turns JSON schemas into rules for `llguidance`, within limits of time and memory, on any thread."""

    def __init__(self) -> None:
        self._trials = Trials()
        self._known: OrderedDict[str, str] = OrderedDict()
        self._lock = Lock()

    def json(self, function: str, schema: Mapping[str, Any]) -> str:
        """Returns an expression for the JSON documents of a schema.

        Raises ValueError, with the name of the function, if the schema is none or cannot be honoured.
        """
        text = json.dumps({"x-guidance": WHITE_SPACE, **schema})
        with self._lock:
            known = self._known.get(text)
        if known is None:
            try:
                require_packages("json_schema")
                # The rules stand in a grammar, in which patterns have the notation of `llguidance`.
                known = self._compilable(text)
            except ValueError as error:
                raise not_honoured(function, error) from None
            with self._lock:
                self._known[text] = known
                if len(self._known) > NUM_KNOWN:
                    self._known.popitem(last=False)
        return known

    def _compilable(self, schema: str) -> str:
        from llguidance import LLMatcher

        grammar = self._trials.run("json_schema", schema).grammar
        matcher = LLMatcher(byte_tokenizer(), grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(cut(matcher.get_error()))
        return grammar.removeprefix("start: ")
