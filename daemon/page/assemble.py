#!/usr/bin/env python3
"""Makes one HTML text of the page's parts and writes it as a C++ source: assemble.py CHART_LIBRARY FOLDER OUT.

Whatever runs or styles the page stands in it, and the content security policy beside it names each part by its hash:
a browser runs nothing else there.
"""

import base64
import hashlib
import sys
from pathlib import Path

SCRIPTS = ["quantities.js", "plots.js", "page.js"]


def hashed(text):
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


def read_library(path):
    text = Path(path).read_text(encoding="utf-8")
    if "</script" in text.lower():
        sys.exit(f"{path}: holds a closing script tag, which would end its element")
    return "\n".join(line for line in text.splitlines() if not line.startswith("//# sourceMappingURL"))


def main(library, folder, out):
    folder = Path(folder)
    chart = read_library(library)
    style = (folder / "page.css").read_text(encoding="utf-8")
    code = "\n".join((folder / name).read_text(encoding="utf-8") for name in SCRIPTS)
    html = (folder / "page.html").read_text(encoding="utf-8")
    for mark, text in (("/* style */", style), ("/* chart library */", chart), ("/* code */", code)):
        if html.count(mark) != 1:
            sys.exit(f"page.html: \"{mark}\" stands there {html.count(mark)} times; once is right")
        html = html.replace(mark, text)
    policy = "; ".join([
        "default-src 'none'",
        f"script-src {hashed(chart)} {hashed(code)}",
        f"style-src {hashed(style)}",
        "img-src data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ])
    data = html.encode()
    rows = (",".join(map(str, data[at:at + 64])) for at in range(0, len(data), 64))
    Path(out).write_text(
        "#include \"daemon/page/page.hpp\"\n\nnamespace terrace {\nnamespace {\nconstexpr unsigned char kHtml[] = {\n"
        + ",\n".join(rows) + "};\n}  // namespace\n\nEmbeddedPage embedded_page() {\n"
        "  return {{reinterpret_cast<const char*>(kHtml), sizeof kHtml},\n          \"" + policy + "\"};\n}\n\n"
        "}  // namespace terrace\n", encoding="ascii")


if __name__ == "__main__":
    main(*sys.argv[1:])
