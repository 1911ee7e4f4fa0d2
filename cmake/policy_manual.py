#!/usr/bin/env python3
"""policy_manual.py docs/POLICY.md: the manual page terrace.toml(5), in the man macros, on stdout.

Knows the Markdown that the document uses: headings, paragraphs, lists, tables, fenced code, and in a line `code`,
**bold** and [links](to). A table becomes one tagged paragraph a row: its first column, then the rest."""

import re
import sys
from pathlib import Path

TOP = """.TH TERRACE.TOML 5 "" "Terrace"
.SH NAME
terrace.toml \\- the policy file of Terrace
.SH DESCRIPTION
"""
END = """.SH SEE ALSO
.BR terrace (1),
.BR terraced (8)
"""


def escaped(text):
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^([.'])", r"\\&\1", text)


def inline(text):
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    parts = re.split(r"(`[^`]*`|\*\*[^*]*\*\*)", text.strip())
    roff = ""
    for part in parts:
        if part.startswith(("`", "**")):
            roff += "\\fB" + escaped(part.strip("`*")) + "\\fR"
        else:
            roff += escaped(part)
    return roff


def cells(row):
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


def table(rows):
    titles = cells(rows[0])
    for row in rows[2:]:
        first, *rest = cells(row)
        notes = [f"{title}: {cell}" if title in ("type", "default") else cell for title, cell in zip(titles[1:], rest)]
        yield f".TP\n{inline(first)}\n{inline('; '.join(note for note in notes if note))}\n"


def blocks(lines):
    """(kind, lines): code, table, heading, or text."""
    block = []
    for line in [*lines, ""]:
        in_code = bool(block) and block[0].startswith("```")
        if in_code and not line.startswith("```"):
            block.append(line)
        elif in_code:
            yield "code", block[1:]
            block = []
        elif line.startswith(("#", "```", "|")) or not line.strip():
            if block and not (line.startswith("|") and block[0].startswith("|")):
                yield ("table" if block[0].startswith("|") else "text"), block
                block = []
            if line.startswith("#"):
                yield "heading", [line]
            elif line.strip():
                block.append(line)
        else:
            block.append(line)


def roff(markdown):
    page = TOP
    for kind, lines in blocks(markdown.split("\n")):
        if kind == "heading":
            level, title = re.match(r"(#+) *(.*)", lines[0]).groups()
            if level != "#":  # the document's own title is the page's
                page += f".{'SH' if level == '##' else 'SS'} {inline(title)}\n"
        elif kind == "code":
            page += ".PP\n.nf\n" + "".join(escaped(line) + "\n" for line in lines) + ".fi\n"
        elif kind == "table":
            page += "".join(table(lines))
        else:
            page += ".PP\n" + "".join(inline(line) + "\n" for line in lines)
    return page + END


if __name__ == "__main__":
    sys.stdout.write(roff(Path(sys.argv[1]).read_text(encoding="utf-8")))
