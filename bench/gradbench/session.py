"""One eval with one tool: starts both, forwards their messages, and records them."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from threading import Timer
from typing import IO, Any, NamedTuple


class Command(NamedTuple):
    """A process to start."""

    words: Sequence[str]
    folder: Path
    environment: dict[str, str]

    def start(self, errors: IO[str]) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen(
            self.words,
            cwd=self.folder,
            env=self.environment,
            stdin=pipe,
            stdout=pipe,
            stderr=errors,
            text=True,
        )


class Evaluation(NamedTuple):
    """The outcome of one `evaluate` message."""

    function: str
    size: str
    seconds: float | None  # the median from the second call on
    valid: bool | None  # None if the tool did not reply
    error: str


class Session(NamedTuple):
    """All evaluations of an eval by a tool, and the reason if it ended early."""

    evaluations: list[Evaluation]
    failure: str


def held(eval_: Command, tool: Command, seconds: float) -> Session:
    """Run the eval with the tool, for at most `seconds` seconds."""
    with tempfile.TemporaryFile("w+") as eval_errors, tempfile.TemporaryFile("w+") as tool_errors:
        processes = [eval_.start(eval_errors), tool.start(tool_errors)]
        timer = Timer(seconds, lambda: [process.kill() for process in processes])
        timer.start()
        try:
            log, failure = relay(*processes)
        finally:
            in_time = timer.is_alive()
            timer.cancel()
            for process in processes:
                process.kill()
                process.communicate()
        if not in_time:
            failure = f"not done in {seconds:.0f} s"
        elif failure == "the eval ended":
            failure = last_line(eval_errors)  # empty if all went well
        elif failure == "the tool ended":
            failure = last_line(tool_errors) or failure
        return Session(list(log.values()), failure)


def relay(
    eval_: subprocess.Popen[str], tool: subprocess.Popen[str]
) -> tuple[dict[int, Evaluation], str]:
    """Forward messages until one side stops."""
    log: dict[int, Evaluation] = {}
    failure = ""
    while line := said(eval_):
        message = json.loads(line)
        if message["kind"] == "end":
            break
        answer = asked(tool, line)
        if not answer:
            return log, "the tool ended"
        response = json.loads(answer)
        note(log, message, response)
        if message["kind"] == "define" and not response.get("success"):
            failure = (response.get("error") or "no such module").strip().splitlines()[-1]
        asked(eval_, answer, wait=False)
    return log, failure or "the eval ended"


def asked(process: subprocess.Popen[str], line: str, wait: bool = True) -> str:
    assert process.stdin
    try:
        process.stdin.write(line)
        process.stdin.flush()
    except BrokenPipeError:
        return ""
    return said(process) if wait else ""


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline()


def note(log: dict[int, Evaluation], message: dict[str, Any], response: dict[str, Any]) -> None:
    match message["kind"]:
        case "evaluate":
            size = message.get("description", "")
            error = (response.get("error") or "").strip().splitlines()[-1:]
            log[message["id"]] = Evaluation(
                message["function"], size, later(response), None, "".join(error)
            )
        case "analysis":
            entry = log[message["of"]]
            error = message.get("error") or entry.error
            log[message["of"]] = entry._replace(valid=message["valid"], error=error)


def later(response: dict[str, Any]) -> float | None:
    """Return the median from the second call on, because the first call compiles."""
    timings = response.get("timings") or []
    times = [t["nanoseconds"] for t in timings if t["name"] == "evaluate"]
    return median(times[1:]) / 1e9 if len(times) > 1 else None


def last_line(file: IO[str]) -> str:
    file.seek(0)
    lines = [line.strip() for line in file if line.strip()]
    return lines[-1] if lines else ""
