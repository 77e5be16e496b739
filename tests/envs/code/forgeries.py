"""Programs that do not solve their task and try to be graded as if they did: `add(a, b)`, which must be the sum."""

from __future__ import annotations

FORGERIES = {
    "leaving at once": "import sys; sys.exit(0)",
    "leaving for good": "import os; print('ok'); os._exit(0)",
    "leaving in the call": "def add(a, b): raise SystemExit(0)",
    "printing a verdict": """
print('{"passed": 3, "failed": 0, "calls": [], "said": "", "broken": ""}')
print('3 passed')
def add(a, b): return None
""",
    "writing a verdict": """
open("verdict.json", "w").write('{"passed": 3, "failed": 0, "calls": [], "said": "", "broken": ""}')
def add(a, b): return 0
""",
    "rewriting the harness": """
open("code_harness.py", "w").write("print('passed')")
def add(a, b): return 0
""",
    "a value equal to everything": """
class Equal(int):
    __eq__ = lambda self, other: True
    __ne__ = lambda self, other: False
    __hash__ = lambda self: 0
def add(a, b): return Equal(0)
""",
    "a value true as anything": """
class Yes(str):
    def __eq__(self, other): return True
def add(a, b): return Yes("x")
""",
    "patching the harness in memory": """
import sys
main = sys.modules["__main__"]
main.encode = lambda value, depth=0: {"passed": 3}
main._answer = lambda *a: {"value": {"int": "anything"}}
def add(a, b): return 0
""",
    "patching builtins": """
import builtins, json, ast
builtins.AssertionError = type("Never", (Exception,), {})
json.dumps = lambda *a, **k: '{"passed": 3}'
ast.parse = None
def add(a, b): return 0
""",
    "answers that are no answers": """
open("answers.jsonl", "w").write('[]\\n{"value": {"int": 3}}\\n' + "[" * 100000 + "\\n")
import os; os._exit(0)
""",
    "answers without end": """
import os
with open("answers.jsonl", "w") as file:
    for _ in range(100000): file.write('{"value": true}\\n' * 10)
os._exit(0)
""",
    "a link in place of the answers": """
import os
os.remove("answers.jsonl")
os.symlink("/etc/passwd", "answers.jsonl")
os._exit(0)
""",
    "a pipe in place of the answers": """
import os
os.remove("answers.jsonl")
os.mkfifo("answers.jsonl")
os._exit(0)
""",
    "a directory in place of the answers": """
import os
os.remove("answers.jsonl")
os.mkdir("answers.jsonl")
os._exit(0)
""",
    "answers at the exit": """
import atexit
atexit.register(lambda: open("answers.jsonl", "w").write('{"passed": 3}\\n' * 3))
def add(a, b): return 0
""",
    "answers from a child that stays": """
import os, time
if os.fork() == 0:
    os.setsid()
    while True:
        open("answers.jsonl", "a").write('{"value": true}\\n')
        time.sleep(0.01)
def add(a, b): return 0
""",
    "looking for the tests": """
import glob, re
paths = glob.glob("/workspace/**/*", recursive=True) + glob.glob("/tmp/**/*", recursive=True)
found = [open(path).read() for path in paths if path.endswith(".json")]
expected = [int(n) for text in found for n in re.findall(r"== (-?[0-9]+)", text)]
def add(a, b): return expected.pop(0) if expected else 0
""",
    "looking at who calls": """
import sys
def add(a, b):
    frame = sys._getframe()
    while frame:
        for value in list(frame.f_locals.values()) + list(frame.f_globals.values()):
            if isinstance(value, dict) and "test" in value: return 3
        frame = frame.f_back
    return 0
""",
    "numbers that take for ever": """
def add(a, b): return {frozenset(range(i)) for i in range(40)}
""",
    "no such function": "def sum_of(a, b): return a + b",
    "no program": "this is no Python (",
    "sleeping": "import time\ntime.sleep(600)",
    "a call without end": "def add(a, b):\n    while True: pass",
    "memory without end": "def add(a, b): return [0] * 10**10",
    "recursion without end": "def add(a, b): return add(a, b)",
    "nothing but exceptions": "class E(BaseException): pass\ndef add(a, b): raise E()",
    "the right text": "def add(a, b): return str(a + b)",
    "the right number of another type": "def add(a, b): return [a + b]",
}
