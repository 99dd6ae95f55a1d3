"""Lines of a test file that a comment marks: `# here: name`."""

import re

MARK = re.compile(r"# here: (.+)$")


def marked_lines(file):
    """`file:line` by the name in the comment."""
    with open(file, encoding="utf-8") as lines:
        found = [(n, MARK.search(line)) for n, line in enumerate(lines, 1)]
    return {m.group(1): f"{file}:{n}" for n, m in found if m}
