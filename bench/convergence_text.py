"""Real text for bench/convergence.py, and the order in which the trainer reads it.

Without --text the text is the prose of the Python installation that runs this: the documentation strings and comments of its
standard library, by file name, with a fingerprint, without the character tables of encodings/, which are a fifth of it and no
prose. The first file is for training, a tenth of it apart is held out, and the second text, for adapters, is the package
fortunes where it is installed, else the tests' part of the library.
"""
import ast
import hashlib
import io
import sysconfig
import tokenize
from pathlib import Path

MASK = (1 << 64) - 1
FORTUNES = Path("/usr/share/games/fortunes")
MOST_BYTES = 6 << 20


def mix_bits(x):
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def hash_text(text):
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = ((value ^ byte) * 0x100000001B3) & MASK
    return value


def draw(text, length, seed, n):
    """Sequence n and its labels, as Sampler (examples/moe_trainer/data.cpp) draws them."""
    key = mix_bits(mix_bits(seed) ^ hash_text("data"))
    at = mix_bits(key ^ mix_bits(n)) % (len(text) - length)
    return list(text[at:at + length]), list(text[at + 1:at + length + 1])


def prose_of(source):
    """Documentation strings and comments of a module, in their order."""
    parts = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            doc = ast.get_docstring(node)
            if doc and node.body:
                parts.append((node.body[0].lineno, doc + "\n\n"))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and len(token.string) > 20:
            parts.append((token.start[0], token.string.lstrip("# ") + "\n"))
    return "".join(text for _, text in sorted(parts))


def library_prose(skip):
    root = Path(sysconfig.get_paths()["stdlib"])
    texts, size = [], 0
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root).as_posix()
        if skip(relative) or size > MOST_BYTES:
            continue
        try:
            texts.append(prose_of(path.read_text(encoding="utf-8")))
        except (SyntaxError, ValueError, OSError, tokenize.TokenError, RecursionError):
            continue
        size += len(texts[-1])
    return "".join(texts)


def is_table(relative):
    return relative.startswith("encodings/")


def is_test(relative):
    return "test/" in relative or "tests/" in relative


def second_text():
    files = sorted(FORTUNES.glob("*.u8")) if FORTUNES.is_dir() else []
    texts = [path.read_text(encoding="utf-8", errors="ignore") for path in files if path.is_file()]
    return "".join(texts) or library_prose(lambda name: "site-packages" in name or not is_test(name))


def make(folder):
    """Writes train.txt, heldout.txt and second.txt; every tenth block of 8 KiB is held out."""
    folder.mkdir(parents=True, exist_ok=True)
    prose = library_prose(lambda name: "site-packages" in name or is_test(name) or is_table(name))
    blocks = [prose[at:at + 8192] for at in range(0, len(prose), 8192)]
    (folder / "heldout.txt").write_text("".join(blocks[9::10]), encoding="utf-8")
    (folder / "train.txt").write_text("".join(b for i, b in enumerate(blocks) if i % 10 != 9), encoding="utf-8")
    (folder / "second.txt").write_text(second_text(), encoding="utf-8")
    return folder


def files_in(folder):
    return {name: folder / f"{name}.txt" for name in ("train", "heldout", "second")}


def fingerprint(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
