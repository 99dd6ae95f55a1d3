"""The tool: answers GradBench's messages, one JSON line per message, until the input ends."""

from __future__ import annotations

import json
import sys
import traceback
from importlib import import_module
from typing import Any

import jax


def main() -> None:
    for line in sys.stdin:
        message = json.loads(line)
        print(json.dumps({"id": message["id"]} | answer(message)), flush=True)


def answer(message: dict[str, Any]) -> dict[str, Any]:
    try:
        match message["kind"]:
            case "start":
                return {"tool": "regrad"}
            case "define":
                module(message)
                return {"success": True}
            case "evaluate":
                function = getattr(module(message), message["function"])
                return {"success": True} | function.evaluate(message["input"])
    except Exception:  # the eval receives every error as text
        return {"success": False, "error": traceback.format_exc()}
    return {}  # "analysis": the eval's judgment of a result


def module(message: dict[str, Any]) -> Any:
    return import_module(f".{message['module']}", __package__)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)  # the evals compare 64-bit floats
    # The tool waits for each result, so a second thread for computation has no use.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    main()
