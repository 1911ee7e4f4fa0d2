"""A reading of C++ and CUDA sources that is just good enough for house rules: no comments, no strings, and where
functions begin and end. It follows braces, not the grammar; the self-test shows what it copes with."""

import re
from dataclasses import dataclass

RAW_STRING = re.compile(r'R"([^()\\ ]{0,16})\(')
NOT_A_FUNCTION = re.compile(r"(namespace|class|struct|union|enum|concept)\b")
CONTROL = re.compile(r"^(if|for|while|switch|do|else|try|catch|return|case|default)\b")


@dataclass
class Function:
    name: str
    first_line: int
    last_line: int

    @property
    def lines(self):
        return self.last_line - self.first_line + 1


def blank_out(text):
    """The text with comments and literals replaced by spaces, every newline kept."""
    out = []
    at = 0
    while at < len(text):
        end = literal_or_comment_end(text, at)
        if end is None:
            out.append(text[at])
            at += 1
            continue
        out.append(re.sub(r"[^\n]", " ", text[at:end]))
        at = end
    return "".join(out)


def literal_or_comment_end(text, at):
    """Where the literal or comment that starts at `at` ends, or None where none starts there."""
    if text.startswith("//", at):
        end = text.find("\n", at)
        return len(text) if end < 0 else end
    if text.startswith("/*", at):
        end = text.find("*/", at + 2)
        return len(text) if end < 0 else end + 2
    if text[at] == "R":
        raw = RAW_STRING.match(text, at)
        if raw:
            end = text.find(")" + raw.group(1) + '"', raw.end())
            return len(text) if end < 0 else end + len(raw.group(1)) + 2
    if text[at] == '"' or (text[at] == "'" and not (at > 0 and (text[at - 1].isalnum() or text[at - 1] == "_"))):
        return quoted_end(text, at)
    return None


def quoted_end(text, at):
    quote = text[at]
    at += 1
    while at < len(text) and text[at] != quote and text[at] != "\n":
        at += 2 if text[at] == "\\" else 1
    return min(at + 1, len(text))


def drop_directives(code):
    """Preprocessor lines blanked, continued lines too: an #else branch would unbalance the braces."""
    lines = code.split("\n")
    continued = False
    depth_of_else = 0
    for number, line in enumerate(lines):
        stripped = line.lstrip()
        directive = continued or stripped.startswith("#")
        if not continued and directive:
            word = re.match(r"#\s*(\w+)", stripped)
            word = word.group(1) if word else ""
            if depth_of_else:
                depth_of_else += word in ("if", "ifdef", "ifndef")
                depth_of_else -= word == "endif"
            elif word in ("else", "elif"):
                depth_of_else = 1
        if directive or depth_of_else:
            lines[number] = ""
        continued = directive and line.endswith("\\")
    return "\n".join(lines)


def is_initialiser(header):
    """Whether a brace after this text opens a value rather than a block: `= {`, `a_{`, `f({`, `return {`."""
    if re.search(r"[=,(\[]$", header) or re.search(r"\breturn$", header):
        return True
    # A member initialiser: after `) :`, an identifier stands right before the brace.
    return re.search(r"\)\s*(noexcept\s*)?:(?!:)", header) is not None and re.search(r"[\w>]$", header) is not None


def without_template(header):
    """The header without its leading `template <...>` clauses."""
    while header.startswith("template"):
        depth = 0
        for at, char in enumerate(header):
            depth += (char == "<") - (char == ">")
            if char == ">" and depth == 0:
                break
        else:
            return header
        header = header[at + 1 :].lstrip()
    return header


def opens_function(header):
    """Whether the text before a brace, at namespace or class scope, declares a function."""
    header = re.sub(r"\b(alignas|__attribute__|__declspec)\s*\(\(?[^()]*\)?\)", "", without_template(header))
    if "(" not in header or CONTROL.match(header):
        return False
    before_arguments = header[: header.index("(")]
    # `class X : public Y<decltype(z)>` is no function; `struct stat now(...)` is.
    is_type = NOT_A_FUNCTION.match(before_arguments) and re.search(r"(?<!:):(?!:)", before_arguments)
    return not is_type


def name_in(header):
    found = re.search(r"([~\w:]+|operator\s*\S+)\s*\(([^)]*)", header)
    if not found:
        return "?"
    if re.fullmatch(r"[A-Z_]+", found.group(1)):  # TEST(Suite, Name)
        return f"{found.group(1)}({found.group(2).strip()})"
    return found.group(1)


def functions(text):
    """Every function with a body, outermost only (a lambda belongs to its function)."""
    code = drop_directives(blank_out(text))
    found = []
    stack = []  # per open brace: "scope", "value" or "body"
    header_start = 0
    open_function = None
    parens = 0
    for at, char in enumerate(code):
        if open_function is None and char in "()":
            parens += 1 if char == "(" else -1
        elif char == "{":
            kind, header = classify(code[header_start:at], stack, parens)
            if kind == "body":
                open_function = (name_in(header), line_of_header(code, header_start, at), len(stack))
            stack.append(kind)
            if kind == "scope":
                header_start = at + 1
        elif char == "}" and stack:
            kind = stack.pop()
            if kind == "body" and open_function and open_function[2] == len(stack):
                found.append(Function(open_function[0], open_function[1], code.count("\n", 0, at) + 1))
                open_function = None
            if kind in ("scope", "body"):
                header_start = at + 1
        elif char == ";" and open_function is None and parens == 0 and (not stack or stack[-1] == "scope"):
            header_start = at + 1
    return found


def line_of_header(code, start, end):
    """The line on which a function's header starts: rows of macros before an empty line are not part of it."""
    start = max(start, code.rfind("\n\n", start, end))
    while code[start].isspace():
        start += 1
    return code.count("\n", 0, start) + 1


def classify(raw_header, stack, parens):
    header = re.sub(r"\s+", " ", raw_header).strip()
    header = re.sub(r"^((public|private|protected)\s*:\s*)+", "", header)
    if "body" in stack or "value" in stack:
        return "inner", header
    if parens > 0 or is_initialiser(header):
        return "value", header
    return ("body" if opens_function(header) else "scope"), header
